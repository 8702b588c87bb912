"""A probe as plain arrays: what it computes, and how named tensors of a stranger's file become one.

Knows nothing of ONNX, nor of the formats that weights are kept in.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ..errors import ProbeError
from ..protocols import FloatArray

Layer = tuple[FloatArray, FloatArray]
"""Weights float32 [n_in, n_out] and biases float32 [n_out] of one linear layer."""

Activation = Literal["relu", "gelu", "tanh", "sigmoid"]
"""What stands between two linear layers; gelu is the exact one, with the error function."""

_erf = np.vectorize(math.erf, otypes=[np.float64])

ACTIVATIONS: dict[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: x * (1 + np.asarray(_erf(x / math.sqrt(2)), np.float64)) / 2,
    "tanh": np.tanh,
    "sigmoid": lambda x: np.exp(-np.logaddexp(0, -x)),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Mlp:
    """Standardise, linear layers with an activation between them, sigmoid where `sigmoid` says so.

    `mean` and `std` are [n_embd]. Without the sigmoid the last layer's result is the probability itself, clipped to
    [0, 1]. Raises ProbeError for shapes that do not fit each other, and for weights that are not finite.
    """

    layers: Sequence[Layer]
    mean: FloatArray
    std: FloatArray
    activation: Activation = "relu"
    sigmoid: bool = True

    def __post_init__(self) -> None:
        if not self.layers:
            raise ProbeError("the probe has no layer; wanted at least one")
        width = self.n_embd
        for index, (weights, biases) in enumerate(self.layers):
            if weights.ndim != 2 or weights.shape[0] != width or biases.shape != weights.shape[1:]:
                got = f"{list(weights.shape)} and {list(biases.shape)}"
                raise ProbeError(f"layer {index} has shapes {got}; wanted [{width}, n_out] and [n_out]")
            _check_finite(f"layer {index}", weights, biases)
            width = weights.shape[1]
        if width != 1:
            raise ProbeError(f"the last layer has {width} outputs; wanted 1")
        if self.mean.ndim != 1 or self.std.shape != self.mean.shape or not (self.std > 0).all():
            raise ProbeError(
                f"mean and std have shapes {list(self.mean.shape)} and {list(self.std.shape)}; wanted [n_embd], std > 0"
            )
        _check_finite("mean or std", self.mean, self.std)
        if self.activation not in get_args(Activation):
            raise ProbeError(f"the activation is {self.activation!r}; wanted {', '.join(get_args(Activation))}")

    @property
    def n_embd(self) -> int:
        """The width of the states that it reads."""
        return int(self.mean.shape[0])

    def forward(self, states: NDArray[np.floating[Any]], dtype: Any = np.float64) -> NDArray[np.float64]:
        """Semantic probabilities float64 [n] of pooled states [n, n_embd], computed in `dtype`."""
        x = (states.astype(dtype) - self.mean.astype(dtype)) / self.std.astype(dtype)
        for index, (weights, biases) in enumerate(self.layers):
            x = x @ weights.astype(dtype) + biases.astype(dtype)
            if index < len(self.layers) - 1:
                x = np.asarray(ACTIVATIONS[self.activation](x), dtype)
        result = np.exp(-np.logaddexp(0, -x[:, 0])) if self.sigmoid else np.clip(x[:, 0], 0, 1)
        return np.asarray(result, np.float64)


def _check_finite(what: str, *arrays: FloatArray) -> None:
    """The ONNX file holds float32, so numbers that are infinite there count as such."""
    with np.errstate(over="ignore"):
        if not all(np.isfinite(array.astype(np.float32)).all() for array in arrays):
            raise ProbeError(f"{what} holds NaN or infinity, or numbers too large for float32; wanted finite ones")


# -- from named tensors ---------------------------------------------------------------------------------

_PAIRS = (("weight", "bias"), ("kernel", "bias"), ("coefs_", "intercepts_"), ("coef", "intercept"), ("w", "b"))
"""How weights are called, and how the biases that go with them are."""

_MEAN = re.compile(r"(?:^|[._])(?:mean_?|mu|x_mean|input_mean)$")
_STD = re.compile(r"(?:^|[._])(?:std_?|scale_?|sigma|x_std|input_std)$")
_BATCH_NORM = re.compile(r"running_(?:mean|var)$|num_batches_tracked$")


def mlp_from_tensors(
    tensors: Mapping[str, NDArray[Any]],
    *,
    activation: Activation = "relu",
    sigmoid: bool = True,
    keeps_order: bool = True,
) -> Mlp:
    """The probe in tensors as PyTorch, NumPy or scikit-learn name and lay them out.

    Linear layers are found by their shapes and put in the order in which they chain: the file's, if it `keeps_order`,
    else that of their names. [n_out, n_in] (PyTorch) and [n_in, n_out] (NumPy, scikit-learn) are told apart by where
    the one output is. Dropout leaves no tensors. `mean` and `std` (or `scale`), where they are there, come first.

    Raises ProbeError, with what is in the file, when that is no such probe.
    """
    left = {name: np.asarray(value) for name, value in tensors.items()}
    if bad := next((name for name in left if _BATCH_NORM.search(name)), None):
        raise ProbeError(f"{bad!a} belongs to a batch norm; wanted linear layers (fold it into the next one first)")
    mean, std = (_taken(left, pattern) for pattern in (_MEAN, _STD))
    pairs: dict[str, tuple[NDArray[Any], NDArray[Any] | None]] = {}
    for name in [name for name, value in left.items() if value.ndim == 2]:
        if name in left:  # biases may have two dimensions, too
            pairs[name] = (left.pop(name), left.pop(_bias_of(name, left), None))
    if left or not pairs:
        raise ProbeError(f"wanted the weights of linear layers and their biases; got {_listed(tensors)}")
    layers = _chained(pairs, keeps_order=keeps_order)
    if layers is None:
        raise ProbeError(f"these layers do not follow each other down to one output: {_listed(tensors)}")
    n_embd = layers[0][0].shape[0]
    return Mlp(
        layers=layers,
        mean=_per_feature(0.0 if mean is None else mean, n_embd),
        std=_per_feature(1.0 if std is None else std, n_embd),
        activation=activation,
        sigmoid=sigmoid,
    )


def _per_feature(value: Any, n_embd: int) -> FloatArray:
    """One number for all features, or one for each, as [n_embd]."""
    flat = np.asarray(value).reshape(-1)
    return np.repeat(flat, n_embd) if flat.shape == (1,) else flat


def _taken(tensors: dict[str, NDArray[Any]], pattern: re.Pattern[str]) -> NDArray[Any] | None:
    name = next((n for n, v in tensors.items() if pattern.search(n.lower()) and (v.ndim < 2 or 1 in v.shape)), "")
    return tensors.pop(name, None)


def _bias_of(name: str, others: Mapping[str, Any]) -> str:
    *parents, last = re.split(r"(?<=[.])", name.lower())
    lower = {other.lower(): other for other in others}
    for weight, bias in _PAIRS:
        wanted = "".join([*parents, last.replace(weight, bias, 1)])
        if weight in last and wanted in lower:
            return lower[wanted]
    return ""


def _chained(pairs: Mapping[str, tuple[NDArray[Any], NDArray[Any] | None]], *, keeps_order: bool) -> list[Layer] | None:
    by_name = sorted(pairs, key=lambda name: [part.zfill(12) if part.isdigit() else part for part in _parts(name)])
    for names in (list(pairs), by_name) if keeps_order else (by_name,):
        for turned in (True, False):
            layers = [_layer(*pairs[name], turned=turned) for name in names]
            widths = [(weights.shape, biases.shape) for weights, biases in layers]
            follow = all(one[0][1] == other[0][0] for one, other in pairwise(widths))
            if follow and widths[-1][0][1] == 1 and all(biases == shape[1:] for shape, biases in widths):
                return layers
    return None


def _parts(name: str) -> list[str]:
    return re.split(r"([0-9]+)", name)


def _layer(weights: NDArray[Any], biases: NDArray[Any] | None, *, turned: bool) -> Layer:
    weights = weights.T if turned else weights
    return weights, np.zeros(weights.shape[1], np.float32) if biases is None else biases.reshape(-1)


def _listed(tensors: Mapping[str, NDArray[Any]]) -> str:
    shown = [f"{ascii(name)[1:-1]} {list(value.shape)}" for name, value in list(tensors.items())[:8]]
    return ", ".join([*shown, *(["..."] if len(tensors) > 8 else [])]) or "nothing"
