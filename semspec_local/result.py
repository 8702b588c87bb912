"""What a finished run gives: answer, text, usage, statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .answer import final_answer
from .engine import Speculation
from .remarks import Remark
from .trace import StepRecord


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """A finished run. `reasoning` is None for a model that does not think."""

    answer: str
    text: str
    reasoning: str | None
    stop_reason: str
    seed: int
    usage: dict[str, int]
    stats: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def result_of(speculation: Speculation, records: list[StepRecord], remarks: Sequence[Remark] = ()) -> RunResult:
    """The result of a run that has ended, or was broken off."""
    counters = speculation.counters
    reasoning, rest = speculation.prefix.split()
    n_tokens = counters.n_committed_tokens
    return RunResult(
        answer=final_answer(rest),
        text=speculation.text,
        reasoning=reasoning,
        stop_reason=speculation.stop_reason or "interrupted",
        seed=speculation.seed,
        usage={
            "prompt_tokens": counters.n_prompt_tokens,
            "completion_tokens": n_tokens,
            "total_tokens": counters.n_prompt_tokens + n_tokens,
        },
        stats=stats_of(speculation, records, remarks),
    )


def stats_of(speculation: Speculation, records: list[StepRecord], remarks: Sequence[Remark]) -> dict[str, Any]:
    """Counters, rates, remarks, and the range of the semantic probabilities; None for what is unknown."""
    counters = speculation.counters
    fields = {name: value for name, value in vars(counters).items() if not name.startswith("_")}
    return {
        **fields,
        "n_committed_tokens": counters.n_committed_tokens,
        **counters.rates(),
        "policy": speculation.policy.name,
        "threshold": speculation.policy.threshold,
        "n_guess": speculation.n_guess,
        "speculated": counters.n_proposed_steps > 0,
        "n_prompt_chars_cut": speculation.prompts.n_chars_cut,
        "remarks": [remark.to_json() for remark in remarks],
        "draft_semantic_prob_range": _range(records, "draft_semantic_prob"),
        "target_semantic_prob_range": _range(records, "target_semantic_prob"),
        "joint_semantic_prob_range": _range(records, "joint_semantic_prob"),
    }


def _range(records: list[StepRecord], name: str) -> list[float] | None:
    values = [value for record in records if (value := getattr(record, name)) is not None]
    return [min(values), max(values)] if values else None
