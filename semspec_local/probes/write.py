"""Write a probe as ONNX from plain arrays, and prove that the file computes what the arrays do.

Needs the `onnx` package (`pip install 'semspec-local[train]'`); knows nothing of who trained the arrays.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, ProbeError
from ..protocols import FloatArray
from ..provenance import atomic_write
from .mlp import Activation, Mlp
from .runtime import OUTPUT_NAME, OnnxJointProbe, OnnxProbe, input_widths, read_probe_file
from .spec import METADATA_KEY, ProbeSpec

OPSET, IR_VERSION = 17, 8
"""Old enough for every onnxruntime that this package accepts (1.18 reads IR version 10 and opset 21)."""

MAX_PARITY_ERROR = 1e-5


def write_mlp_onnx(
    path: Path | str,
    mlp: Mlp,
    spec: ProbeSpec,
    *,
    states: FloatArray,
    expected: NDArray[np.floating[Any]] | None = None,
) -> float:
    """Write the probe to `path` and return the largest difference to `expected`, in probability.

    `states` float32 [n, width] are pooled states to compare on (a joint probe's inputs, side by side); `expected` [n]
    is what the trainer computed for them (default: `mlp.forward`). The file appears under its name only when it loads
    and the difference is at most 1e-5, or what rounding to float32 costs where states are so large that it costs more;
    otherwise ProbeError.
    """
    if mlp.n_embd != (width := sum(input_widths(spec).values())):
        raise ProbeError(f"the probe reads states of width {mlp.n_embd}; wanted {width}, the model's")
    exact = mlp.forward(states)
    with np.errstate(all="ignore"):
        rounding = np.abs(mlp.forward(states, np.float32) - exact)
    wanted = exact if expected is None else np.asarray(expected)
    tolerance = np.maximum(MAX_PARITY_ERROR, 4 * rounding.max(initial=0.0) * (rounding > MAX_PARITY_ERROR / 4))
    return write_proven(path, _build(mlp, spec), states=states, expected=wanted, tolerance=tolerance)


def write_proven(
    path: Path | str,
    data: bytes,
    *,
    states: FloatArray,
    expected: NDArray[np.floating[Any]],
    tolerance: NDArray[np.float64] | float = MAX_PARITY_ERROR,
) -> float:
    """Write a serialized probe to `path` if it computes `expected` [n] to within `tolerance`; the largest difference.

    Otherwise ProbeError, and no file under that name.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=".onnx", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
        file = read_probe_file(temporary)
        got = (OnnxJointProbe(file) if file.spec.role == "joint" else OnnxProbe(file)).predict_rows(states)
        differences = np.abs(got - expected)
        worst = float(differences.max(initial=0.0))
        if not (differences <= tolerance).all():
            over = differences > tolerance
            raise ProbeError(
                f"{path} was not written: ONNX and the original differ by {differences[over].max():.2e}; "
                f"wanted at most {np.broadcast_to(tolerance, over.shape)[over].max():.0e}"
            )
        temporary.chmod(0o644)  # mkstemp makes it private
        temporary.replace(path)
    except ProbeError as error:
        raise ProbeError(str(error).replace(str(temporary), str(path))) from None
    finally:
        temporary.unlink(missing_ok=True)
    return worst


def rewrite_spec(path: Path, spec: ProbeSpec) -> None:
    """Give a probe's file another spec; the graph stays as it is. Raises ProbeError for a file that is no probe."""
    onnx = _onnx()
    read_probe_file(path)
    model = onnx.load(str(path))
    onnx.helper.set_model_props(model, {METADATA_KEY: spec.to_json()})
    atomic_write(path, model.SerializeToString())


def _onnx() -> Any:
    try:
        import onnx
        import onnx.helper
    except ImportError:
        raise ConfigError("writing ONNX needs the onnx package: pip install 'semspec-local[train]'") from None
    return onnx


def _build(mlp: Mlp, spec: ProbeSpec) -> bytes:
    _onnx()
    from onnx import TensorProto, helper, numpy_helper

    weights = {"mean": mlp.mean, "std": mlp.std}
    widths = input_widths(spec)
    nodes = [
        helper.make_node("Concat", list(widths), ["all"], axis=1),
        helper.make_node("Sub", ["all", "mean"], ["centred"]),
        helper.make_node("Div", ["centred", "std"], ["x0"]),
    ]
    for index, (matrix, bias) in enumerate(mlp.layers):
        weights |= {f"w{index}": matrix, f"b{index}": bias}
        last = index == len(mlp.layers) - 1
        linear = "logit" if last else f"linear{index}"
        nodes.append(helper.make_node("Gemm", [f"x{index}", f"w{index}", f"b{index}"], [linear]))
        if not last:
            nodes += _activation(mlp.activation, linear, f"x{index + 1}", helper.make_node)
    if mlp.activation == "gelu":
        weights |= {"root2": np.float32(math.sqrt(2)), "one": np.float32(1), "half": np.float32(0.5)}
    weights |= {} if mlp.sigmoid else {"zero": np.float32(0), "top": np.float32(1)}
    nodes.append(
        helper.make_node(*(("Sigmoid", ["logit"]) if mlp.sigmoid else ("Clip", ["logit", "zero", "top"])), ["column"])
    )
    nodes.append(helper.make_node("Squeeze", ["column", "axes"], [OUTPUT_NAME]))

    initializers = [
        numpy_helper.from_array(np.ascontiguousarray(value, dtype=np.float32), name) for name, value in weights.items()
    ]
    initializers.append(numpy_helper.from_array(np.array([1], np.int64), "axes"))
    graph = helper.make_graph(
        nodes,
        "semspec_probe",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", width]) for name, width in widths.items()],
        [helper.make_tensor_value_info(OUTPUT_NAME, TensorProto.FLOAT, ["n"])],
        initializers,
    )
    opset = helper.make_opsetid("", OPSET)
    model = helper.make_model(graph, opset_imports=[opset], ir_version=IR_VERSION, producer_name="semspec-local")
    helper.set_model_props(model, {METADATA_KEY: spec.to_json()})
    data: bytes = model.SerializeToString()
    return data


def _activation(name: Activation, x: str, y: str, make_node: Callable[..., Any]) -> list[Any]:
    if name != "gelu":
        return [make_node({"relu": "Relu", "tanh": "Tanh", "sigmoid": "Sigmoid"}[name], [x], [y])]
    # ONNX has a Gelu of its own only from opset 20 on.
    return [
        make_node("Div", [x, "root2"], [f"{x}_scaled"]),
        make_node("Erf", [f"{x}_scaled"], [f"{x}_erf"]),
        make_node("Add", [f"{x}_erf", "one"], [f"{x}_gate"]),
        make_node("Mul", [x, f"{x}_gate"], [f"{x}_double"]),
        make_node("Mul", [f"{x}_double", "half"], [y]),
    ]
