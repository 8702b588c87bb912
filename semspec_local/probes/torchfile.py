"""Read the tensors of a PyTorch file (.pt, .pth) without PyTorch, and without running anything that it says.

Such a file is a zip archive with a pickle, which names tensors, and their bytes beside it. The pickle is read by an
unpickler that knows tensors and dictionaries and refuses every other name.
"""

from __future__ import annotations

import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ProbeError

MAX_PICKLE_BYTES = 16 * 2**20
"""The names and shapes of a probe's tensors take some KB."""

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


@dataclass(frozen=True)
class _Storage:
    kind: str
    key: str
    n_items: int


@dataclass(frozen=True)
class _Tensor:
    """A tensor as the pickle describes it: a window on a storage."""

    storage: _Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


def _rebuild_tensor(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> _Tensor:
    whole = [offset, *size, *stride]
    if (
        not isinstance(storage, _Storage)
        or not all(type(n) is int and n >= 0 for n in whole)
        or len(size) != len(stride)
    ):
        raise _Refused("a tensor without a storage, or of no shape")
    return _Tensor(storage, offset, tuple(size), tuple(stride))


def _rebuild_parameter(data: Any, *_: Any) -> Any:
    return data


_KNOWN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    **{("torch", name): kind for name, kind in _STORAGES.items()},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise _Refused(f"{module}.{name}")
        return _KNOWN[module, name]

    def persistent_load(self, pid: Any) -> _Storage:
        if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage":
            raise _Refused("a storage of an unknown kind")
        _, kind, key, _device, n_items = pid
        if kind not in _STORAGES.values() or not isinstance(key, str) or type(n_items) is not int:
            raise _Refused("a storage of an unknown kind")
        return _Storage(kind, key, n_items)


def read_torch_file(path: Path, *, max_bytes: int) -> dict[str, NDArray[Any]]:
    """The tensors of a state dict by name, in its order; those of a dictionary inside it as `outer.inner`.

    Other values (an epoch's number, a name) are left out. Raises ProbeError for a file that is not whole, that is
    larger than `max_bytes` when unpacked, or whose pickle names anything but tensors.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            parts = {name.partition("/")[2]: name for name in archive.namelist()}
            if sum(info.file_size for info in archive.infolist()) > max_bytes:
                raise ProbeError(f"{path} unpacks to more than {max_bytes // 2**20} MiB; wanted a probe's weights")
            if "data.pkl" not in parts or archive.getinfo(parts["data.pkl"]).file_size > MAX_PICKLE_BYTES:
                raise ProbeError(f"{path} is a zip archive, but not one of PyTorch's: it has no data.pkl")
            if "byteorder" in parts and archive.read(parts["byteorder"]) != b"little":
                raise ProbeError(f"{path} was written on a big-endian machine; save it again on another")
            found = _flat(_unpickled(path, archive.read(parts["data.pkl"])))
            return {
                name: _array(path, tensor, archive.read(parts[f"data/{tensor.storage.key}"]))
                for name, tensor in found.items()
            }
    except KeyError as error:
        raise ProbeError(f"{path} lacks a part, {error}; wanted a whole PyTorch file") from None
    except ZIP_ERRORS as error:
        raise ProbeError(f"{path} is not a whole PyTorch file ({error}); fetch or save it again") from None


def _unpickled(path: Path, data: bytes) -> Any:
    try:
        return _Unpickler(BytesIO(data)).load()
    except _Refused as error:
        raise ProbeError(
            f"{path} holds more than tensors ({error}), and opening that could run any code; "
            "wanted torch.save(model.state_dict(), ...)"
        ) from None
    except Exception as error:  # a broken pickle may raise anything
        raise ProbeError(f"{path}: its list of tensors cannot be read ({type(error).__name__}: {error})") from None


def _flat(value: Any, before: str = "", depth: int = 0) -> dict[str, _Tensor]:
    if isinstance(value, _Tensor):
        return {before: value}
    found: dict[str, _Tensor] = {}
    if isinstance(value, Mapping) and depth < 8:
        for key, inner in value.items():
            found |= _flat(inner, f"{before}.{key}" if before else str(key), depth + 1)
    return found


def _array(path: Path, tensor: _Tensor, data: bytes) -> NDArray[Any]:
    kind, last = tensor.storage.kind, _last_item(tensor.offset, tensor.size, tensor.stride)
    items = np.frombuffer(data, "<u2" if kind == _BFLOAT16 else kind)
    # A stride of 0 makes much out of little, so the shape itself is looked at, too.
    if last > len(items) or prod(tensor.size) > max(len(items), 1):
        raise ProbeError(f"{path}: a tensor of shape {list(tensor.size)} is larger than its {len(items)} numbers")
    strides = tuple(step * items.itemsize for step in tensor.stride)
    view = np.lib.stride_tricks.as_strided(items[tensor.offset :], tensor.size, strides, writeable=False)
    if kind == _BFLOAT16:
        return np.asarray((view.astype(np.uint32) << 16).view(np.float32))
    return np.array(view)


def _last_item(offset: int, size: Sequence[int], stride: Sequence[int]) -> int:
    """One past the last item that a window reaches."""
    if 0 in size:
        return offset
    return offset + sum((n - 1) * step for n, step in zip(size, stride)) + 1
