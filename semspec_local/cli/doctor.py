"""`semspec-local doctor`: what is wrong with this machine, and what to do about it."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import click

from ..config import ModelConfig
from ..doctor import CHECKS, Check, Examination, Status, examine
from ..doctor.machine import terminal_encoding
from ..provenance import command_line, provenance
from .options import take
from .pair_options import check_naming, loading_options, named_probes, set_verbosity

_MARKS: dict[Status, str] = {"ok": "✓", "warn": "!", "fail": "✗"}
_WORDS: dict[Status, str] = {"ok": "ok", "warn": "warn", "fail": "fail"}
_COLOURS: dict[Status, str] = {"ok": "green", "warn": "yellow", "fail": "red"}
_NAME_WIDTH = max(len(name) for name, _ in CHECKS)

Say = Callable[[str, str, int], None]
"""Prints a line whose first so many characters are in a style."""


@click.command()
@loading_options
@click.option("--smoke", is_flag=True, help="Also load the pair and answer a small question with it.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line.")
@click.option("-q", "--quiet", is_flag=True, help="Print only what is not ok.")
def doctor(**options: Any) -> int:
    """Say what is wrong with this machine, its files and its libraries, and what to do about each.

    No model is loaded unless --smoke asks for it, and the network is not used. What could crash is looked at in a
    process of its own.

    Exit code: 0 when nothing failed (there may be warnings), 1 when something did, 2 for options that make no sense.
    """
    set_verbosity(quiet=True, verbose=0)  # the checks say it
    checks = examine(_examination(options))
    if options["as_json"]:
        found = list(checks)
        about = {"summary": _counted(found), "provenance": provenance(command_line("semspec-local"))}
        click.echo(json.dumps({"checks": [check.to_json() for check in found], **about}))
    else:
        found = _shown(checks, quiet=options["quiet"])
    return int(any(check.status == "fail" for check in found))


def _examination(options: dict[str, Any]) -> Examination:
    check_naming(options)
    return Examination(
        **{name: options[name] for name in ("pair", "target", "draft", "smoke")},
        probes=named_probes(options),
        models=take(ModelConfig, options),
    )


def _counted(checks: Iterable[Check]) -> dict[Status, int]:
    counts = Counter(check.status for check in checks)
    return {status: counts[status] for status in _MARKS}


def _shown(checks: Iterator[Check], *, quiet: bool) -> list[Check]:
    """Print each check as soon as it is made, and a line at the end."""
    say = _printer()
    marks = _MARKS if _can_show("".join(_MARKS.values())) else _WORDS
    # A file or a pipe gets each detail on one line, as programs read it.
    width = shutil.get_terminal_size().columns - 1 if sys.stdout.isatty() else None
    found = []
    for check in checks:
        found.append(check)
        if not quiet or check.status != "ok":
            _show(check, marks, width, say)
    if not quiet:
        say("\n" + _closing(_counted(found)), "", 0)
    return found


def _show(check: Check, marks: dict[Status, str], width: int | None, say: Say) -> None:
    """The mark, the name and the detail; below the detail what to do."""
    mark = marks[check.status].ljust(max(map(len, marks.values())))
    head = f"{mark} {check.name:<{_NAME_WIDTH}}  "
    for number, line in enumerate(_wrapped(check.detail, head, width)):
        say(line, _COLOURS[check.status], 0 if number else len(mark))
    if check.fix is not None:
        for line in _wrapped(check.fix, " " * len(head) + "fix: ", width):
            say(line, "bold", len(line))


def _wrapped(text: str, head: str, width: int | None) -> list[str]:
    if width is None or width < len(head) + 20:
        return [head + text]
    indents: dict[str, Any] = {"initial_indent": head, "subsequent_indent": " " * len(head)}
    # Commands and paths stay whole, so that they can be copied.
    return textwrap.wrap(text, width, **indents, break_on_hyphens=False, break_long_words=False) or [head]


def _closing(counts: dict[Status, int]) -> str:
    n_warn, n_fail = counts["warn"], counts["fail"]
    warnings = f"{n_warn} warning{'' if n_warn == 1 else 's'}"
    if n_fail:
        return f"{n_fail} of {sum(counts.values())} checks failed, {warnings}."
    return f"Nothing failed; {warnings}." if n_warn else f"All {counts['ok']} checks are ok."


def _can_show(text: str) -> bool:
    """Can standard output, and the terminal behind it, show these characters?"""
    encodings = [sys.stdout.encoding or "ascii"]
    if sys.stdout.isatty():
        encodings.append(terminal_encoding(sys.stdout))
    try:
        return all(text.encode(encoding) for encoding in encodings)
    except (UnicodeEncodeError, LookupError):
        return False


def _printer() -> Say:
    """Prints lines; on a terminal the beginnings of some are in a style."""
    from rich.console import Console
    from rich.text import Text

    plain = not sys.stdout.isatty() or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    console = Console(
        file=sys.stdout, highlight=False, force_terminal=not plain, color_system=None if plain else "auto"
    )

    def say(line: str, style: str, n_styled: int) -> None:
        text = Text(line)
        text.stylize(style, 0, n_styled)
        console.print(text, soft_wrap=True)

    return say
