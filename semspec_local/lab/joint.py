"""Fit the joint probe: both models' pooled states and features of a drafted step in, the target's share out.

It is taught on draft-written steps only, which is what it will judge. Imports torch through `train`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from .ridge import fit_stacked, fitted, taught
from .split import Split
from .train import JOINT_HEADS, FittedHead, Rows, TrainConfig, fit_all

STACKED = JOINT_HEADS[-1]


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

    Without `kinds` it is what the features can say alone: the thing to beat. The head `stacked` chooses the kinds
    itself, for the roles that are named.
    """
    if config.joint_heads == (STACKED,):
        return _train_stacked(collection, labels, split, tuple(kinds), config, say)
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


def _train_stacked(
    collection: Collection,
    labels: Labels,
    split: Split,
    roles: Sequence[Role],
    config: TrainConfig,
    say: Callable[[str], None],
) -> TrainedJoint:
    judged = judged_rows(collection)
    rows = (collection.n_tokens > 0) & taught(split, collection.problem_ids)
    if not (rows & judged).any():
        raise ConfigError("no step of the draft is left to learn from; collect more problems")
    found = fit_stacked(collection, labels, rows, judged, roles, FEATURES, config.seed)
    share = labels.target_share[rows & judged]
    inputs = joined(collection, found.kinds, FEATURES)[rows & judged]
    head = fitted(STACKED, found.penalty, found.mlp, inputs, share, found.unseen)
    say(f"{'joint' if roles else 'features alone'}, {STACKED}: cross-validated MSE {head.validation_mse:.4f}")
    return TrainedJoint(
        kinds=found.kinds,
        features=FEATURES,
        head=head,
        validation_rows=inputs[: len(head.validation_probs)],
        sweep=found.sweep,
        n_rows={"train": len(share)},
        train_label_mean=float(share.mean()),
    )
