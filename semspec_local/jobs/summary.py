"""Counts and rates of a job, for its progress and its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from .records import ItemRecord

N_SLOWEST = 3


@dataclass
class Tally:
    """Adds up finished items; holds numbers only, so that a long job stays small."""

    n_failed_before: int = 0
    clock: Callable[[], float] = time.monotonic
    n_by_status: dict[str, int] = field(default_factory=lambda: {"ok": 0, "truncated": 0, "error": 0})
    n_tokens: int = 0
    n_proposed: int = 0
    n_accepted: int = 0
    n_tokens_by_draft: int = 0
    slowest: list[tuple[float, str]] = field(default_factory=list)
    begun: float = field(init=False)

    def __post_init__(self) -> None:
        self.begun = self.clock()

    def add(self, record: ItemRecord) -> None:
        self.n_by_status[record.status] += 1
        self.n_tokens += record.usage.get("completion_tokens", 0)
        self.n_proposed += record.stats.get("n_proposed_steps", 0)
        self.n_accepted += record.stats.get("n_accepted_steps", 0)
        self.n_tokens_by_draft += record.stats.get("n_tokens_by_draft", 0)
        self.slowest = sorted([*self.slowest, (record.seconds, record.id)], reverse=True)[:N_SLOWEST]

    @property
    def n_new(self) -> int:
        return sum(self.n_by_status.values())

    @property
    def seconds(self) -> float:
        return max(self.clock() - self.begun, 1e-9)

    def note(self) -> str:
        """How it goes, beside the count: what failed, tokens and acceptance."""
        parts = [f"{self.n_tokens / self.seconds:,.1f} tokens/s"]
        if self.n_proposed:
            parts.append(f"{self.n_accepted / self.n_proposed:.0%} accepted")
        if n_failed := self.n_by_status["error"] + self.n_failed_before:
            parts.append(f"{n_failed:,} failed")
        return ", ".join(parts)

    def lines(self) -> Iterator[str]:
        """The end of the job, for people."""
        n = self.n_by_status
        counts = f"{n['ok']:,} ok, {n['truncated']:,} cut off, {n['error']:,} failed"
        yield f"{self.n_new:,} items in {self.seconds:,.1f} s: {counts}"
        if not self.n_tokens:
            return
        rate = f"{self.n_new / self.seconds * 60:,.1f} items/min, {self.n_tokens / self.seconds:,.1f} tokens/s"
        if self.n_proposed:
            accepted, share = self.n_accepted / self.n_proposed, self.n_tokens_by_draft / self.n_tokens
            rate += f"; {accepted:.0%} of drafted steps accepted, {share:.0%} of tokens by the draft"
        yield rate
        yield "slowest: " + ", ".join(f"{item_id} {seconds:.1f} s" for seconds, item_id in self.slowest)
