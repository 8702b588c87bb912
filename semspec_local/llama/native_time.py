"""How long native code itself works: its calls are timed for the duration of a `with`, and at no other time.

What is not seen: Python that llama.cpp calls back while it computes counts as llama.cpp's (contexts whose
`calls_back` is true), and a GPU may go on computing after a call has returned. The timer adds about half a microsecond
to each call, most of it outside of what it measures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .native import C

Place = tuple[Any, tuple[str, ...]]
"""A module or class, and the names of its functions to time."""

LLAMA: Place = (
    C,
    (
        "llama_decode",
        "llama_sampler_sample",
        "llama_sampler_apply",
        "llama_tokenize",
        "llama_memory_clear",
        "llama_memory_seq_rm",
    ),
)
"""The functions that work; all others together take a few microseconds for each token."""


@dataclass
class NativeTime:
    """Seconds in native code, the number of calls, and the seconds of the whole `with` once it is left."""

    native_s: float = 0.0
    n_calls: int = 0
    elapsed_s: float = 0.0


@contextmanager
def native_time(*others: Place, clock: Callable[[], float] = time.perf_counter) -> Iterator[NativeTime]:
    """Time calls of llama.cpp, and of `others`, in this block.

    For one thread: the functions are replaced where all who call them find them.
    """
    spent = NativeTime()
    untimed = [(place, name, getattr(place, name)) for place, names in (LLAMA, *others) for name in names]
    start = clock()
    try:
        for place, name, function in untimed:
            setattr(place, name, _timed(function, spent, clock))
        yield spent
    finally:
        for place, name, function in untimed:
            setattr(place, name, function)
        spent.elapsed_s = clock() - start


def _timed(function: Any, spent: NativeTime, clock: Callable[[], float]) -> Any:
    def call(*arguments: Any) -> Any:
        start = clock()
        try:
            return function(*arguments)
        finally:
            spent.native_s += clock() - start
            spent.n_calls += 1

    return call
