"""Split a collection's rows into train, validation and test, whole problems at a time.

Rows of one problem share prefixes and steps; a split by rows would test on what was trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def fold_by_problem(problem_ids: NDArray[np.str_], n_folds: int, seed: int) -> list[Split]:
    """As many splits as folds: every problem is a test problem in one of them; 15 % of the others are validation.

    ConfigError for fewer than two folds, or fewer problems than folds and one.
    """
    problems = sorted(set(problem_ids.tolist()))
    if n_folds < 2 or len(problems) <= n_folds:
        raise ConfigError(f"got {n_folds} folds of {len(problems)} problems; wanted 2 or more, and more problems")
    np.random.default_rng(seed).shuffle(problems)
    return [_with_test(problems, frozenset(problems[k::n_folds])) for k in range(n_folds)]


def split_without_test(problem_ids: NDArray[np.str_], seed: int) -> Split:
    """Train and validation alone, for a probe that was tested over folds."""
    problems = sorted(set(problem_ids.tolist()))
    np.random.default_rng(seed).shuffle(problems)
    return _with_test(problems, frozenset())


def _with_test(problems: Sequence[str], test: frozenset[str]) -> Split:
    others = [problem for problem in problems if problem not in test]
    n_validation = max(1, round(SHARES[1] * len(problems)))
    return Split(frozenset(others[n_validation:]), frozenset(others[:n_validation]), test)


def without_validation(split: Split) -> Split:
    """The same with the problems for validation among those for training, for heads that need none."""
    return Split(split.train | split.validation, frozenset(), split.test)


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
