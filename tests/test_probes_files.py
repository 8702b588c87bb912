"""Files that are no probe, or a hostile one: always one clear line and exit code 4."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from semspec_local.errors import ProbeError
from semspec_local.modelinfo import ModelInfo
from semspec_local.probes import OnnxProbe, ProbeSpec, load_joint_probe, load_probe, read_probe_file
from semspec_local.probes.mlp import Mlp
from semspec_local.probes.onnxfile import read_header
from semspec_local.probes.runtime import input_widths
from semspec_local.probes.spec import METADATA_KEY
from semspec_local.probes.write import write_mlp_onnx
from semspec_local.protocols import StepStates

N_EMBD = 4
INFO = ModelInfo(
    architecture="llama", n_layer=2, n_embd=N_EMBD, n_vocab=9, name="Tiny", quantization="F16", path="tiny.gguf"
)
SPEC = ProbeSpec(
    role="target",
    layer=1,
    norm="post",
    pooling="last",
    window="token",
    n_embd=N_EMBD,
    n_layer=2,
    architecture="llama",
    model_name="Tiny",
    fingerprint="0" * 64,
    quantization="F16",
)
FLOAT = TensorProto.FLOAT


def model(
    nodes=None, *, ir=8, opset=17, kind=FLOAT, rows="n", width=N_EMBD, name="hidden", out="semantic_prob", spec=SPEC
):
    """A linear probe; every argument can make it a wrong one."""
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    weights = numpy_helper.from_array(np.ones((width, 1), dtype), "w")
    if nodes is None:
        nodes = [helper.make_node("MatMul", [name, "w"], ["logit"]), helper.make_node("Sigmoid", ["logit"], [out])]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, kind, [rows, width])],
        [helper.make_tensor_value_info(out, kind, None)],
        [weights],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir)
    if spec is not None:
        helper.set_model_props(made, {METADATA_KEY: spec.to_json()})
    return made


def refusal(path: Path) -> str:
    with pytest.raises(ProbeError) as caught:
        load_probe(path, "target", INFO)
    message = str(caught.value)
    assert caught.value.exit_code == 4
    assert message.isprintable(), "one line, no control characters"
    assert path.name in message
    return message


def save(tmp_path: Path, made: onnx.ModelProto) -> Path:
    path = tmp_path / "probe.onnx"
    path.write_bytes(made.SerializeToString())
    return path


def test_the_plain_one_is_accepted(tmp_path):
    probe = load_probe(save(tmp_path, model()), "target", INFO)
    np.testing.assert_allclose(probe.predict(np.zeros((3, N_EMBD), np.float32)), 0.5)


@pytest.mark.case(61)
@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("p.onnx", b"", "is empty"),
        ("p.pkl", pickle.dumps({"a": 1}), "pickle"),
        ("p.onnx", pickle.dumps({"a": 1}), "convert it first"),
        ("p.pt", b"PK\x03\x04....", "convert it first"),
        ("p.joblib", b"\x78\x9c....", "convert it first"),
        ("p.onnx", b"\x93NUMPY....", "NumPy array"),
        ("p.safetensors", b"\x10\0\0\0\0\0\0\0{" + b" " * 40, "safetensors"),
        ("p.pth", b"\x08\x08....", "named .pth"),
        ("p.onnx", b"GGUF\x03\0\0\0", "GGUF model"),
        ("p.onnx", b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        ("p.onnx", b"\n<!DOCTYPE html><html>", "web page"),
        ("p.onnx", b'{"error": "not found"}', "JSON"),
        ("p.onnx", b"hello, this is no model at all", "no ONNX file"),
        ("p.onnx", b"\0" * 100, "no ONNX file"),
        ("p.onnx", b"\x08\x08", "no graph"),
    ],
)
def test_other_kinds_of_files_are_named(tmp_path, name, content, words):
    path = tmp_path / name
    path.write_bytes(content)
    assert words in refusal(path)


def test_what_is_not_there_or_not_a_file_is_refused(tmp_path):
    assert "does not exist" in refusal(tmp_path / "missing.onnx")
    (tmp_path / "folder.onnx").mkdir()
    assert "is not a file" in refusal(tmp_path / "folder.onnx")


def test_an_oversized_file_is_refused(tmp_path):
    path = tmp_path / "huge.onnx"
    with path.open("wb") as stream:
        stream.write(b"\x08\x08")
        stream.truncate(600 * 2**20)  # sparse: takes no space
    assert "600 MiB; wanted at most 512" in refusal(path)


def test_every_truncation_is_refused(tmp_path):
    data = model().SerializeToString()
    path = tmp_path / "probe.onnx"
    for length in range(1, len(data)):
        path.write_bytes(data[:length])
        refusal(path)


def test_damaged_bytes_never_raise_anything_else(tmp_path):
    data = model().SerializeToString()
    rng = np.random.default_rng(0)
    path = tmp_path / "probe.onnx"
    n_refused = 0
    for _ in range(300):
        damaged = bytearray(data)
        for at in rng.integers(len(data), size=2):
            damaged[at] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            load_probe(path, "target", INFO)
        except ProbeError as error:
            n_refused += 1
            assert str(error).isprintable()
    assert n_refused > 150


@pytest.mark.parametrize("newer", [{"ir": 99}, {"opset": 99}])
def test_files_newer_than_onnxruntime_say_so(tmp_path, newer):
    message = refusal(save(tmp_path, model(**newer)))
    assert "too new for onnxruntime" in message
    assert "99" in message


def test_a_file_without_a_spec_is_refused(tmp_path):
    assert "no 'semspec.probe'" in refusal(save(tmp_path, model(spec=None)))


@pytest.mark.case(59)
def test_weights_kept_elsewhere_must_be_beside_the_file(tmp_path):
    path = tmp_path / "probe.onnx"
    onnx.save_model(model(), str(path), save_as_external_data=True, location="probe.onnx.data", size_threshold=0)
    load_probe(path, "target", INFO)
    (tmp_path / "probe.onnx.data").unlink()
    assert "keeps weights in probe.onnx.data, which is not beside it" in refusal(path)


@pytest.mark.parametrize("location", ["../secret", "/etc/passwd", "..", "a\x1b[31mb", ""])
def test_weights_outside_the_folder_are_refused(tmp_path, location):
    made = model()
    weights = made.graph.initializer[0]
    weights.ClearField("raw_data")
    weights.data_location = TensorProto.EXTERNAL
    entry = weights.external_data.add()
    entry.key, entry.value = "location", location
    assert "wanted a file beside it" in refusal(save(tmp_path, made))


@pytest.mark.case(58)
@pytest.mark.parametrize(
    ("change", "got"),
    [
        ({"name": "states"}, "inputs are ['states']"),
        ({"out": "label"}, "outputs are ['label']"),
        ({"kind": TensorProto.DOUBLE}, "tensor(double)"),
        ({"width": 7}, "['n', 7]"),
        ({"rows": 3}, "[3, 4]"),
    ],
)
def test_another_signature_is_refused_with_the_wanted_one(tmp_path, change, got):
    message = refusal(save(tmp_path, model(**change)))
    assert got in message
    assert "wanted the input hidden float32 [n, 4] and the output semantic_prob float32 [n] or [n, 1]" in message


def test_an_output_of_another_shape_is_refused(tmp_path):
    message = refusal(save(tmp_path, model([helper.make_node("Sigmoid", ["hidden"], ["semantic_prob"])])))
    assert "float32[1, 4]" in message


@pytest.mark.case(59)
def test_a_batch_size_fixed_at_one_runs_row_by_row(tmp_path):
    probe = load_probe(save(tmp_path, model(rows=1)), "target", INFO)
    states = np.arange(3 * N_EMBD, dtype=np.float32).reshape(3, N_EMBD) / 10
    np.testing.assert_allclose(probe.predict(states), 1 / (1 + np.exp(-states.sum(axis=1))), rtol=1e-5)


def linear_output(*more):
    return [helper.make_node("MatMul", ["hidden", "w"], ["semantic_prob" if not more else "logit"]), *more]


def test_results_outside_probability_are_refused(tmp_path):
    probe = load_probe(save(tmp_path, model(linear_output())), "target", INFO)
    assert probe.predict(np.full((1, N_EMBD), -1e-7, np.float32))[0] == 0, "rounding is clipped"
    for value in (0.5, -0.1):
        with pytest.raises(ProbeError, match="for a probability; wanted a number from 0 to 1"):
            probe.predict(np.full((1, N_EMBD), value, np.float32))
    assert "nan for a probability" in refusal(
        save(tmp_path, model(linear_output(helper.make_node("Div", ["logit", "logit"], ["semantic_prob"]))))
    )


@pytest.mark.parametrize("operator", ["Loop", "RandomNormal", "Tile"])
def test_operators_that_loop_or_draw_or_blow_up_are_refused(tmp_path, operator):
    nodes = [*linear_output(), helper.make_node(operator, ["hidden"], ["other"])]
    assert f"operator {operator}" in refusal(save(tmp_path, model(nodes)))


def test_unknown_operators_give_one_line(tmp_path):
    nodes = [helper.make_node("Nope\x1b[31m\n", ["hidden"], ["semantic_prob"])]
    assert "cannot load it" in refusal(save(tmp_path, model(nodes)))


def test_the_wrong_role_is_refused_before_the_graph_is_run(tmp_path):
    nodes = [helper.make_node("Nope", ["hidden"], ["semantic_prob"])]
    path = save(tmp_path, model(nodes, spec=replace(SPEC, role="draft")))
    assert "role is 'draft'; this place wants 'target'" in refusal(path)


def joint_spec(**changes) -> ProbeSpec:
    reads = replace(SPEC, n_embd=3, model_name="little").reads()
    return replace(SPEC, **{"role": "joint", "features": ("n_tokens",), "draft": reads, **changes})


def joint_file(tmp_path, spec=None):
    widths = (SPEC.n_embd, 3, 1)
    rng = np.random.default_rng(0)
    layers = [(rng.normal(size=(sum(widths), 1)).astype(np.float32), np.zeros(1, np.float32))]
    mlp = Mlp(layers=layers, mean=np.zeros(sum(widths), np.float32), std=np.ones(sum(widths), np.float32))
    states = rng.normal(size=(9, sum(widths))).astype(np.float32)
    path = tmp_path / "joint.onnx"
    write_mlp_onnx(path, mlp, spec or joint_spec(), states=states)
    return path, mlp, states


def test_a_joint_probe_reads_both_models_and_features(tmp_path):
    path, mlp, states = joint_file(tmp_path)
    infos = {"target": INFO, "draft": replace(INFO, n_embd=3, name="little")}
    probe = load_joint_probe(path, infos)
    assert probe.warnings == () and probe.features == ("n_tokens",)
    assert probe.taps == {"target": SPEC.tap, "draft": SPEC.tap}
    n = SPEC.n_embd
    got = probe.predict(states[:, :n], states[:, n : n + 3], states[:, n + 3 :])
    np.testing.assert_allclose(got, mlp.forward(states), atol=1e-6)
    step = (
        StepStates(before=states[0, :n], own=states[1:2, :n]),
        StepStates(states[0, n : n + 3], states[1:2, n : n + 3]),
    )
    pooled = [part.pool(SPEC.window, SPEC.pooling) for part in step]
    expected = mlp.forward(np.concatenate([*pooled, [4.0]])[None, :])[0]
    assert probe.semantic_prob(*step, np.array([4.0], np.float32)) == pytest.approx(expected, abs=1e-6)


def test_a_joint_probe_belongs_to_a_pair(tmp_path):
    path, *_ = joint_file(tmp_path)
    with pytest.raises(ProbeError, match="the probe's n_embd is 3; the draft model"):
        load_joint_probe(path, {"target": INFO, "draft": INFO})
    for single in (lambda: OnnxProbe(read_probe_file(path)), lambda: load_probe(path, "target", INFO)):
        with pytest.raises(ProbeError, match="joint probe"):
            single()
    with pytest.raises(ProbeError, match="a probe of the target alone"):
        load_joint_probe(save(tmp_path, model()), {"target": INFO, "draft": INFO})


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"draft": None}, "draft is None; wanted an object with layer"),
        ({"draft": {"layer": 1}}, "draft is"),
        ({"features": ("n_tokens", "n_tokens")}, "each once"),
        ({"features": ("colour",)}, "each once, of target_logprob_mean"),
        ({"features": 3}, "a list"),
        ({"role": "target"}, "only a joint probe has that"),
    ],
)
def test_a_joint_spec_is_whole_or_refused(changes, wanted):
    with pytest.raises(ProbeError, match=wanted):
        joint_spec(**changes)


def test_a_joint_spec_survives_json_and_may_read_no_features(tmp_path):
    spec = joint_spec(features=())
    assert ProbeSpec.from_json(spec.to_json()) == spec
    assert input_widths(spec) == {"target_hidden": SPEC.n_embd, "draft_hidden": 3}


def test_the_header_is_read_as_the_onnx_package_wrote_it():
    made = model(ir=9, opset=18)
    header = read_header(made.SerializeToString())
    assert (header.ir_version, header.opsets) == (9, {"": 18})
    assert header.operators == {"MatMul", "Sigmoid"}
    assert header.metadata == {METADATA_KEY: SPEC.to_json()}
    assert header.external_files == ()
