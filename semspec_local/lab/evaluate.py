"""How good are probabilities, and how well does a score order drafted steps? With intervals, beside a constant.

Rows of one problem are alike, so an interval comes from resampling problems, not rows. Knows nothing of files or torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

N_RESAMPLES = 1000
N_CALIBRATION_BINS = 10
LIKELY_SHARE = 0.5
"""A step that at least half of the samples agree with; AUROC asks whether the probe finds these."""

SUPPORTED_SHARE = 0.25

RATIO = "acceptance_ratio"
"""The score of the paper's rule: target_semantic_prob / draft_semantic_prob."""

Floats = NDArray[np.float64]
Interval = dict[str, float | None]
"""`value`, and `low` and `high` of the 95 % bootstrap interval over problems; None where undefined."""


def probe_quality(
    share: Floats, predicted: Floats, problems: NDArray[np.str_], *, seed: int, n_resamples: int = N_RESAMPLES
) -> dict[str, Interval]:
    """Quality of predicted shares [n] against true ones [n] on held-out problems.

    `mse`, `mae`, `r2`, `spearman`; `auroc` (finds steps with a share of at least 0.5); `brier` (expected squared error
    against the event that one more sample would lie in the step's cluster); `calibration_error` (mean gap between
    predicted and true share over ten bins of equal width, weighted by rows).
    """
    return bootstrap(lambda rows: _quality(share[rows], predicted[rows]), problems, seed=seed, n_resamples=n_resamples)


def decision_table(
    target_share: Floats,
    scores: Mapping[str, Floats],
    problems: NDArray[np.str_],
    *,
    seed: int,
    n_resamples: int = N_RESAMPLES,
) -> dict[str, dict[str, Interval]]:
    """How each score [n] orders draft-written steps by the share of the target's samples that mean the same [n].

    `auroc_in_target_cluster` (share over 0), `auroc_supported` (share of at least 0.25), `spearman`. With the
    paper's ratio among the scores, `auroc_in_target_cluster_minus_ratio` compares the others with it, resample by
    resample.
    """

    def statistic(rows: NDArray[np.int64]) -> dict[str, float]:
        share = target_share[rows]
        found: dict[str, float] = {}
        for name, score in scores.items():
            found[f"{name}/auroc_in_target_cluster"] = auroc(share > 0, score[rows])
            found[f"{name}/auroc_supported"] = auroc(share >= SUPPORTED_SHARE, score[rows])
            found[f"{name}/spearman"] = spearman(share, score[rows])
        if RATIO in scores:
            for name in set(scores) - {RATIO}:
                gain = found[f"{name}/auroc_in_target_cluster"] - found[f"{RATIO}/auroc_in_target_cluster"]
                found[f"{name}/auroc_in_target_cluster_minus_ratio"] = gain
        return found

    flat = bootstrap(statistic, problems, seed=seed, n_resamples=n_resamples)
    return {
        name: {key.split("/", 1)[1]: value for key, value in sorted(flat.items()) if key.startswith(f"{name}/")}
        for name in scores
    }


def gains(
    target_share: Floats,
    score: Floats,
    others: Mapping[str, Floats],
    problems: NDArray[np.str_],
    *,
    seed: int,
    n_resamples: int = N_RESAMPLES,
) -> dict[str, Interval]:
    """By how much the AUROC of `score` [n] for "in a target cluster" exceeds that of others, resample by resample."""

    def statistic(rows: NDArray[np.int64]) -> dict[str, float]:
        event = target_share[rows] > 0
        own = auroc(event, score[rows])
        return {name: own - auroc(event, other[rows]) for name, other in others.items()}

    return bootstrap(statistic, problems, seed=seed, n_resamples=n_resamples)


def bootstrap(
    statistic: Callable[[NDArray[np.int64]], dict[str, float]],
    problems: NDArray[np.str_],
    *,
    seed: int,
    n_resamples: int = N_RESAMPLES,
) -> dict[str, Interval]:
    """Every number of `statistic(row indices)` on all rows, with an interval from resampling whole problems.

    NaN means undefined: such a value is None, and such resamples are left out; with fewer than half of the resamples
    defined, or one problem only, the interval is None.
    """
    groups = [np.flatnonzero(problems == problem) for problem in sorted(set(problems.tolist()))]
    values = statistic(np.arange(len(problems)))
    rng = np.random.default_rng(seed)
    drawn: dict[str, list[float]] = {name: [] for name in values}
    for _ in range(n_resamples if len(groups) > 1 else 0):
        rows = np.concatenate([groups[index] for index in rng.integers(len(groups), size=len(groups))])
        for name, value in statistic(rows).items():
            drawn[name].append(value)
    return {name: _interval(value, np.array(drawn[name])) for name, value in values.items()}


def auroc(event: NDArray[np.bool_], score: Floats) -> float:
    """Chance that a row with the event scores above one without, ties half; NaN when all rows are alike."""
    n_with = int(event.sum())
    n_without = len(event) - n_with
    if not n_with or not n_without:
        return float("nan")
    ranks = rankdata(score)
    return float((ranks[event].sum() - n_with * (n_with + 1) / 2) / (n_with * n_without))


def spearman(first: Floats, other: Floats) -> float:
    """Rank correlation; NaN when one side is constant."""
    a, b = rankdata(first) - (len(first) + 1) / 2, rankdata(other) - (len(other) + 1) / 2
    spread = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / spread if spread else float("nan")


def calibration_error(share: Floats, predicted: Floats) -> float:
    """Mean gap between predicted and true share over bins of equal width, weighted by rows."""
    bins = np.minimum((predicted * N_CALIBRATION_BINS).astype(np.int64), N_CALIBRATION_BINS - 1)
    gaps = np.bincount(bins, weights=predicted - share, minlength=N_CALIBRATION_BINS)
    return float(np.abs(gaps).sum() / len(share))


def _quality(share: Floats, predicted: Floats) -> dict[str, float]:
    error = predicted - share
    mse, variance = float(np.mean(error**2)), float(np.var(share))
    return {
        "mse": mse,
        "mae": float(np.mean(np.abs(error))),
        "r2": 1 - mse / variance if variance else float("nan"),
        "spearman": spearman(share, predicted),
        "auroc": auroc(share >= LIKELY_SHARE, predicted),
        # E[(p - event)^2] for an event with probability `share`.
        "brier": float(np.mean(error**2 + share * (1 - share))),
        "calibration_error": calibration_error(share, predicted),
    }


def _interval(value: float, drawn: Floats) -> Interval:
    defined = drawn[np.isfinite(drawn)]
    low: float | None = None
    high: float | None = None
    if len(defined) and 2 * len(defined) >= len(drawn):
        low, high = (float(bound) for bound in np.quantile(defined, (0.025, 0.975)))
    return {"value": value if np.isfinite(value) else None, "low": low, "high": high}


def values_only(quality: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    """The values without their intervals, as a probe's spec keeps them."""
    return {name: interval["value"] for name, interval in quality.items()}
