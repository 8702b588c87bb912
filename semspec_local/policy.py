"""The rules that accept or reject a drafted step: scores and a random generator in, a decision out.

Pure: this module knows nothing of models, probes, text or caches. Sources: arXiv 2602.03708 (SemanticSpec) and
the three versions of its authors' code for the `semantic-` rules; the log-probability of arXiv 2604.15244 for
`mean-loglik`; arXiv 2504.07891 for `specreason`. In symbols, for a step of tokens i: lT_i and lD_i are the
log-probabilities that target and draft give to it (natural log, temperature 1).
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from .errors import ConfigError, ModelError, ProbeError
from .protocols import FloatArray

Need = Literal[
    "draft_semantic_prob",
    "target_semantic_prob",
    "joint_semantic_prob",
    "draft_logprobs",
    "target_logprobs",
    "target_in_top2",
    "target_rating",
]

Reason = Literal[
    # a policy's decisions
    "ratio_ok",
    "below_floor",
    "draw_won",
    "draw_lost",
    "top2",
    "score_ok",
    "below_threshold",
    "always",
    # the engine's, for steps that are not put to a policy
    "priming",
    "forced_target",
    "rejected",  # written by the target in place of a rejected candidate
    "answer_phase",
    "think_budget",
    "no_draft",
    "no_gain",  # drafting costs more time here than it saves
]
"""Why a step was accepted, rejected or written: a closed set of codes, as they stand in a trace."""

_T = TypeVar("_T")

_RATINGS = (0.0, 9.0)

SCORE_NOISE = 0.01

_ROUNDING = 1e-3
"""A log-probability may exceed 0 by this much, from float32 sums over a large vocabulary."""


@dataclass(frozen=True, eq=False)
class StepScores:
    """What is known of one candidate step; None is "not known".

    `n_tokens` counts the tokens that the target read, at least one. The logarithms are natural, at temperature 1
    and over the whole vocabulary: `draft_logprobs` float32 [n_draft_tokens], `target_logprobs` float32
    [n_target_tokens]. `target_in_top2` bool [n_target_tokens] says of each token whether it is one of the target's
    two likeliest. `target_rating` is the target's own mark for the step, 0 to 9 (see `rating`).
    """

    n_tokens: int
    draft_semantic_prob: float | None = None
    target_semantic_prob: float | None = None
    joint_semantic_prob: float | None = None
    draft_logprobs: FloatArray | None = None
    target_logprobs: FloatArray | None = None
    target_in_top2: NDArray[np.bool_] | None = None
    target_rating: float | None = None

    @property
    def acceptance_ratio(self) -> float | None:
        """Target / draft semantic probability, finite; 0.0 if the denominator is 0, None if either is unknown."""
        draft, target = self.draft_semantic_prob, self.target_semantic_prob
        if draft is None or target is None:
            return None
        return min(target / draft, sys.float_info.max) if draft else 0.0


@dataclass(frozen=True)
class Decision:
    """What a policy says of one candidate: the answer, its reason, and the number it was compared by."""

    accepted: bool
    reason: Reason
    score: float | None = None
    threshold: float | None = None


class Policy(ABC):
    """One rule. It compares one score with one threshold (None: the rule has none), so a sweep gives a curve.

    `decide` takes exactly one number from `rng` whatever the rule and the outcome, so the same seed gives the
    same numbers to the same steps, and two policies under one seed see the same draws.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    """One plain sentence for the command line."""
    needs: ClassVar[frozenset[Need]] = frozenset()
    """The scores that must be known; the engine has only these computed."""
    default_threshold: ClassVar[float | None] = None
    threshold_range: ClassVar[tuple[float, float]] = (0.0, sys.float_info.max)
    lossless: ClassVar[bool] = False
    """Whether the target's own distribution of text is kept."""
    noise: ClassVar[float] = SCORE_NOISE
    """Scores that differ by less may be of the same step, read in batches of another shape or on another machine."""
    drafts: ClassVar[bool] = True
    """Whether the draft writes steps; if not, the target writes every one."""

    def __init__(self, threshold: float | None = None) -> None:
        self.threshold = self.default_threshold if threshold is None else self._checked(threshold)

    def decide(self, scores: StepScores, rng: np.random.Generator) -> Decision:
        """Accept or reject one candidate.

        Raises ConfigError if a needed score is unknown, ProbeError if a semantic probability is none, ModelError if a
        log-probability or the rating is none.
        """
        draw = float(rng.random())
        _check_scores(self.name, scores, self.needs)
        return self._rule(scores, draw)

    def is_near(self, score: float | None, threshold: float | None) -> bool:
        """Might a step with this score have been decided otherwise elsewhere?"""
        return score is not None and threshold is not None and abs(score - threshold) < self.noise

    def chance(self, scores: StepScores) -> float:
        """The probability with which `decide` accepts, to within 1/1024: an acceptance never turns on a larger draw."""
        _check_scores(self.name, scores, self.needs)
        low, high = 0.0, 1.0
        if self._rule(scores, 1 - sys.float_info.epsilon).accepted:
            return 1.0
        if not self._rule(scores, 0.0).accepted:
            return 0.0
        for _ in range(10):
            middle = (low + high) / 2
            low, high = (middle, high) if self._rule(scores, middle).accepted else (low, middle)
        return (low + high) / 2

    @abstractmethod
    def _rule(self, scores: StepScores, draw: float) -> Decision:
        """The rule itself; `draw` is uniform in [0, 1)."""

    def _by_score(self, score: float) -> Decision:
        assert self.threshold is not None, "a rule with a score has a threshold"
        accepted = score >= self.threshold
        return Decision(accepted, "score_ok" if accepted else "below_threshold", score, self.threshold)

    def _by_coin(self, ratio: float, draw: float) -> Decision:
        """Accept with probability min(1, ratio), unless the ratio is below the floor."""
        assert self.threshold is not None, "a rule with a coin has a floor"
        if ratio < self.threshold:
            return Decision(False, "below_floor", ratio, self.threshold)
        accepted = draw < ratio
        return Decision(accepted, "ratio_ok" if accepted else "draw_lost", ratio, self.threshold)

    @classmethod
    def _checked(cls, threshold: float) -> float:
        low, high = cls.threshold_range
        if cls.default_threshold is None:
            raise ConfigError(f"the threshold is {threshold}; policy {cls.name} has no threshold, so leave it out")
        if not low <= threshold <= high:  # NaN is in no range
            wanted = f"{low:g} or more" if high == sys.float_info.max else f"a number from {low:g} to {high:g}"
            raise ConfigError(f"the threshold is {threshold}; policy {cls.name} wanted {wanted}")
        return float(threshold)


class SemanticRatio(Policy):
    """The August 2025 rule of the authors' code: a ratio floor (`threshold_min` there), then a coin."""

    name = "semantic-ratio"
    summary = "Reject below a floor of target/draft semantic probability, else accept with probability min(1, ratio)."
    needs = frozenset({"draft_semantic_prob", "target_semantic_prob"})
    default_threshold = 0.7

    def _rule(self, scores: StepScores, draw: float) -> Decision:
        return self._by_coin(_known(scores.acceptance_ratio), draw)


class SemanticGreedy(Policy):
    """The authors' first rule: no coin, no floor. A draft probability of 0 counts as a ratio of 1, since p_T >= 0."""

    name = "semantic-greedy"
    summary = "Accept when the target's semantic probability is at least the draft's."
    needs = frozenset({"draft_semantic_prob", "target_semantic_prob"})
    default_threshold = 1.0

    def _rule(self, scores: StepScores, draw: float) -> Decision:
        return self._by_score(_known(scores.acceptance_ratio) if scores.draft_semantic_prob else 1.0)


class SemanticTop2(Policy):
    """The authors' latest rule. Its code declares a floor of 0.5 and never applies it; so the default here is none."""

    name = "semantic-top2"
    summary = "Accept when every token is in the target's top 2, else with probability min(1, target/draft ratio)."
    needs = frozenset({"draft_semantic_prob", "target_semantic_prob", "target_in_top2"})
    default_threshold = 0.0

    def _rule(self, scores: StepScores, draw: float) -> Decision:
        ratio = _known(scores.acceptance_ratio)
        if _known(scores.target_in_top2).all():
            return Decision(True, "top2", ratio, self.threshold)
        return self._by_coin(ratio, draw)


class SemanticJoint(Policy):
    """Ours: one probe reads both models, and says what share of the target's steps here would mean the same."""

    name = "semantic-joint"
    summary = "Accept when the joint probe finds the step's meaning likely enough for the target."
    needs = frozenset({"joint_semantic_prob"})
    default_threshold = 0.5
    threshold_range = (0.0, 1.0)

    def _rule(self, scores: StepScores, draw: float) -> Decision:
        return self._by_score(_known(scores.joint_semantic_prob))


class LoglikRatio(Policy):
    """Score exp((sum lT - sum lD) / n_target_tokens): with one vocabulary, the geometric mean of the token ratios."""

    name = "loglik-ratio"
    summary = "Accept when the target finds the step's tokens likely enough next to the draft."
    needs = frozenset({"draft_logprobs", "target_logprobs"})
    default_threshold = 0.7

    def _rule(self, scores: StepScores, draw: float) -> Decision:
        target, draft = _known(scores.target_logprobs), _known(scores.draft_logprobs)
        return self._by_score(_exp((_sum(target) - _sum(draft)) / len(target)))


class MeanLoglik(Policy):
    """Score exp(mean lT): the geometric mean of the token probabilities.

    `min_token_prob`, off when None, also rejects a step that holds a token less likely than this.
    """

    name = "mean-loglik"
    summary = "Accept when the target finds the step's tokens likely enough on average."
    needs = frozenset({"target_logprobs"})
    default_threshold = 0.6
    threshold_range = (0.0, 1.0)

    def __init__(self, threshold: float | None = None, *, min_token_prob: float | None = None) -> None:
        super().__init__(threshold)
        if min_token_prob is not None and not 0 <= min_token_prob <= 1:
            raise ConfigError(f"min_token_prob is {min_token_prob}; wanted a number from 0 to 1")
        self.min_token_prob = min_token_prob

    def _rule(self, scores: StepScores, draw: float) -> Decision:
        target = _known(scores.target_logprobs)
        # A mean of probabilities is at most 1; rounding in float32 must not say otherwise.
        score = min(_exp(_sum(target) / len(target)), 1.0)
        if self.min_token_prob is not None and _exp(float(target.min())) < self.min_token_prob:
            return Decision(False, "below_floor", score, self.threshold)
        return self._by_score(score)


class SpecReason(Policy):
    """SpecReason's rule (arXiv 2504.07891): the target rates the step in digits, asked in words of our own (`rating`).

    The default is the paper's threshold. A step that leaves no room in the context for the question is not put to this
    policy: the target writes one instead (`forced_target`).
    """

    name = "specreason"
    summary = "Accept when the target, asked to rate the step from 0 to 9, rates it high enough."
    needs = frozenset({"target_rating"})
    default_threshold = 7.0
    threshold_range = _RATINGS
    noise = 0.0  # ratings are whole numbers

    def _rule(self, scores: StepScores, draw: float) -> Decision:
        return self._by_score(_known(scores.target_rating))


class RandomRate(Policy):
    """The control: accepts at a given rate, blind to the step. Its score is the draw; below the threshold accepts."""

    name = "random"
    summary = "Accept at random at the threshold's rate, whatever the step says: a control to compare others with."
    default_threshold = 0.5
    noise = 0.0  # the same draws everywhere
    threshold_range = (0.0, 1.0)

    def _rule(self, scores: StepScores, draw: float) -> Decision:
        assert self.threshold is not None, "random has a rate"
        accepted = draw < self.threshold
        return Decision(accepted, "draw_won" if accepted else "draw_lost", draw, self.threshold)


class Always(Policy):
    name = "always"
    summary = "Accept every step: the fast end of the trade-off."

    def _rule(self, scores: StepScores, draw: float) -> Decision:
        return Decision(True, "always")


class Never(Policy):
    """Not asked in a run, since nothing is drafted; asked all the same, it rejects."""

    name = "never"
    summary = "Use no draft: the target alone, the slow and exact end of the trade-off."
    lossless = True
    drafts = False

    def _rule(self, scores: StepScores, draw: float) -> Decision:
        return Decision(False, "no_draft")


POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        *(SemanticRatio, SemanticGreedy, SemanticTop2, SemanticJoint),
        *(LoglikRatio, MeanLoglik, SpecReason, RandomRate, Always, Never),
    )
}
"""Every policy by its name, in the order to show them."""


def make_policy(name: str, threshold: float | None = None) -> Policy:
    """The policy of that name; `threshold` None takes its own default. Raises ConfigError for either."""
    if name not in POLICIES:
        raise ConfigError(f"--policy is {name!r}; known are {', '.join(POLICIES)}")
    return POLICIES[name](threshold)


def _known(value: _T | None) -> _T:
    assert value is not None, "decide() checks that what a policy needs is known"
    return value


def _sum(logprobs: FloatArray) -> float:
    return float(logprobs.sum(dtype=np.float64))


def _exp(x: float) -> float:
    """e**x, as large as a float gets at most."""
    return math.exp(min(x, math.log(sys.float_info.max)))


def _check_scores(policy: str, scores: StepScores, needs: frozenset[Need]) -> None:
    """Bad numbers must never look like a good step, so everything a policy needs is checked first."""
    if scores.n_tokens < 1:
        raise ValueError(f"the step has {scores.n_tokens} tokens; an empty step is not put to a policy")
    for need in sorted(needs):
        value = getattr(scores, need)
        if value is None:
            raise ConfigError(f"policy {policy} needs {need}, which is not known here; choose another policy")
        if need in ("draft_semantic_prob", "target_semantic_prob", "joint_semantic_prob"):
            if not 0 <= value <= 1:
                raise ProbeError(f"{need} is {value}; wanted a number from 0 to 1, so this probe cannot be trusted")
        elif need == "target_rating":
            low, high = _RATINGS
            if not low <= value <= high:
                raise ModelError(f"target_rating is {value}; wanted a number from {low:g} to {high:g}")
        elif len(value) == 0:
            raise ValueError(f"{need} is empty; wanted one value per token")
        elif need != "target_in_top2":
            _check_logprobs(need, value)


def _check_logprobs(need: Need, logprobs: FloatArray) -> None:
    worst = float(logprobs.max())  # NaN if there is any
    # The target may rule a token out; the draft cannot, for it wrote them all.
    ruled_out = need == "draft_logprobs" and bool(np.isneginf(logprobs).any())
    if not worst <= _ROUNDING or ruled_out:
        raise ModelError(f"{need} holds {-math.inf if ruled_out else worst}; wanted numbers up to 0")
