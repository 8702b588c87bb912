"""`semspec-local doctor`: what is printed, how it looks, and its exit codes."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from semspec_local.cli import _run
from semspec_local.cli import doctor as shown
from semspec_local.doctor import CHECKS, Check, Examination, machine

FOUND = [
    Check(name="python", status="ok", detail="3.11", fix=None),
    Check(name="llama-cpp", status="fail", detail="it is " + "very " * 30 + "broken", fix="pip install it"),
    Check(name="load", status="warn", detail="busy", fix="wait"),
]


class Terminal(io.StringIO):
    """Standard output that is a terminal, with an encoding of its own."""

    def __init__(self, encoding: str) -> None:
        super().__init__()
        self._encoding = encoding

    @property
    def encoding(self) -> str:
        return self._encoding

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def own_levels() -> Iterator[None]:
    """What the command sets of logging lasts as long as the test."""
    loggers = [logging.getLogger(name) for name in ("semspec_local", "semspec_local.llama.logs")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels):
        logger.setLevel(level)


@pytest.fixture
def found(monkeypatch):
    """The checks find this, whatever the machine is like."""
    monkeypatch.setattr(shown, "examine", lambda _: iter(FOUND))
    monkeypatch.setenv("COLUMNS", "60")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def on_terminal(encoding: str, monkeypatch, *options: str) -> str:
    terminal = Terminal("utf-8")
    monkeypatch.setattr(machine.os, "device_encoding", lambda _: encoding)
    monkeypatch.setattr(terminal, "fileno", lambda: 1)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        assert _run(["doctor", *options]) == 1
    return terminal.getvalue()


def without_colours(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def test_json_of_the_embedded_pair(capsys):
    code = _run(["doctor", "--pair", "tiny", "--json"])
    out, err = capsys.readouterr()
    assert (code, err, out.count("\n")) == (0, "", 1)
    answer = json.loads(out)
    assert all(set(check) == {"name", "status", "detail", "fix"} for check in answer["checks"])
    names = [check["name"] for check in answer["checks"]]
    assert names == [name for name, _ in CHECKS if name in names] and len(names) >= 18
    assert sum(answer["summary"].values()) == len(names) and answer["summary"]["fail"] == 0
    assert answer["provenance"]["semspec_local"]


@pytest.mark.usefixtures("found")
def test_a_pipe_gets_a_line_for_each_detail_and_fix(capsys):
    assert _run(["doctor"]) == 1
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert err == "" and "\x1b" not in out
    assert lines[0] == "✓ python        3.11"
    assert lines[1].startswith("✗ llama-cpp     it is very") and lines[1].endswith("broken")
    assert lines[2] == " " * 16 + "fix: pip install it"
    assert lines[3:] == ["! load          busy", " " * 16 + "fix: wait", "", "1 of 3 checks failed, 1 warning."]


@pytest.mark.usefixtures("found")
def test_a_terminal_gets_colours_and_wrapped_lines(monkeypatch):
    out = on_terminal("UTF-8", monkeypatch)
    assert "\x1b[31m✗" in out and "\x1b[32m✓" in out
    plain = without_colours(out).splitlines()
    assert max(map(len, plain)) < 60 and sum(line.startswith(" " * 16 + "very") for line in plain) > 2


@pytest.mark.usefixtures("found")
@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colours_can_be_refused(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    out = on_terminal("UTF-8", monkeypatch)
    assert "\x1b" not in out and "✗ llama-cpp" in out


@pytest.mark.usefixtures("found")
def test_a_terminal_without_the_marks_gets_words(monkeypatch):
    out = on_terminal("ISO-8859-1", monkeypatch)
    assert out.isascii() and "warn" in out
    assert "ok   python        3.11" in without_colours(out)


@pytest.mark.usefixtures("found")
def test_a_file_in_another_encoding_gets_words(monkeypatch, capsys):
    monkeypatch.setattr(shown, "_can_show", lambda _: False)
    _run(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ok   python        3.11" and lines[1].startswith("fail llama-cpp     it")


@pytest.mark.usefixtures("found")
def test_quiet_says_only_what_is_not_ok(monkeypatch, capsys):
    assert _run(["doctor", "-q"]) == 1
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[::2]] == ["llama-cpp", "load"]
    monkeypatch.setattr(shown, "examine", lambda _: iter(FOUND[:1]))
    assert _run(["doctor", "-q"]) == 0
    assert tuple(capsys.readouterr()) == ("", "")


def test_the_closing_line():
    assert shown._closing({"ok": 9, "warn": 0, "fail": 0}) == "All 9 checks are ok."
    assert shown._closing({"ok": 9, "warn": 2, "fail": 0}) == "Nothing failed; 2 warnings."
    assert shown._closing({"ok": 6, "warn": 0, "fail": 3}) == "3 of 9 checks failed, 0 warnings."


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--pair", "tiny", "-m", "a.gguf"], "--pair and -m/-md"),
        (["-md", "a.gguf"], "add -m"),
        (["-c", "1"], "-c is 1"),
        (["-t", "100000"], "-t is 100000"),
        (["--smoke=1"], "does not take a value"),
        (["--no-such"], "No such option"),
    ],
)
def test_options_that_make_no_sense(capsys, options, words):
    assert _run(["doctor", *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in err


def test_what_the_options_mean(monkeypatch, tmp_path):
    seen: list[Examination] = []
    monkeypatch.setattr(shown, "examine", lambda examination: seen.append(examination) or iter([]))
    target, probe = tmp_path / "t.gguf", tmp_path / "p.onnx"
    assert _run(["doctor", "-q", "-m", str(target), "-c", "99", "-t", "1", "--joint-probe", str(probe)]) == 0
    (one,) = seen
    assert (one.target, one.draft, one.probes) == (target, None, {"joint": probe})
    assert (one.models.n_ctx, one.models.n_threads, one.smoke) == (99, 1, False)


# -- the check of the terminal itself ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("encoding", "variables", "status", "words"),
    [
        ("UTF-8", {}, "ok", "UTF-8, colours"),
        ("UTF-8", {"NO_COLOR": "1"}, "ok", "NO_COLOR"),
        ("UTF-8", {"TERM": "dumb"}, "ok", "TERM=dumb"),
        ("cp1252", {}, "warn", "cp1252"),
    ],
)
@pytest.mark.usefixtures("found")
def test_the_terminal(monkeypatch, encoding, variables, status, words):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    verdict = terminal_verdict(encoding, monkeypatch)
    assert verdict.status == status and words in verdict.detail


def terminal_verdict(encoding: str, monkeypatch):
    terminal = Terminal("utf-8")
    monkeypatch.setattr(machine, "terminal_encoding", lambda _: encoding)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        return machine.terminal(Examination())


def test_standard_output_that_is_no_terminal(capsys):
    assert "no terminal" in machine.terminal(Examination()).detail


def test_a_stream_without_a_file_has_the_encoding_of_the_locale(monkeypatch):
    monkeypatch.setattr(machine.locale, "getpreferredencoding", lambda _: "KOI8-R")
    assert machine.terminal_encoding(io.StringIO()) == "KOI8-R"


@pytest.mark.usefixtures("found")
@pytest.mark.parametrize(("value", "status"), [(1, "ok"), (0, "warn"), (None, "warn")])
def test_long_paths_on_windows(monkeypatch, value, status):
    class Key:
        def __enter__(self):
            return self

        def __exit__(self, *_: object) -> None:
            pass

    def query(*_: object) -> tuple[int, int]:
        if value is None:
            raise FileNotFoundError
        return value, 4

    registry = SimpleNamespace(HKEY_LOCAL_MACHINE=0, OpenKey=lambda *_: Key(), QueryValueEx=query)
    monkeypatch.setitem(sys.modules, "winreg", registry)
    monkeypatch.setattr(machine.sys, "platform", "win32")
    assert terminal_verdict("cp65001", monkeypatch).status == status
