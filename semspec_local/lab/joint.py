"""Fit the joint probe: both models' pooled states and features of a drafted step in, the target's share out.

It is taught on draft-written steps only, which is what it will judge. Imports torch through `train`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from ..protocols import FEATURES, FloatArray
from ..roles import Role
from .collection import Collection, StateKind
from .joint_rows import joined, judged_rows
from .labels import Labels
from .split import Split
from .train import FittedHead, Rows, TrainConfig, fit_all


@dataclass(frozen=True)
class TrainedJoint:
    """The joint head that validation chose, what it reads, and everything it was chosen from."""

    kinds: Mapping[Role, StateKind]
    features: tuple[str, ...]
    head: FittedHead
    validation_rows: FloatArray
    sweep: tuple[dict[str, Any], ...]
    n_rows: dict[str, int]
    train_label_mean: float

    def predict(self, collection: Collection) -> NDArray[np.float64]:
        """Its output on the draft-written steps of a collection, float64 [n_rows]; NaN on other rows."""
        rows = judged_rows(collection)
        probs = np.full(len(rows), np.nan)
        probs[rows] = self.head.predict(joined(collection, self.kinds, self.features)[rows])
        return probs


def train_joint(
    collection: Collection,
    labels: Labels,
    split: Split,
    kinds: Mapping[Role, StateKind],
    config: TrainConfig,
    *,
    say: Callable[[str], None] = lambda _: None,
) -> TrainedJoint:
    """Fit every head on the states of `kinds` and all features; keep the best on validation.

    Without `kinds` it is what the features can say alone: the thing to beat.
    """
    rows = judged_rows(collection)
    states, share = joined(collection, kinds, FEATURES), labels.target_share
    masks = {part: rows & split.mask(part, collection.problem_ids) for part in ("train", "validation")}
    for part, mask in masks.items():
        if not mask.any():
            raise ConfigError(f"no step of the draft is left in the {part} part; collect more problems")
    train, validation = (Rows(states[mask], share[mask].astype(np.float32)) for mask in masks.values())
    fits = fit_all(train, validation, replace(config, heads=config.joint_heads))
    best = min(fits, key=lambda fitted: fitted.validation_mse)
    say(f"{'joint' if kinds else 'features alone'}, {best.head}: validation MSE {best.validation_mse:.4f}")
    return TrainedJoint(
        kinds=dict(kinds),
        features=FEATURES,
        head=best,
        validation_rows=validation.states,
        sweep=tuple(fitted.line() for fitted in fits),
        n_rows={part: int(mask.sum()) for part, mask in masks.items()},
        train_label_mean=float(share[masks["train"]].mean()),
    )
