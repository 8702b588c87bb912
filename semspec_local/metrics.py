"""Counters in, rates out: the only place where a rate is defined.

A rate is None when it is unknown (nothing to divide by), never infinite or NaN. A failed item counts in no rate:
the caller leaves its counters out of `total`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # trace imports this module
    from .trace import StepRecord


@dataclass(kw_only=True)
class Counters:
    """What happened in one run, or in several together (`total`).

    A step is proposed when a policy was asked about it. Committed tokens are counted by who wrote them, in the
    target's tokens where the target holds the step and in the draft's elsewhere, so the three add up to
    `n_committed_tokens`. `n_tokens_reused` of those that the target wrote were evaluated with a rejected candidate.
    `n_guesses` tokens were guessed by the draft where the target wrote, which kept `n_guesses_kept` of them.
    `accepted_run_lengths` maps the length of an accepted run to how often it occurred: one run before each
    rejection, 0 included, and the unfinished one at the end unless it is 0. `n_prompt_tokens_read` leaves out the
    beginning of the prompt that was in the cache already.
    Times are in seconds of wall clock; `ttft_s` is None before the first token, and for several runs together.
    """

    n_prompt_tokens: int = 0
    n_prompt_tokens_read: int = 0
    n_steps: int = 0
    n_proposed_steps: int = 0
    n_accepted_steps: int = 0
    n_draft_tokens_proposed: int = 0
    n_draft_tokens_accepted: int = 0
    n_tokens_by_draft: int = 0
    n_tokens_by_target: int = 0
    n_tokens_reused: int = 0
    n_guesses: int = 0
    n_guesses_kept: int = 0
    n_tokens_forced: int = 0
    accepted_run_lengths: dict[int, int] = field(default_factory=dict)
    prefill_s: float = 0.0
    propose_s: float = 0.0
    score_s: float = 0.0
    probe_s: float = 0.0
    write_s: float = 0.0
    read_s: float = 0.0
    wall_s: float = 0.0
    ttft_s: float | None = None
    _open_run: int = field(default=0, init=False, repr=False, compare=False)

    @classmethod
    def from_steps(
        cls,
        records: Iterable[StepRecord],
        *,
        n_prompt_tokens: int = 0,
        n_prompt_tokens_read: int = 0,
        prefill_s: float = 0.0,
        wall_s: float = 0.0,
        ttft_s: float | None = None,
    ) -> Counters:
        """The counters of a run from its trace; what the steps do not tell is given by name."""
        counters = cls(
            n_prompt_tokens=n_prompt_tokens,
            n_prompt_tokens_read=n_prompt_tokens_read,
            prefill_s=prefill_s,
            wall_s=wall_s,
            ttft_s=ttft_s,
        )
        for record in records:
            counters.add(record)
        return counters

    def add(self, record: StepRecord) -> None:
        """Count one step, candidate or written."""
        for name in _STEP_SECONDS:
            setattr(self, name, getattr(self, name) + getattr(record, name))
        if record.accepted is not None:
            self._add_decision(record.accepted, record.n_draft_tokens or 0)
        if record.committed:
            self._add_committed(record)

    def _add_decision(self, accepted: bool, n_draft_tokens: int) -> None:
        self.n_proposed_steps += 1
        self.n_draft_tokens_proposed += n_draft_tokens
        if accepted:
            self.n_accepted_steps += 1
            self.n_draft_tokens_accepted += n_draft_tokens
            if self._open_run:
                self._count_run(self._open_run, -1)
            self._open_run += 1
            self._count_run(self._open_run, 1)
        else:
            if not self._open_run:
                self._count_run(0, 1)
            self._open_run = 0

    def _count_run(self, length: int, change: int) -> None:
        n_runs = self.accepted_run_lengths.get(length, 0) + change
        if n_runs:
            self.accepted_run_lengths[length] = n_runs
        else:
            del self.accepted_run_lengths[length]

    def _add_committed(self, record: StepRecord) -> None:
        n_tokens = record.n_target_tokens if record.n_target_tokens is not None else record.n_draft_tokens or 0
        self.n_steps += 1
        self.n_tokens_reused += record.n_reused_tokens
        self.n_guesses += record.n_guesses
        self.n_guesses_kept += record.n_guesses_kept
        if record.origin == "draft":
            self.n_tokens_by_draft += n_tokens
        elif record.origin == "target":
            self.n_tokens_by_target += n_tokens
        else:
            self.n_tokens_forced += n_tokens

    @property
    def n_committed_tokens(self) -> int:
        return self.n_tokens_by_draft + self.n_tokens_by_target + self.n_tokens_forced

    @property
    def decode_s(self) -> float:
        """Seconds of wall time after the prompt was read."""
        return self.wall_s - self.prefill_s

    @property
    def step_acceptance_rate(self) -> float | None:
        """Accepted / proposed steps."""
        return _rate(self.n_accepted_steps, self.n_proposed_steps)

    @property
    def token_acceptance_rate(self) -> float | None:
        """Tokens of accepted / of proposed steps, in the draft's tokens."""
        return _rate(self.n_draft_tokens_accepted, self.n_draft_tokens_proposed)

    @property
    def guess_acceptance_rate(self) -> float | None:
        """Guessed tokens that the target kept / all that were guessed."""
        return _rate(self.n_guesses_kept, self.n_guesses)

    @property
    def target_token_share(self) -> float | None:
        """Committed tokens that the target wrote / all committed tokens."""
        return _rate(self.n_tokens_by_target, self.n_committed_tokens)

    @property
    def mean_accepted_run(self) -> float | None:
        """Accepted steps per accepted run, runs of length 0 included."""
        n_accepted = sum(length * n_runs for length, n_runs in self.accepted_run_lengths.items())
        return _rate(n_accepted, sum(self.accepted_run_lengths.values()))

    @property
    def prefill_tps(self) -> float | None:
        """The prompt's tokens that were read per second of prefill."""
        return _rate(self.n_prompt_tokens_read, self.prefill_s)

    @property
    def decode_tps(self) -> float | None:
        """Committed tokens per second of wall time after the prefill; rejected tokens never count."""
        return _rate(self.n_committed_tokens, self.decode_s)

    @property
    def time_per_step_s(self) -> float | None:
        """Seconds of wall time after the prefill per committed step."""
        return _rate(self.decode_s, self.n_steps)

    def rates(self) -> dict[str, float | None]:
        """Every rate by its name."""
        return {name: getattr(self, name) for name in RATES}


RATES = (
    "step_acceptance_rate",
    "token_acceptance_rate",
    "guess_acceptance_rate",
    "target_token_share",
    "mean_accepted_run",
    "prefill_tps",
    "decode_tps",
    "time_per_step_s",
)
"""The names of the rates, in the order to show them."""

_STEP_SECONDS = ("propose_s", "score_s", "probe_s", "write_s", "read_s")


def total(counters: Iterable[Counters]) -> Counters:
    """The sum of several runs, so that a rate of it is a ratio of totals. The time to first token of one run stays."""
    runs = list(counters)
    result = Counters(ttft_s=runs[0].ttft_s if len(runs) == 1 else None)
    for run in runs:
        for item in fields(Counters):
            if item.init and item.name not in ("accepted_run_lengths", "ttft_s"):
                setattr(result, item.name, getattr(result, item.name) + getattr(run, item.name))
        for length, n_runs in run.accepted_run_lengths.items():
            result._count_run(length, n_runs)
    return result


def _rate(part: float, whole: float) -> float | None:
    if not whole > 0:
        return None
    rate = part / whole
    return rate if math.isfinite(rate) else None
