"""What each policy accepts, and that no bad number ever looks like a good step."""

from __future__ import annotations

import math
import sys
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semspec_local.config import RunConfig
from semspec_local.errors import ConfigError, ModelError, ProbeError
from semspec_local.policy import POLICIES, Decision, MeanLoglik, Need, Policy, Reason, StepScores, make_policy

PROB = st.floats(0, 1)
LOGPROBS = st.lists(st.floats(-30, 0, width=32), min_size=1, max_size=8)
SCORES = st.builds(
    lambda draft, target, draft_logprobs, tokens: scores(
        draft,
        target,
        draft_logprobs,
        target_logprobs=[logprob for logprob, _ in tokens],
        top2=[top2 for _, top2 in tokens],
        joint=draft,
        rating=round(9 * draft),
    ),
    PROB,
    PROB,
    LOGPROBS,
    st.lists(st.tuples(st.floats(-30, 0, width=32), st.booleans()), min_size=1, max_size=8),
)
NAMES = st.sampled_from(list(POLICIES))


class FixedDraw:
    """A generator whose next number is known."""

    def __init__(self, draw: float) -> None:
        self.draw = draw

    def random(self) -> float:
        return self.draw


def scores(
    draft: float | None = 0.5,
    target: float | None = 0.5,
    draft_logprobs: list[float] | None = None,
    target_logprobs: list[float] | None = None,
    top2: list[bool] | None = None,
    joint: float | None = None,
    rating: float | None = None,
) -> StepScores:
    return StepScores(
        n_tokens=len(target_logprobs or [0]),
        draft_semantic_prob=draft,
        target_semantic_prob=target,
        joint_semantic_prob=joint,
        draft_logprobs=None if draft_logprobs is None else np.array(draft_logprobs, np.float32),
        target_logprobs=None if target_logprobs is None else np.array(target_logprobs, np.float32),
        target_in_top2=None if top2 is None else np.array(top2, np.bool_),
        target_rating=rating,
    )


def decide(policy: Policy, given_scores: StepScores, draw: float = 0.5) -> Decision:
    return policy.decide(given_scores, FixedDraw(draw))  # type: ignore[arg-type]


@given(NAMES, SCORES, st.integers(0, 2**32))
def test_every_decision_takes_one_draw_and_repeats_with_its_seed(name: str, some: StepScores, seed: int) -> None:
    policy = make_policy(name)
    rng, same, one_draw = (np.random.default_rng(seed) for _ in range(3))
    assert policy.decide(some, rng) == policy.decide(some, same)
    one_draw.random()
    assert rng.random() == one_draw.random()


@given(NAMES, SCORES, st.floats(0, 1, exclude_max=True))
def test_a_decision_is_finite_and_from_the_closed_set(name: str, some: StepScores, draw: float) -> None:
    decision = decide(make_policy(name), some, draw)
    assert decision.reason in get_args(Reason)
    assert decision.score is None or math.isfinite(decision.score)
    assert decision.threshold == make_policy(name).threshold


WITHOUT_COIN = ["semantic-greedy", "semantic-joint", "loglik-ratio", "mean-loglik", "specreason"]


@given(st.sampled_from(WITHOUT_COIN), SCORES, st.floats(0, 1))
def test_a_rule_without_a_coin_accepts_iff_its_score_reaches_the_threshold(
    name: str, some: StepScores, threshold: float
) -> None:
    decision = decide(make_policy(name, threshold), some)
    assert decision.score is not None
    assert decision.accepted == (decision.score >= threshold)
    assert decision.reason == ("score_ok" if decision.accepted else "below_threshold")


@given(PROB, PROB)
def test_semantic_greedy_accepts_iff_the_target_prob_is_at_least_the_draft_prob(draft: float, target: float) -> None:
    assert decide(make_policy("semantic-greedy"), scores(draft, target)).accepted == (target >= draft)


@given(PROB, PROB, st.floats(0, 1, exclude_max=True), st.floats(0, 1.5))
def test_semantic_ratio_is_a_floor_and_then_a_coin(draft: float, target: float, draw: float, floor: float) -> None:
    ratio = target / draft if draft else 0.0
    reason = "below_floor" if ratio < floor else "ratio_ok" if draw < ratio else "draw_lost"
    decision = decide(make_policy("semantic-ratio", floor), scores(draft, target), draw)
    assert (decision.accepted, decision.reason) == (reason == "ratio_ok", reason)


@given(SCORES, st.floats(0, 1, exclude_max=True))
def test_a_floor_above_every_ratio_rejects_everything(some: StepScores, draw: float) -> None:
    for name in ("semantic-ratio", "semantic-greedy"):
        assert not decide(make_policy(name, sys.float_info.max), scores(0.9, 0.9), draw).accepted
    assert decide(make_policy("never"), some, draw) == Decision(False, "no_draft")


def test_equal_probabilities_are_always_accepted_at_the_defaults() -> None:
    for name in ("semantic-ratio", "semantic-greedy", "semantic-top2", "loglik-ratio"):
        for draw in (0.0, 0.5, math.nextafter(1, 0)):
            same = scores(0.3, 0.3, [-1.0, -3.0], [-1.0, -3.0], [True, False])
            assert decide(make_policy(name), same, draw).accepted, name


def test_semantic_top2_skips_the_coin_only_when_every_token_is_in_the_top_2() -> None:
    policy = make_policy("semantic-top2")
    assert decide(policy, scores(0.9, 0.0, top2=[True, True])).reason == "top2"
    assert decide(policy, scores(0.8, 0.2, top2=[True, False]), 0.24) == Decision(True, "ratio_ok", 0.25, 0.0)
    assert decide(policy, scores(0.8, 0.2, top2=[True, False]), 0.26).reason == "draw_lost"
    assert decide(make_policy("semantic-top2", 0.5), scores(0.8, 0.2, top2=[False]), 0.0).reason == "below_floor"


@given(LOGPROBS)
def test_loglik_ratio_is_the_geometric_mean_of_token_ratios(target: list[float]) -> None:
    draft = [value / 2 for value in target]
    decision = decide(make_policy("loglik-ratio"), scores(None, None, draft, target))
    assert decision.score == pytest.approx(math.exp(sum(t - d for t, d in zip(target, draft)) / len(target)))


def test_loglik_ratio_divides_by_the_targets_tokens_across_vocabularies() -> None:
    decision = decide(make_policy("loglik-ratio"), scores(None, None, [-1.0, -1.0, -1.0], [-2.0, -3.0]))
    assert decision.score == pytest.approx(math.exp(-1))


def test_the_guard_of_mean_loglik_is_off_by_default() -> None:
    unlikely = scores(None, None, None, [-0.01, -0.01, -0.01, -9.0])
    assert decide(MeanLoglik(0.1), unlikely).accepted
    assert decide(MeanLoglik(0.1, min_token_prob=0.001), unlikely).reason == "below_floor"
    assert decide(MeanLoglik(0.1, min_token_prob=0.0), unlikely).accepted
    with pytest.raises(ConfigError):
        MeanLoglik(min_token_prob=1.5)


def test_specreason_accepts_from_a_rating_of_7_on_unless_told_otherwise() -> None:
    found = [decide(make_policy("specreason"), scores(rating=rating)) for rating in range(10)]
    assert [decision.accepted for decision in found] == [False] * 7 + [True] * 3
    assert found[3] == Decision(False, "below_threshold", 3.0, 7.0)
    assert decide(make_policy("specreason", 9), scores(rating=9)) == Decision(True, "score_ok", 9.0, 9.0)
    assert not decide(make_policy("specreason", 9), scores(rating=8)).accepted


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1, 10])
def test_a_rating_that_is_none_raises(bad: float) -> None:
    with pytest.raises(ModelError, match=f"target_rating is {bad}; wanted a number from 0 to 9"):
        decide(make_policy("specreason", 0), scores(rating=bad))


def test_a_token_the_target_rules_out_gives_score_zero() -> None:
    for name in ("mean-loglik", "loglik-ratio"):
        assert decide(make_policy(name), scores(None, None, [-1.0, -1.0], [-1.0, -math.inf])).score == 0.0


@given(st.floats(0, 1))
def test_random_accepts_at_its_rate(rate: float) -> None:
    rng = np.random.default_rng(7)
    policy = make_policy("random", rate)
    n_accepted = sum(policy.decide(scores(), rng).accepted for _ in range(1000))
    # five standard deviations of a fixed seed's 1,000 draws
    assert abs(n_accepted - 1000 * rate) <= 80
    assert policy.decide(scores(), rng).reason in ("draw_won", "draw_lost")


def test_always_and_never() -> None:
    assert decide(make_policy("always"), StepScores(1)) == Decision(True, "always")
    assert [name for name, policy in POLICIES.items() if not policy.drafts] == ["never"]
    assert [name for name, policy in POLICIES.items() if policy.lossless] == ["never"]


BAD_PROBS = [math.nan, math.inf, -math.inf, -0.1, 1.0001]


@pytest.mark.parametrize("bad", BAD_PROBS)
@pytest.mark.parametrize("name", ["semantic-ratio", "semantic-greedy", "semantic-top2"])
def test_a_semantic_prob_that_is_none_raises(name: str, bad: float) -> None:
    for pair in ((bad, 0.5), (0.5, bad)):
        with pytest.raises(ProbeError, match="wanted a number from 0 to 1"):
            decide(make_policy(name), scores(*pair, top2=[True]))


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.5])
def test_a_log_probability_that_is_none_raises(bad: float) -> None:
    with pytest.raises(ModelError, match="target_logprobs"):
        decide(make_policy("mean-loglik"), scores(None, None, None, [-1.0, bad]))
    for draft in ([-1.0, bad], [-1.0, -math.inf]):
        with pytest.raises(ModelError, match="draft_logprobs"):
            decide(make_policy("loglik-ratio"), scores(None, None, draft, [-1.0]))


@given(NAMES, SCORES, st.data())
@settings(max_examples=60)
def test_what_a_policy_needs_is_all_it_needs(name: str, some: StepScores, data: st.DataObject) -> None:
    needs = POLICIES[name].needs
    known = {need: getattr(some, need) for need in needs}
    assert decide(make_policy(name), StepScores(some.n_tokens, **known)) == decide(make_policy(name), some)
    if needs:
        missing = data.draw(st.sampled_from(sorted(needs)))
        with pytest.raises(ConfigError, match=missing):
            decide(make_policy(name), StepScores(some.n_tokens, **{**known, missing: None}))


def test_an_empty_step_is_never_judged() -> None:
    with pytest.raises(ValueError, match="empty"):
        decide(make_policy("always"), StepScores(0))
    with pytest.raises(ValueError, match="empty"):
        decide(make_policy("semantic-top2"), scores(top2=[]))


@given(PROB, PROB)
def test_the_acceptance_ratio_is_finite(draft: float, target: float) -> None:
    ratio = scores(draft, target).acceptance_ratio
    assert ratio is not None and math.isfinite(ratio)
    assert scores(None, target).acceptance_ratio is None is scores(draft, None).acceptance_ratio
    assert scores(0.0, target).acceptance_ratio == 0.0


def test_an_unknown_policy_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="semantic-greedy"):
        make_policy("semantic")


@pytest.mark.parametrize(
    ("name", "threshold"),
    [
        ("semantic-ratio", -0.1),
        ("semantic-ratio", math.nan),
        ("semantic-ratio", math.inf),
        ("random", 1.1),
        ("mean-loglik", 2.0),
        ("specreason", 9.5),
        ("always", 0.5),
        ("never", 0.0),
    ],
)
def test_a_threshold_out_of_range_says_got_and_wanted(name: str, threshold: float) -> None:
    with pytest.raises(ConfigError, match=f"{threshold}; policy {name}"):
        make_policy(name, threshold)


def test_every_policy_describes_itself() -> None:
    assert RunConfig().policy in POLICIES
    for name, kind in POLICIES.items():
        assert kind.name == name
        assert kind.summary.endswith(".") and kind.summary.count(". ") == 0
        assert kind.needs <= set(get_args(Need))
        assert make_policy(name).threshold == kind.default_threshold
        if kind.default_threshold is not None:
            low, high = kind.threshold_range
            assert low <= kind.default_threshold <= high
            assert make_policy(name, high).threshold == high


def test_scores_with_arrays_compare_by_identity() -> None:
    some: Any = scores(target_logprobs=[-1.0, -2.0])
    assert some == some and some != scores(target_logprobs=[-1.0, -2.0])
