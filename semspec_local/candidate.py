"""A step that the draft proposes, on its way through the loop."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from .policy import Decision, StepScores
from .prefix import Side
from .protocols import ModelStep
from .steps import StepReader


@dataclass
class Candidate:
    """A step the draft proposes, as each model holds it; `fits` is False when it cannot be put to the policy."""

    drafted: ModelStep
    text: bytes
    read: ModelStep | None = None
    fits: bool = True
    times: dict[str, float] = field(default_factory=dict)
    scores: StepScores | None = None


def kept_part(step: ModelStep, reader: StepReader, side: Side) -> tuple[int, bytes]:
    """How many of a written step's tokens are kept, and their text: a stop string and what follows it are cut off."""
    assert reader.end is not None
    pieces = [side.model.vocabulary.piece(token) for token in step.tokens]
    if reader.end.kind != "stop":
        return len(pieces), b"".join(pieces)
    n_bytes = max(0, reader.end.n_bytes)
    kept = position = 0
    while kept < len(pieces) and position < n_bytes:
        position += len(pieces[kept])
        kept += 1
    return kept, b"".join(pieces)[:n_bytes]


def shortened(step: ModelStep, n_tokens: int) -> ModelStep:
    """The first tokens of a step, with what is known of them."""
    return ModelStep(
        tokens=step.tokens[:n_tokens],
        states={tap: replace(states, own=states.own[:n_tokens]) for tap, states in step.states.items()}
        if n_tokens
        else {},
        logprobs=None if step.logprobs is None else step.logprobs[:n_tokens],
        in_top2=None if step.in_top2 is None else step.in_top2[:n_tokens],
        end=step.end,
    )


def verdict_of(candidate: Candidate, decision: Decision) -> dict[str, Any]:
    """The fields of a record that a verified candidate has."""
    scores = candidate.scores
    return {
        "draft_semantic_prob": scores.draft_semantic_prob if scores else None,
        "target_semantic_prob": scores.target_semantic_prob if scores else None,
        "joint_semantic_prob": scores.joint_semantic_prob if scores else None,
        "acceptance_ratio": scores.acceptance_ratio if scores else None,
        "score": decision.score,
        "threshold": decision.threshold,
        "accepted": decision.accepted if scores else None,
        **candidate.times,
    }
