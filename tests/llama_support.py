"""What the tests on llama.cpp share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from semspec_local.config import SamplingConfig
from semspec_local.llama.session import LlamaStepModel
from semspec_local.steps import StepReader

GREEDY = SamplingConfig(temperature=0.0)
FREE = SamplingConfig(temperature=1.0, top_k=0, top_p=1.0)

TOKENS = [int(token) for token in np.random.default_rng(5).integers(0, 256, 400)]
"""Ids of bytes, in no order."""

NOISE = {"rtol": 0.01, "atol": 0.01}
"""How far results of about 1 may differ when sums are taken in another order: keys and values are kept in float16."""


def session(path: Path, **options: Any) -> LlamaStepModel:
    return LlamaStepModel(path, **{"n_ctx": 512, "n_threads": 1, "sampling": GREEDY, **options})


def at_most(n: int) -> StepReader:
    """Reads a step that ends after `n` tokens and nowhere else."""
    return StepReader(max_tokens=n, boundary="\x00 never \x00")


def script(model: LlamaStepModel, tokens: Iterable[int]) -> None:
    """Let the sampler draw these tokens."""
    drawn = iter(tokens)
    model._sampler.sample = model._sampler.sample_last = lambda _: next(drawn)  # type: ignore[method-assign]


def unscript(model: LlamaStepModel) -> None:
    """Let the sampler draw by itself again."""
    del model._sampler.sample, model._sampler.sample_last


def read_one_by_one(model: LlamaStepModel, tokens: Sequence[int], **options: Any) -> list[Any]:
    return [model.score([token], **options) for token in tokens]
