"""From clusters to labels: the share of samples that mean the same as a step.

Two clusterings of one prefix are made. In the first each model's samples are clustered alone, as arXiv 2602.03708
does; it gives the label `own`. In the second the samples of both are clustered together; it says what share of the
*target's* samples mean the same as a step that the draft wrote, which is what a decision wants to know.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import NOT_AS_WRITTEN, ConfigError
from ..roles import ROLES, Role
from .collection import Collection, Prefix
from .meaning.cluster import Clusterer

LABELS_VERSION = 1
LABELS_FILE = "labels.json"

Recipe = Literal["own", "joint"]

RECIPES: dict[Recipe, str] = {
    "own": "own: share of the writer's own samples at the prefix that lie in the step's cluster",
    "joint": "joint: share of the model's samples at the prefix that mean the same as the step, whoever wrote it",
}
"""What a probe is taught. `own` is the paper's: each model on its own steps; `joint`: each model on those of both."""

DEFAULT_RECIPE: Recipe = "joint"
"""The better one where the truth is known: on the embedded pair (docs/log.md, 2026-12-01)."""


@dataclass(frozen=True)
class PrefixClusters:
    """Cluster ids of one prefix's samples, in their order. `own` ids count within one writer's samples."""

    prefix_id: int
    own: tuple[int, ...]
    joint: tuple[int, ...]


@dataclass(frozen=True)
class Labels:
    """Labels of every row of a collection, each float64 [n_rows], a share in [0, 1].

    `own_share`: share of the writer's own samples at that prefix that lie in the step's cluster (the paper's label; the
    step itself is counted). `target_share`, `draft_share`: share of that model's samples that lie in the step's
    cluster of the joint clustering, whoever wrote it.
    """

    clusterer: str
    prefixes: tuple[PrefixClusters, ...]
    own_share: NDArray[np.float64]
    target_share: NDArray[np.float64]
    draft_share: NDArray[np.float64]

    def share(self, recipe: Recipe, role: Role) -> NDArray[np.float64]:
        """What a probe of `role` is taught by a recipe, float64 [n_rows]."""
        if recipe == "own":
            return self.own_share
        return self.target_share if role == "target" else self.draft_share


def taught_rows(collection: Collection, recipe: Recipe, role: Role) -> NDArray[np.bool_]:
    """The rows that a recipe teaches a probe of `role` on, bool [n_rows]; empty steps are never among them."""
    usable = collection.n_tokens > 0
    return usable & (collection.writers == role) if recipe == "own" else usable


def make_labels(
    collection: Collection, clusterer: Clusterer, *, progress: Callable[[int, int], None] | None = None
) -> Labels:
    """Cluster every prefix; `progress(done, total)` is called after each."""
    found = []
    for number, prefix in enumerate(collection.prefixes, start=1):
        found.append(_cluster_prefix(prefix, clusterer))
        if progress is not None:
            progress(number, len(collection.prefixes))
    return _derive(collection, clusterer.name, found)


def labels_file(clusterer: str) -> str:
    """Where the labels of one kind of clusterer stay, for comparing; `LABELS_FILE` is what training reads."""
    return f"labels-{clusterer}.json"


def write_labels(labels: Labels, collection: Collection, file: str = LABELS_FILE) -> Path:
    """Write labels into the collection's folder, under a temporary name first."""
    path = collection.folder / file
    document = {
        "version": LABELS_VERSION,
        "clusterer": labels.clusterer,
        "index_sha256": collection.index_sha256,
        "prefixes": [
            {"prefix_id": item.prefix_id, "own": list(item.own), "joint": list(item.joint)} for item in labels.prefixes
        ],
    }
    temporary = path.with_suffix(".json.tmp")
    temporary.write_text(json.dumps(document), encoding="utf-8")
    temporary.replace(path)
    return path


def read_labels(collection: Collection, file: str = LABELS_FILE) -> Labels:
    """Read what `write_labels` wrote; ConfigError when it is missing, broken, or of an earlier state of the index."""
    path = collection.folder / file
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["version"] != LABELS_VERSION:
            raise ConfigError(f"{path}: version is {document['version']!r}; wanted {LABELS_VERSION}")
        if document["index_sha256"] != collection.index_sha256:
            raise ConfigError(f"{path} was made for another state of index.jsonl; make the labels again")
        found = [
            PrefixClusters(int(item["prefix_id"]), tuple(item["own"]), tuple(item["joint"]))
            for item in document["prefixes"]
        ]
        clusterer = str(document["clusterer"])
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}; make the labels first") from None
    except NOT_AS_WRITTEN as error:
        raise ConfigError(f"{path} holds no labels ({type(error).__name__}: {error})") from None
    return _derive(collection, clusterer, found)


def _cluster_prefix(prefix: Prefix, clusterer: Clusterer) -> PrefixClusters:
    texts = [sample.text for sample in prefix.samples]
    context = f"{prefix.question}\n\n{prefix.text}"
    writers = [sample.writer for sample in prefix.samples]
    own = [0] * len(texts)
    for role in ROLES:
        rows = [row for row, writer in enumerate(writers) if writer == role]
        for row, cluster_id in zip(rows, clusterer.cluster([texts[row] for row in rows], context)):
            own[row] = cluster_id
    # Greedy clusters depend on order. The target's samples go first, so that they found the clusters.
    order = sorted(range(len(texts)), key=lambda row: writers[row] != "target")
    joint = [0] * len(texts)
    for row, cluster_id in zip(order, clusterer.cluster([texts[row] for row in order], context)):
        joint[row] = cluster_id
    return PrefixClusters(prefix.prefix_id, tuple(own), tuple(joint))


def _derive(collection: Collection, clusterer: str, found: Sequence[PrefixClusters]) -> Labels:
    own: list[float] = []
    shares: dict[str, list[float]] = {role: [] for role in ROLES}
    if [item.prefix_id for item in found] != [prefix.prefix_id for prefix in collection.prefixes]:
        raise ConfigError("the labels and the collection have different prefixes; make the labels again")
    for prefix, clusters in zip(collection.prefixes, found):
        if not len(prefix.samples) == len(clusters.own) == len(clusters.joint):
            raise ConfigError(f"prefix {prefix.prefix_id}: its labels do not fit its samples; make the labels again")
        writers = np.array([sample.writer for sample in prefix.samples])
        own_ids, joint_ids = np.array(clusters.own), np.array(clusters.joint)
        own += [float(np.mean(own_ids[writers == w] == c)) for w, c in zip(writers, own_ids)]
        for role in ROLES:
            shares[role] += [float(np.mean(joint_ids[writers == role] == c)) for c in joint_ids]
    return Labels(clusterer, tuple(found), np.array(own), np.array(shares["target"]), np.array(shares["draft"]))


def label_facts(collection: Collection, labels: Labels) -> dict[str, Any]:
    """What the labels look like, for a report: counts, clusters per prefix, mean labels."""
    by_draft = collection.writers == "draft"
    facts: dict[str, Any] = {
        "clusterer": labels.clusterer,
        "n_problems": len(set(collection.problem_ids.tolist())),
        "n_prefixes": len(collection.prefixes),
        "n_prefixes_left_out": collection.n_left_out,
        "joint_clusters_per_prefix_mean": float(np.mean([len(set(item.joint)) for item in labels.prefixes])),
        "draft_steps_target_share_mean": float(labels.target_share[by_draft].mean()),
        "draft_steps_in_a_target_cluster": float((labels.target_share[by_draft] > 0).mean()),
    }
    for role in ROLES:
        rows = collection.writers == role
        counts = [
            len({c for c, sample in zip(item.own, prefix.samples) if sample.writer == role})
            for prefix, item in zip(collection.prefixes, labels.prefixes)
        ]
        facts[role] = {
            "n_samples": int(rows.sum()),
            "n_empty_samples": int((rows & (collection.n_tokens == 0)).sum()),
            "tokens_per_step_mean": float(collection.n_tokens[rows].mean()),
            "clusters_per_prefix_mean": float(np.mean(counts)),
            "own_share_mean": float(labels.own_share[rows].mean()),
            "own_share_std": float(labels.own_share[rows].std()),
        }
    return facts
