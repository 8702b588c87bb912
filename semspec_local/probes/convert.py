"""Turn a probe that was trained elsewhere into one of ours: its weights, where it reads, and which model it is for.

The files are read by `weightfile` and `adopt`; `write` proves that the ONNX file computes what the original does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from ..errors import ConfigError, ProbeError
from ..modelinfo import ModelInfo
from ..protocols import FloatArray, Norm, Pooling, Window
from ..provenance import sha256_file
from ..roles import Role
from .adopt import adopt_onnx
from .mlp import Activation, Mlp
from .spec import ProbeSpec
from .weightfile import Weights, kind_of, read_weights
from .write import write_mlp_onnx

N_COMPARED = 256
"""States on which the original and the ONNX file are compared; half of them have features of a large scale."""

LARGE_SCALE = 1e4
"""A few features of a transformer's states are so many times larger than the others."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Where a probe reads: see `ProbeSpec`. None is what nobody has said yet."""

    layer: int | None = None
    norm: Norm | None = None
    pooling: Pooling | None = None
    window: Window | None = None

    @property
    def missing(self) -> list[str]:
        return [name for name in ("layer", "norm", "pooling", "window") if getattr(self, name) is None]

    def filled(self, other: Reading) -> Reading:
        """This reading, and the other's where this one says nothing. A place is a layer and a norm together."""
        same_place = self.layer in (None, other.layer) and self.norm in (None, other.norm)
        return Reading(
            layer=other.layer if same_place and self.layer is None else self.layer,
            norm=other.norm if same_place and self.norm is None else self.norm,
            pooling=self.pooling or other.pooling,
            window=self.window or other.window,
        )


def from_hidden_state(k: int, n_layer: int) -> Reading:
    """The place of Hugging Face's `hidden_states[k]`: the output of block k - 1; the last is after the final norm."""
    index = k + n_layer + 1 if k < 0 else k
    if not 1 <= index <= n_layer:
        raise ConfigError(
            f"--hidden-state is {k}; wanted 1 to {n_layer}, or -{n_layer} to -1: 0 is the embeddings, before any layer"
        )
    last = index == n_layer
    return Reading(layer=index - 1, norm="post" if last else "pre")


def what_it_says(says: Mapping[str, str], n_layer: int, source: str) -> Reading:
    """The reading that a file's own words give. Raises ProbeError for words that cannot be meant."""
    reading = Reading()
    words: dict[str, Any] = {}
    if "layer" in says:  # the file's own words go before what its layout suggests
        says = {name: text for name, text in says.items() if name != "hidden_state"}
    try:
        if "hidden_state" in says:
            reading = from_hidden_state(int(says["hidden_state"]), n_layer)
        if "layer" in says:
            words["layer"] = int(says["layer"])
    except (ValueError, ConfigError) as error:
        raise ProbeError(f"{source} says where it reads, but not in a way that fits this model: {error}") from None
    for name, kind in (("norm", Norm), ("pooling", Pooling), ("window", Window)):
        if name in says:
            if says[name] not in get_args(kind):
                raise ProbeError(
                    f"{source} says that its {name} is {says[name]!a}; wanted {' or '.join(get_args(kind))}"
                )
            words[name] = says[name]
    return Reading(**words).filled(reading)


@dataclass(frozen=True)
class Found:
    """A probe from elsewhere, read. `weights` is None for an ONNX file, which is taken as it is.

    `is_official`: it looks like those of the method's authors, and is taken to read where theirs do.
    """

    path: Path
    weights: Weights | None
    reading: Reading
    is_official: bool = False


def read_probe(path: Path, info: ModelInfo, *, activation: Activation = "relu", sigmoid: bool = True) -> Found:
    """Read `path` for the model `info`, and what it says about where it reads.

    Raises ProbeError for a file that is no probe, or whose width is not the model's.
    """
    if kind_of(path) == "onnx":
        return Found(path, None, Reading())
    weights = read_weights(path, activation=activation, sigmoid=sigmoid)
    if weights.mlp.n_embd != info.n_embd:
        raise ProbeError(
            f"{path} reads states of width {weights.mlp.n_embd}; {info.name!a} has width {info.n_embd}, "
            "so it is for another model"
        )
    reading = what_it_says(weights.says, info.n_layer, str(path))
    return Found(path, weights, reading, weights.is_official)


def convert_probe(found: Found, out: Path, info: ModelInfo, role: Role, reading: Reading) -> tuple[ProbeSpec, float]:
    """Write the probe as `out` and return its spec, and the largest difference to the original, in probability.

    `info` needs a fingerprint. Raises ProbeError, and writes nothing, when the difference is over 1e-5 or the file does
    not load.
    """
    assert reading.layer is not None and reading.norm and reading.pooling and reading.window, "the reading is not whole"
    assert info.fingerprint is not None, "the model's fingerprint is not known"
    spec = ProbeSpec(
        role=role,
        layer=reading.layer,
        norm=reading.norm,
        pooling=reading.pooling,
        window=reading.window,
        n_embd=info.n_embd,
        n_layer=info.n_layer,
        architecture=info.architecture,
        model_name=info.name,
        fingerprint=info.fingerprint,
        quantization=info.quantization,
        training={"converted_from": found.path.name, "sha256": sha256_file(found.path)},
    )
    if found.weights is None:
        return spec, adopt_onnx(found.path, out, spec, states=comparison_states(info.n_embd))
    mlp = found.weights.mlp
    return spec, write_mlp_onnx(out, mlp, spec, states=comparison_states(info.n_embd, mlp))


def comparison_states(n_embd: int, mlp: Mlp | None = None) -> FloatArray:
    """States float32 [N_COMPARED, n_embd] to compare on: like the training's, where the probe knows its mean and std.

    In the second half, one feature in 64 is larger by LARGE_SCALE.
    """
    rng = np.random.default_rng(0)
    states = rng.standard_normal((N_COMPARED, n_embd))
    states[N_COMPARED // 2 :, rng.permutation(n_embd)[: max(1, n_embd // 64)]] *= LARGE_SCALE
    if mlp is not None:
        states = states * mlp.std + mlp.mean
    return states.astype(np.float32)
