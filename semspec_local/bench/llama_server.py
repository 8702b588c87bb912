"""llama.cpp's own server as a child process: started on a loopback port, asked over HTTP, and always stopped.

Knows nothing of questions, of chat templates or of arms.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import SemspecError
from ..interrupts import HeldInterrupt

logger = logging.getLogger(__name__)

DEFAULT_N_MAX = 3
"""Tokens that the server drafts at a time; llama.cpp's own default."""

START_TIMEOUT_S = 300.0  # a big file from a slow disk
REQUEST_TIMEOUT_S = 3600.0
_HEALTH_TIMEOUT_S = 5.0
_STOP_TIMEOUT_S = 10.0
_POLL_S = 0.05
_PORTS_TO_TRY = 3
_MAX_LOG_BYTES = 1 << 16

_LOOPBACK = "127.0.0.1"

# Settings of the user's own servers; what is measured here is set by arguments alone.
_FOREIGN_SETTINGS = ("LLAMA_ARG_", "LLAMA_API_KEY", "AIP_")

_STOP_TYPES = ("eos", "limit", "word")
_COMPLAINT = re.compile(r"\berror\b|\bfailed\b|couldn't", re.IGNORECASE)

# Linux ends the server when the thread that started it is gone, even if that was killed. Asked for between fork and
# exec, but in a Python of its own: ours has threads, whose locks a forked child may find held for ever.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """What a server is started with. `n_ctx` is for each of its `n_slots` slots; without a `draft`, no speculation."""

    model: Path
    draft: Path | None = None
    n_max: int = DEFAULT_N_MAX
    n_ctx: int
    n_threads: int
    n_threads_draft: int
    n_gpu_layers: int = 0
    n_gpu_layers_draft: int = 0
    n_slots: int = 1

    def arguments(self) -> list[str]:
        """The command line, but for the address."""
        words: list[object] = ["-m", self.model, "-t", self.n_threads, "-ngl", _layers(self.n_gpu_layers)]
        words += ["-np", self.n_slots, "-c", self.n_ctx * self.n_slots, "--no-webui"]
        words += ["--cache-ram", 0]  # else it copies the cache of every finished request, to use it again
        if self.draft is not None:
            # A draft alone does nothing: the kind of speculation must be named too.
            words += ["-md", self.draft, "--spec-type", "draft-simple", "--spec-draft-n-max", self.n_max]
            words += ["-td", self.n_threads_draft, "-ngld", _layers(self.n_gpu_layers_draft)]
        return [str(word) for word in words]


def _layers(n: int) -> str:
    return "all" if n < 0 else str(n)


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a server says of one completion.

    `tokens` are all it drew, the one that ended generation included; `stop_type` is one of `_STOP_TYPES`.
    `n_prompt` and `n_cached` are tokens of the prompt: all, and those that it did not read again. `prompt_s` and
    `written_s` are by its own clock, `wall_s` is by ours, from the request to the whole answer. `n_drafted` and
    `n_accepted` are None when nothing was drafted.
    """

    tokens: list[int]
    stop_type: str
    stopping_word: str
    truncated: bool
    n_prompt: int
    n_cached: int
    prompt_s: float
    written_s: float
    n_drafted: int | None
    n_accepted: int | None
    wall_s: float

    @classmethod
    def from_json(cls, values: Mapping[str, Any], wall_s: float) -> Reply:
        """The answer of /completion; ValueError, TypeError or LookupError when it is none."""
        timings = values["timings"]
        drafted = timings.get("draft_n")
        if values["stop_type"] not in _STOP_TYPES:
            raise ValueError(f"stop_type is {values['stop_type']!r}, wanted one of {', '.join(_STOP_TYPES)}")
        return cls(
            tokens=[int(token) for token in values["tokens"]],
            stop_type=str(values["stop_type"]),
            stopping_word=str(values.get("stopping_word", "")),
            truncated=bool(values.get("truncated", False)),
            n_prompt=int(values["tokens_evaluated"]),
            n_cached=int(timings.get("cache_n", 0)),
            prompt_s=float(timings["prompt_ms"]) / 1e3,
            written_s=float(timings["predicted_ms"]) / 1e3,
            n_drafted=None if drafted is None else int(drafted),
            n_accepted=None if drafted is None else int(timings["draft_n_accepted"]),
            wall_s=wall_s,
        )


class LlamaServer:
    """One server. Use it in a `with`; threads may share it.

    One that died, or was stopped because it hung, is started anew for the next request. On Linux it also ends when
    this process is killed, if the main thread started it.
    """

    def __init__(
        self,
        binary: Path,
        options: ServerOptions,
        *,
        start_timeout_s: float = START_TIMEOUT_S,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._binary, self._options = binary.absolute(), options
        self._start_timeout_s, self._request_timeout_s, self._clock = start_timeout_s, request_timeout_s, clock
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._log, self._port, self._alias = Path(os.devnull), 0, ""
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Its process, while it runs."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def start(self) -> None:
        """Start it, unless it runs, and wait until it is ready.

        Raises SemspecError, with the end of its log, when it ends or is not ready in time.
        """
        with self._lock:
            if self._closed:
                raise SemspecError("llama-server was stopped; wanted it running")
            if self.pid is not None:
                return
            if self._process is not None:
                logger.warning("llama-server has ended by itself; it is started again")
            for n_left in reversed(range(_PORTS_TO_TRY)):
                self._stop()
                if self._start_once(may_retry=n_left > 0):
                    return

    def complete(self, request: Mapping[str, Any]) -> Reply:
        """The answer to one request to /completion; SemspecError when there is none."""
        self.start()
        body = json.dumps(request).encode()
        start = self._clock()
        try:
            status, data = self._ask("POST", "/completion", body, timeout_s=self._request_timeout_s)
            wall_s = self._clock() - start
        except TimeoutError:
            self._stop()
            limit = f"{self._request_timeout_s:g} s"
            raise SemspecError(f"llama-server gave no answer within {limit}; it was stopped") from None
        except (OSError, http.client.HTTPException) as error:
            raise SemspecError(self._why_it_failed(error)) from None
        if status != 200:
            raise SemspecError(f"llama-server answered with HTTP status {status}: {_message(data)}")
        try:
            return Reply.from_json(json.loads(data), wall_s)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise SemspecError(
                f"llama-server's answer is no completion as this program knows it ({error!r}): {_start_of(data)}"
            ) from None

    def close(self) -> None:
        """Stop it for good; what other threads still wait for fails."""
        self._closed = True
        try:
            self._stop()
        finally:
            if self._folder is not None:
                self._folder.cleanup()

    def __enter__(self) -> LlamaServer:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the process --------------------------------------------------------------------------------

    def _start_once(self, *, may_retry: bool) -> bool:
        """True when it is ready; False when another program took its port before it could."""
        self._port, self._alias = _free_port(), f"semspec-{secrets.token_hex(8)}"
        try:
            with HeldInterrupt() as held:  # else Ctrl-C could come before we hold what was started
                self._process = self._launch()
            held.check()
            ready = self._wait_until_ready()
        except BaseException:
            self._stop()
            raise
        if ready:
            return True
        why = self._last_words()
        process = self._process
        code = process.wait() if process is not None else 0
        self._stop()
        if may_retry and "bind" in why:
            return False
        raise SemspecError(f"llama-server ended before it was ready ({_ending(code)}): {why}")

    def _launch(self) -> subprocess.Popen[bytes]:
        command = [str(self._binary), *self._options.arguments()]
        command += ["--host", _LOOPBACK, "--port", str(self._port), "--alias", self._alias]
        logger.debug("starting %s", shlex.join(command))
        if sys.platform == "linux" and threading.current_thread() is threading.main_thread():
            command = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="semspec-")
        self._log = Path(self._folder.name) / "log"
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN_SETTINGS)}
        with self._log.open("wb") as log:
            try:
                return subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,  # Ctrl-C is for us; we stop it then
                )
            except OSError as error:
                raise SemspecError(f"{self._binary} cannot be started: {error.strerror or error}") from None

    def _wait_until_ready(self) -> bool:
        """False when it has ended; SemspecError when it takes too long."""
        deadline = self._clock() + self._start_timeout_s
        while self.pid is not None:
            if self._is_ready():
                return True
            if self._clock() > deadline:
                raise SemspecError(
                    f"llama-server was not ready within {self._start_timeout_s:g} s: {self._last_words()}"
                )
            time.sleep(_POLL_S)
        if self._closed:
            raise SemspecError("llama-server was stopped while it started")
        return False

    def _is_ready(self) -> bool:
        """Does it say so? The alias tells it from another program on its port."""
        try:
            status, _ = self._ask("GET", "/health", timeout_s=_HEALTH_TIMEOUT_S)
            if status != 200:
                return False
            _, data = self._ask("GET", "/v1/models", timeout_s=_HEALTH_TIMEOUT_S)
            return bool(json.loads(data)["data"][0]["id"] == self._alias)
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
            return False

    def _stop(self) -> None:
        """End the process, kindly first."""
        process = self._process
        if process is None:
            return
        try:
            process.terminate()
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            process.kill()
            process.wait()
            if self._process is process:  # another thread may have started the next one
                self._process = None

    # -- talking to it ------------------------------------------------------------------------------

    def _ask(self, method: str, path: str, body: bytes | None = None, *, timeout_s: float) -> tuple[int, bytes]:
        """Status and body. Raises OSError or HTTPException."""
        connection = http.client.HTTPConnection(_LOOPBACK, self._port, timeout=timeout_s)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()  # for the server, the end of a request that nobody waits for any more

    def _why_it_failed(self, error: Exception) -> str:
        process = self._process
        if self._closed or process is None:
            return "llama-server was stopped before it had answered"
        try:  # the connection breaks a moment before the process is gone
            code = process.wait(1)
        except subprocess.TimeoutExpired:
            return f"llama-server broke off the connection: {error or type(error).__name__}"
        return f"llama-server ended while it answered ({_ending(code)}): {self._last_words()}"

    def _last_words(self) -> str:
        """The last line of its log, and the first that complains, if that is another one."""
        try:
            data = self._log.read_bytes()[-_MAX_LOG_BYTES:]
        except OSError:
            data = b""
        lines = [line.strip() for line in data.decode("utf-8", "replace").splitlines() if line.strip()]
        if not lines:
            return "its log is empty"
        complaint = next((line for line in lines if _COMPLAINT.search(line)), lines[-1])
        return " ... ".join(line[-300:] for line in dict.fromkeys((complaint, lines[-1])))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:  # a number without a name here
        return f"signal {-code}"


def _message(data: bytes) -> str:
    """What an error body of the server says."""
    try:
        return str(json.loads(data)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return _start_of(data)


def _start_of(data: bytes) -> str:
    text = " ".join(data[:200].decode("utf-8", "replace").split())
    return repr(text) if text else "nothing"
