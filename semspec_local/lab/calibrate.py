"""Choose a policy's threshold so that it seldom accepts a step that the target would not write.

Learn-then-test (arXiv 2110.01052): thresholds are tried from the strictest to the loosest, each is a hypothesis "the
risk is over alpha", and the first that cannot be refuted ends the search; several searches begin at fixed places. Then,
with probability 1 - delta over the problems, the chosen threshold's risk is at most alpha. Problems, not steps, are
independent, so a problem is one observation.

The risk is the share of accepted drafted steps that lie in no cluster of the target's samples. As a share of accepted
steps it is no mean over problems, but "risk <= alpha" is: accepted steps count 1 - alpha when they are wrong and -alpha
when they are right, and the mean of that is at most 0. A policy with a coin counts each step by its chance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from ..policy import StepScores, make_policy
from ..roles import ROLES, ProbeRole
from .collection import Collection
from .labels import Labels

Floats = NDArray[np.float64]

N_STARTS = 4
"""Searches that share delta: where the strictest thresholds accept too little to say anything, others begin later."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was found. `threshold` is None when no threshold keeps the risk; `bound` is then the least one known.

    `bound` is the upper bound of the risk at the threshold, with confidence 1 - delta for all that were tried
    together. `risk` (None when nothing is accepted) and `acceptance` are those seen there, over all steps.
    """

    policy: str
    alpha: float
    delta: float
    threshold: float | None
    risk: float | None
    acceptance: float
    bound: float
    n_problems: int
    n_steps: int
    data: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def calibrate(
    policy: str,
    chances: Callable[[float], Floats],
    thresholds: Sequence[float],
    wrong: NDArray[np.bool_],
    problems: NDArray[np.str_],
    *,
    alpha: float,
    delta: float,
    data: str = "",
) -> Calibration:
    """The loosest of `thresholds` that keeps the risk at most `alpha` with confidence 1 - `delta`.

    `chances(threshold)` float64 [n] are the chances that the policy accepts each drafted step, and fall with the
    threshold; `wrong` bool [n] are the steps that lie in no target cluster; `problems` [n] the problem of each.
    Raises ConfigError for an alpha or delta outside (0, 1), and for no steps.
    """
    for name, value in (("alpha", alpha), ("delta", delta)):
        if not 0 < value < 1:
            raise ConfigError(f"{name} is {value}; wanted a number between 0 and 1")
    if not len(wrong):
        raise ConfigError("there are no drafted steps to calibrate on; collect some")
    names, of = np.unique(problems, return_inverse=True)
    of = np.random.default_rng(0).permutation(len(names))[
        of
    ]  # a bet looks at one after another; names may mean something

    ordered, share = sorted(thresholds, reverse=True), delta / N_STARTS
    tried: dict[float, Floats] = {}
    kept = []
    for start in {len(ordered) * k // N_STARTS for k in range(N_STARTS)}:
        for threshold in ordered[start:]:
            accepted = tried.setdefault(threshold, chances(threshold))
            too_many = (accepted * wrong).sum() > alpha * accepted.sum()  # no promise against what was seen
            if too_many or _p_value(accepted, wrong, of, alpha, share) > share:
                break
            kept.append(threshold)
    chosen = min(kept, default=None)
    bounds = {t: _upper_bound(tried[t], wrong, of, share) for t in ([chosen] if chosen is not None else tried)}
    # Without one that keeps it, the threshold of which the most can be said stands for the rest.
    bound, shown = min((bounds[t], t) for t in bounds)
    accepted = tried[shown]
    n_accepted = float(accepted.sum())
    return Calibration(
        policy=policy,
        alpha=alpha,
        delta=delta,
        threshold=chosen,
        risk=float((accepted * wrong).sum()) / n_accepted if n_accepted else None,
        acceptance=float(accepted.mean()),
        bound=bound,
        n_problems=len(names),
        n_steps=len(wrong),
        data=data,
    )


def _upper_bound(accepted: Floats, wrong: NDArray[np.bool_], of: NDArray[np.intp], delta: float) -> float:
    """The least risk, in hundredths of a percent, that the data refute every larger one of."""
    low, high = 1, 10_000
    while low < high:
        middle = (low + high) // 2
        if _p_value(accepted, wrong, of, middle / 10_000, delta) <= delta:
            high = middle
        else:
            low = middle + 1
    return low / 10_000


def _p_value(accepted: Floats, wrong: NDArray[np.bool_], of: NDArray[np.intp], alpha: float, delta: float) -> float:
    """Evidence against "the risk is over alpha"; small is strong."""
    # Per problem, in [0, 1], with a mean of at most alpha exactly when the risk is at most alpha.
    values = np.bincount(of, accepted * (wrong - alpha)) / np.bincount(of) + alpha
    return betting_p_value(values, alpha, delta)


def betting_p_value(values: Floats, alpha: float, delta: float) -> float:
    """p-value of "the mean is alpha or more" for independent values [n] in [0, 1] (arXiv 2010.09686, by betting).

    A gambler who bets on smaller values could only win so much if it were true. `delta` is the p-value hoped for; it
    sets the stakes and nothing else. What counts is what the gambler has at the end: the most on the way would be as
    valid, but then a lucky beginning could refute what the whole does not.
    """
    if alpha >= 1:
        return 0.0
    count = np.arange(1, len(values) + 1)
    mean = (0.5 + values.cumsum()) / (count + 1)
    variance = (0.25 + ((values - mean) ** 2).cumsum()) / (count + 1)
    before = np.concatenate([[0.25], variance[:-1]])  # a stake may know the past only
    stakes = np.minimum(np.sqrt(2 * math.log(1 / delta) / (len(values) * before)), 0.9 / (1 - alpha))
    won = np.log1p(-stakes * (values - alpha)).sum()
    return float(min(1.0, math.exp(-max(won, 0.0))))


# -- from a collection ----------------------------------------------------------------------------------

N_THRESHOLDS = 60
_MOST = 1.2
"""The largest threshold to try for a ratio; probabilities end at 1."""


def calibrate_policy(
    name: str,
    collection: Collection,
    labels: Labels,
    predicted: Mapping[ProbeRole, Floats],
    *,
    alpha: float,
    delta: float,
) -> Calibration:
    """`calibrate` a policy on the draft-written steps of a labelled collection.

    `predicted` has the semantic probabilities of the probes on every row, float64 [n_rows], if the policy needs them.
    Raises ConfigError for a policy without a threshold, or with one that says nothing of steps (`random`).
    """
    policy = make_policy(name)
    if policy.default_threshold is None or not policy.needs:
        raise ConfigError(f"policy {name} has no threshold that could be calibrated")
    rows = np.flatnonzero((collection.writers == "draft") & (collection.n_tokens > 0))
    scores = list(_scores(collection, predicted, rows))
    low, high = policy.threshold_range

    def chances(threshold: float) -> Floats:
        at = make_policy(name, threshold)
        return np.array([at.chance(one) for one in scores])

    return calibrate(
        name,
        chances,
        np.linspace(low, min(high, _MOST), N_THRESHOLDS + 1).tolist(),
        labels.target_share[rows] == 0,
        collection.problem_ids[rows],
        alpha=alpha,
        delta=delta,
        data=str(collection.header.get("data", "")),
    )


def _scores(
    collection: Collection, predicted: Mapping[ProbeRole, Floats], rows: NDArray[np.intp]
) -> Iterator[StepScores]:
    """What a policy would be given; of log-probabilities the means are stored, and they are all that policies read."""
    top2_share = collection.feature("target", "top2_share")
    means = {role: collection.feature(role, "logprob_mean") for role in ROLES}
    for row in rows:
        n = int(collection.n_tokens[row])
        in_top2 = np.ones(n, dtype=bool)
        in_top2[0] = top2_share[row] >= 1
        yield StepScores(
            n_tokens=n,
            draft_semantic_prob=float(predicted["draft"][row]) if "draft" in predicted else None,
            target_semantic_prob=float(predicted["target"][row]) if "target" in predicted else None,
            joint_semantic_prob=float(predicted["joint"][row]) if "joint" in predicted else None,
            draft_logprobs=np.full(n, means["draft"][row], np.float32),
            target_logprobs=np.full(n, means["target"][row], np.float32),
            target_in_top2=in_top2,
        )
