"""How long llama.cpp itself works: its calls are timed for the duration of a `with`, and at no other time.

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

TIMED = ("llama_decode", "llama_sampler_sample", "llama_sampler_apply")
"""The functions that compute; all others together take a few microseconds for each token."""


@dataclass
class NativeTime:
    """Seconds in llama.cpp, the number of calls, and the seconds of the whole `with` once it is left."""

    native_s: float = 0.0
    n_calls: int = 0
    elapsed_s: float = 0.0


@contextmanager
def native_time(clock: Callable[[], float] = time.perf_counter) -> Iterator[NativeTime]:
    """Time llama.cpp's calls in this block. For one thread: the functions are replaced in the module that all share."""
    spent = NativeTime()
    untimed = {name: getattr(C, name) for name in TIMED}
    start = clock()
    try:
        for name, function in untimed.items():
            setattr(C, name, _timed(function, spent, clock))
        yield spent
    finally:
        for name, function in untimed.items():
            setattr(C, name, function)
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
