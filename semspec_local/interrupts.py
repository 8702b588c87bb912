"""Ctrl-C at the wrong moment: hold it back for a moment."""

from __future__ import annotations

# The functions beneath `signal`'s: those turn every number into an enum, which takes longer than all the rest here.
import _signal  # type: ignore[import-not-found]
import signal
import threading
from functools import partial
from types import FrameType
from typing import Any

_SIGNALS = [int(getattr(signal, name)) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK") if hasattr(signal, name)]


class HeldInterrupt:
    """What a signal handler raises inside this block waits in `error`, for `check` to raise it afterwards.

    Python runs handlers between any two instructions. For a change that must happen whole, that is too early. And when
    C code calls back into Python it can be before the callback's own `try`: an exception that leaves a callback is
    lost, so Ctrl-C would do nothing.
    """

    def __enter__(self) -> HeldInterrupt:
        self.error: BaseException | None = None
        self._active = True
        self._handlers: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                handler = _signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    _signal.signal(number, partial(self._on_signal, handler))
        return self

    def _on_signal(self, handler: Any, number: int, frame: FrameType | None) -> None:
        try:
            handler(number, frame)
        except BaseException as error:
            if not self._active:
                raise
            self.error = self.error or error

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            _signal.signal(number, handler)
        self._active = False

    def check(self) -> None:
        """Raise what was held."""
        if self.error is not None:
            raise self.error
