"""Split a collection's rows into train, validation and test, whole problems at a time.

Rows of one problem share prefixes and steps; a split by rows would test on what was trained on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError

PARTS = ("train", "validation", "test")
SHARES = (0.70, 0.15, 0.15)


@dataclass(frozen=True)
class Split:
    """Problem ids of each part."""

    train: frozenset[str]
    validation: frozenset[str]
    test: frozenset[str]

    @property
    def n_overlap(self) -> int:
        """Problems that are in two parts; 0 in every split that `split_by_problem` makes."""
        return len(self.train) + len(self.validation) + len(self.test) - len(self.train | self.validation | self.test)

    def mask(self, part: str, problem_ids: NDArray[np.str_]) -> NDArray[np.bool_]:
        """Which rows belong to a part, bool [n_rows]."""
        return np.isin(problem_ids, sorted(getattr(self, part)))


def split_by_problem(problem_ids: NDArray[np.str_], seed: int) -> Split:
    """Shuffle the problems with `seed` and cut them 70 / 15 / 15, at least one each; ConfigError below three."""
    problems = sorted(set(problem_ids.tolist()))
    if len(problems) < len(PARTS):
        raise ConfigError(f"the collection has {len(problems)} problems; wanted at least {len(PARTS)} to split")
    np.random.default_rng(seed).shuffle(problems)
    n_validation, n_test = (max(1, round(share * len(problems))) for share in SHARES[1:])
    n_train = len(problems) - n_validation - n_test
    split = Split(
        frozenset(problems[:n_train]),
        frozenset(problems[n_train : n_train + n_validation]),
        frozenset(problems[n_train + n_validation :]),
    )
    assert split.n_overlap == 0, f"{split.n_overlap} problems are in two parts"
    return split
