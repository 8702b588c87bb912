"""scripts/demo: what it sets up, pulls and asks for which arguments; the program and the setup are pretended."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="scripts/demo is a shell script")

Demo = Callable[..., list[list[str]]]


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Demo:
    """Runs scripts/demo; returns the calls it made, `setup` or the arguments of semspec-local."""
    log = tmp_path / "calls"
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "demo", tmp_path / "scripts")
    note = f"{{ printf '%s\\t' \"$@\"; echo; }} >>{shlex.quote(str(log))}"
    # Nothing was pulled: `models path` fails.
    for place, line in {
        "scripts/setup": f"set -- setup; {note}",
        ".venv/bin/python": f'exec {shlex.quote(sys.executable)} "$@"',
        ".venv/bin/semspec-local": f'{note}; [ "$2" != path ]',
    }.items():
        (tmp_path / place).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / place).chmod(0o755)

    def calls(*arguments: str) -> list[list[str]]:
        log.unlink(missing_ok=True)
        program = [str(tmp_path / "scripts" / "demo"), *arguments]
        done = subprocess.run(program, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return [line.split("\t")[:-1] for line in log.read_text().splitlines()]

    return calls


def test_without_arguments_it_pulls_the_default_pair_and_asks_a_question_of_its_own(demo):
    setup, look, pull, (*run, question) = demo()
    assert (setup, look) == (["setup"], ["models", "path", "qwen2.5-coder"])
    assert pull == ["models", "pull", "qwen2.5-coder"]
    assert run == ["run", "--seed", "2", "--"] and question.startswith("A library ")


def test_tiny_asks_the_embedded_pair_and_pulls_nothing(demo):
    setup, (*run, question) = demo("--tiny")
    assert setup == ["setup"]
    assert run == ["run", "--seed", "2", "--pair", "tiny", "--"] and question.startswith("Anna has 9 shells. ")
    assert demo("--tiny", "--policy", "never", "-v")[1] == [
        *("run", "--seed", "2", "--pair", "tiny", "--policy", "never", "-v", "--"),
        question,
    ]
    assert demo("-v", "--tiny")[1] == ["run", "--seed", "2", "-v", "--pair", "tiny", "--", question]


def test_tiny_takes_another_question_and_shows_the_help(demo):
    assert demo("--tiny", "How many?") == [["setup"], ["run", "--pair", "tiny", "How many?"]]
    assert demo("--tiny", "-f", "a file.txt") == [["setup"], ["run", "--pair", "tiny", "-f", "a file.txt"]]
    assert demo("--tiny", "--help") == [["setup"], ["run", "--pair", "tiny", "--help"]]


def test_a_pair_or_a_question_of_ones_own_is_left_alone(demo):
    assert demo("-m", "big.gguf", "--policy", "never", "hi") == [
        ["setup"],
        ["run", "-m", "big.gguf", "--policy", "never", "hi"],
    ]
    assert demo("hi")[-1] == ["run", "hi"]
