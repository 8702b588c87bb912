"""What the tests of `doctor` share: an examination with known answers, and the same questions asked in this process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from semspec_local.doctor import Check, Examination, examination, examine, tasks
from semspec_local.doctor.child import Answer, Task

FAKE_ABSENT = "raise ModuleNotFoundError(\"No module named 'llama_cpp'\")\n"
FAKE_ILLEGAL = "import os, signal\nos.kill(os.getpid(), signal.SIGILL)\n"
FAKE_HANGING = "import time\ntime.sleep(600)\n"
FAKE_CALLING = "import socket\nsocket.getaddrinfo('127.0.0.1', 9)\nraise ImportError('no')\n"


@pytest.fixture
def asked_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions are answered in this process, where their parts can be replaced, and travel as JSON all the same."""

    def ask(questions: Sequence[Task], **_: Any) -> dict[str, Answer]:
        answers: dict[str, Answer] = {}
        for task in questions:
            if all(answers[name].ok for name in task.needs if name in answers):
                try:
                    value = getattr(tasks, task.call)(**json.loads(json.dumps(task.arguments)))
                    answers[task.name] = Answer(json.loads(json.dumps(value)))
                except Exception as error:
                    answers[task.name] = Answer(error=str(error), kind=type(error).__name__)
        return answers

    monkeypatch.setattr(examination, "ask", ask)


def answered(answers: dict[str, Answer], **options: Any) -> Examination:
    """An examination whose children have said this already."""
    found = Examination(**options)
    found.__dict__["answers"] = {"llama": Answer({"version": "0", "file": "x"}), **answers}
    return found


def checks_of(**options: Any) -> dict[str, Check]:
    """All checks of an examination, by name."""
    found = {check.name: check for check in examine(Examination(**options))}
    for check in found.values():
        assert (check.fix is None) == (check.status == "ok")
        assert all(text.isprintable() and text for text in (check.detail, check.fix or "-"))
        assert "this check broke" not in check.detail, check.detail
    return found


def fake_llama_cpp(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let children import this in place of llama_cpp."""
    (folder / "llama_cpp").mkdir(parents=True)
    (folder / "llama_cpp" / "__init__.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
