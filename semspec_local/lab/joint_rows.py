"""The draft-written steps of a collection as a joint probe reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from ..features import LEAST_LOGPROB
from ..protocols import FloatArray
from ..roles import ROLES, Role
from .collection import Collection, StateKind


def judged_rows(collection: Collection) -> NDArray[np.bool_]:
    """Draft-written steps that are not empty, bool [n_rows]."""
    return np.asarray((collection.writers == "draft") & (collection.n_tokens > 0))


def joined(collection: Collection, kinds: Mapping[Role, StateKind], features: Iterable[str]) -> FloatArray:
    """One row per sample, as the joint probe's three inputs stand side by side, float32 [n_rows, width].

    A role that `kinds` leaves out is not read.
    """
    parts = [collection.states(role, kinds[role]) for role in ROLES if role in kinds]
    parts += [feature_rows(collection, name)[:, None] for name in features]
    return np.concatenate(parts, axis=1).astype(np.float32)


def feature_rows(collection: Collection, name: str) -> FloatArray:
    """A feature of every row, float32 [n_rows]: what `features.step_features` gives in a run."""
    if name == "n_tokens":
        return collection.n_tokens.astype(np.float32)
    if name == "step_index":
        steps = [prefix.step_index for prefix in collection.prefixes for _ in prefix.samples]
        return np.array(steps, dtype=np.float32)
    role, _, what = name.partition("_")
    found = collection.feature("draft" if role == "draft" else "target", what)
    return np.maximum(found, LEAST_LOGPROB) if "logprob" in what else found
