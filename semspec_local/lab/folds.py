"""What probes say of problems that they were not taught on, for every problem: each fold is left out once.

A collection of one machine has some hundred problems; a test on a seventh of them says little. Imports torch
through `train`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..roles import PROBE_ROLES, ROLES, ProbeRole
from .calibrate import calibrate_policy
from .collection import Collection
from .joint import train_joint
from .joint_rows import judged_rows
from .labels import Labels
from .ridge import trainer
from .split import fold_by_problem
from .train import TrainConfig, kind_line

CALIBRATED = "semantic-joint"
"""The policy whose thresholds are chosen from the folds."""

ALPHAS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2)
DELTA = 0.1


@dataclass(frozen=True)
class OutOfFold:
    """Probabilities float64 [n_rows] by probe, each from heads that did not see the row's problem; NaN where none.

    `features_alone` come from heads that read a joint probe's features and no state. `chosen` says of every fold what
    the joint head read.
    """

    predicted: Mapping[ProbeRole, NDArray[np.float64]]
    features_alone: NDArray[np.float64]
    chosen: tuple[dict[str, Any], ...]
    n_folds: int

    def calibrations(self, collection: Collection, labels: Labels) -> list[dict[str, Any]]:
        """Thresholds of the policy `CALIBRATED` for every alpha, as a probe's spec keeps them.

        They are chosen on heads of the folds, each taught on less than the head that is shipped.
        """
        found = []
        for alpha in ALPHAS:
            one = calibrate_policy(CALIBRATED, collection, labels, self.predicted, alpha=alpha, delta=DELTA)
            found.append({**one.to_json(), "data": f"{one.data}, {self.n_folds} folds"})
        return found


def predict_out_of_fold(
    collection: Collection,
    labels: Labels,
    config: TrainConfig,
    n_folds: int,
    *,
    say: Callable[[str], None] = lambda _: None,
) -> OutOfFold:
    """Teach all three probes once per fold, states and heads chosen anew each time, and predict what was left out."""
    usable, judged = collection.n_tokens > 0, judged_rows(collection)
    predicted: dict[ProbeRole, NDArray[np.float64]] = {role: np.full(len(usable), np.nan) for role in PROBE_ROLES}
    features_alone = np.full(len(usable), np.nan)
    chosen = []
    for number, split in enumerate(fold_by_problem(collection.problem_ids, n_folds, config.seed), start=1):
        say(f"fold {number} of {n_folds}")
        test = split.mask("test", collection.problem_ids)
        probes = {role: trainer(config)(collection, labels, split, role, config) for role in ROLES}
        for role, probe in probes.items():
            rows = test & usable
            predicted[role][rows] = probe.head.predict(collection.states(role, probe.kind)[rows])
        kinds = {role: probe.kind for role, probe in probes.items()}
        joint = train_joint(collection, labels, split, kinds, config)
        predicted["joint"][test & judged] = joint.predict(collection)[test & judged]
        plain = train_joint(collection, labels, split, {}, config)
        features_alone[test & judged] = plain.predict(collection)[test & judged]
        chosen.append({role: kind_line(kind) for role, kind in joint.kinds.items()} | {"head": joint.head.head})
    return OutOfFold(predicted, features_alone, tuple(chosen), n_folds)
