"""llama.cpp's log, sent into `logging`; the last complaints are kept for error messages."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

from ..errors import one_line
from .native import C

logger = logging.getLogger(__name__)
logger.addHandler(logging.NullHandler())  # without it, `logging` prints warnings to stderr when nobody has set it up

# enum ggml_log_level
_LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.INFO, 4: logging.WARNING}
_ERROR, _CONTINUED = 4, 5

_complaints: deque[str] = deque(maxlen=8)
_last_level = 0


def _on_log(level: int, text: bytes | None, _user_data: Any) -> None:
    global _last_level
    level = _last_level if level == _CONTINUED else level
    _last_level = level
    line = one_line((text or b"").decode("utf-8", errors="replace"))
    if not line.strip("."):  # the loader's progress dots
        return
    if level == _ERROR:
        _complaints.append(line)
    logger.log(_LEVELS.get(level, logging.DEBUG), "%s", line)


# llama.cpp keeps the pointer: the object must live as long as the process.
_CALLBACK = C.llama_log_callback(_on_log)


def route_logs() -> None:
    """Send llama.cpp's log into the logger of this module; calling it again is harmless."""
    C.llama_log_set(_CALLBACK, None)


def forget_complaints() -> None:
    _complaints.clear()


def first_complaint() -> str:
    """The first error llama.cpp logged since `forget_complaints`: it is usually the cause, the rest its echo."""
    return _complaints[0] if _complaints else ""
