"""Linear probes by ridge regression, and a joint head stacked on two of them: for collections of few problems.

A collection made on one machine has a hundred problems or two, and states have a thousand numbers. One part for
validation is then so small that luck chooses layer and penalty. Here both are chosen by cross-validation over all
problems that are not for the test, with the closed form of ridge regression. Of its two forms, with an unknown for each
number of a state (primal) or for each row (dual), the one with fewer is solved.

The joint head is a logistic regression on a step's features and on what the two linear probes say of the target's
share, which is one linear layer again. It learns from what probes said that had not seen the row's problem ("stacked
generalization", Wolpert 1992); from their own training rows it would learn to trust them too much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Collection as Group
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve

from ..errors import ConfigError
from ..probes.mlp import Mlp
from ..protocols import FloatArray
from ..roles import ROLES, Role
from .collection import Collection, StateKind
from .joint_rows import feature_rows
from .labels import Labels, taught_rows
from .split import Split
from .train import HEADS, MIN_STD, FittedHead, TrainConfig, TrainedProbe, kind_line, train_probe

Array = NDArray[np.float64]

PENALTIES = (1e3, 3e3, 1e4, 3e4, 1e5)
"""Of the squared weights of standardised states, beside the sum of squared errors over all rows."""

N_FOLDS = 5
_SECOND_PENALTY = 1e-3
_N_PARITY = 256
"""Rows on which the ONNX file is compared with what was fitted."""


@dataclass(frozen=True)
class Standardised:
    """A linear function of rows [n, width] that are standardised first; `weights` [width, n_outputs]."""

    mean: Array
    std: Array
    weights: Array
    bias: Array

    def __call__(self, rows: NDArray[Any]) -> Array:
        """Values [n, n_outputs]."""
        return np.asarray(((rows - self.mean) / self.std) @ self.weights + self.bias, np.float64)

    def mlp(self, *, sigmoid: bool) -> Mlp:
        layer = (self.weights.astype(np.float32), self.bias.astype(np.float32))
        mean, std = self.mean.astype(np.float32), self.std.astype(np.float32)
        return Mlp(layers=[layer], mean=mean, std=std, sigmoid=sigmoid)


def fit_ridge(rows: NDArray[Any], share: Array, penalties: Sequence[float]) -> Standardised:
    """The share as a linear function of rows [n, width], one output for each penalty."""
    mean, std = _moments(rows)
    scaled = (rows - mean) / std
    centre = share.mean()
    if _is_wide(scaled):
        weights = scaled.T @ _solved(scaled @ scaled.T, share - centre, penalties)
    else:
        weights = _solved(scaled.T @ scaled, scaled.T @ (share - centre), penalties)
    return Standardised(mean, std, weights, np.full(len(penalties), centre))


def _is_wide(rows: NDArray[Any]) -> bool:
    """Are there more numbers in a row than rows?"""
    return bool(rows.shape[1] > rows.shape[0])


def _solved(gram: NDArray[Any], wanted: NDArray[Any], penalties: Sequence[float]) -> NDArray[Any]:
    """Solutions [n, n_penalties] of (gram + penalty) x = wanted, in the precision of `gram` [n, n]."""
    eye = np.eye(len(gram), dtype=gram.dtype)
    found = [
        solve(gram + gram.dtype.type(penalty) * eye, wanted, assume_a="pos", overwrite_a=True, check_finite=False)
        for penalty in penalties
    ]
    return np.stack(found, axis=1)


def fit_logistic(rows: NDArray[Any], share: Array) -> Standardised:
    """The share as a sigmoid of a linear function of rows [n, width], by Newton's method; shares are soft labels."""
    mean, std = _moments(rows)
    x = np.concatenate([(rows - mean) / std, np.ones((len(rows), 1))], axis=1)
    penalty = np.eye(x.shape[1]) * _SECOND_PENALTY * len(x)
    penalty[-1, -1] = 0
    weights = np.zeros(x.shape[1])
    for _ in range(50):
        probs = 1 / (1 + np.exp(-np.clip(x @ weights, -30, 30)))
        curvature = (x * (probs * (1 - probs) + 1e-6)[:, None]).T @ x + penalty
        step = np.linalg.solve(curvature, x.T @ (probs - share) + penalty @ weights)
        weights -= step
        if np.abs(step).max() < 1e-8:
            break
    return Standardised(mean, std, weights[:-1, None], weights[-1:])


def _moments(rows: NDArray[Any]) -> tuple[Array, Array]:
    std = rows.std(axis=0, dtype=np.float64)
    return rows.mean(axis=0, dtype=np.float64), np.where(std < MIN_STD, 1.0, std)


@dataclass(frozen=True)
class Chosen:
    """The states and the penalty that cross-validation chose for one reader.

    `unseen` [n_rows]: what probes said that had not seen the row's problem; `linear` was fitted to all rows.
    """

    kind: StateKind
    penalty: float
    linear: Standardised
    unseen: Array
    sweep: tuple[dict[str, Any], ...]


def choose(collection: Collection, reader: Role, rows: NDArray[np.bool_], share: Array, seed: int) -> Chosen:
    """Fit every kind of state of `reader` on these rows of a collection; keep what errs least on unseen problems.

    `share` [n] belongs to the rows that are used.
    """
    part = _parts(collection.problem_ids[rows], seed)
    best: tuple[float, StateKind, float, Array] | None = None
    sweep: list[dict[str, Any]] = []
    for kind in collection.kinds(reader):
        unseen = _unseen(collection.states(reader, kind)[rows], share, part)
        errors = ((unseen - share[:, None]) ** 2).mean(axis=0)
        for at, penalty in enumerate(PENALTIES):
            error = float(errors[at])
            sweep.append(kind_line(kind) | {"head": "ridge", "penalty": penalty, "validation_mse": error})
            if best is None or error < best[0]:
                best = error, kind, penalty, unseen[:, at].copy()
    if best is None:
        raise ConfigError(f"the collection has no states of the {reader}")
    _, kind, penalty, kept = best
    linear = fit_ridge(collection.states(reader, kind)[rows], share, [penalty])
    return Chosen(kind, penalty, linear, kept, tuple(sweep))


def _unseen(states: FloatArray, share: Array, part: NDArray[np.int64]) -> Array:
    """What ridge regressions say of each row without its part, float64 [n_rows, n_penalties].

    The products of rows are computed once for all parts, so the states are standardised by all rows; that uses no
    label.
    """
    mean, std = _moments(states)
    scaled = ((states - mean) / std).astype(np.float32)
    wide = _is_wide(scaled)
    gram = scaled @ scaled.T if wide else scaled.T @ scaled
    unseen = np.empty((len(share), len(PENALTIES)))
    for number in range(part.max() + 1):
        out = part == number
        centre = share[~out].mean()
        wanted = (share[~out] - centre).astype(np.float32)
        if wide:
            found = gram[np.ix_(out, ~out)] @ _solved(gram[np.ix_(~out, ~out)], wanted, PENALTIES)
        else:
            kept = gram - scaled[out].T @ scaled[out]
            found = scaled[out] @ _solved(kept, scaled[~out].T @ wanted, PENALTIES)
        unseen[out] = found + centre
    return unseen


def _parts(problem_ids: NDArray[np.str_], seed: int) -> NDArray[np.int64]:
    """A number below `N_FOLDS` for every row, the same for all rows of a problem; ConfigError for one problem alone."""
    problems = sorted(set(problem_ids.tolist()))
    n = min(N_FOLDS, len(problems))
    if n < 2:
        raise ConfigError("ridge probes are chosen over problems, and only one is left; collect more")
    np.random.default_rng(seed).shuffle(problems)
    number = {problem: i % n for i, problem in enumerate(problems)}
    return np.array([number[problem] for problem in problem_ids.tolist()])


def taught(split: Split, problem_ids: NDArray[np.str_]) -> NDArray[np.bool_]:
    """Rows of all problems that are not for the test, bool [n_rows]."""
    return split.mask("train", problem_ids) | split.mask("validation", problem_ids)


def trainer(config: TrainConfig) -> Callable[..., TrainedProbe]:
    """What fits a probe of one model under this configuration."""
    return train_ridge if config.heads == (HEADS[-1],) else train_probe


def train_ridge(
    collection: Collection,
    labels: Labels,
    split: Split,
    role: Role,
    config: TrainConfig,
    *,
    say: Callable[[str], None] = lambda _: None,
) -> TrainedProbe:
    """A probe of one model, fitted to what the recipe teaches: `train.train_probe` for the head `ridge`."""
    rows = taught_rows(collection, config.recipe, role) & taught(split, collection.problem_ids)
    if not rows.any():
        raise ConfigError(f"no step of the {role} is left to learn from; collect more problems")
    share = labels.share(config.recipe, role)[rows]
    found = choose(collection, role, rows, share, config.seed)
    states = collection.states(role, found.kind)[rows]
    head = fitted("ridge", found.penalty, found.linear.mlp(sigmoid=False), states, share, found.unseen)
    say(f"{role} {found.kind.tensor(role)}: cross-validated MSE {head.validation_mse:.4f}")
    n_rows = {"train": int(rows.sum())}
    return TrainedProbe(role, found.kind, head, states[:_N_PARITY], found.sweep, n_rows, float(share.mean()))


def fitted(name: str, setting: float, mlp: Mlp, rows: FloatArray, share: Array, unseen: Array) -> FittedHead:
    """A head with its errors: on the rows it was fitted to, and on problems that were not seen."""
    return FittedHead(
        head=name,
        setting=setting,
        mlp=mlp,
        n_epochs=1,
        train_mse=float(((mlp.forward(rows) - share) ** 2).mean()),
        validation_mse=float(((np.clip(unseen, 0, 1) - share) ** 2).mean()),
        validation_probs=mlp.forward(rows[:_N_PARITY]).astype(np.float32),
    )


@dataclass(frozen=True)
class Stacked:
    """A joint head as one linear layer on states and features, the kinds of states it reads, and how it was chosen."""

    kinds: dict[Role, StateKind]
    mlp: Mlp
    penalty: float
    unseen: Array
    sweep: tuple[dict[str, Any], ...]


def fit_stacked(
    collection: Collection,
    labels: Labels,
    rows: NDArray[np.bool_],
    judged: NDArray[np.bool_],
    roles: Group[Role],
    features: Sequence[str],
    seed: int,
) -> Stacked:
    """Fit a joint head: the probes of `roles` on `rows` (steps of both models), the second stage on those of `judged`.

    Without roles it is a logistic regression on the features alone. `unseen` [n judged rows of rows] is what it said
    of problems that it had not seen.
    """
    share, second = labels.target_share, rows & judged
    chosen = {role: choose(collection, role, rows, share[rows], seed) for role in ROLES if role in roles}
    said = [found.unseen[judged[rows]][:, None] for found in chosen.values()]
    own = np.stack([feature_rows(collection, name)[second] for name in features], axis=1).astype(np.float64)
    inputs, wanted = np.concatenate([*said, own], axis=1), share[second]
    part = _parts(collection.problem_ids[second], seed)
    unseen = np.empty(len(wanted))
    for number in range(part.max() + 1):
        out = part == number
        unseen[out] = _sigmoid(fit_logistic(inputs[~out], wanted[~out])(inputs[out])[:, 0])
    whole = _as_one_layer([found.linear for found in chosen.values()], fit_logistic(inputs, wanted))
    line = {"head": "stacked", "penalty": _SECOND_PENALTY, "validation_mse": float(((unseen - wanted) ** 2).mean())}
    sweep = [line, *({"reader": role, **_best_line(found)} for role, found in chosen.items())]
    kinds = {role: found.kind for role, found in chosen.items()}
    return Stacked(kinds, whole.mlp(sigmoid=True), _SECOND_PENALTY, unseen, tuple(sweep))


def _best_line(found: Chosen) -> dict[str, Any]:
    return min(found.sweep, key=lambda line: line["validation_mse"])


def _as_one_layer(probes: Sequence[Standardised], second: Standardised) -> Standardised:
    """The second stage over the probes' outputs and the features, as one layer over their states and the features."""
    n, scaled = len(probes), second.weights[:, 0] / second.std
    weights = [probe.weights[:, 0] * factor for probe, factor in zip(probes, scaled)]
    bias = second.bias + sum((p.bias - m) * f for p, m, f in zip(probes, second.mean, scaled))
    return Standardised(
        mean=np.concatenate([*(probe.mean for probe in probes), second.mean[n:]]),
        std=np.concatenate([*(probe.std for probe in probes), second.std[n:]]),
        weights=np.concatenate([*weights, second.weights[n:, 0]])[:, None],
        bias=np.asarray(bias, np.float64),
    )


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-np.clip(x, -30, 30))), np.float64)
