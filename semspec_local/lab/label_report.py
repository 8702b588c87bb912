"""What a clustering looks like: sizes, entropy, examples, agreement with another; for the terminal and as a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import combinations
from typing import Any

import numpy as np

from ..roles import ROLES
from .collection import Collection, Prefix
from .labels import Labels, PrefixClusters, label_facts
from .meaning.cluster import adjusted_rand
from .page import page, table


@dataclass(frozen=True)
class Meaning:
    """One cluster of a prefix's samples, whoever wrote them: how many of each model's, and the first text."""

    n_by_writer: dict[str, int]
    text: str


def meanings(prefix: Prefix, clusters: PrefixClusters) -> list[Meaning]:
    """The joint clusters of a prefix, those with most samples first."""
    found: dict[int, list[Any]] = {}
    for sample, cluster_id in zip(prefix.samples, clusters.joint):
        found.setdefault(cluster_id, []).append(sample)
    members = sorted(found.values(), key=len, reverse=True)
    return [
        Meaning({role: sum(s.writer == role for s in samples) for role in ROLES}, samples[0].text.strip())
        for samples in members
    ]


def semantic_entropy(ids: Sequence[int]) -> float:
    """Entropy of the clusters' shares, in nats (arXiv 2302.09664)."""
    shares = np.array(list(Counter(ids).values())) / len(ids)
    return float(-(shares * np.log(shares)).sum())


def summary(collection: Collection, labels: Labels) -> dict[str, Any]:
    """`label_facts`, and the mean semantic entropy of each model's samples at a prefix, in nats."""
    facts = label_facts(collection, labels)
    for role in ROLES:
        entropies = [
            semantic_entropy([c for c, sample in zip(item.own, prefix.samples) if sample.writer == role])
            for prefix, item in zip(collection.prefixes, labels.prefixes)
        ]
        facts[role]["semantic_entropy_mean"] = float(np.mean(entropies))
    return facts


def agreement(first: Labels, other: Labels) -> dict[str, float]:
    """How far two clusterers agree on the samples of each prefix.

    `adjusted_rand` (mean over prefixes), `same_clusters` (share of prefixes clustered alike), and over all pairs of
    samples of one prefix: `together_first`, `together_other` (share put together) and `disagree`.
    """
    rand, alike, pairs = [], [], Counter[tuple[bool, bool]]()
    for one, two in zip(first.prefixes, other.prefixes):
        rand.append(adjusted_rand(one.joint, two.joint))
        alike.append(_renumbered(one.joint) == _renumbered(two.joint))
        for i, j in combinations(range(len(one.joint)), 2):
            pairs[one.joint[i] == one.joint[j], two.joint[i] == two.joint[j]] += 1
    total = max(1, pairs.total())
    return {
        "adjusted_rand": float(np.mean(rand)),
        "same_clusters": float(np.mean(alike)),
        "together_first": (pairs[True, True] + pairs[True, False]) / total,
        "together_other": (pairs[True, True] + pairs[False, True]) / total,
        "disagree": (pairs[True, False] + pairs[False, True]) / total,
    }


def _renumbered(ids: Sequence[int]) -> list[int]:
    numbers: dict[int, int] = {}
    return [numbers.setdefault(cluster_id, len(numbers)) for cluster_id in ids]


# -- to be read -----------------------------------------------------------------------------------------


def summary_lines(facts: dict[str, Any]) -> Iterator[str]:
    yield f"clusterer: {facts['clusterer']}"
    yield f"prefixes: {facts['n_prefixes']} of {facts['n_problems']} problems; {facts['n_prefixes_left_out']} left out"
    yield f"meanings at a prefix, both models together: {facts['joint_clusters_per_prefix_mean']:.2f}"
    for role in ROLES:
        own = facts[role]
        yield (
            f"{role}: {own['n_samples']} samples, {own['clusters_per_prefix_mean']:.2f} meanings at a prefix, "
            f"semantic entropy {own['semantic_entropy_mean']:.2f} nats"
        )
    yield f"drafted steps that mean what a step of the target means: {facts['draft_steps_in_a_target_cluster']:.1%}"


def picked(collection: Collection, n: int) -> list[int]:
    """`n` prefixes spread evenly over the collection."""
    n = min(n, len(collection.prefixes))
    return [int(i) for i in np.linspace(0, len(collection.prefixes) - 1, n)] if n else []


def example_lines(collection: Collection, labels: Labels, n: int, width: int = 100) -> Iterator[str]:
    """The meanings at some prefixes: how many samples of target and draft, and the first step's beginning."""
    for i in picked(collection, n):
        prefix = collection.prefixes[i]
        yield f"prefix {prefix.prefix_id} ({prefix.problem_id}, step {prefix.step_index}):"
        for found in meanings(prefix, labels.prefixes[i]):
            counts = " ".join(f"{role} {found.n_by_writer[role]:>2}" for role in ROLES)
            text = " ".join(found.text.split())
            yield f"  {counts}  {text if len(text) <= width else text[: width - 3] + '...'}"


def labels_page(collection: Collection, labels: Labels, n: int) -> str:
    """A self-contained HTML page: the summary, and every meaning at `n` prefixes."""
    parts = [f"<p>{escape(line)}</p>" for line in summary_lines(summary(collection, labels))]
    for i in picked(collection, n):
        prefix = collection.prefixes[i]
        parts.append(f"<h2>{escape(prefix.problem_id)}, step {prefix.step_index}</h2>")
        parts.append(f"<details><summary>question and steps before</summary><pre>{escape(prefix.question)}\n\n")
        parts.append(f"{escape(prefix.text)}</pre></details>")
        rows = [
            [*(str(found.n_by_writer[role]) for role in ROLES), found.text]
            for found in meanings(prefix, labels.prefixes[i])
        ]
        parts.append(table([*ROLES, "the first step with this meaning"], rows))
    return page(f"Meanings in {collection.folder.name}", parts)
