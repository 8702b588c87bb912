"""Fit probes to labelled states. The only file of the package that imports torch.

The paper's probes (arXiv 2602.03708) are MLPs of up to 5120-2048-512-256-1 for a 32B model and about 100,000 rows.
Collections made on one machine have a few thousand rows of states of 900 to 1,500 numbers, so the MLP here is
n_embd-256-64-1 with the paper's dropout of 0.3, and a linear probe competes with it (arXiv 2606.02628 found linear
probes on middle layers enough for 4-bit models). Validation problems choose; test problems are not seen here.
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
from ..probes.convert import Layer, mlp_forward
from ..protocols import FloatArray, Role
from .collection import Collection, StateKind
from .labels import Labels
from .split import Split

HEADS = ("linear", "mlp")
LOSSES = ("mse", "bce")

MIN_STD = 1e-6
"""A state's number that varies less than this over the train rows is constant; it is not scaled."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How probes are fitted; learning rate, loss, dropout are the paper's (see `hidden` in the module's docstring).

    `loss` is taken on the share itself: `mse` (the paper's) or `bce` with the share as soft label. Each head is fitted
    with every weight decay (coupled, as Adam has it). Training stops after `patience` epochs without a lower
    mean squared error on the validation rows, and the best epoch's weights are kept.
    """

    heads: tuple[str, ...] = HEADS
    hidden: tuple[int, ...] = (256, 64)
    dropout: float = 0.3
    loss: Literal["mse", "bce"] = "mse"
    learning_rate: float = 1e-3
    weight_decays: tuple[float, ...] = (1e-4, 1e-2)
    batch_size: int = 64
    max_epochs: int = 200
    patience: int = 15
    seed: int = 0
    n_threads: int = 1

    def __post_init__(self) -> None:
        if not self.heads or not set(self.heads) <= set(HEADS):
            raise ConfigError(f"heads are {self.heads}; wanted some of {', '.join(HEADS)}")
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
    """A fitted probe as plain arrays, with `validation_probs` [n], torch's own outputs on the validation rows."""

    head: str
    weight_decay: float
    layers: tuple[Layer, ...]
    mean: FloatArray
    std: FloatArray
    n_epochs: int
    train_mse: float
    validation_mse: float
    validation_probs: FloatArray

    def predict(self, states: FloatArray) -> NDArray[np.float64]:
        """Semantic probabilities [n] of pooled states float32 [n, n_embd]."""
        return mlp_forward(self.layers, self.mean, self.std, states)


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


def train_probe(
    collection: Collection,
    labels: Labels,
    split: Split,
    role: Role,
    config: TrainConfig,
    *,
    say: Callable[[str], None] = lambda _: None,
) -> TrainedProbe:
    """Fit every kind of state with every head on the model's own steps (label `own`); keep the best on validation."""
    usable = (collection.writers == role) & (collection.n_tokens > 0)
    masks = {part: usable & split.mask(part, collection.problem_ids) for part in ("train", "validation")}
    for part, mask in masks.items():
        if not mask.any():
            raise ConfigError(f"no step of the {role} is left in the {part} part; collect more problems")
    best: tuple[StateKind, FittedHead] | None = None
    sweep = []
    for kind in collection.kinds(role):
        states = collection.states(role, kind)
        train, validation = (Rows(states[mask], labels.own_share[mask].astype(np.float32)) for mask in masks.values())
        for fitted in _fit_all(train, validation, config):
            sweep.append(_sweep_line(kind, fitted))
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
        float(labels.own_share[masks["train"]].mean()),
    )


def _fit_all(train: Rows, validation: Rows, config: TrainConfig) -> list[FittedHead]:
    return [
        fit_head(train, validation, head=head, weight_decay=weight_decay, config=config)
        for head in config.heads
        for weight_decay in config.weight_decays
    ]


def fit_head(train: Rows, validation: Rows, *, head: str, weight_decay: float, config: TrainConfig) -> FittedHead:
    """Fit one head; the same rows, settings and seed give the same weights on the same machine."""
    torch.set_num_threads(config.n_threads)
    mean = train.states.mean(axis=0, dtype=np.float64).astype(np.float32)
    std = train.states.std(axis=0, dtype=np.float64).astype(np.float32)
    std = np.where(std < MIN_STD, np.float32(1), std).astype(np.float32)
    x, x_val = (torch.from_numpy((rows.states - mean) / std) for rows in (train, validation))
    y, y_val = (torch.from_numpy(np.ascontiguousarray(rows.labels)) for rows in (train, validation))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        net = _build(x.shape[1], head, config, float(train.labels.mean()))
        n_epochs = _fit(net, x, y, x_val, y_val, weight_decay, config)
    net.eval()
    with torch.no_grad():
        probs, val_probs = (torch.sigmoid(net(part)[:, 0]).numpy() for part in (x, x_val))
    return FittedHead(
        head,
        weight_decay,
        tuple(_layers(net)),
        mean,
        std,
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


def _fit(net: Any, x: Any, y: Any, x_val: Any, y_val: Any, weight_decay: float, config: TrainConfig) -> int:
    """Train `net` in place, leave it with the weights of its best epoch, and return that epoch's number."""
    optimizer = torch.optim.Adam(net.parameters(), lr=config.learning_rate, weight_decay=weight_decay)
    best_mse, best_epoch, best_state = math.inf, 0, {name: part.clone() for name, part in net.state_dict().items()}
    for epoch in range(1, config.max_epochs + 1):
        net.train()
        for rows in torch.randperm(len(x)).split(config.batch_size):
            optimizer.zero_grad()
            logits = net(x[rows])[:, 0]
            if config.loss == "bce":
                loss = nn.functional.binary_cross_entropy_with_logits(logits, y[rows])
            else:
                loss = nn.functional.mse_loss(torch.sigmoid(logits), y[rows])
            loss.backward()
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


def _sweep_line(kind: StateKind, fitted: FittedHead) -> dict[str, Any]:
    return {
        "layer": kind.layer,
        "window": kind.window,
        "pooling": kind.pooling,
        "head": fitted.head,
        "weight_decay": fitted.weight_decay,
        "n_epochs": fitted.n_epochs,
        "train_mse": fitted.train_mse,
        "validation_mse": fitted.validation_mse,
    }
