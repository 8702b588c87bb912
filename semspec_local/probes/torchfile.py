"""Read the tensors of a PyTorch file (.pt, .pth) without PyTorch, and without running anything that it says.

Such a file is a zip archive with a pickle, which names tensors, and their bytes beside it. The pickle is read by an
unpickler that knows tensors and dictionaries and refuses every other name.
"""

from __future__ import annotations

import pickle
import pickletools
import struct
import zipfile
import zlib
from collections.abc import Sequence
from io import BytesIO
from itertools import count, islice
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import ProbeError
from .runtime import one_line

MAX_PICKLE_BYTES, MAX_OPCODES = 2**20, 20_000
"""The names and shapes of a probe's tensors take some KB and some hundred opcodes; far more could exhaust the stack."""

_MAX_VALUES, _MAX_NUMBER = 10_000, 2**40
_MODELS = ("model_state_dict", "state_dict", "model")
"""What the weights are called in a checkpoint that holds other tensors too, such as an optimizer's."""

_BFLOAT16 = "bfloat16"
_STORAGES: dict[str, str] = {
    "FloatStorage": "<f4",
    "DoubleStorage": "<f8",
    "HalfStorage": "<f2",
    "BFloat16Storage": _BFLOAT16,
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ShortStorage": "<i2",
    "CharStorage": "|i1",
    "ByteStorage": "|u1",
    "BoolStorage": "|b1",
}
"""What PyTorch calls a piece of memory, and the kind of number that is in it."""


ZIP_ERRORS = (
    *(zipfile.BadZipFile, zlib.error, struct.error),
    *(OSError, EOFError, ValueError, RuntimeError, NotImplementedError),
)
"""What `zipfile` raises for archives that are broken, in one way or another."""


class _Refused(pickle.UnpicklingError):
    """The pickle names something that is no tensor."""


class _Storage(NamedTuple):
    kind: str
    key: str


class _Tensor(NamedTuple):
    """A tensor as the pickle describes it: a window on a storage. A tuple, which no pickle can change afterwards."""

    storage: _Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class _Dict(dict[Any, Any]):
    """What stands for an OrderedDict; attributes that a pickle gives it are dropped."""

    def __setstate__(self, state: object) -> None:
        pass


def _rebuild_tensor(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> _Tensor:
    whole = [offset, *size, *stride]
    sound = all(type(n) is int and 0 <= n < _MAX_NUMBER for n in whole) and len(size) == len(stride)
    if not isinstance(storage, _Storage) or not sound:
        raise _Refused("a tensor without a storage, or of no shape")
    return _Tensor(storage, offset, tuple(size), tuple(stride))


def _rebuild_parameter(data: Any, *_: Any) -> Any:
    return data


_KNOWN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): _Dict,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    **{("torch", name): kind for name, kind in _STORAGES.items()},
}


class _Unpickler(pickle._Unpickler):
    """The one in Python: a pickle cannot make it take memory that is not in the file."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise _Refused(one_line(f"{module}.{name}"))
        return _KNOWN[module, name]

    def persistent_load(self, pid: Any) -> _Storage:
        if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage":
            raise _Refused("a storage of an unknown kind")
        _, kind, key, *_ = pid
        if kind not in _STORAGES.values() or not isinstance(key, str):
            raise _Refused("a storage of an unknown kind")
        return _Storage(kind, key)


def read_torch_file(path: Path, *, max_bytes: int) -> dict[str, NDArray[Any]]:
    """The tensors of a state dict by name, in its order; those of a dictionary inside it as `outer.inner`.

    Of a checkpoint those of the model count; other values (an epoch's number, a name) are left out. Raises ProbeError
    for a file that is not whole, whose tensors take more than `max_bytes`, or whose pickle names anything else.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            parts = {name.partition("/")[2]: name for name in archive.namelist()}
            if len(parts) != len(archive.infolist()):
                raise ProbeError(f"{path} has two parts of one name; wanted a PyTorch file")
            if "data.pkl" not in parts or archive.getinfo(parts["data.pkl"]).file_size > MAX_PICKLE_BYTES:
                raise ProbeError(f"{path} is a zip archive, but not one of a probe's weights as PyTorch writes them")
            if "byteorder" in parts and archive.read(parts["byteorder"]) != b"little":
                raise ProbeError(f"{path} was written on a big-endian machine; save it again on another")
            found = _tensors_in(_unpickled(path, archive.read(parts["data.pkl"])))
            if sum(8 * prod(tensor.size) for tensor in found.values()) > max_bytes:
                raise ProbeError(f"{path} holds tensors of over {max_bytes // 2**20} MiB; wanted a probe's weights")
            keys = {tensor.storage.key for tensor in found.values()}
            storages = {key: archive.read(parts[f"data/{key}"]) for key in keys}
            return {name: _array(path, tensor, storages[tensor.storage.key]) for name, tensor in found.items()}
    except KeyError as error:
        raise ProbeError(f"{path} lacks a part, {one_line(error)}; wanted a whole PyTorch file") from None
    except ZIP_ERRORS as error:
        raise ProbeError(f"{path} is not a whole PyTorch file ({one_line(error)}); fetch or save it again") from None


def _unpickled(path: Path, data: bytes) -> Any:
    try:
        if sum(1 for _ in islice(pickletools.genops(data), MAX_OPCODES + 1)) > MAX_OPCODES:
            raise _Refused("more than a list of tensors takes")
        return _Unpickler(BytesIO(data)).load()
    except _Refused as error:
        raise ProbeError(
            f"{path} holds more than tensors ({error}), and opening that could run any code; "
            "wanted torch.save(model.state_dict(), ...)"
        ) from None
    except Exception as error:  # a broken pickle may raise anything
        raise ProbeError(f"{path}: its list of tensors cannot be read ({one_line(error)})") from None


def _tensors_in(value: Any) -> dict[str, _Tensor]:
    """The tensors by name; in a checkpoint, those of the model alone."""
    found: dict[str, _Tensor] = {}
    waiting: list[tuple[str, Any]] = [("", value)]
    for n_seen in count():
        if not waiting or n_seen > _MAX_VALUES:
            break
        name, inner = waiting.pop()
        if isinstance(inner, _Tensor):
            found[name] = inner
        elif isinstance(inner, dict) and name.count(".") < 8:
            named = [(f"{name}.{key}" if name else str(key), one) for key, one in dict.items(inner)]
            waiting += reversed(named)
    for model in _MODELS:
        if own := {name.removeprefix(f"{model}."): one for name, one in found.items() if name.startswith(f"{model}.")}:
            return own
    return found


def _array(path: Path, tensor: _Tensor, data: bytes) -> NDArray[Any]:
    kind, last = tensor.storage.kind, _last_item(tensor.offset, tensor.size, tensor.stride)
    n_bytes = 2 if kind == _BFLOAT16 else np.dtype(kind).itemsize
    items = np.frombuffer(data[: len(data) // n_bytes * n_bytes], "<u2" if kind == _BFLOAT16 else kind)
    # A stride of 0 makes much out of little, so the shape itself is looked at, too.
    if last > len(items) or prod(tensor.size) > max(len(items), 1):
        raise ProbeError(f"{path}: a tensor of shape {list(tensor.size)} is larger than its {len(items)} numbers")
    strides = tuple(step * items.itemsize for step in tensor.stride)
    view = np.lib.stride_tricks.as_strided(items[tensor.offset :], tensor.size, strides, writeable=False)
    return from_bfloat16(view) if kind == _BFLOAT16 else np.array(view)


def from_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """bfloat16, which NumPy has not, is the upper half of a float32."""
    return np.asarray((bits.astype(np.uint32) << 16).view(np.float32))


def _last_item(offset: int, size: Sequence[int], stride: Sequence[int]) -> int:
    """One past the last item that a window reaches."""
    if 0 in size:
        return offset
    return offset + sum((n - 1) * step for n, step in zip(size, stride)) + 1
