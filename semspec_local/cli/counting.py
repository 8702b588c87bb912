"""How far a long count has come, on stderr: a bar with the time left on a terminal, else a plain line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

LINE_EVERY_S = 10.0
"""Seconds between two plain lines."""

Advance = Callable[[int, str], None]
"""Is told how many are done in all, and what else to say."""


@contextmanager
def counting(
    what: str,
    total: int,
    *,
    done: int = 0,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Advance]:
    """Follow a count of `what` from `done` up to `total`."""
    stream = stream if stream is not None else sys.stderr
    if not stream.isatty():
        yield _lines(what, done, total, stream, clock)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    text = TextColumn("{task.description}", markup=False)
    columns = (text, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=stream, highlight=False)) as bars:
        task = bars.add_task(what, total=total, completed=done)
        yield lambda done, note: bars.update(task, completed=done, description=f"{what} {note}".strip())


def _lines(what: str, before: int, total: int, stream: TextIO, clock: Callable[[], float]) -> Advance:
    begun = said_at = clock()

    def advance(done: int, note: str) -> None:
        nonlocal said_at
        now = clock()
        if now - said_at < LINE_EVERY_S and done < total:
            return
        said_at = now
        rate = (done - before) / (now - begun) if now > begun else 0.0
        left = f", about {_duration((total - done) / rate)} left" if rate and done < total else ""
        print(f"{done:,} of {total:,} {what}{left}{', ' + note if note else ''}", file=stream, flush=True)

    return advance


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
