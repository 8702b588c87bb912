"""Numbers that a joint probe reads beside hidden states: one definition for training and for runs."""

from __future__ import annotations

from collections.abc import Container, Iterable

import numpy as np

from .policy import Need, StepScores
from .protocols import FEATURES, Feature, FloatArray

FEATURE_NEEDS: dict[Feature, Need] = {
    "target_logprob_mean": "target_logprobs",
    "target_logprob_min": "target_logprobs",
    "draft_logprob_mean": "draft_logprobs",
    "target_top2_share": "target_in_top2",
}
"""What must be computed for a feature; the others cost nothing. Log-probabilities cost a vocabulary projection."""

LEAST_LOGPROB = -30.0
"""A token that a model rules out has a log-probability of minus infinity; a probe is given this instead."""


def needs_of(names: Container[str]) -> frozenset[Need]:
    """What must be computed for these features."""
    return frozenset(FEATURE_NEEDS[name] for name in FEATURES if name in names and name in FEATURE_NEEDS)


def step_features(names: Iterable[str], scores: StepScores, step_index: int) -> FloatArray:
    """The features of one step by name, float32 [k]. What they need has to be known (see FEATURE_NEEDS)."""
    return np.array([_value(name, scores, step_index) for name in names], dtype=np.float32)


def _value(name: str, scores: StepScores, step_index: int) -> float:
    if name == "n_tokens":
        return float(scores.n_tokens)
    if name == "step_index":
        return float(step_index)
    if name == "target_top2_share":
        assert scores.target_in_top2 is not None, "the target's top 2 are not known"
        return float(scores.target_in_top2.mean())
    logprobs = scores.draft_logprobs if name == "draft_logprob_mean" else scores.target_logprobs
    assert logprobs is not None, "log-probabilities are not known"
    found = logprobs.min() if name == "target_logprob_min" else logprobs.mean(dtype=np.float64)
    return max(float(found), LEAST_LOGPROB)
