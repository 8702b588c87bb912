"""How many lanes are worth having: what a token costs when so many sequences write at once, measured."""

from __future__ import annotations

import time
from collections.abc import Mapping

from .context import LlamaContext
from .model import LlamaModel

LANE_NUMBERS = (1, 2, 4, 8, 16, 32)
WORTH = 0.9
"""Twice the lanes must bring the cost per token down to this share, or they are not worth their memory."""

OVERHEAD_S = 200e-6
"""What a token costs in Python when several lanes take turns, more than when one writes alone (docs/log.md)."""

_N_CONTEXT, _N_TRIALS = 32, 3


def batch_costs(model: LlamaModel, *, n_threads: int, most: int, one_cache: bool = True) -> dict[int, float]:
    """Seconds per token when 1, 2, 4 ... sequences write one token each, up to `most`; the best of three."""
    costs: dict[int, float] = {}
    numbers = [n for n in LANE_NUMBERS if n <= most]
    with LlamaContext(model, n_ctx=64, n_threads=n_threads, n_seq_max=numbers[-1], one_cache=one_cache) as context:
        for sequence in range(numbers[-1]):
            context.decode([0] * _N_CONTEXT, range(_N_CONTEXT), [sequence] * _N_CONTEXT)
        position = _N_CONTEXT
        for n in numbers:
            taken = []
            for _ in range(_N_TRIALS):
                start = time.perf_counter()
                context.decode([0] * n, [position] * n, list(range(n)), [True] * n)
                taken.append(time.perf_counter() - start)
                for sequence in range(n):
                    context.trim(position, sequence)
            costs[n] = min(taken) / n
    return costs


def best_lanes(costs: Mapping[int, float]) -> int:
    """The number after which doubling brings too little; 1 where all of that is less than taking turns costs."""
    numbers = sorted(costs)
    best = numbers[0]
    for n in numbers[1:]:
        if costs[n] > WORTH * costs[best]:
            break
        best = n
    return best if costs[best] + OVERHEAD_S <= WORTH * costs[1] else 1
