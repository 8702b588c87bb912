"""Ask math-verify whether two answers are equal, from any thread and within bounded time.

math-verify's own time limits are signals: they work in the main thread alone, and never inside a long computation of
Python's integers. Here it runs in a process of its own, which ends when a question takes too long, and is started anew.
"""

from __future__ import annotations

import atexit
import json
import os
import selectors
import subprocess
import sys
import threading
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from ..errors import ConfigError, SemspecError

TIMEOUT_S = 10.0
_START_TIMEOUT_S = 120.0  # importing sympy takes a second; on a machine that is busy and cold, much longer
MAX_CHARS = 1000
"""A longer text is no answer; math-verify is not asked."""


def require_math_verify() -> None:
    """ConfigError where math-verify is not installed."""
    if find_spec("math_verify") is None:
        raise ConfigError("grading needs math-verify: pip install 'semspec-local[bench]'")


class Verifier:
    """math-verify in a process of its own, started with the first question. Threads may share one."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def same(self, expected: str, answer: str) -> bool | None:
        """Are the two equal as mathematics? None where math-verify cannot read one of them, or takes too long.

        Raises ConfigError where math-verify is not installed, SemspecError where it does not start.
        """
        if max(len(expected), len(answer)) > MAX_CHARS:
            return None
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._stop()
            process = self._process or self._start()
            try:
                assert process.stdin is not None
                process.stdin.write(json.dumps([expected, answer]).encode() + b"\n")
                # The process ends itself first; the second is for one that cannot.
                found = _read(process, self.timeout_s + 1)
            except OSError:  # it ended between two questions
                found = None
            except BaseException:  # a reply that is not waited for would answer the next question
                self._stop()
                raise
            if found is None:
                self._stop()
                return None
            return bool(found[0]) if found[0] is not None else None

    def close(self) -> None:
        """End the process. Another question starts another."""
        with self._lock:
            self._stop()

    def _start(self) -> subprocess.Popen[bytes]:
        require_math_verify()
        path = os.pathsep.join(entry for entry in sys.path if entry)
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "semspec_local.bench.verify_worker", str(self.timeout_s)],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
        self._process = process
        try:
            found = _read(process, _START_TIMEOUT_S)
        except BaseException:
            self._stop()
            raise
        if found is None or "ready" not in found[0]:
            self._stop()
            why = found[0].get("error", "") if found else f"no sign of life within {_START_TIMEOUT_S:.0f} seconds"
            raise SemspecError(f"math-verify does not start ({why}); try: pip install -U 'semspec-local[bench]'")
        return process

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(OSError):
            process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


def _read(process: subprocess.Popen[bytes], timeout_s: float) -> list[Any] | None:
    """The next reply, in a list; None when none comes in time, or the process has ended."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        # A reply is one short line, so that once a part of it is there, so is the rest.
        line = process.stdout.readline() if selector.select(timeout_s) else b""
    return [json.loads(line)] if line.endswith(b"\n") else None


_shared = Verifier()
atexit.register(_shared.close)


def shared() -> Verifier:
    """The one of this Python process."""
    return _shared
