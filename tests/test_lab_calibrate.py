"""Thresholds with a promise: the bound holds as often as it says, and what is saved is what a run uses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from semspec_local.errors import ConfigError
from semspec_local.lab.calibrate import betting_p_value, calibrate
from semspec_local.policy import POLICIES, StepScores, make_policy

THRESHOLDS = [round(0.05 * i, 2) for i in range(21)]


def steps(rng: np.random.Generator, n_problems: int, n_each: int = 4):
    """Scores of drafted steps, which of them are wrong (the likelier, the lower the score), and their problems."""
    problems = np.repeat([f"p{i}" for i in range(n_problems)], n_each)
    ease = np.repeat(rng.normal(0, 0.1, n_problems), n_each)
    score = np.clip(rng.uniform(size=len(problems)) + ease, 0, 1)
    return score, rng.uniform(size=len(problems)) < (1 - score) ** 2, problems


def above(score):
    return lambda threshold: (score >= threshold).astype(float)


def find(score, wrong, problems, alpha=0.2, delta=0.1):
    return calibrate("any", above(score), THRESHOLDS, wrong, problems, alpha=alpha, delta=delta)


def test_the_promise_is_broken_no_more_often_than_it_says():
    truth_score, truth_wrong, _ = steps(np.random.default_rng(99), 20_000)
    true_risk = {t: truth_wrong[truth_score >= t].mean() for t in THRESHOLDS if (truth_score >= t).any()}
    n_found = n_broken = 0
    for seed in range(60):
        found = find(*steps(np.random.default_rng(seed), 150))
        if found.threshold is not None:
            n_found += 1
            n_broken += true_risk[found.threshold] > 0.2
    assert n_found >= 50
    assert n_broken <= binom.ppf(0.999, n_found, 0.1)


@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.2])
def test_no_threshold_promises_less_than_was_seen(alpha):
    for seed in range(40):
        found = find(*steps(np.random.default_rng(seed), 60), alpha=alpha)
        assert found.threshold is None or found.risk <= alpha


def test_many_easy_problems_before_many_hard_ones_promise_nothing():
    wrong = np.repeat([False, True, False], [50_000, 5_000, 45_000])  # 5 %, the bet's best case first
    problems = np.array([f"p{i:06d}" for i in range(len(wrong))])
    found = find(np.ones(len(wrong)), wrong, problems, alpha=0.049)
    assert found.threshold is None


def test_a_lucky_beginning_does_not_refute_what_the_whole_says():
    values = np.array([0.0] * 60 + [0.5] * 40)  # a mean of 0.2
    assert betting_p_value(values, 0.15, 0.025) > 0.5
    assert betting_p_value(values, 0.4, 0.025) < 0.025


def test_more_problems_give_a_looser_threshold_and_a_smaller_alpha_a_stricter_one():
    few, many = (find(*steps(np.random.default_rng(1), n)) for n in (100, 2000))
    assert many.threshold < few.threshold
    strict = find(*steps(np.random.default_rng(1), 2000), alpha=0.1)
    assert strict.threshold > many.threshold
    for found in (few, many, strict):
        assert found.risk <= found.bound <= found.alpha
    assert (many.n_problems, many.n_steps) == (2000, 8000)


def test_where_no_threshold_can_keep_it_the_bound_is_said():
    score, _, problems = steps(np.random.default_rng(0), 40)
    found = find(score, np.random.default_rng(1).uniform(size=len(score)) < 0.5, problems, alpha=0.05)
    assert found.threshold is None
    assert 0.05 < found.bound <= 1


def test_a_problem_is_one_observation_however_many_steps_it_has():
    score, wrong, problems = steps(np.random.default_rng(3), 60, n_each=1)
    once = find(score, wrong, problems, alpha=0.4)
    often = find(*(np.repeat(part, 50) for part in (score, wrong, problems)), alpha=0.4)
    assert (once.threshold, once.bound) == (often.threshold, often.bound)


def test_chances_count_as_much_as_they_are():
    _, wrong, problems = steps(np.random.default_rng(4), 400)
    whole = calibrate("any", lambda t: np.ones(len(wrong)), [0.0], wrong, problems, alpha=0.9, delta=0.1)
    half = calibrate("any", lambda t: np.full(len(wrong), 0.5), [0.0], wrong, problems, alpha=0.9, delta=0.1)
    assert half.risk == pytest.approx(whole.risk) == wrong.mean()
    assert (whole.acceptance, half.acceptance) == (1, 0.5)
    assert half.bound > whole.bound  # half as many steps say less


@pytest.mark.parametrize(("change", "wanted"), [({"alpha": 0}, "alpha is 0"), ({"delta": 1}, "delta is 1")])
def test_alpha_and_delta_are_shares(change, wanted):
    with pytest.raises(ConfigError, match=wanted):
        find(*steps(np.random.default_rng(0), 5), **change)


def test_nothing_to_calibrate_on_is_said():
    none = np.zeros(0)
    with pytest.raises(ConfigError, match="no drafted steps"):
        find(none, none.astype(bool), none.astype(str))
    score, wrong, problems = steps(np.random.default_rng(0), 5)
    found = find(score * 0 - 1, wrong, problems)
    assert (found.threshold, found.risk, found.acceptance, found.bound) == (None, None, 0, 1)


@pytest.mark.parametrize("alpha", [0.02, 0.2, 0.7])
@pytest.mark.parametrize("kind", ["zeros and ones", "even"])
def test_p_values_are_small_no_more_often_than_they_say(alpha, kind):
    rng = np.random.default_rng(0)

    def values():
        if kind == "zeros and ones":
            return (rng.uniform(size=120) < alpha).astype(float)
        return rng.uniform(0, 2 * alpha, 120) if alpha <= 0.5 else rng.uniform(2 * alpha - 1, 1, 120)

    found = np.array([betting_p_value(values(), alpha, 0.1) for _ in range(2000)])
    for level in (0.2, 0.1, 0.02):
        assert (found <= level).sum() <= binom.ppf(0.9999, len(found), level)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=50), st.floats(0.001, 1), st.floats(0.001, 0.5))
def test_p_values_are_probabilities(values, alpha, delta):
    assert 0 <= betting_p_value(np.array(values), alpha, delta) <= 1


NEEDED = {
    "n_tokens": 2,
    "target_logprobs": np.full(2, -0.2, np.float32),
    "draft_logprobs": np.full(2, -0.1, np.float32),
    "target_in_top2": np.array([True, False]),
    "target_rating": 7.0,
}


@given(st.sampled_from(sorted(POLICIES)), st.floats(0, 1), st.floats(0.01, 1), st.floats(0, 1))
def test_a_chance_is_how_often_a_policy_accepts(name, target, draft, threshold):
    policy = make_policy(name, threshold if POLICIES[name].default_threshold is not None else None)
    scores = StepScores(**NEEDED, target_semantic_prob=target, draft_semantic_prob=draft, joint_semantic_prob=target)
    draws = (np.arange(200) + 0.5) / 200
    accepted = np.mean([policy._rule(scores, draw).accepted for draw in draws])
    assert policy.chance(scores) == pytest.approx(accepted, abs=0.006)
