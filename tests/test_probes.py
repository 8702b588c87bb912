"""Probe specs, the fit between probe and model, and reading probabilities; broken files are in test_probes_files.py."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from semspec_local.errors import ConfigError, ProbeError
from semspec_local.modelinfo import ModelInfo
from semspec_local.probes import OnnxProbe, ProbeSpec, find_probe, load_probe, read_probe_file
from semspec_local.probes import runtime as runtime_module
from semspec_local.probes.mlp import Mlp
from semspec_local.probes.write import write_mlp_onnx
from semspec_local.protocols import StepStates, TapPoint

N_EMBD = 6
INFO = ModelInfo(
    architecture="llama",
    n_layer=4,
    n_embd=N_EMBD,
    n_vocab=100,
    name="Tiny",
    quantization="F16",
    path="tiny.gguf",
    fingerprint="a" * 64,
)
SPEC = ProbeSpec(
    role="target",
    layer=2,
    norm="pre",
    pooling="mean",
    window="predictor",
    n_embd=N_EMBD,
    n_layer=4,
    architecture="llama",
    model_name="Tiny",
    fingerprint="a" * 64,
    quantization="F16",
    training={"data": "made up", "n_rows": {"train": 3}},
    evaluation={"mse": 0.1, "spearman": None},
)


def arrays(seed: int = 0, widths: tuple[int, ...] = (N_EMBD, 5, 3, 1)):
    rng = np.random.default_rng(seed)
    layers = [
        (rng.normal(size=(a, b)).astype(np.float32), rng.normal(size=b).astype(np.float32)) for a, b in pairwise(widths)
    ]
    mean = rng.normal(size=widths[0]).astype(np.float32)
    std = rng.uniform(0.5, 2, size=widths[0]).astype(np.float32)
    return Mlp(layers=layers, mean=mean, std=std), rng.normal(size=(20, widths[0])).astype(np.float32)


def write(path: Path, spec: ProbeSpec = SPEC) -> Path:
    mlp, states = arrays()
    write_mlp_onnx(path, mlp, spec, states=states)
    return path


@pytest.mark.parametrize(
    ("known", "wanted"),
    [
        ([], None),
        ([("semantic-joint", 0.05, None)], None),
        ([("semantic-ratio", 0.05, 0.9)], None),
        ([("semantic-joint", 0.1, 0.3), ("semantic-joint", 0.01, 0.6), ("semantic-joint", 0.005, 0.8)], 0.6),
        ([("semantic-joint", 0.05, None), ("semantic-joint", 0.2, 0.1), ("semantic-joint", 0.1, 0.3)], 0.3),
        ([("semantic-joint", 0.002, 0.9), ("semantic-joint", 0.005, 0.8)], 0.8),
    ],
)
def test_without_a_threshold_the_usual_share_of_errors_decides(known, wanted):
    found = [{"policy": policy, "alpha": alpha, "threshold": threshold} for policy, alpha, threshold in known]
    assert replace(SPEC, calibrations=found).calibrated_threshold("semantic-joint") == wanted


@pytest.mark.parametrize(
    ("threshold", "acceptance", "wanted"),
    [(0.3, 0.7, 0.7), (0.31, 0.7, None), (0.3, None, None), (0.3, "0.7", None), (0.3, 1.5, None), (None, 0.7, None)],
)
def test_what_was_accepted_is_known_of_a_calibrated_threshold_alone(threshold, acceptance, wanted):
    found = {"policy": "semantic-joint", "alpha": 0.05, "threshold": threshold, "acceptance": acceptance}
    spec = replace(SPEC, calibrations=[found])
    assert spec.calibrated_acceptance("semantic-joint", 0.3) == wanted
    assert spec.calibrated_acceptance("semantic-joint", None) is spec.calibrated_acceptance("always", 0.3) is None


def test_a_spec_survives_json():
    assert ProbeSpec.from_json(SPEC.to_json()) == SPEC
    assert SPEC.tap == TapPoint(2, "pre")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("role", "judge", "target or draft or joint"),
        ("layer", -1, "whole number from 0"),
        ("layer", True, "whole number"),
        ("layer", 2.0, "whole number"),
        ("layer", 4, "below n_layer, which is 4"),
        ("norm", "none", "pre or post"),
        ("norm", "post", "only the last layer (3)"),
        ("pooling", ["mean"], "mean or last"),
        ("window", None, "predictor or token"),
        ("n_embd", 0, "from 1"),
        ("architecture", 7, "text"),
        ("fingerprint", "abc", "64 small hex digits"),
        ("training", [], "an object"),
        ("evaluation", {"mse": "low"}, "finite number or null"),
        ("spec_version", 2, "wanted 1"),
        ("spec_version", True, "wanted 1"),
    ],
)
def test_a_spec_refuses_other_values(field, value, words):
    text = json.dumps(json.loads(SPEC.to_json()) | {field: value})
    with pytest.raises(ProbeError) as caught:
        ProbeSpec.from_json(text, "probe.onnx")
    assert words in str(caught.value)
    assert str(caught.value).startswith("probe.onnx: ")
    assert caught.value.exit_code == 4


def test_a_spec_is_read_strictly():
    values = json.loads(SPEC.to_json())
    without = {key: value for key, value in values.items() if key != "window"}
    for text, words in [
        (json.dumps(without), "has no window"),
        (json.dumps(values | {"colour": "\x1b[31m"}), "unknown field 'colour'"),
        (json.dumps({"layer": 1}), "has no spec_version"),
        ("[1]", "wanted a JSON object"),
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        (SPEC.to_json().replace("0.1", "NaN"), "NaN is no JSON number"),
    ]:
        with pytest.raises(ProbeError, match=words):
            ProbeSpec.from_json(text)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architecture": "qwen2"}, "architecture is 'llama'; the target model 'Tiny' wants 'qwen2'"),
        ({"n_embd": 8}, "n_embd is 6; the target model 'Tiny' wants 8"),
        ({"n_layer": 5}, "n_layer is 4; the target model 'Tiny' wants 5"),
    ],
)
def test_a_probe_of_another_shape_is_refused(change, words):
    with pytest.raises(ProbeError, match=words):
        SPEC.check_model(replace(INFO, **change), "target")


def test_a_probe_in_the_other_models_place_is_refused():
    with pytest.raises(ProbeError, match="role is 'target'; this place wants 'draft'"):
        SPEC.check_model(INFO, "draft")


def test_another_file_of_the_same_shape_is_a_warning():
    assert SPEC.check_model(INFO, "target") == ()
    assert SPEC.check_model(replace(INFO, fingerprint=None), "target") == ()
    (other_file,) = SPEC.check_model(replace(INFO, fingerprint="b" * 64), "target")
    assert "aaaaaaaaaaaa" in other_file
    assert "bbbbbbbbbbbb" in other_file
    (other_quantization,) = SPEC.check_model(replace(INFO, quantization="Q4_0", fingerprint="b" * 64), "target")
    assert "F16" in other_quantization
    assert "Q4_0" in other_quantization


def test_model_facts_survive_a_dict_and_are_checked():
    assert ModelInfo.from_dict(INFO.to_dict()) == INFO
    for change in ({"n_embd": "6"}, {"n_layer": True}, {"name": None}, {"colour": 1}):
        with pytest.raises(ConfigError):
            ModelInfo.from_dict(INFO.to_dict() | change)


def test_the_file_computes_what_the_arrays_do(tmp_path):
    mlp, states = arrays()
    path = tmp_path / "deep" / "target.onnx"
    assert write_mlp_onnx(path, mlp, SPEC, states=states) <= 1e-6
    assert [item.name for item in path.parent.iterdir()] == ["target.onnx"]
    probe = load_probe(path, "target", INFO)
    assert probe.spec == SPEC
    assert probe.tap == TapPoint(2, "pre")
    assert probe.warnings == ()
    np.testing.assert_allclose(probe.predict(states), mlp.forward(states), atol=1e-6)
    assert probe.predict(states[:0]).shape == (0,)


@pytest.mark.case(56)
def test_one_feature_of_huge_scale_does_not_break_parity(tmp_path):
    # Some dimensions of a transformer's states are ten thousand times the others.
    mlp, states = arrays()
    scale = np.ones(N_EMBD, np.float32)
    scale[1] = 1e4
    path = tmp_path / "target.onnx"
    assert (
        write_mlp_onnx(path, replace(mlp, mean=mlp.mean * scale, std=mlp.std * scale), SPEC, states=states * scale)
        <= 1e-5
    )


def test_a_file_that_differs_from_training_is_not_written(tmp_path):
    mlp, states = arrays()
    path = write(tmp_path / "target.onnx")
    before = path.read_bytes()
    expected = mlp.forward(states) + 1e-3
    with pytest.raises(ProbeError, match="differ by"):
        write_mlp_onnx(path, mlp, SPEC, states=states, expected=expected)
    assert path.read_bytes() == before
    assert [item.name for item in tmp_path.iterdir()] == ["target.onnx"]


def test_arrays_of_the_wrong_shape_are_refused(tmp_path):
    mlp, states = arrays()
    layers, std = mlp.layers, mlp.std
    for bad_layers, bad_std in [(layers[:-1], std), (layers[1:], std), ([], std), (layers, std * 0), (layers, std[:2])]:
        with pytest.raises(ProbeError, match="wanted"):
            write_mlp_onnx(tmp_path / "x.onnx", replace(mlp, layers=bad_layers, std=bad_std), SPEC, states=states)
    with pytest.raises(ProbeError, match=f"width {N_EMBD}; wanted {N_EMBD + 1}"):
        write_mlp_onnx(tmp_path / "x.onnx", mlp, replace(SPEC, n_embd=N_EMBD + 1), states=states)
    assert not list(tmp_path.iterdir())


@pytest.mark.case(20)
@pytest.mark.parametrize("window", ["predictor", "token"])
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_a_step_is_pooled_as_the_spec_says(tmp_path, window, pooling):
    mlp, states = arrays()
    probe = OnnxProbe(read_probe_file(write(tmp_path / "p.onnx", replace(SPEC, window=window, pooling=pooling))))
    rows = states[:3] if window == "predictor" else states[1:4]
    vector = rows.mean(axis=0) if pooling == "mean" else rows[-1]
    got = probe.semantic_prob(StepStates(before=states[0], own=states[1:4]))
    assert got == pytest.approx(mlp.forward(vector[None, :])[0], abs=1e-6)
    assert 0 <= got <= 1


def test_states_that_do_not_fit_are_refused(tmp_path):
    probe = load_probe(write(tmp_path / "p.onnx"), "target", INFO)
    with pytest.raises(ProbeError, match=r"are \[2, 5\]; wanted \[n, 6\]"):
        probe.predict(np.zeros((2, 5), np.float32))
    with pytest.raises(ProbeError, match="NaN or infinity"):
        probe.predict(np.full((1, N_EMBD), np.nan, np.float32))


def test_warnings_travel_with_the_probe(tmp_path):
    probe = load_probe(write(tmp_path / "p.onnx"), "target", replace(INFO, quantization="Q4_0"))
    assert len(probe.warnings) == 1


@pytest.mark.case(60)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
def test_a_probe_starts_no_threads(tmp_path):
    path = write(tmp_path / "p.onnx")
    before = len(list(Path("/proc/self/task").iterdir()))
    probe = load_probe(path, "target", INFO)
    probe.predict(np.zeros((50, N_EMBD), np.float32))
    assert len(list(Path("/proc/self/task").iterdir())) == before


def test_shipped_probes_are_found_by_pair_and_role(tmp_path, monkeypatch):
    monkeypatch.setattr(runtime_module, "shipped", lambda kind: tmp_path / kind)
    path = write(tmp_path / "probes" / "tiny" / "target.onnx")
    assert find_probe("tiny", "target") == path
    assert find_probe("tiny", "draft") is None
    assert find_probe("other", "target") is None
    assert find_probe("../probes/tiny", "target") is None


def test_importing_probes_loads_nothing_heavy():
    code = "import sys, semspec_local.probes; print([m for m in ('onnxruntime', 'onnx', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
