"""Write a probe as ONNX from plain arrays, and prove that the file computes what the arrays do.

Needs the `onnx` package (`pip install 'semspec-local[train]'`); knows nothing of who trained the arrays.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, ProbeError
from ..protocols import FloatArray
from .runtime import INPUT_NAME, OUTPUT_NAME, OnnxProbe, read_probe_file
from .spec import METADATA_KEY, ProbeSpec

Layer = tuple[FloatArray, FloatArray]
"""Weights float32 [n_in, n_out] and biases float32 [n_out] of one linear layer."""

OPSET, IR_VERSION = 17, 8
"""Old enough for every onnxruntime that this package accepts (1.18 reads IR version 10 and opset 21)."""

MAX_PARITY_ERROR = 1e-5


def mlp_forward(layers: Sequence[Layer], mean: FloatArray, std: FloatArray, states: FloatArray) -> NDArray[np.float64]:
    """What the ONNX file computes, in float64: standardise, linear layers with ReLU between, sigmoid; [n]."""
    x = (states.astype(np.float64) - mean) / std
    for index, (weights, biases) in enumerate(layers):
        x = x @ weights.astype(np.float64) + biases
        if index < len(layers) - 1:
            x = np.maximum(x, 0)
    return np.asarray(np.exp(-np.logaddexp(0, -x[:, 0])))


def write_mlp_onnx(
    path: Path | str,
    layers: Sequence[Layer],
    mean: FloatArray,
    std: FloatArray,
    spec: ProbeSpec,
    *,
    states: FloatArray,
    expected: NDArray[np.floating[Any]] | None = None,
) -> float:
    """Write the probe to `path` and return the largest difference to `expected`, in probability.

    `mean` and `std` are float32 [n_embd] and become part of the graph. `states` float32 [n, n_embd] are real pooled
    states to compare on; `expected` [n] is what the trainer computed for them (default: `mlp_forward`). The file
    appears under its name only when it loads and the difference is at most 1e-5; otherwise ProbeError.
    """
    _check_shapes(layers, mean, std, spec.n_embd)
    data = _build(layers, mean, std, spec)
    wanted = mlp_forward(layers, mean, std, states) if expected is None else np.asarray(expected)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=".onnx", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
        got = OnnxProbe(read_probe_file(temporary)).predict(states)
        difference = float(np.max(np.abs(got - wanted), initial=0.0))
        if not difference <= MAX_PARITY_ERROR:
            raise ProbeError(
                f"{path} was not written: ONNX and the trained arrays differ by {difference:.2e}; "
                f"wanted at most {MAX_PARITY_ERROR:.0e}"
            )
        temporary.chmod(0o644)  # mkstemp makes it private
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return difference


def _check_shapes(layers: Sequence[Layer], mean: FloatArray, std: FloatArray, n_embd: int) -> None:
    width = n_embd
    for index, (weights, biases) in enumerate(layers):
        if weights.ndim != 2 or weights.shape[0] != width or biases.shape != weights.shape[1:]:
            got = f"{list(weights.shape)} and {list(biases.shape)}"
            raise ProbeError(f"layer {index} has shapes {got}; wanted [{width}, n_out] and [n_out]")
        width = weights.shape[1]
    if not layers or width != 1:
        raise ProbeError(f"the last layer has {width} outputs; wanted 1")
    if mean.shape != (n_embd,) or std.shape != (n_embd,) or not (std > 0).all():
        raise ProbeError(
            f"mean and std have shapes {list(mean.shape)} and {list(std.shape)}; wanted [{n_embd}], std > 0"
        )


def _build(layers: Sequence[Layer], mean: FloatArray, std: FloatArray, spec: ProbeSpec) -> bytes:
    try:
        from onnx import TensorProto, helper, numpy_helper
    except ImportError:
        raise ConfigError("writing ONNX needs the onnx package: pip install 'semspec-local[train]'") from None

    weights = {"mean": mean, "std": std}
    nodes = [
        helper.make_node("Sub", [INPUT_NAME, "mean"], ["centred"]),
        helper.make_node("Div", ["centred", "std"], ["x0"]),
    ]
    for index, (matrix, bias) in enumerate(layers):
        weights |= {f"w{index}": matrix, f"b{index}": bias}
        last = index == len(layers) - 1
        linear = "logit" if last else f"linear{index}"
        nodes.append(helper.make_node("Gemm", [f"x{index}", f"w{index}", f"b{index}"], [linear]))
        if not last:
            nodes.append(helper.make_node("Relu", [linear], [f"x{index + 1}"]))
    nodes.append(helper.make_node("Sigmoid", ["logit"], ["column"]))
    nodes.append(helper.make_node("Squeeze", ["column", "axes"], [OUTPUT_NAME]))

    initializers = [
        numpy_helper.from_array(np.ascontiguousarray(value, dtype=np.float32), name) for name, value in weights.items()
    ]
    initializers.append(numpy_helper.from_array(np.array([1], np.int64), "axes"))
    graph = helper.make_graph(
        nodes,
        "semspec_probe",
        [helper.make_tensor_value_info(INPUT_NAME, TensorProto.FLOAT, ["n", spec.n_embd])],
        [helper.make_tensor_value_info(OUTPUT_NAME, TensorProto.FLOAT, ["n"])],
        initializers,
    )
    opset = helper.make_opsetid("", OPSET)
    model = helper.make_model(graph, opset_imports=[opset], ir_version=IR_VERSION, producer_name="semspec-local")
    helper.set_model_props(model, {METADATA_KEY: spec.to_json()})
    data: bytes = model.SerializeToString()
    return data
