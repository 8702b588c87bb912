"""Which steps mean the same.

A clusterer turns texts into cluster ids. Most ask a rule, text by text, whether two of them mean the same. Knows
nothing of models, prefixes or labels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import comb
from typing import Protocol

from ...errors import ConfigError
from .numbers import numbers_in

MIN_COSINE, MIN_COSINE_SAME_NUMBERS = 0.8, 0.6
"""Least cosine of two sentence embeddings of one meaning, alone and where the numbers are equal too.

The second was chosen by reading pairs without knowing their cosine (docs/log.md): with equal numbers most pairs down to
0.5 mean the same. The few below 0.6 were left out: too few to tell, and below 0.5 most do not.
"""


def min_cosine_for(same_numbers: bool) -> float:
    """The least cosine that is taken where none is given."""
    return MIN_COSINE_SAME_NUMBERS if same_numbers else MIN_COSINE


class Clusterer(Protocol):
    """Groups texts by meaning."""

    @property
    def name(self) -> str:
        """The rule in words, for reports."""
        ...

    def cluster(self, texts: Sequence[str], context: str = "") -> list[int]:
        """One cluster id per text, numbered from 0 in order of first appearance; `context` came before all of them."""
        ...


class Rule(Protocol):
    """Says of two texts whether they mean the same."""

    @property
    def name(self) -> str: ...

    def same(self, first: str, other: str, context: str) -> bool: ...


class RuleClusterer:
    """Gives each text to the first cluster whose first text means the same by a rule.

    With `same_numbers` they must hold the same set of numbers, too: models of language hardly see numbers, and in
    mathematics the numbers are the meaning.
    """

    def __init__(self, rule: Rule, *, same_numbers: bool) -> None:
        self.rule = rule
        self._same_numbers = same_numbers
        self.name = f"{rule.name} and equal sets of numbers" if same_numbers else rule.name

    def cluster(self, texts: Sequence[str], context: str = "") -> list[int]:
        numbers = [numbers_in(text) if self._same_numbers else frozenset() for text in texts]

        def same(first: int, other: int) -> bool:
            if texts[first] == texts[other]:
                return True
            return numbers[first] == numbers[other] and self.rule.same(texts[first], texts[other], context)

        return greedy_clusters(len(texts), same)


class ExactRule:
    """Texts mean the same when they are equal but for case and white space."""

    name = "equal text (case and white space aside)"

    def same(self, first: str, other: str, context: str) -> bool:
        del context
        return first.casefold().split() == other.casefold().split()


def greedy_clusters(n_items: int, same: Callable[[int, int], bool]) -> list[int]:
    """Give each item to the first cluster whose first item `same(first, item)` as it; else open a new cluster."""
    firsts: list[int] = []
    ids: list[int] = []
    for item in range(n_items):
        cluster_id = next((number for number, first in enumerate(firsts) if same(first, item)), len(firsts))
        if cluster_id == len(firsts):
            firsts.append(item)
        ids.append(cluster_id)
    assert len(ids) == n_items, f"{n_items} items but {len(ids)} cluster ids"
    assert set(ids) == set(range(len(firsts))), "a cluster is empty"
    return ids


def adjusted_rand(first: Sequence[int], other: Sequence[int]) -> float:
    """Agreement of two clusterings of the same items: 1 when equal, about 0 by chance (Hubert and Arabie 1985)."""
    if len(first) != len(other):
        raise ConfigError(f"got clusterings of {len(first)} and {len(other)} items; wanted the same items")

    def pairs(ids: Sequence[object]) -> int:
        return sum(comb(n, 2) for n in Counter(ids).values())

    both, alone, total = pairs(list(zip(first, other))), (pairs(first), pairs(other)), comb(len(first), 2)
    by_chance = alone[0] * alone[1] / total if total else 0.0
    most = sum(alone) / 2
    return 1.0 if most == by_chance else (both - by_chance) / (most - by_chance)
