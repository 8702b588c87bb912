"""Questions for a child process: what may crash, hang or load much does so there, and the others are still answered.

The child reads the tasks as JSON and writes one line before and one after each, so that what it died of has a name.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

TIME_LIMIT_S = 120.0

# The paths of this process, not those of the folder that it was started in: the child must import what `run` would.
_CODE = "import sys; sys.path[:] = sys.argv[1:]; from semspec_local.doctor.child import main; main()"
_NETWORK = {"socket.connect", "socket.bind", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"}
_WINDOWS_DEATHS = {
    0xC000001D: "SIGILL (illegal instruction)",
    0xC0000005: "SIGSEGV (access violation)",
    0xC0000409: "SIGABRT (abort)",
}


@dataclass(frozen=True)
class Task:
    """A function of `tasks` to call with these arguments (JSON); pointless where one that it `needs` has failed."""

    name: str
    call: str
    arguments: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answer:
    """The value that a task returned, or what went wrong.

    `kind` is the name of the exception, or `signal`, `timeout` or `exit`; `opened` are the uses of the network that
    Python saw up to then.
    """

    value: Any = None
    error: str | None = None
    kind: str | None = None
    opened: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.error is None


def ask(tasks: Sequence[Task], *, time_limit_s: float = TIME_LIMIT_S) -> dict[str, Answer]:
    """The answers by name, from as many children as it takes; tasks whose needs have failed have none."""
    answers: dict[str, Answer] = {}
    while left := [task for task in tasks if task.name not in answers and not _pointless(task, answers)]:
        begun, death = _run_child(left, answers, time_limit_s)
        if death is None:
            break
        unanswered = [task.name for task in left if task.name not in answers]
        # A child that could not even begin would not begin the next task either.
        for name in [begun] if begun in unanswered else unanswered:
            answers[name] = death
    return {task.name: answers[task.name] for task in tasks if task.name in answers and not _pointless(task, answers)}


def _pointless(task: Task, answers: dict[str, Answer]) -> bool:
    return any(name in answers and not answers[name].ok for name in task.needs)


def _run_child(
    tasks: Sequence[Task], answers: dict[str, Answer], time_limit_s: float
) -> tuple[str | None, Answer | None]:
    """Put what a child says into `answers`; the task that it was at, and its death if it left one unanswered."""
    command = [sys.executable, "-c", _CODE, *(path for path in sys.path if isinstance(path, str))]
    questions = json.dumps([[task.name, task.call, task.arguments] for task in tasks]).encode()
    environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}  # it would start a debugger
    try:
        done = subprocess.run(
            command, input=questions, capture_output=True, env=environment, timeout=time_limit_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        begun = _take(error.stdout or b"", answers)
        death = Answer(error=f"it did not end within {time_limit_s:g} s", kind="timeout")
    except OSError as error:
        begun, death = None, Answer(error=f"no process can be started: {error.strerror or error}", kind="exit")
    else:
        begun = _take(done.stdout, answers)
        death = _death(done.returncode, done.stderr)
    return begun, death if any(task.name not in answers for task in tasks) else None


def _take(said: bytes, answers: dict[str, Answer]) -> str | None:
    """Read the child's lines; the last task that it began."""
    begun = None
    for line in said.splitlines():
        try:
            message = json.loads(line)
        except ValueError:  # it was cut off in the middle
            break
        if "begin" in message:
            begun = message["begin"]
        else:
            name = message.pop("name")
            answers[name] = Answer(**{**message, "opened": tuple(message["opened"])})
    return begun


def _death(code: int, stderr: bytes) -> Answer:
    lines = [line.strip() for line in stderr.decode("utf-8", "replace").splitlines() if line.strip()]
    last_words = f": {lines[-1][-200:]}" if lines else ""
    if code in _WINDOWS_DEATHS:
        return Answer(error=f"the process died of {_WINDOWS_DEATHS[code]}{last_words}", kind="signal")
    if code >= 0:
        return Answer(error=f"the process ended with exit code {code}{last_words}", kind="exit")
    try:
        name, meaning = signal.Signals(-code).name, signal.strsignal(-code)
    except ValueError:  # a number without a name here
        name, meaning = f"signal {-code}", None
    return Answer(error=f"the process died of {name}{f' ({meaning})' if meaning else ''}{last_words}", kind="signal")


def main() -> None:
    """The child: answer the tasks on standard input, one after the other."""
    from . import tasks

    # What libraries print must not stand between the answers.
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)
    opened: set[str] = set()
    sys.addaudithook(lambda event, _: opened.add(event) if event in _NETWORK else None)
    for name, call, arguments in json.load(sys.stdin):
        _write(replies, {"begin": name})
        reply: dict[str, Any] = {"name": name}
        try:
            reply["value"] = getattr(tasks, call)(**arguments)
        except Exception as error:  # the parent says it in its own way
            reply |= {"error": str(error) or type(error).__name__, "kind": type(error).__name__}
        _write(replies, {**reply, "opened": sorted(opened)})


def _write(stream: TextIO, message: dict[str, Any]) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()
