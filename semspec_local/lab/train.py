"""Fit probes to labelled states. The only file of the package that imports torch.

The paper's probes (arXiv 2602.03708) are MLPs of up to 5120-2048-512-256-1 for a 32B model and about 100,000 rows.
Collections made on one machine have a few thousand rows of states of 900 to 1,500 numbers, so the MLP here is
n_embd-256-64-1 with the paper's dropout of 0.3, and a linear probe competes with it (arXiv 2606.02628 found linear
probes on middle layers enough for 4-bit models). With as few rows as weights, Adam overfits a linear
probe within three epochs (seen on made-up data of that shape); so that one is solved to the end (L-BFGS) under an L2
penalty. Validation problems choose; test problems are not seen here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ..errors import ConfigError
from ..probes.mlp import Layer, Mlp
from ..protocols import FloatArray
from ..roles import Role
from .collection import Collection, StateKind
from .labels import DEFAULT_RECIPE, RECIPES, Labels, Recipe, taught_rows
from .split import Split

HEADS = ("linear", "mlp", "ridge")
JOINT_HEADS = ("linear", "mlp", "stacked")
"""`ridge` and `stacked` are chosen otherwise than the others (see `ridge`), and go alone."""

LOSSES = ("mse", "bce")

MIN_STD = 1e-6
"""A state's number that varies less than this over the train rows is constant; it is not scaled."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How probes are fitted.

    `recipe` says on whose steps a probe is taught, and what (`labels.RECIPES`). `loss` is taken on the share itself:
    `mse` (the paper's) or `bce` with the share as soft label. A linear head is fitted once per penalty, which
    multiplies the squared weights (of standardised states). An MLP is fitted once per learning rate (the paper's is
    1e-3) with Adam; it stops after `patience` epochs without a lower mean squared error on the validation rows, and
    keeps the best epoch's weights.
    """

    recipe: Recipe = DEFAULT_RECIPE
    heads: tuple[str, ...] = HEADS[:2]
    joint_heads: tuple[str, ...] = JOINT_HEADS[:2]
    hidden: tuple[int, ...] = (256, 64)
    dropout: float = 0.3
    loss: Literal["mse", "bce"] = "mse"
    penalties: tuple[float, ...] = (1e-4, 4e-4, 1.6e-3, 6.4e-3, 2.56e-2, 0.1, 0.4)
    learning_rates: tuple[float, ...] = (1e-3, 1e-4)
    weight_decay: float = 1e-4
    batch_size: int = 64
    max_epochs: int = 200
    patience: int = 15
    seed: int = 0
    n_threads: int = 1

    @property
    def cross_validates(self) -> bool:
        """Are all heads chosen by cross-validation, so that no part for validation is needed?"""
        return (self.heads, self.joint_heads) == (HEADS[-1:], JOINT_HEADS[-1:])

    def __post_init__(self) -> None:
        for heads, known in ((self.heads, HEADS), (self.joint_heads, JOINT_HEADS)):
            if not heads or not set(heads) <= set(known):
                raise ConfigError(f"heads are {', '.join(heads) or 'none'}; wanted some of {', '.join(known)}")
            if known[-1] in heads and len(heads) > 1:
                raise ConfigError(f"heads are {', '.join(heads)}; {known[-1]} goes alone, for it is chosen otherwise")
        if self.recipe not in RECIPES:
            raise ConfigError(f"recipe is {self.recipe!r}; wanted {' or '.join(RECIPES)}")
        if self.loss not in LOSSES:
            raise ConfigError(f"loss is {self.loss!r}; wanted {' or '.join(LOSSES)}")
        if min(self.batch_size, self.max_epochs, self.patience, self.n_threads, *self.hidden) < 1:
            raise ConfigError("batch size, epochs, patience, threads and hidden widths start at 1")


@dataclass(frozen=True)
class Rows:
    """Pooled states float32 [n, n_embd] with their labels float32 [n]."""

    states: FloatArray
    labels: FloatArray


@dataclass(frozen=True)
class FittedHead:
    """A fitted probe as plain arrays, with `validation_probs` [n], the outputs to which those of its file are compared.

    They are torch's own, on the validation rows; of heads without such rows, NumPy's on some of the train rows.

    `setting` is the penalty of a linear head, the learning rate of an MLP. `n_epochs` counts L-BFGS rounds or Adam
    epochs.
    """

    head: str
    setting: float
    mlp: Mlp
    n_epochs: int
    train_mse: float
    validation_mse: float
    validation_probs: FloatArray

    def predict(self, states: FloatArray) -> NDArray[np.float64]:
        """Semantic probabilities [n] of pooled states float32 [n, n_embd]."""
        return self.mlp.forward(states)

    def line(self) -> dict[str, Any]:
        """What a sweep's table says of it."""
        return {
            "head": self.head,
            "learning_rate" if self.head == "mlp" else "penalty": self.setting,
            "n_epochs": self.n_epochs,
            "train_mse": self.train_mse,
            "validation_mse": self.validation_mse,
        }


@dataclass(frozen=True)
class TrainedProbe:
    """The head that validation chose, the states it reads, and everything it was chosen from."""

    role: Role
    kind: StateKind
    head: FittedHead
    validation_states: FloatArray
    sweep: tuple[dict[str, Any], ...]
    n_rows: dict[str, int]
    train_label_mean: float


def kind_line(kind: StateKind) -> dict[str, Any]:
    """What a sweep's table says of the states that were read."""
    return {"layer": kind.layer, "norm": kind.norm, "window": kind.window, "pooling": kind.pooling}


def train_probe(
    collection: Collection,
    labels: Labels,
    split: Split,
    role: Role,
    config: TrainConfig,
    *,
    say: Callable[[str], None] = lambda _: None,
) -> TrainedProbe:
    """Fit every kind of state with every head to what the recipe teaches; keep the best on validation."""
    usable = taught_rows(collection, config.recipe, role)
    share = labels.share(config.recipe, role)
    masks = {part: usable & split.mask(part, collection.problem_ids) for part in ("train", "validation")}
    for part, mask in masks.items():
        if not mask.any():
            raise ConfigError(f"no step of the {role} is left in the {part} part; collect more problems")
    best: tuple[StateKind, FittedHead] | None = None
    sweep = []
    for kind in collection.kinds(role):
        states = collection.states(role, kind)
        train, validation = (Rows(states[mask], share[mask].astype(np.float32)) for mask in masks.values())
        for fitted in fit_all(train, validation, config):
            sweep.append({**kind_line(kind), **fitted.line()})
            if best is None or fitted.validation_mse < best[1].validation_mse:
                best = kind, fitted
        say(f"{role} {kind.tensor(role)}: best validation MSE so far {best[1].validation_mse:.4f}" if best else "")
    if best is None:
        raise ConfigError(f"the collection has no states of the {role}")
    kind, fitted = best
    return TrainedProbe(
        role,
        kind,
        fitted,
        collection.states(role, kind)[masks["validation"]],
        tuple(sweep),
        {part: int(mask.sum()) for part, mask in masks.items()},
        float(share[masks["train"]].mean()),
    )


def fit_all(train: Rows, validation: Rows, config: TrainConfig) -> list[FittedHead]:
    """One fit per head and setting."""
    return [
        fit_head(train, validation, head=head, setting=setting, config=config)
        for head in config.heads
        for setting in (config.penalties if head == "linear" else config.learning_rates)
    ]


def fit_head(train: Rows, validation: Rows, *, head: str, setting: float, config: TrainConfig) -> FittedHead:
    """Fit one head with one penalty or learning rate.

    The same rows, settings and seed give the same weights on the same machine.
    """
    torch.set_num_threads(config.n_threads)
    mean = train.states.mean(axis=0, dtype=np.float64).astype(np.float32)
    std = train.states.std(axis=0, dtype=np.float64).astype(np.float32)
    std = np.where(std < MIN_STD, np.float32(1), std).astype(np.float32)
    x, x_val = (torch.from_numpy((rows.states - mean) / std) for rows in (train, validation))
    y, y_val = (torch.from_numpy(np.ascontiguousarray(rows.labels)) for rows in (train, validation))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        net = _build(x.shape[1], head, config, float(train.labels.mean()))
        if head == "linear":
            n_epochs = _solve(net, x, y, setting, config)
        else:
            n_epochs = _descend(net, (x, y), (x_val, y_val), setting, config)
    net.eval()
    with torch.no_grad():
        probs, val_probs = (torch.sigmoid(net(part)[:, 0]).numpy() for part in (x, x_val))
    return FittedHead(
        head,
        setting,
        Mlp(layers=_layers(net), mean=mean, std=std),
        n_epochs,
        float(np.mean((probs - train.labels) ** 2)),
        float(np.mean((val_probs - validation.labels) ** 2)),
        np.asarray(val_probs, dtype=np.float32),
    )


def _build(n_embd: int, head: str, config: TrainConfig, label_mean: float) -> Any:
    widths = [n_embd, *(config.hidden if head == "mlp" else ())]
    parts: list[Any] = []
    for n_in, n_out in pairwise(widths):
        parts += [nn.Linear(n_in, n_out), nn.ReLU(), nn.Dropout(config.dropout)]
    last = nn.Linear(widths[-1], 1)
    share = min(max(label_mean, 0.01), 0.99)
    with torch.no_grad():
        last.weight.mul_(0.1)  # start near the constant predictor, which is already a fair guess
        last.bias.fill_(math.log(share / (1 - share)))
    return nn.Sequential(*parts, last)


def _loss(logits: Any, labels: Any, config: TrainConfig) -> Any:
    if config.loss == "bce":
        return nn.functional.binary_cross_entropy_with_logits(logits, labels)
    return nn.functional.mse_loss(torch.sigmoid(logits), labels)


def _solve(net: Any, x: Any, y: Any, penalty: float, config: TrainConfig) -> int:
    """Minimise loss and penalty of a linear `net` in place; return the number of L-BFGS rounds taken."""
    weight = net[-1].weight
    optimizer = torch.optim.LBFGS(
        net.parameters(), max_iter=config.max_epochs, tolerance_grad=1e-6, line_search_fn="strong_wolfe"
    )

    def closure() -> Any:
        optimizer.zero_grad()
        loss = _loss(net(x)[:, 0], y, config) + penalty * weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return int(optimizer.state[weight]["n_iter"])


def _descend(net: Any, train: tuple[Any, Any], validation: tuple[Any, Any], rate: float, config: TrainConfig) -> int:
    """Train `net` in place, leave it with the weights of its best epoch, and return that epoch's number."""
    (x, y), (x_val, y_val) = train, validation
    optimizer = torch.optim.Adam(net.parameters(), lr=rate, weight_decay=config.weight_decay)
    best_mse, best_epoch, best_state = math.inf, 0, {name: part.clone() for name, part in net.state_dict().items()}
    for epoch in range(1, config.max_epochs + 1):
        net.train()
        for rows in torch.randperm(len(x)).split(config.batch_size):
            optimizer.zero_grad()
            _loss(net(x[rows])[:, 0], y[rows], config).backward()
            optimizer.step()
        net.eval()
        with torch.no_grad():
            mse = float(nn.functional.mse_loss(torch.sigmoid(net(x_val)[:, 0]), y_val))
        if mse < best_mse:
            best_mse, best_epoch = mse, epoch
            best_state = {name: part.clone() for name, part in net.state_dict().items()}
        elif epoch - best_epoch >= config.patience:
            break
    net.load_state_dict(best_state)
    return best_epoch


def _layers(net: Sequence[Any]) -> list[Layer]:
    return [
        (np.ascontiguousarray(part.weight.detach().numpy().T), part.bias.detach().numpy().copy())
        for part in net
        if isinstance(part, nn.Linear)
    ]
