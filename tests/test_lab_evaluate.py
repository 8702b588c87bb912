"""Statistics against definitions and against scipy."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from semspec_local.lab import evaluate
from semspec_local.lab.exam import histogram, verdict

RNG = np.random.default_rng(0)
SHARE = RNG.integers(0, 9, size=300) / 8
PREDICTED = np.clip(0.7 * SHARE + RNG.normal(scale=0.15, size=300) + 0.1, 0, 1)
PROBLEMS = np.array([f"p{n // 10}" for n in range(300)])


def test_auroc_is_the_chance_of_the_right_order():
    event, score = SHARE >= 0.5, np.round(PREDICTED, 1)
    pairs = [(a > b) + (a == b) / 2 for a in score[event] for b in score[~event]]
    assert evaluate.auroc(event, score) == pytest.approx(np.mean(pairs))
    assert np.isnan(evaluate.auroc(np.ones(3, bool), np.arange(3.0)))


def test_spearman_agrees_with_scipy():
    assert evaluate.spearman(SHARE, PREDICTED) == pytest.approx(stats.spearmanr(SHARE, PREDICTED).statistic)
    assert np.isnan(evaluate.spearman(SHARE, np.ones(300)))


def test_brier_is_the_error_against_one_more_sample():
    events = RNG.random((20_000, 300)) < SHARE
    drawn = float(np.mean((events - PREDICTED) ** 2))
    quality = evaluate.probe_quality(SHARE, PREDICTED, PROBLEMS, seed=0, n_resamples=1)
    assert quality["brier"]["value"] == pytest.approx(drawn, abs=1e-3)


def test_calibration_error_of_a_calibrated_and_of_a_biased_prediction():
    assert evaluate.calibration_error(SHARE, SHARE) == 0
    assert evaluate.calibration_error(np.full(4, 0.2), np.full(4, 1.0)) == pytest.approx(0.8)


def test_perfect_and_constant_predictions():
    perfect = evaluate.probe_quality(SHARE, SHARE, PROBLEMS, seed=0, n_resamples=50)
    assert (perfect["mse"]["value"], perfect["r2"]["value"]) == (0, 1)
    assert perfect["spearman"]["value"] == pytest.approx(1)
    constant = evaluate.probe_quality(SHARE, np.full(300, SHARE.mean()), PROBLEMS, seed=0, n_resamples=50)
    assert constant["r2"]["value"] == pytest.approx(0)
    assert constant["auroc"]["value"] == 0.5
    assert constant["spearman"] == {"value": None, "low": None, "high": None}


def test_intervals_are_seeded_and_wider_when_whole_problems_are_alike():
    def mean(values):
        return lambda rows: {"mean": float(values[rows].mean())}

    per_problem = np.repeat(RNG.normal(size=30), 10)
    first = evaluate.bootstrap(mean(per_problem), PROBLEMS, seed=1)["mean"]
    assert evaluate.bootstrap(mean(per_problem), PROBLEMS, seed=1)["mean"] == first
    assert first["low"] < first["value"] < first["high"]
    by_row = evaluate.bootstrap(mean(per_problem), np.arange(300).astype(str), seed=1)["mean"]
    assert first["high"] - first["low"] > 2 * (by_row["high"] - by_row["low"])


def test_one_problem_has_no_interval():
    found = evaluate.probe_quality(SHARE, PREDICTED, np.array(["p"] * 300), seed=0)["mse"]
    assert found["value"] is not None
    assert (found["low"], found["high"]) == (None, None)


def test_the_decision_table_compares_every_score_with_the_ratio():
    scores = {evaluate.RATIO: RNG.normal(size=300), "good": PREDICTED, "share": SHARE}
    table = evaluate.decision_table(SHARE, scores, PROBLEMS, seed=0, n_resamples=200)
    assert list(table) == list(scores)
    assert table["share"]["auroc_in_target_cluster"]["value"] == 1
    assert table["good"]["auroc_in_target_cluster_minus_ratio"]["low"] > 0
    assert "auroc_in_target_cluster_minus_ratio" not in table[evaluate.RATIO]
    assert evaluate.values_only(table["share"])["spearman"] == pytest.approx(1)


def test_gains_are_paired():
    noise = RNG.normal(size=300)
    found = evaluate.gains(SHARE, PREDICTED, {"itself": PREDICTED, "noise": noise}, PROBLEMS, seed=0, n_resamples=200)
    assert found["itself"] == {"value": 0, "low": 0, "high": 0}
    assert found["noise"]["low"] > 0


def gain(value, low, high):
    return {"value": value, "low": low, "high": high}


@pytest.mark.parametrize(
    ("over", "sentence"),
    [
        ({"a": gain(0.2, 0.1, 0.3), "b": gain(0.1, 0.05, 0.2)}, "it tells more than the logits alone: +0.100 AUROC"),
        ({"a": gain(0.2, 0.1, 0.3), "b": gain(0.1, -0.1, 0.2)}, "it cannot be said that it tells more"),
        ({"a": gain(-0.2, -0.3, -0.1), "b": gain(0.1, 0.05, 0.2)}, "it tells less than the logits alone: -0.200"),
        ({"a": gain(None, None, None), "b": gain(0.1, None, None)}, "too few problems"),
    ],
)
def test_the_verdict_goes_by_the_best_score_without_hidden_states(over, sentence):
    assert verdict({"beyond_logits": {"score": "it", "auroc_gain_over": over}}).startswith(sentence)


def test_the_histogram_counts_every_step_once():
    found = histogram(np.array([0.5, 0.4, 1.0]), np.array([0.0, 1.0, 0.52]))
    assert (sum(found["likely"]), sum(found["unlikely"])) == (2, 1)
    assert (found["likely"][0], found["likely"][10], found["unlikely"][-1]) == (1, 1, 1)
