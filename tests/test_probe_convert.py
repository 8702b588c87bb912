"""Probes from elsewhere: read without running them, converted with proof, or refused in one line."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pairs_support import manifest_of, write_manifest
from pairs_support import role as table_of
from pairs_support import source as source_of

from semspec_local.cli import _run
from semspec_local.errors import ConfigError, ProbeError
from semspec_local.llama.model import LlamaModel
from semspec_local.probes import ProbeSpec, load_probe
from semspec_local.probes.convert import (
    Reading,
    comparison_states,
    convert_probe,
    from_hidden_state,
    read_probe,
    what_it_says,
)
from semspec_local.probes.mlp import Mlp, mlp_from_tensors
from semspec_local.probes.weightfile import read_weights
from semspec_local.probes.write import write_mlp_onnx
from semspec_local.provenance import sha256_file
from semspec_local.resources import config_dir

A_SPEC = ProbeSpec(
    role="target",
    layer=1,
    norm="pre",
    pooling="mean",
    window="token",
    n_embd=4,
    n_layer=4,
    architecture="llama",
    model_name="made up",
    fingerprint="0" * 64,
    quantization="F32",
)
READING = Reading(layer=1, norm="pre", pooling="mean", window="predictor")
WRITE_TORCH = """
import sys, numpy as np, torch
from collections import OrderedDict
from torch import nn
folder, d = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
x = torch.from_numpy(np.load(folder + "/states.npy"))

class Official(nn.Module):
    def __init__(self, *widths):
        super().__init__()
        for i, (a, b) in enumerate(zip(widths, widths[1:]), 1):
            setattr(self, f"fc{i}", nn.Linear(a, b))
        self.n = len(widths) - 1
    def forward(self, x):
        for i in range(1, self.n + 1):
            x = getattr(self, f"fc{i}")(x)
            x = torch.relu(x) if i < self.n else torch.sigmoid(x)
        return x[:, 0]

def sequential(activation):
    layers = nn.Linear(d, 7), activation, nn.Dropout(0.3), nn.Linear(7, 5), activation, nn.Linear(5, 1)
    return nn.Sequential(*layers, nn.Sigmoid())

models = {"fc2": Official(d, 9, 1), "fc3": Official(d, 9, 6, 1), "fc4": Official(d, 16, 12, 6, 1),
          "gelu": sequential(nn.GELU()), "tanh": sequential(nn.Tanh()),
          "linear": nn.Sequential(nn.Linear(d, 1), nn.Sigmoid())}
for name, model in models.items():
    model.eval()
    with torch.no_grad():
        np.save(f"{folder}/{name}.npy", model(x).reshape(-1).numpy())
    torch.save(model.state_dict(), f"{folder}/{name}.pt")
half = models["fc3"].bfloat16()
torch.save({"model_state_dict": half.state_dict(), "epoch": 3, "note": "x"}, folder + "/bfloat16.pt")
torch.save(models["tanh"], folder + "/module.pt")
torch.save(models["fc2"].state_dict(), folder + "/old.pt", _use_new_zipfile_serialization=False)
shared = torch.arange(4.0 * d).reshape(4, d)
torch.save({"fc1.weight": shared.T[:, 1:2].T, "fc1.bias": torch.zeros(1)}, folder + "/strided.pt")
torch.save({"fc1.weight": torch.full((1, d), float("nan")), "fc1.bias": torch.zeros(1)}, folder + "/nan.pt")
torch.save({"fc1.weight": torch.zeros(1, d + 1), "fc1.bias": torch.zeros(1)}, folder + "/wide.pt")
torch.save({"norm.running_mean": torch.zeros(d), "fc1.weight": torch.zeros(1, d)}, folder + "/batchnorm.pt")
"""


@pytest.fixture(scope="module")
def model(tiny) -> Path:
    return tiny("llama")


@pytest.fixture(scope="module")
def info(model):
    with LlamaModel(model) as loaded:
        return replace(loaded.info(), fingerprint=sha256_file(model))


@pytest.fixture(scope="module")
def torch_files(info, tmp_path_factory) -> Path:
    """State dicts as another process of torch wrote them, each with what torch computed on `states.npy`."""
    pytest.importorskip("torch", reason="makes the files with torch: pip install '.[train]'")
    folder = tmp_path_factory.mktemp("torch")
    np.save(folder / "states.npy", comparison_states(info.n_embd))
    subprocess.run([sys.executable, "-c", WRITE_TORCH, str(folder), str(info.n_embd)], check=True)
    return folder


def convert(source: Path, out: Path, info, reading: Reading = READING, **options: Any):
    found = read_probe(source, info, **options)
    spec, difference = convert_probe(found, out, info, "target", reading.filled(found.reading))
    assert difference <= 1e-5
    return load_probe(out, "target", info), spec


def cli(*arguments: object) -> tuple[int, str]:
    """Exit code, and all that was printed."""
    with redirect_stdout(io.StringIO()) as printed, redirect_stderr(printed):
        code = _run([str(argument) for argument in arguments])
    return code, printed.getvalue()


# -- PyTorch --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fc2", "fc3", "fc4", "gelu", "tanh", "linear"])
def test_a_state_dict_becomes_onnx_that_computes_what_torch_does(torch_files, info, tmp_path, name):
    activation = name if name in ("gelu", "tanh") else "relu"
    probe, _ = convert(torch_files / f"{name}.pt", tmp_path / "p.onnx", info, activation=activation)
    expected = np.load(torch_files / f"{name}.npy")
    np.testing.assert_allclose(probe.predict(np.load(torch_files / "states.npy")), expected, atol=1e-5)


@pytest.mark.parametrize("name", ["fc2", "fc3", "fc4"])
def test_the_layouts_of_the_methods_authors_say_where_they_read(torch_files, info, name):
    reading = read_probe(torch_files / f"{name}.pt", info).reading
    assert reading == Reading(layer=info.n_layer - 1, norm="post", pooling="mean", window="predictor")
    assert read_probe(torch_files / "tanh.pt", info).reading == Reading()


def test_a_checkpoint_in_bfloat16_with_other_facts_is_read(torch_files, info, tmp_path):
    probe, _ = convert(torch_files / "bfloat16.pt", tmp_path / "p.onnx", info)
    states = np.load(torch_files / "states.npy")[:64]
    np.testing.assert_allclose(probe.predict(states), np.load(torch_files / "fc3.npy")[:64], atol=0.02)


def test_a_window_on_a_larger_storage_is_read_with_its_strides(torch_files, info):
    mlp = read_weights(torch_files / "strided.pt").mlp
    np.testing.assert_array_equal(mlp.layers[0][0][:, 0], np.arange(info.n_embd) + info.n_embd)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("module.pt", "holds more than tensors"),
        ("old.pt", "is a pickle, which can run any code"),
        ("nan.pt", "holds NaN or infinity"),
        ("wide.pt", "so it is for another model"),
        ("batchnorm.pt", "belongs to a batch norm"),
    ],
)
def test_a_torch_file_that_is_no_probe_is_refused(torch_files, model, tmp_path, name, wanted):
    out = tmp_path / "p.onnx"
    options = ["--role", "target", "-m", model, "--hidden-state", 2, "--pooling", "mean", "--window", "token"]
    code, output = cli("probe", "convert", torch_files / name, "-o", out, *options)
    assert code == 4 and output.startswith("Error: ") and output.count("\n") == 1, output
    assert wanted in output
    assert not list(tmp_path.iterdir())


# -- safetensors, NumPy, scikit-learn -------------------------------------------------------------------


def arrays(n_embd: int, seed: int = 0) -> Mlp:
    rng = np.random.default_rng(seed)
    sizes = [(n_embd, 6), (6, 6), (6, 1)]
    layers = [(rng.normal(size=size).astype(np.float32), rng.normal(size=size[1]).astype(np.float32)) for size in sizes]
    scale = np.ones(n_embd, np.float32)
    scale[3] = 1e4
    return Mlp(layers=layers, mean=scale * rng.normal(size=n_embd).astype(np.float32), std=scale)


@pytest.mark.parametrize("turned", [True, False])
def test_safetensors_and_npz_are_read_in_either_layout(info, tmp_path, turned):
    save_file = pytest.importorskip("safetensors.numpy", reason="the extra packages of training").save_file
    mlp = arrays(info.n_embd)
    tensors = {"input_mean": mlp.mean, "input_std": mlp.std}
    for i, (weights, biases) in enumerate(mlp.layers):
        tensors |= {f"net.{3 * i}.weight": weights.T.copy() if turned else weights, f"net.{3 * i}.bias": biases}
    facts = {"layer": "2", "norm": "pre", "pooling": "last", "window": "token"}
    save_file(tensors, tmp_path / "p.safetensors", metadata=facts)
    np.savez(tmp_path / "p.npz", **tensors, layer=2, norm="pre", pooling="last", window="token")
    states = comparison_states(info.n_embd, mlp)
    for name in ("p.safetensors", "p.npz"):
        probe, spec = convert(tmp_path / name, tmp_path / f"{name}.onnx", info, Reading())
        assert (spec.layer, spec.norm, spec.pooling, spec.window) == (2, "pre", "last", "token")
        np.testing.assert_allclose(probe.predict(states), mlp.forward(states), atol=1e-5)


def test_numbers_without_dimension_count_and_names_may_be_capital(tmp_path):
    np.savez(tmp_path / "p.npz", W1=np.ones((4, 3)), B1=np.ones((1, 3)), W2=np.ones((3, 1)), B2=3.5, mean=2.0, std=5.0)
    mlp = read_weights(tmp_path / "p.npz").mlp
    assert [biases.tolist() for _, biases in mlp.layers] == [[1, 1, 1], [3.5]]
    assert (mlp.mean.tolist(), mlp.std.tolist()) == ([2] * 4, [5] * 4)


def test_safetensors_are_ordered_by_the_numbers_in_their_names(tmp_path):
    save_file = pytest.importorskip("safetensors.numpy", reason="the extra packages of training").save_file
    tensors = {f"hidden.{i}.weight": np.full((3, 3), i, np.float32) for i in range(11)}
    save_file({**tensors, "out.weight": np.ones((1, 3), np.float32)}, tmp_path / "p.safetensors")
    layers = read_weights(tmp_path / "p.safetensors").mlp.layers
    assert [weights[0, 0] for weights, _ in layers] == [*range(11), 1]


def test_safetensors_in_bfloat16_are_read(tmp_path):
    torch = pytest.importorskip("torch", reason="makes the file with torch: pip install '.[train]'")
    save_file = pytest.importorskip("safetensors.torch", reason="the extra packages of training").save_file
    weights = torch.tensor([[0.5, -3.0, 1e-3]], dtype=torch.bfloat16)
    save_file({"a.weight": weights, "a.bias": torch.ones(1)}, tmp_path / "p.safetensors")
    ((got, bias),) = read_weights(tmp_path / "p.safetensors").mlp.layers
    np.testing.assert_array_equal(got.T, weights.float().numpy())
    assert bias.tolist() == [1]


@pytest.mark.case(56)
@pytest.mark.filterwarnings("ignore:Stochastic Optimizer")
@pytest.mark.parametrize("kind", ["mlp", "mlp regressor", "logistic", "linear"])
def test_a_scikit_learn_pipeline_with_one_huge_feature_is_converted(info, tmp_path, kind):
    pytest.importorskip("sklearn", reason="the extra package of scikit-learn: pip install '.[sklearn]'")
    import skops.io
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.neural_network import MLPClassifier, MLPRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    rng = np.random.default_rng(0)
    states = rng.normal(size=(300, info.n_embd))
    states[:, 5] *= 1e4
    share = 1 / (1 + np.exp(-states[:, 0] + states[:, 5] / 1e4))
    last = {
        "mlp": MLPClassifier(hidden_layer_sizes=(8, 4), activation="tanh", max_iter=30, random_state=0),
        "mlp regressor": MLPRegressor(hidden_layer_sizes=(8,), activation="logistic", max_iter=30, random_state=0),
        "logistic": LogisticRegression(),
        "linear": Ridge(),
    }[kind]
    pipeline = make_pipeline(StandardScaler(), last)
    classifies = hasattr(last, "predict_proba")
    pipeline.fit(states, share > 0.5 if classifies else share)
    skops.io.dump(pipeline, tmp_path / "p.skops")
    probe, _ = convert(tmp_path / "p.skops", tmp_path / "p.onnx", info)
    expected = pipeline.predict_proba(states)[:, 1] if classifies else pipeline.predict(states).clip(0, 1)
    np.testing.assert_allclose(probe.predict(states.astype(np.float32)), expected, atol=1e-5)


def test_a_pipeline_of_another_kind_is_refused(tmp_path):
    pytest.importorskip("sklearn", reason="the extra package of scikit-learn: pip install '.[sklearn]'")
    import joblib
    import skops.io
    from sklearn.decomposition import PCA
    from sklearn.linear_model import LogisticRegression, PoissonRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    rows, labels = np.random.default_rng(0).normal(size=(30, 4)), np.arange(30) % 3
    unscaled = make_pipeline(StandardScaler(with_mean=False), LogisticRegression()).fit(rows + 5, labels > 0)
    skops.io.dump(unscaled, tmp_path / "p.skops")
    mlp = read_weights(tmp_path / "p.skops").mlp
    np.testing.assert_allclose(mlp.forward(rows + 5), unscaled.predict_proba(rows + 5)[:, 1], atol=1e-9)
    counts = PoissonRegressor().fit(rows, labels)
    reduced = make_pipeline(PCA(2), LogisticRegression()).fit(rows, labels > 0)
    three, unfitted = LogisticRegression().fit(rows, labels), LogisticRegression()
    for estimator, wanted in (
        (reduced, "begins with PCA"),
        (counts, "ends with PoissonRegressor"),
        (three, "3 classes"),
        (unfitted, "not fitted"),
    ):
        skops.io.dump(estimator, tmp_path / "p.skops")
        with pytest.raises(ProbeError, match=wanted):
            read_weights(tmp_path / "p.skops")
    joblib.dump(three, tmp_path / "p.joblib")
    with pytest.raises(ProbeError, match=r"skops\.io\.dump"):
        read_weights(tmp_path / "p.joblib")


# -- names and places -----------------------------------------------------------------------------------


def test_layers_in_any_order_of_the_file_are_chained():
    rng = np.random.default_rng(1)
    sizes = {"layers.0": (5, 4), "layers.2": (4, 3), "layers.10": (3, 1)}
    tensors = {}
    for name in ("layers.10", "layers.2", "layers.0"):
        tensors |= {
            f"{name}.bias": rng.normal(size=sizes[name][1]),
            f"{name}.weight": rng.normal(size=sizes[name][::-1]),
        }
    mlp = mlp_from_tensors(tensors)
    assert [weights.shape for weights, _ in mlp.layers] == list(sizes.values())
    np.testing.assert_array_equal(mlp.layers[1][1], tensors["layers.2.bias"])


@pytest.mark.parametrize(
    ("tensors", "wanted"),
    [
        ({}, "got nothing"),
        ({"a.weight": np.zeros((1, 4)), "gain": np.zeros(4)}, r"got a.weight \[1, 4\], gain \[4\]"),
        ({"a.weight": np.zeros((2, 4)), "b.weight": np.zeros((1, 3))}, "do not follow each other"),
        ({"a.weight": np.zeros((2, 4)), "a.bias": np.zeros(2)}, "do not follow each other down to one output"),
        ({"a.weight": np.zeros((1, 4)), "std": np.zeros(4)}, "std > 0"),
    ],
)
def test_tensors_that_are_no_probe_are_named(tensors, wanted):
    with pytest.raises(ProbeError, match=wanted):
        mlp_from_tensors(tensors)


@pytest.mark.case(18)
def test_hidden_states_are_counted_as_hugging_face_does():
    assert from_hidden_state(1, 28) == Reading(layer=0, norm="pre")
    assert from_hidden_state(27, 28) == from_hidden_state(-2, 28) == Reading(layer=26, norm="pre")
    assert from_hidden_state(28, 28) == from_hidden_state(-1, 28) == Reading(layer=27, norm="post")
    for wrong in (0, 29, -29):
        with pytest.raises(ConfigError, match="wanted 1 to 28"):
            from_hidden_state(wrong, 28)


def test_a_place_is_a_layer_and_a_norm_together():
    official = from_hidden_state(-1, 28)
    assert Reading(layer=3).filled(official).missing == ["norm", "pooling", "window"]
    assert Reading(layer=27).filled(official).norm == "post"
    assert what_it_says({"layer": "3", "hidden_state": "-1"}, 28, "p").missing == ["norm", "pooling", "window"]


@pytest.mark.parametrize("seed", range(4))
def test_wide_probes_without_a_scaler_pass_with_features_of_a_large_scale(tmp_path, info, seed):
    rng = np.random.default_rng(seed)
    sizes = [(1536, 256), (256, 1)]
    layers = [
        tuple(rng.uniform(-1, 1, s).astype(np.float32) / size[0] ** 0.5 for s in (size, size[1:])) for size in sizes
    ]
    mlp = Mlp(layers=layers, mean=np.zeros(1536, np.float32), std=np.ones(1536, np.float32))
    spec = replace(A_SPEC, n_embd=1536, n_layer=4, layer=1)
    write_mlp_onnx(tmp_path / "p.onnx", mlp, spec, states=comparison_states(1536, mlp))


def test_words_of_a_file_that_cannot_be_meant_are_refused():
    for says in ({"layer": "two"}, {"norm": "layer"}, {"window": "all"}, {"hidden_state": "0"}):
        with pytest.raises(ProbeError, match="says"):
            what_it_says(says, 4, "p.npz")


# -- an ONNX file of one's own --------------------------------------------------------------------------


def own_onnx(
    path: Path,
    n_embd: int,
    *,
    kind: str = "plain",
    opset: int = 17,
    ir: int = 8,
    batch: Any = "rows",
    classes: tuple[int, ...] = (0, 1),
) -> Path:
    """Somebody's linear probe: `plain`, `double`, `zipmap`, `two` columns, or a `label` alone."""
    onnx = pytest.importorskip("onnx", reason="the extra packages of training")
    from onnx import TensorProto, helper, numpy_helper

    dtype = {"double": np.float64, "half": np.float16}.get(kind, np.float32)
    number = {"double": TensorProto.DOUBLE, "half": TensorProto.FLOAT16}.get(kind, TensorProto.FLOAT)
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(n_embd, 1)).astype(dtype) / 8
    nodes = [helper.make_node("MatMul", ["X", "W"], ["z"]), helper.make_node("Sigmoid", ["z"], ["hidden"])]
    outputs = [helper.make_tensor_value_info("hidden", number, [batch, 1])]
    if kind == "noise":
        nodes.append(helper.make_node("RandomNormalLike", ["hidden"], ["unused"]))
    start = [numpy_helper.from_array(weights, "W")]
    if kind in ("zipmap", "two", "label"):
        start.append(numpy_helper.from_array(np.array([1], dtype), "one"))
        nodes += [
            helper.make_node("Sub", ["one", "hidden"], ["other"]),
            helper.make_node("Concat", ["other", "hidden"], ["probabilities"], axis=1),
            helper.make_node("ArgMax", ["probabilities"], ["label"], axis=1, keepdims=0),
        ]
        label = helper.make_tensor_value_info("label", TensorProto.INT64, [batch])
        outputs = [label, helper.make_tensor_value_info("probabilities", number, [batch, 2])]
        if kind == "label":
            outputs = [label]
        if kind == "zipmap":
            maps = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(number, []))
            zipped_value = helper.make_value_info("maps", helper.make_sequence_type_proto(maps))
            nodes.append(
                helper.make_node(
                    "ZipMap", ["probabilities"], ["maps"], domain="ai.onnx.ml", classlabels_int64s=list(classes)
                )
            )
            outputs = [label, zipped_value]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("X", number, [batch, n_embd])], outputs, start)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("ai.onnx.ml", 3)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=ir), path)
    return path


@pytest.mark.parametrize("kind", ["plain", "double", "zipmap", "two"])
def test_an_onnx_file_of_ones_own_is_taken_as_it_is(info, tmp_path, kind):
    source = own_onnx(tmp_path / "own.onnx", info.n_embd, kind=kind, ir=9)
    probe, spec = convert(source, tmp_path / "p.onnx", info)
    weights = np.random.default_rng(0).normal(size=(info.n_embd, 1)) / 8
    states = np.random.default_rng(1).normal(size=(9, info.n_embd)).astype(np.float32)
    np.testing.assert_allclose(probe.predict(states), 1 / (1 + np.exp(-(states @ weights)[:, 0])), atol=1e-5)
    assert spec.training["converted_from"] == "own.onnx"


def test_half_precision_is_taken_with_the_digits_that_it_has(info, tmp_path):
    source = own_onnx(tmp_path / "own.onnx", info.n_embd, kind="half")
    convert_probe(read_probe(source, info), tmp_path / "p.onnx", info, "target", READING)
    probe = load_probe(tmp_path / "p.onnx", "target", info)
    weights = np.random.default_rng(0).normal(size=(info.n_embd, 1)) / 8
    states = np.random.default_rng(1).normal(size=(9, info.n_embd)).astype(np.float32)
    np.testing.assert_allclose(probe.predict(states), 1 / (1 + np.exp(-(states @ weights)[:, 0])), atol=5e-3)


@pytest.mark.case(59)
def test_a_batch_size_of_one_is_kept_and_a_newer_ir_version_lowered(info, tmp_path):
    source = own_onnx(tmp_path / "own.onnx", info.n_embd, batch=1, ir=11)
    probe, _ = convert(source, tmp_path / "p.onnx", info)
    weights = np.random.default_rng(0).normal(size=(info.n_embd, 1)) / 8
    states = np.random.default_rng(1).normal(size=(5, info.n_embd)).astype(np.float32)
    np.testing.assert_allclose(probe.predict(states), 1 / (1 + np.exp(-(states @ weights)[:, 0])), atol=1e-5)


@pytest.mark.case(59)
def test_weights_beside_an_onnx_file_move_into_it(info, tmp_path):
    onnx = pytest.importorskip("onnx", reason="the extra packages of training")
    source = own_onnx(tmp_path / "own.onnx", info.n_embd)
    loaded = onnx.load(source)
    onnx.save(loaded, source, save_as_external_data=True, location="own.data", size_threshold=0)
    (tmp_path / "out").mkdir()
    convert(source, tmp_path / "out" / "p.onnx", info)
    assert [item.name for item in (tmp_path / "out").iterdir()] == ["p.onnx"]
    (tmp_path / "own.data").unlink()
    with pytest.raises(ProbeError, match=r"own\.data, which is not beside it"):
        convert(source, tmp_path / "out" / "q.onnx", info)


@pytest.mark.case(58)
@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"kind": "label"}, r"its outputs are label \[n\]"),
        ({"opset": 23}, "has opset 23 of ai.onnx; wanted 21 at most"),
        ({"n_embd": 5}, r"its inputs are X \[n, 5\]"),
        ({"batch": 7}, r"its inputs are X \[7, "),
        ({"kind": "zipmap", "classes": (0, 1, 2)}, "its outputs are label"),
        ({"kind": "noise"}, "own.onnx uses the ONNX operator RandomNormalLike"),
    ],
)
def test_an_onnx_file_that_is_no_probe_is_refused(info, tmp_path, options, wanted):
    n_embd = options.pop("n_embd", info.n_embd)
    source = own_onnx(tmp_path / "own.onnx", n_embd, **options)
    with pytest.raises(ProbeError, match=wanted):
        convert(source, tmp_path / "p.onnx", info)
    assert [item.name for item in tmp_path.iterdir()] == ["own.onnx"]


# -- the commands ---------------------------------------------------------------------------------------


def an_npz(path: Path, n_embd: int, **facts: Any) -> Path:
    rng = np.random.default_rng(2)
    np.savez(path, w0=rng.normal(size=(n_embd, 4)), b0=np.zeros(4), w1=rng.normal(size=(4, 1)), b1=np.zeros(1), **facts)
    return path


def test_what_nobody_said_is_named_when_nobody_can_be_asked(model, info, tmp_path):
    source = an_npz(tmp_path / "p.npz", info.n_embd, layer=1)
    code, output = cli("probe", "convert", source, "-m", model)
    assert (code, output.count("\n")) == (2, 1) and "give --role" in output
    code, output = cli("probe", "convert", source, "-m", model, "--role", "draft")
    assert code == 2 and "give --norm, --pooling, --window" in output
    code, output = cli("probe", "convert", source, "-m", model, "--role", "draft", "--layer", 0, "--hidden-state", 1)
    assert code == 2 and "leave out --layer and --norm" in output
    assert [item.name for item in tmp_path.iterdir()] == ["p.npz"]


def test_a_converted_probe_can_be_inspected_and_run(tiny, info, model, tmp_path):
    facts = {"hidden_state": -1, "pooling": "mean", "window": "token"}
    source = an_npz(tmp_path / "p.npz", info.n_embd, **facts)
    draft = tiny("llama-q8")
    for role, path in (("target", model), ("draft", draft)):
        code, output = cli("probe", "convert", source, "-m", path, "--role", role, "-o", tmp_path / f"{role}.onnx")
        assert code == 0 and f"{role} probe for" in output and "post norm" in output, output
    code, output = cli("probe", "convert", source, "-m", model, "--role", "target", "-o", tmp_path / "target.onnx")
    assert code == 2 and "exists; give another name with -o, or --force" in output
    code, output = cli("probe", "inspect", tmp_path / "target.onnx")
    assert code == 0 and "mean over the token window" in output and "converted_from p.npz" in output
    code, output = cli("probe", "inspect", tmp_path / "draft.onnx", "--json")
    assert json.loads(output)["spec"]["quantization"].endswith("Q8_0")
    probes = [word for role in ("target", "draft") for word in (f"--{role}-probe", tmp_path / f"{role}.onnx")]
    code, output = cli(
        "run",
        "hi",
        "-m",
        model,
        "-md",
        draft,
        *probes,
        "--policy",
        "semantic-ratio",
        "-n",
        30,
        "-t",
        1,
        "-s",
        1,
        "--json",
        "-q",
    )
    assert code == 0 and json.loads(output)["stats"]["policy"] == "semantic-ratio", output


def test_an_installed_probe_is_found_before_the_shipped_one(tiny, info, model, tmp_path):
    source = an_npz(tmp_path / "p.npz", info.n_embd, hidden_state=1, pooling="mean", window="token")
    assert cli("probe", "convert", source, "-m", model, "--role", "target")[0] == 0
    folder = config_dir() / "models"
    folder.mkdir(parents=True)
    roles = (
        table_of(path.read_bytes(), source_of("path", path=str(path)), path.name) for path in (model, tiny("llama-q8"))
    )
    write_manifest(folder / "mine.toml", manifest_of(*roles, name="mine", description="Mine"))
    code, output = cli("probe", "install", tmp_path / "p.onnx", "--pair", "mine")
    assert code == 0 and output.strip().endswith("probes/mine/target.onnx"), output
    code, output = cli("probe", "install", tmp_path / "p.onnx", "--pair", "mine")
    assert code == 2 and "--force replaces it" in output
    code, output = cli("probe", "list")
    assert [line.split()[:4] for line in output.splitlines() if line.startswith("mine")] == [
        ["mine", "target", "yours", "used"]
    ]
    (row,) = [row for row in json.loads(cli("probe", "list", "--json")[1]) if row["pair"] == "mine"]
    assert row["reads"] == "layer 0 pre, mean of token"
