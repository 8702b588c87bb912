"""llama.cpp gives up on some broken files, and on errors of its own, by aborting the process.

Nothing can be saved then, but it can be said: one line, and an exit code that tells a file from a failure, in place of
a backtrace and a core dump.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import DecodeError, ModelError, one_line
from .native import ggml_base

_path: Path | None = None
_advice = ""


def _on_abort(message: bytes | None) -> None:
    text = one_line((message or b"no reason given").decode("utf-8", errors="replace"))
    reason = re.sub(r"^\S*/", "", text)  # where the source lay when it was built
    if _path is not None:
        said, code = f"{_path} cannot be loaded: llama.cpp gave up ({reason}); {_advice}", ModelError.exit_code
    else:
        said, code = f"llama.cpp gave up ({reason}); what was written so far is kept", DecodeError.exit_code
    with suppress(Exception):
        sys.stdout.flush()
    os.write(2, f"Error: {said}\n".encode())
    os._exit(code)


# ggml keeps the pointer: the object must live as long as the process.
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(_on_abort)


def say_aborts() -> None:
    """Let an abort of llama.cpp end the process in one line; calling it again is harmless."""
    ggml_base().ggml_set_abort_callback(_CALLBACK)


@contextmanager
def loading(path: Path, advice: str) -> Iterator[None]:
    """Inside, an abort is about this file; `advice` says what to do."""
    global _path, _advice
    before, (_path, _advice) = (_path, _advice), (path, advice)
    try:
        yield
    finally:
        _path, _advice = before
