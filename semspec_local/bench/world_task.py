"""Held-out problems of the made world: which ones, what is right, and which decisions on their steps were wrong.

The world says of every step whether it may come next, so the error of a policy is counted, not estimated.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from ..lab.world import Problem, problems
from ..lab.world.text import Meaning, meaning_of
from ..trace import StepRecord

BENCH_SEED = 1_000_000
"""The seed of the problems to measure on; the pair and its probes were taught on those of the seeds 1, 2 and 3."""

TUNING_SEED = 2_000_000
"""The seed of the problems to choose a threshold on."""


@dataclass(frozen=True, kw_only=True)
class Verdicts:
    """A policy's decisions in a run, and how many were wrong by the truth of the world."""

    n_accepted: int = 0
    n_accepted_wrong: int = 0
    n_rejected: int = 0
    n_rejected_right: int = 0


def world_items(n: int, *, offset: int = 0, seed: int = BENCH_SEED) -> list[Problem]:
    """`n` problems of a seed, from number `offset` on; the same number is the same problem whatever `n` is."""
    return list(islice(problems(seed, offset + n), offset, None))


def verdicts_on(problem: Problem, records: Iterable[StepRecord]) -> Verdicts:
    """Judge every decision by what was committed before it.

    A step is right when its text has a meaning and the problem allows that meaning next. Steps that no policy was
    asked about count in nothing, but what they say is known to the steps after them.
    """
    done: list[Meaning] = []
    decisions: list[tuple[bool, bool]] = []
    for record in records:
        meaning = meaning_of(record.text)
        if record.accepted is not None:
            decisions.append((record.accepted, meaning is not None and problem.is_right(meaning, done)))
        if record.committed and meaning is not None:
            done.append(meaning)
    return Verdicts(
        n_accepted=sum(accepted for accepted, _ in decisions),
        n_accepted_wrong=sum(accepted and not right for accepted, right in decisions),
        n_rejected=sum(not accepted for accepted, _ in decisions),
        n_rejected_right=sum(not accepted and right for accepted, right in decisions),
    )
