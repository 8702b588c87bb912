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
SLOWER = 0.95
"""Below this share of the target's measured speed a run lost time; costs are measured no more finely than that."""

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
        found += _about_drafting(speculation, records, counters, c_t_alone)
        found += _about_scores(policy, records)
    return found


def _about_prompt_and_context(speculation: Speculation) -> Iterator[Remark]:
    if n_cut := speculation.prompts.n_chars_cut:
        yield Remark("prompt_cut", f"The question did not fit: its first {n_cut:,} characters were left out.")
    if speculation.stop_reason == "context_full":
        sides = [side for side in speculation.sides() if not side.only_guesses]
        n_ctx = min(sides, key=lambda side: side.room).model.n_ctx
        yield Remark("context_full", f"The context of {n_ctx:,} tokens is full, so the text ends here (see -c).")


def _about_drafting(
    speculation: Speculation, records: Sequence[StepRecord], counters: Counters, c_t_alone: float | None
) -> Iterator[Remark]:
    if speculation.gave_up:
        rate = counters.token_acceptance_rate
        begun = f"Drafting was given up, with {rate:.0%} of its tokens accepted" if rate is not None else ""
        yield Remark(
            "gave_up",
            f"{begun or _who_wrote(counters)}: by the costs that were measured here drafting is not expected to "
            "gain time (--no-give-up drafts all the same).",
        )
        return
    if not counters.n_proposed_steps:
        helped = counters.n_tokens_by_draft or counters.n_guesses_kept
        if speculation.stop_reason not in (None, "interrupted", "error") and not helped:
            yield Remark("draft_inactive", f"The draft is loaded and was of no use: {_why_inactive(records)}.")
        return
    last = [record.accepted for record in records if record.accepted is not None][-N_LAST_STEPS:]
    if len(last) >= MIN_STEPS_TO_JUDGE and sum(last) < LOW_ACCEPTANCE * len(last):
        yield Remark(
            "low_acceptance",
            f"Only {sum(last)} of the last {len(last)} drafted steps were accepted, so drafting cost time here: "
            "try a better draft, another policy or threshold, or --policy never.",
        )
    tps = counters.decode_tps
    if len(last) >= MIN_STEPS_TO_JUDGE and tps is not None and c_t_alone is not None and tps * c_t_alone < SLOWER:
        yield Remark(
            "slower_than_target",
            f"Speculation lost time: {tps * c_t_alone:.2f} times the speed that was measured of the target alone; "
            "--policy never is faster here.",
        )


def _who_wrote(counters: Counters) -> str:
    return "The draft guessed tokens and no steps" if counters.n_guesses else "The target wrote alone"


def _why_inactive(records: Sequence[StepRecord]) -> str:
    reasons = {record.reason for record in records if record.committed}
    if reasons <= {"priming"}:
        return "the target's first step was all (see --n-prime)"
    if "forced_target" in reasons:
        return "no step that it wrote could be verified"
    return "there was no step that it could have written"


def _about_scores(policy: Policy, records: Sequence[StepRecord]) -> Iterator[Remark]:
    if n := sum(policy.is_near(record.score, record.threshold) for record in records):
        decisions = "1 decision lay" if n == 1 else f"{n} decisions lay"
        said = f"{decisions} so close to the threshold that other rounding may turn it, as on another machine."
        yield Remark("near_threshold", said)
