"""What a person should hear about a finished run: speculation that did not help, numbers on the edge, text left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from .engine import Speculation
from .metrics import Counters
from .policy import Policy
from .trace import StepRecord

RemarkKind = Literal[
    "draft_inactive",
    "gave_up",
    "low_acceptance",
    "slower_than_target",
    "probe_mismatch",
    "near_threshold",
    "prompt_cut",
    "context_full",
]

N_LAST_STEPS = 8
MIN_STEPS_TO_JUDGE = 5
LOW_ACCEPTANCE = 0.3
"""Below this share of accepted steps no known machine gains from drafting: break-even is far higher."""


@dataclass(frozen=True)
class Remark:
    """One thing to know about a run: a code for programs, a sentence for people."""

    kind: RemarkKind
    text: str

    def to_json(self) -> dict[str, str]:
        return asdict(self)


def remarks_of(
    speculation: Speculation,
    records: Sequence[StepRecord],
    *,
    probe_warnings: Sequence[str] = (),
    c_t_alone: float | None = None,
) -> list[Remark]:
    """The remarks on a run that has ended, or was broken off.

    `probe_warnings` is what was said when its probes were loaded; `c_t_alone` are the target's measured seconds per
    token alone, for a run that had the machine to itself.
    """
    policy, counters = speculation.policy, speculation.counters
    found = [*_about_prompt_and_context(speculation)]
    if policy.drafts:
        found += [Remark("probe_mismatch", warning) for warning in probe_warnings]
        found += _about_drafting(records, counters, c_t_alone)
        found += _about_scores(policy, records)
    return found


def _about_prompt_and_context(speculation: Speculation) -> Iterator[Remark]:
    if n_cut := speculation.prompts.n_chars_cut:
        yield Remark("prompt_cut", f"The question did not fit: its first {n_cut:,} characters were left out.")
    if speculation.stop_reason == "context_full":
        n_ctx = min(side.model.n_ctx for side in speculation.sides())
        yield Remark("context_full", f"The context of {n_ctx:,} tokens is full, so the text ends here; -c widens it.")


def _about_drafting(records: Sequence[StepRecord], counters: Counters, c_t_alone: float | None) -> Iterator[Remark]:
    if any(record.reason == "no_gain" for record in records):
        rate = counters.step_acceptance_rate
        seen = "at any acceptance" if rate is None else f"when {rate:.0%} of steps are accepted"
        yield Remark(
            "gave_up",
            f"Drafting was given up: by the costs that were measured here it is slower than the target alone {seen} "
            "(--no-give-up drafts on).",
        )
        return
    if not counters.n_proposed_steps:
        why = "the target's first step was all (see --n-prime)"
        if counters.propose_s:
            why = "no step that the draft wrote could be verified"
        yield Remark("draft_inactive", f"The draft is loaded and was of no use: {why}.")
        return
    last = [record.accepted for record in records if record.accepted is not None][-N_LAST_STEPS:]
    if len(last) >= MIN_STEPS_TO_JUDGE and sum(last) < LOW_ACCEPTANCE * len(last):
        yield Remark(
            "low_acceptance",
            f"Only {sum(last)} of the last {len(last)} drafted steps were accepted, so drafting cost time here: "
            "try a better draft, another policy or threshold, or --policy never.",
        )
    tps = counters.decode_tps
    if tps is not None and c_t_alone is not None and tps * c_t_alone < 1:
        yield Remark(
            "slower_than_target",
            f"Speculation lost time: {tps * c_t_alone:.2f} times the speed that was measured of the target alone; "
            "--policy never is faster here.",
        )


def _about_scores(policy: Policy, records: Sequence[StepRecord]) -> Iterator[Remark]:
    if n := sum(policy.is_near(record.score, record.threshold) for record in records):
        decisions = "1 decision lies" if n == 1 else f"{n} decisions lie"
        yield Remark(
            "near_threshold",
            f"{decisions} so close to the threshold that rounding, as elsewhere, may turn what follows.",
        )
