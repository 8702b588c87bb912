"""Counts and rates of a job, for its progress and its end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from .records import ItemRecord

N_SLOWEST = 3


@dataclass
class Tally:
    """Adds up finished items; holds numbers only, so that a long job stays small.

    `n_lanes` is how many items ran at once in one pair of models; None where there were several pairs, or none yet.
    `drafting_s` and `n_tokens_drafting` are those of items for which something was drafted, without the time for their
    prompts.
    """

    n_failed_before: int = 0
    n_lanes: int | None = None
    clock: Callable[[], float] = time.monotonic
    n_by_status: dict[str, int] = field(default_factory=lambda: {"ok": 0, "truncated": 0, "error": 0})
    n_tokens: int = 0
    n_proposed: int = 0
    n_accepted: int = 0
    n_tokens_by_draft: int = 0
    drafting_s: float = 0.0
    n_tokens_drafting: int = 0
    slowest: list[tuple[float, str]] = field(default_factory=list)
    n_by_remark: dict[str, int] = field(default_factory=dict)
    begun: float = field(init=False)

    def __post_init__(self) -> None:
        self.begun = self.clock()
        self._first_start, self._last_end = math.inf, 0.0

    def add(self, record: ItemRecord) -> None:
        self.n_by_status[record.status] += 1
        self.n_tokens += record.usage.get("completion_tokens", 0)
        self.n_proposed += record.stats.get("n_proposed_steps", 0)
        self.n_accepted += record.stats.get("n_accepted_steps", 0)
        self.n_tokens_by_draft += record.stats.get("n_tokens_by_draft", 0)
        self.slowest = sorted([*self.slowest, (record.seconds, record.id)], reverse=True)[:N_SLOWEST]
        if record.stats.get("n_proposed_steps"):
            self.drafting_s += record.stats["wall_s"] - record.stats["prefill_s"]
            self.n_tokens_drafting += record.stats["n_committed_tokens"]
        for kind in {remark["kind"] for remark in record.stats.get("remarks", ())}:
            self.n_by_remark[kind] = self.n_by_remark.get(kind, 0) + 1
        now = self.clock()
        self._first_start, self._last_end = min(self._first_start, now - record.seconds), now

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
        if self.n_by_remark:
            counts = ", ".join(f"{kind} {n:,}" for kind, n in sorted(self.n_by_remark.items()))
            yield f"items with remarks (stats.remarks tells): {counts}"
        yield "slowest: " + ", ".join(f"{item_id} {seconds:.1f} s" for seconds, item_id in self.slowest)

    def speculation(self, c_t_alone: float | None) -> str | None:
        """What drafting gained or lost against `c_t_alone` seconds per token of the target alone; None says nothing.

        In several lanes items share their time, so it is the whole job, prompts included, that is compared.
        """
        if self.n_lanes is None or not self.n_tokens_drafting:
            return None
        if c_t_alone is None:
            return (
                "speculation: gained or lost is unknown; `semspec-local costs`, with the same models and threads, "
                "measures what the target alone costs here"
            )
        cost = f"(measured cost {1000 * c_t_alone:.3g} ms a token)"
        if self.n_lanes > 1:
            times = c_t_alone * self.n_tokens / max(self._last_end - self._first_start, 1e-9)
            alone = "the target alone in one lane would have been"
            return f"speculation in {self.n_lanes} lanes: {times:.2f} times as fast as {alone} {cost}"
        times = c_t_alone * self.n_tokens_drafting / max(self.drafting_s, 1e-9)
        compared = f"{times:.2f} times as fast as the target alone would have been {cost}"
        return f"speculation: {compared}" if times >= 1 else f"speculation lost time: {compared}; try --policy never"
