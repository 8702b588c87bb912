"""Telling people how a pull goes, on stderr: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol, TextIO

from .files import Advance, file_bytes, format_size

LINE_EVERY_S = 5.0
"""Seconds between two plain progress lines."""


class Progress(Protocol):
    """How a pull reports."""

    def note(self, text: str) -> None:
        """Say one line."""

    def bar(self, label: str, total: int) -> AbstractContextManager[Advance]:
        """Follow `total` bytes under a label; the context gives the function that is told of each advance."""


class Silent:
    """Says nothing: the default of the Python functions."""

    def note(self, text: str) -> None:
        pass

    @contextmanager
    def bar(self, label: str, total: int) -> Iterator[Advance]:
        yield lambda n_bytes: None


class Lines:
    """Plain lines, at most one every few seconds, for logs and pipes."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    @contextmanager
    def bar(self, label: str, total: int) -> Iterator[Advance]:
        done, said_at = 0, self._clock()

        def advance(n_bytes: int) -> None:
            nonlocal done, said_at
            done += n_bytes
            if self._clock() - said_at >= LINE_EVERY_S:
                said_at = self._clock()
                self.note(f"{label}: {min(100, 100 * done // max(1, total))}% of {format_size(total)}")

        yield advance


class Bars:
    """A rich progress bar; rich honours NO_COLOR."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console

        self._console = Console(file=stream, highlight=False)

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def bar(self, label: str, total: int) -> Iterator[Advance]:
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as RichProgress

        name = TextColumn("{task.description}", markup=False)
        columns = (name, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with RichProgress(*columns, console=self._console, transient=True) as bars:
            task = bars.add_task(label, total=total)
            yield lambda n_bytes: bars.advance(task, n_bytes)


def progress_on(stream: TextIO | None = None) -> Progress:
    """The progress reporter that suits a stream (default: stderr)."""
    stream = stream if stream is not None else sys.stderr
    return Bars(stream) if stream.isatty() else Lines(stream)


WATCH_EVERY_S = 0.25
"""Seconds between two looks at a folder that another program writes to."""


class Watch:
    """Follows the largest file under a folder while another program downloads into it; `told` bytes were passed on.

    The largest, not the sum: package clients download to a temporary file and then copy it.
    """

    def __init__(self, folder: Path, advance: Advance) -> None:
        self._folder, self._advance, self.told = folder, advance, 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._over.wait(WATCH_EVERY_S):
            sizes = (file_bytes(Path(place) / name) for place, _, names in os.walk(self._folder) for name in names)
            grown = max(sizes, default=0) - self.told
            if grown > 0:
                self.told += grown
                self._advance(grown)
