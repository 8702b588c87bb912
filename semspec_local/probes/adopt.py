"""Make a probe out of somebody's own ONNX file: the wanted input, output and spec around the graph as it is.

Needs the `onnx` package (`pip install 'semspec-local[train]'`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, ProbeError
from ..protocols import FloatArray
from .onnxfile import read_header
from .runtime import (
    INPUT_NAME,
    MAX_PROBE_BYTES,
    OUTPUT_NAME,
    check_external,
    one_line,
    read_probe_bytes,
    refuse_operators,
)
from .spec import METADATA_KEY, ProbeSpec
from .write import MAX_PARITY_ERROR, write_proven

MAX_IR_VERSION = 10
MAX_OPSETS = {"": 21, "ai.onnx": 21, "ai.onnx.ml": 5}
"""What the oldest onnxruntime that this package accepts (1.18) reads."""

_PREFIX = "own/"
_FLOATS = {1: np.float32, 10: np.float16, 11: np.float64}
"""ONNX's numbers of the kinds of float."""

_TOLERANCES = {1: MAX_PARITY_ERROR, 10: 4e-3, 11: MAX_PARITY_ERROR}
"""How far two evaluators of one graph may differ, in probability: half precision has three digits."""


def adopt_onnx(source: Path, path: Path, spec: ProbeSpec, *, states: FloatArray) -> float:
    """Write the ONNX file `source` to `path` as the probe that `spec` says; the largest difference between them.

    Its one input may have any name, and be float32, float64 or float16 [n, n_embd]; one output must be a probability:
    [n], [n, 1] or [n, 2] (the second column counts), as a tensor or through ZipMap. Weights kept beside the file move
    into it. The graph stays as it is, so what may differ is what evaluators round. `states` float32 [n, n_embd] are
    what both are compared on.
    Raises ProbeError, and writes nothing, when that is not so.
    """
    try:
        import onnx
        from onnx import compose, helper
    except ImportError:
        raise ConfigError("converting ONNX needs the onnx package: pip install 'semspec-local[train]'") from None
    model = _loaded(source, onnx)
    for message in (model.metadata_props, model.graph.metadata_props):
        del message[:]
    model.ir_version = min(model.ir_version, MAX_IR_VERSION)
    model = compose.add_prefix(model, _PREFIX)
    kind = _input_kind(source, model.graph, spec.n_embd)
    output, columns = _probability(source, model.graph)
    _keep_only(model.graph, output)
    try:
        with np.errstate(all="ignore"):  # an exp that overflows is a probability of 0
            expected = _reference(model, output, columns, states.astype(_FLOATS[kind]))
    except Exception as error:  # whatever a stranger's graph makes onnx's evaluator raise
        raise ProbeError(f"{source} cannot be computed ({type(error).__name__}: {one_line(error)})") from None
    _wrap(model.graph, output, columns, kind, spec.n_embd, helper)
    helper.set_model_props(model, {METADATA_KEY: spec.to_json()})
    model.producer_name = "semspec-local"
    tolerance = _TOLERANCES[kind]
    return write_proven(path, model.SerializeToString(), states=states, expected=expected, tolerance=tolerance)


def _loaded(source: Path, onnx: Any) -> Any:
    """The model with all its weights, after a look at what it needs."""
    try:
        header = read_header(read_probe_bytes(source))
    except ValueError as error:
        raise ProbeError(f"{source} is no ONNX file, or not a whole one ({error})") from None
    refuse_operators(source, header)
    for name in header.external_files:
        check_external(source, name)
    if sum((source.parent / name).stat().st_size for name in header.external_files) > MAX_PROBE_BYTES:
        raise ProbeError(f"{source} keeps more than {MAX_PROBE_BYTES // 2**20} MiB beside it; wanted a probe's weights")
    for domain, version in header.opsets.items():
        if domain not in MAX_OPSETS:
            raise ProbeError(f"{source} uses operators of {domain!a}; wanted ONNX's own")
        if version > MAX_OPSETS[domain]:
            name = domain or "ai.onnx"
            raise ProbeError(
                f"{source} has opset {version} of {name}; wanted {MAX_OPSETS[domain]} at most: "
                "export it with an older one"
            )
    try:
        model = onnx.load(str(source))
        onnx.checker.check_model(model)
    except Exception as error:  # the checker's errors share no base with protobuf's
        raise ProbeError(f"{source} is not sound: {one_line(error)}") from None
    return model


def _input_kind(source: Path, graph: Any, n_embd: int) -> int:
    """The kind of number that the one input takes."""
    weights = {tensor.name for tensor in graph.initializer}
    inputs = [item for item in graph.input if item.name not in weights]
    shapes = [_shape(item) for item in inputs]
    fits = len(inputs) == 1 and len(shapes[0]) == 2 and shapes[0][0] in (None, 1) and shapes[0][1] in (None, n_embd)
    if not fits or inputs[0].type.tensor_type.elem_type not in _FLOATS:
        got = ", ".join(f"{_name(item)} {_shown(shape)}" for item, shape in zip(inputs, shapes)) or "none"
        raise ProbeError(f"{source}: its inputs are {got}; wanted one, of floats [n, {n_embd}]")
    return int(inputs[0].type.tensor_type.elem_type)


def _probability(source: Path, graph: Any) -> tuple[str, int]:
    """The tensor that is the probability, and its columns (0: it has one dimension)."""
    zipped = {
        node.output[0]: node.input[0] for node in graph.node if node.op_type == "ZipMap" and _n_classes(node) == 2
    }
    found: list[tuple[str, int]] = []
    for item in graph.output:
        shape = _shape(item)
        if item.name in zipped:
            found.append((zipped[item.name], 2))
        elif (
            item.type.tensor_type.elem_type in _FLOATS
            and len(shape) in (1, 2)
            and (len(shape) == 1 or shape[1] in (1, 2))
        ):
            found.append((item.name, 0 if len(shape) == 1 else shape[1] or 0))
    named = [choice for choice in found if choice[0] == _PREFIX + OUTPUT_NAME]
    if len(named or found) != 1:
        got = ", ".join(f"{_name(item)} {_shown(_shape(item))}" for item in graph.output)
        raise ProbeError(
            f"{source}: its outputs are {got}; wanted one of floats [n], [n, 1] or [n, 2], or {OUTPUT_NAME}"
        )
    return (named or found)[0]


def _n_classes(node: Any) -> int:
    return next((len(a.ints) + len(a.strings) for a in node.attribute if a.name.startswith("classlabels_")), 0)


def _keep_only(graph: Any, output: str) -> None:
    """Drop what the one output does not need: labels, ZipMap, other heads."""
    needed, nodes = {output}, []
    for node in reversed(graph.node):
        if needed & set(node.output):
            needed |= set(node.input)
            nodes.append(node)
    kept = list(reversed(nodes))
    del graph.node[:]
    graph.node.extend(kept)
    del graph.output[:]


def _reference(model: Any, output: str, columns: int, states: NDArray[Any]) -> NDArray[np.float64]:
    """What the original computes, row by row, by onnx's own evaluator."""
    import onnx
    from onnx.reference import ReferenceEvaluator

    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    copy.graph.output.append(onnx.helper.make_empty_tensor_value_info(output))
    evaluator = ReferenceEvaluator(copy)
    name = _input_of(copy.graph).name
    rows = [np.asarray(evaluator.run(None, {name: row[None, :]})[0], np.float64).reshape(-1) for row in states]
    wrong = next((row for row in rows if row.size != max(columns, 1)), None)
    if wrong is not None:
        raise ValueError(f"it gives {wrong.size} numbers for one state; wanted {max(columns, 1)}")
    return np.array([row[-1] for row in rows])


def _wrap(graph: Any, output: str, columns: int, kind: int, n_embd: int, helper: Any) -> None:
    """The wanted input before the graph, and the wanted output behind it."""
    from onnx import TensorProto, numpy_helper

    old = _input_of(graph)
    batch = _shape(old)[0] or "n"
    graph.node.insert(0, helper.make_node("Cast", [INPUT_NAME], [old.name], to=kind))
    graph.input.remove(old)
    graph.input.insert(0, helper.make_tensor_value_info(INPUT_NAME, TensorProto.FLOAT, [batch, n_embd]))
    last = output
    if columns == 2:
        graph.initializer.append(numpy_helper.from_array(np.array(1, np.int64), "second"))
        graph.node.append(helper.make_node("Gather", [output, "second"], ["column"], axis=1))
        last = "column"
    graph.initializer.append(numpy_helper.from_array(np.array([-1], np.int64), "flat"))
    graph.node.append(helper.make_node("Cast", [last], ["as_float"], to=TensorProto.FLOAT))
    graph.node.append(helper.make_node("Reshape", ["as_float", "flat"], [OUTPUT_NAME]))
    graph.output.append(helper.make_tensor_value_info(OUTPUT_NAME, TensorProto.FLOAT, [batch]))


def _input_of(graph: Any) -> Any:
    weights = {tensor.name for tensor in graph.initializer}
    return next(item for item in graph.input if item.name not in weights)


def _shape(item: Any) -> list[int | None]:
    """Its sizes; None for one that is not fixed. Empty for what is no tensor."""
    sizes = item.type.tensor_type.shape.dim
    return [size.dim_value if size.HasField("dim_value") and size.dim_value > 0 else None for size in sizes]


def _shown(shape: list[int | None]) -> str:
    return f"[{', '.join('n' if size is None else str(size) for size in shape)}]"


def _name(item: Any) -> str:
    return str(ascii(item.name.removeprefix(_PREFIX))[1:-1])
