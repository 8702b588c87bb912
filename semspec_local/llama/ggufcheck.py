"""Is this file a whole GGUF? Asked before llama.cpp sees it, because llama.cpp's own answer is late and vague."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import ModelError
from .logs import first_complaint, forget_complaints, route_logs
from .native import GgufInitParams, ggml_base

_MAGIC = b"GGUF"


def check_gguf(path: Path) -> None:
    """Raise ModelError when `path` is not a complete GGUF file; reads the header only."""
    if not path.exists():
        raise ModelError(f"no model file at {path}; check the path, or see `semspec-local models list`")
    if path.is_dir():
        raise ModelError(f"{path} is a folder; wanted a GGUF file")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(512)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    _check_head(path, head, size)
    _check_tensors(path, size)


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


def _check_tensors(path: Path, size: int) -> None:
    """The header is whole, and the file reaches to the end of its last tensor."""
    route_logs()
    forget_complaints()
    library = ggml_base()
    header = library.gguf_init_from_file(os.fsencode(path), GgufInitParams(no_alloc=True, ctx=None))
    if not header:
        reason = first_complaint() or "its header cannot be read"
        raise ModelError(f"{path} is a broken or truncated GGUF file ({reason}); download it again")
    try:
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
    if n_tensors == 0:
        raise ModelError(f"{path} holds no weights (a vocabulary-only GGUF, or the index of a split model)")
    if end > size:
        raise ModelError(f"{path} is truncated: it has {size:,} bytes, its tensors need {end:,}; download it again")
