"""Is this file a whole GGUF? Asked before llama.cpp sees it, because llama.cpp's own answer is late and vague."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..errors import ModelError
from .logs import first_complaint, forget_complaints, route_logs
from .native import GgufInitParams, ggml_base

_MAGIC = b"GGUF"
_U16 = 2  # GGUF_TYPE_UINT16


def check_gguf(path: Path) -> None:
    """Raise ModelError when `path` is not a complete GGUF, all parts of a split one included; reads headers only."""
    for part in _check_file(path):
        _check_file(part, is_first=False)


def _check_file(path: Path, *, is_first: bool = True) -> list[Path]:
    """Check one file; returns the other parts when it is the first part of a split model."""
    try:
        if not path.exists():
            raise ModelError(f"no model file at {path}; check the path, or see `semspec-local models list`")
        if not path.is_file():  # reading a pipe would wait for ever
            raise ModelError(f"{path} is a {'folder' if path.is_dir() else 'device or pipe'}; wanted a GGUF file")
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(512)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    _check_head(path, head, size)
    index, n_parts = _check_tensors(path, size)
    return _other_parts(path, index, n_parts) if is_first and n_parts > 1 else []


def _check_head(path: Path, head: bytes, size: int) -> None:
    if size == 0:
        raise ModelError(f"{path} is empty (0 bytes); download it again")
    if head.startswith(_MAGIC):
        return
    text = head.lstrip().lower()
    if text.startswith(b"version https://git-lfs"):
        raise ModelError(f"{path} is a Git LFS pointer, not the model; fetch the file itself (git lfs pull)")
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        raise ModelError(f"{path} is a web page, not a model; the download saved an error or login page")
    if head.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x04")) or text.startswith(b"{"):
        raise ModelError(f"{path} is not a GGUF file (another model format); convert it to GGUF first")
    raise ModelError(f"{path} is not a GGUF file: it starts with {head[:4]!r}, wanted {_MAGIC!r}")


def _check_tensors(path: Path, size: int) -> tuple[int, int]:
    """The header is whole, and the file reaches to the end of its last tensor; its place among how many parts."""
    route_logs()
    forget_complaints()
    library = ggml_base()
    header = library.gguf_init_from_file(os.fsencode(path), GgufInitParams(no_alloc=True, ctx=None))
    if not header:
        reason = first_complaint() or "its header cannot be read"
        raise ModelError(f"{path} is a broken or truncated GGUF file ({reason}); download it again")
    try:
        index, n_parts = (_number(header, key) for key in (b"split.no", b"split.count"))
        start = library.gguf_get_data_offset(header)
        n_tensors = library.gguf_get_n_tensors(header)
        end = max(
            (
                start + library.gguf_get_tensor_offset(header, i) + library.gguf_get_tensor_size(header, i)
                for i in range(n_tensors)
            ),
            default=0,
        )
    finally:
        library.gguf_free(header)
    if n_tensors == 0 and n_parts < 2:
        raise ModelError(f"{path} holds no weights (a vocabulary-only GGUF, or the index of a split model)")
    if end > size:
        raise ModelError(f"{path} is truncated: it has {size:,} bytes, its tensors need {end:,}; download it again")
    return index, n_parts


def _number(header: int, key: bytes) -> int:
    """A 16-bit number of the header; 0 when there is none of that name and type."""
    library = ggml_base()
    at = library.gguf_find_key(header, key)
    return int(library.gguf_get_val_u16(header, at)) if at >= 0 and library.gguf_get_kv_type(header, at) == _U16 else 0


def _other_parts(path: Path, index: int, n_parts: int) -> list[Path]:
    """The files that belong to the first part of a split model; llama.cpp finds them by their names."""
    named = re.fullmatch(r"(.+)-\d{5}-of-\d{5}\.gguf", path.name)
    if named is None or path.name != f"{named[1]}-{index + 1:05}-of-{n_parts:05}.gguf":
        raise ModelError(
            f"{path} is part {index + 1} of {n_parts} of a split model, and llama.cpp wants it to be named "
            f"NAME-{index + 1:05}-of-{n_parts:05}.gguf; rename all parts, or merge them with llama-gguf-split --merge"
        )
    parts = [path.with_name(f"{named[1]}-{i + 1:05}-of-{n_parts:05}.gguf") for i in range(n_parts)]
    if index:
        raise ModelError(
            f"{path} is part {index + 1} of {n_parts} of a split model; give its first part, {parts[0].name}"
        )
    if missing := [part.name for part in parts if not part.exists()]:
        raise ModelError(f"{path} is split into {n_parts} parts, and {', '.join(missing)} is not in its folder")
    return parts[1:]
