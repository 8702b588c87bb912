"""Look into an ONNX file without running it: versions, metadata, operators, outside files.

A few lines of protobuf reading stand here so that a probe's spec is checked before onnxruntime sees the file,
and so that the `onnx` package is not needed at run time. Field numbers are those of onnx.proto.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10


@dataclass(frozen=True)
class OnnxHeader:
    """What a ModelProto says before it is run.

    `opsets` maps a domain ("" is ONNX's own) to its version. `operators` are the operator names of the graph and of
    its local functions. `external_files` are the locations of weights that are kept outside the file.
    """

    ir_version: int
    opsets: dict[str, int]
    metadata: dict[str, str]
    operators: frozenset[str]
    external_files: tuple[str, ...]


def read_header(data: bytes) -> OnnxHeader:
    """Read the header of a serialized ModelProto; ValueError when the bytes are not a whole one."""
    ir_version = 0
    opsets: dict[str, int] = {}
    metadata: dict[str, str] = {}
    operators: set[str] = set()
    external: dict[str, None] = {}
    has_graph = False
    for number, value in _fields(memoryview(data)):
        if number == 1 and isinstance(value, int):
            ir_version = value
        elif number == 7:
            has_graph = True
            for part, inner in _fields(_message(value)):
                if part == 1:
                    operators.add(_text_field(_message(inner), 4))
                elif part == 5:
                    external.update(dict.fromkeys(_locations(_message(inner))))
        elif number == 8:
            opset = dict(_fields(_message(value)))
            version = opset.get(2, 0)
            opsets[_text(opset.get(1, memoryview(b"")))] = version if isinstance(version, int) else 0
        elif number == 14:
            entry = _message(value)
            metadata[_text_field(entry, 1)] = _text_field(entry, 2)
        elif number == 25:  # local functions have nodes too
            operators.update(_text_field(_message(node), 4) for part, node in _fields(_message(value)) if part == 7)
    if not has_graph or not ir_version:
        raise ValueError("no graph, or no IR version")
    return OnnxHeader(ir_version, opsets, metadata, frozenset(operators), tuple(external))


def _locations(tensor: memoryview) -> Iterator[str]:
    for number, value in _fields(tensor):
        if number == 13:
            entry = _message(value)
            if _text_field(entry, 1) == "location":
                yield _text_field(entry, 2)


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Every (field number, value) of one message; ValueError where the bytes break the rules of the wire."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if not number:
            raise ValueError("field number 0")
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire == _BYTES:
            length, at = _varint(data, at)
        elif wire in (_FIXED64, _FIXED32):
            length = 8 if wire == _FIXED64 else 4
        else:
            raise ValueError(f"wire type {wire}")
        if at + length > len(data):
            raise ValueError(f"{at + length - len(data)} bytes are missing")
        yield number, data[at : at + length]
        at += length


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(_MAX_VARINT_BYTES):
        if at >= len(data):
            raise ValueError("it ends in the middle of a number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value, at
    raise ValueError("a number has too many bytes")


def _message(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise ValueError("a number where a message belongs")
    return value


def _text(value: int | memoryview) -> str:
    return bytes(_message(value)).decode("utf-8", errors="replace")


def _text_field(message: memoryview, wanted: int) -> str:
    return next((_text(value) for number, value in _fields(message) if number == wanted), "")
