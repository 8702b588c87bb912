"""Turning a GGUF into another file type, through llama.cpp's own quantizer."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import ConfigError, ModelError

_PREFIXES = ("LLAMA_FTYPE_MOSTLY_", "LLAMA_FTYPE_ALL_")


def file_types() -> dict[str, int]:
    """llama.cpp's file types by name (Q4_0, Q8_0, F16, ...) with their numbers."""
    from llama_cpp import llama_cpp as C

    return {
        constant.removeprefix(prefix): int(getattr(C, constant))
        for prefix in _PREFIXES
        for constant in sorted(dir(C))
        if constant.startswith(prefix)
    }


def check_file_type(name: str) -> str:
    """Return `name` as llama.cpp spells it; ConfigError lists the known file types when it is none of them."""
    known = file_types()
    if name.upper() not in known:
        raise ConfigError(f"unknown file type {name!r}; known: {', '.join(sorted(known))}")
    return name.upper()


def requantize(source: Path, destination: Path, file_type: str, n_threads: int) -> None:
    """Write `source`, turned into `file_type`, to `destination` in place: give a temporary name.

    Raises ConfigError for an unknown file type, and ModelError when llama.cpp cannot do it.
    """
    import ctypes

    from llama_cpp import llama_cpp as C

    from ..interrupts import HeldInterrupt
    from .ggufcheck import check_gguf
    from .logs import first_complaint, forget_complaints, route_logs

    number = file_types()[check_file_type(file_type)]
    check_gguf(source)
    route_logs()
    forget_complaints()
    params = C.llama_model_quantize_default_params()
    params.ftype, params.nthread, params.allow_requantize = number, n_threads, True
    with HeldInterrupt() as held:  # llama.cpp logs, and the log is a callback
        code = C.llama_model_quantize(os.fsencode(source), os.fsencode(destination), ctypes.byref(params))
    held.check()
    if code != 0:
        destination.unlink(missing_ok=True)
        words = [word for word in first_complaint().split() if word.strip("=")]  # some complaints come in a frame
        reason = " ".join(words) or f"code {code}"
        raise ModelError(f"llama.cpp could not turn {source} into {file_type}: {reason}")
