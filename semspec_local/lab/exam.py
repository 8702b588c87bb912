"""Put finished probes to a test: what they say of the steps of another collection, against the shares found there.

With many samples per prefix and exact clusters, as in the made world, the shares are the semantic probabilities
themselves. Reads the ONNX files as a run does; knows nothing of how they were trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from ..probes import ProbeSpec, load_joint_probe, load_probe
from ..roles import ROLES, ProbeRole, Role
from . import evaluate
from .collection import Collection, StateKind
from .joint_rows import joined, judged_rows
from .labels import Labels

N_CURVE_BINS, N_HISTOGRAM_BINS = 10, 20

LOGITS_ONLY = ("target_logprob_mean", "target_logprob_min", "target_top2_share", "logprob_mean_target_minus_draft")
"""The scores that need no hidden state; `mean-loglik` and `loglik-ratio` are the first and the last."""


def examine(
    probes: Mapping[ProbeRole, Path],
    collection: Collection,
    labels: Labels,
    *,
    seed: int = 0,
    n_resamples: int = evaluate.N_RESAMPLES,
) -> dict[str, Any]:
    """Quality of each probe on the steps of each writer, and how well the scores tell good drafted steps from others.

    The truth for a probe of `role` is the share of that model's samples that mean the same as the step (the joint
    clustering). Raises ConfigError when the collection lacks the states that a probe reads.
    """
    usable = collection.n_tokens > 0
    report: dict[str, Any] = {
        **collection.origin,
        "n_samples": collection.header.get("n_samples"),
        "n_prefixes": len(collection.prefixes),
        "clusterer": labels.clusterer,
        "probes": {},
    }
    predicted: dict[ProbeRole, NDArray[np.float64]] = {}
    for role in ROLES:
        predicted[role] = predict_rows(probes[role], role, collection)
        share = labels.share("joint", role)
        report["probes"][role] = {
            f"{writer}_steps": _quality(share, predicted[role], collection, rows, seed, n_resamples)
            for writer in ROLES
            if (rows := usable & (collection.writers == writer)).any()
        }
    if "joint" in probes:
        predicted["joint"] = predict_rows(probes["joint"], "joint", collection)
        judged = usable & (collection.writers == "draft")
        found = _quality(labels.target_share, predicted["joint"], collection, judged, seed, n_resamples)
        report["probes"]["joint"] = {"draft_steps": found}
    report["decision"] = decision(collection, labels, predicted, usable, n_resamples=n_resamples, seed=seed)
    return report


def decision(
    collection: Collection,
    labels: Labels,
    predicted: Mapping[ProbeRole, NDArray[np.float64]],
    rows: NDArray[np.bool_],
    *,
    n_resamples: int,
    seed: int,
    logits_only: Mapping[str, NDArray[np.float64]] = MappingProxyType({}),
) -> dict[str, Any]:
    """What the policies must tell apart: the draft-written steps among `rows`, by the target's share.

    `logits_only` are more scores [n_rows] that no hidden state went into, beside those of `LOGITS_ONLY`.
    """
    rows = rows & (collection.writers == "draft") & (collection.n_tokens > 0)
    target, draft = predicted["target"][rows], predicted["draft"][rows]
    ratio = np.divide(target, draft, out=np.zeros_like(target), where=draft > 0)
    features = {
        name: collection.feature("target", name)[rows] for name in ("logprob_mean", "logprob_min", "top2_share")
    }
    difference = features["logprob_mean"] - collection.feature("draft", "logprob_mean")[rows]
    scores = {
        evaluate.RATIO: ratio,
        "draft_semantic_prob": draft,
        "target_semantic_prob": target,
        **({"joint_semantic_prob": predicted["joint"][rows]} if "joint" in predicted else {}),
        **{f"target_{name}": feature.astype(np.float64) for name, feature in features.items()},
        "logprob_mean_target_minus_draft": difference.astype(np.float64),
        "fewer_tokens": -collection.n_tokens[rows].astype(np.float64),
        **{name: score[rows] for name, score in logits_only.items()},
    }
    share, problems = labels.target_share[rows], collection.problem_ids[rows]
    best = "joint_semantic_prob" if "joint" in predicted else "target_semantic_prob"
    rivals = {name: scores[name] for name in (*LOGITS_ONLY, *logits_only)}
    over = evaluate.gains(share, scores[best], rivals, problems, seed=seed, n_resamples=n_resamples)
    return {
        "n_steps": int(rows.sum()),
        "in_a_target_cluster": float((share > 0).mean()),
        "target_share_mean": float(share.mean()),
        "scores": evaluate.decision_table(share, scores, problems, seed=seed, n_resamples=n_resamples),
        "beyond_logits": {"score": best, "auroc_gain_over": over},
    }


def verdict(decision: Mapping[str, Any]) -> str:
    """Does the hidden state add anything to what log-probabilities say? One sentence, from `decision`'s result."""
    score, over = decision["beyond_logits"]["score"], decision["beyond_logits"]["auroc_gain_over"]
    known = {name: gain for name, gain in over.items() if gain["value"] is not None and gain["low"] is not None}
    if not known:
        return f"too few problems, or steps of one kind only: it cannot be said whether {score} beats the logits"
    name, least = min(known.items(), key=lambda item: item[1]["value"])
    seen = f"{least['value']:+.3f} AUROC ({least['low']:+.3f} to {least['high']:+.3f}) against {name}, the best of them"
    if least["low"] > 0:
        return f"{score} tells more than the logits alone: {seen}"
    if least["high"] < 0:
        return f"{score} tells less than the logits alone: {seen}"
    return f"it cannot be said that {score} tells more than the logits alone: {seen}"


def predict_rows(path: Path, role: ProbeRole, collection: Collection) -> NDArray[np.float64]:
    """A probe's output on every row, float64 [n_rows]; NaN on empty steps, and a joint one's on steps of the target.

    Raises ConfigError when the collection lacks the states that the probe reads.
    """
    if role == "joint":
        return _predict_joint(path, collection)
    usable = collection.n_tokens > 0
    probe = load_probe(path, role, collection.models[role])
    spec = probe.spec
    kind = StateKind(spec.layer, spec.window, spec.pooling, spec.norm)
    if kind not in collection.kinds(role):
        raise ConfigError(
            f"{collection.folder} has no states {kind.tensor(role)}, which {path} reads; collect them too"
        )
    probs = np.full(len(usable), np.nan)
    probs[usable] = probe.predict(collection.states(role, kind)[usable])
    return probs


def _predict_joint(path: Path, collection: Collection) -> NDArray[np.float64]:
    probe = load_joint_probe(path, collection.models)
    specs: dict[Role, ProbeSpec] = {"target": probe.spec, "draft": probe.draft_spec}
    kinds = {role: StateKind(spec.layer, spec.window, spec.pooling, spec.norm) for role, spec in specs.items()}
    for role in ROLES:
        if kinds[role] not in collection.kinds(role):
            raise ConfigError(
                f"{collection.folder} has no states {kinds[role].tensor(role)}, which {path} reads; collect them too"
            )
    rows = judged_rows(collection)
    probs = np.full(len(rows), np.nan)
    probs[rows] = probe.predict_rows(joined(collection, kinds, probe.features)[rows])
    return probs


def _quality(
    share: NDArray[np.float64],
    predicted: NDArray[np.float64],
    collection: Collection,
    rows: NDArray[np.bool_],
    seed: int,
    n_resamples: int,
) -> dict[str, Any]:
    truth, guess = share[rows], predicted[rows]
    return {
        "n_steps": int(rows.sum()),
        "share_mean": float(truth.mean()),
        "mse_constant": float(truth.var()),
        **evaluate.probe_quality(truth, guess, collection.problem_ids[rows], seed=seed, n_resamples=n_resamples),
        "calibration_curve": calibration_curve(truth, guess),
        "histogram": histogram(truth, guess),
    }


def calibration_curve(share: NDArray[np.float64], predicted: NDArray[np.float64]) -> list[dict[str, float]]:
    """Mean prediction and mean share in bins of equal width; empty bins are left out."""
    bins = np.minimum((predicted * N_CURVE_BINS).astype(np.int64), N_CURVE_BINS - 1)
    return [
        {"n": int(inside.sum()), "predicted": float(predicted[inside].mean()), "share": float(share[inside].mean())}
        for k in range(N_CURVE_BINS)
        if (inside := bins == k).any()
    ]


def histogram(share: NDArray[np.float64], predicted: NDArray[np.float64]) -> dict[str, list[int]]:
    """How often each prediction was made, in bins of equal width, for steps that are likely and those that are not."""
    likely = share >= evaluate.LIKELY_SHARE
    return {
        name: np.histogram(predicted[rows], N_HISTOGRAM_BINS, (0, 1))[0].tolist()
        for name, rows in (("likely", likely), ("unlikely", ~likely))
    }
