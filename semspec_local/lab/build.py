"""From a labelled collection to the probes of a pair and their report.

Training needs torch, which `train` imports; this file is imported when probes are built, not before.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from ..probes.spec import ProbeSpec
from ..probes.write import write_mlp_onnx
from ..roles import ROLES, ProbeRole, Role
from . import evaluate
from .collection import Collection, StateKind, read_collection
from .exam import decision
from .folds import predict_out_of_fold
from .joint import TrainedJoint, train_joint
from .joint_rows import judged_rows
from .labels import RECIPES, Labels, label_facts, read_labels, taught_rows
from .ridge import trainer
from .split import PARTS, Split, split_by_problem, split_without_test, without_validation
from .train import FittedHead, TrainConfig, TrainedProbe, kind_line

REPORT_VERSION = 1

_PACKAGES = ("semspec-local", "llama-cpp-python", "numpy", "onnx", "onnxruntime", "scipy", "tokenizers", "torch")


def build_probes(
    folder: Path | str,
    out: Path | str,
    config: TrainConfig,
    *,
    command: str = "",
    n_folds: int = 0,
    n_resamples: int = evaluate.N_RESAMPLES,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Train, test and write `<out>/<pair>/{target,draft,joint}.onnx` and `report.json`; return the report.

    `folder` is a collection with labels. With `n_folds` every problem is tested, by heads that did not see it, and the
    probes that are written are taught on all; otherwise 15 % of the problems are left out for the test. The probes are
    written only after all were trained and tested.
    Raises ConfigError for a collection that cannot be used, ProbeError when ONNX does not compute what torch did.
    """
    collection = read_collection(folder)
    if not re.fullmatch(r"[A-Za-z0-9][\w.+-]*", collection.pair):
        raise ConfigError(f"the collection's pair is {collection.pair!r}; wanted a plain name, for a folder")
    labels = read_labels(collection)
    folds = predict_out_of_fold(collection, labels, config, n_folds, say=say) if n_folds else None
    split = (split_without_test if folds else split_by_problem)(collection.problem_ids, config.seed)
    if config.cross_validates:
        split = without_validation(split)
    sizes = {part: len(getattr(split, part)) for part in PARTS}
    say(f"problems: {sizes}; in two parts: {split.n_overlap}")
    probes = {role: trainer(config)(collection, labels, split, role, config, say=say) for role in ROLES}
    joint = train_joint(collection, labels, split, {r: p.kind for r, p in probes.items()}, config, say=say)
    said: dict[ProbeRole, NDArray[np.float64]] = {"joint": joint.predict(collection)}
    said |= {role: _predict_all(collection, probe) for role, probe in probes.items()}
    in_test = split.mask("test", collection.problem_ids)
    if folds:
        said, in_test = dict(folds.predicted), np.ones(len(in_test), dtype=np.bool_)
    report = _report_head(collection, labels, split, config, command)
    for role, probe in probes.items():
        report["probes"][role] = _test_probe(collection, labels, in_test, probe, said[role], n_resamples, config)
    report["probes"]["joint"] = _test_joint(collection, labels, in_test, joint, said["joint"], n_resamples, config)
    calibrations: list[dict[str, Any]] = []
    if folds:
        calibrations = folds.calibrations(collection, labels)
        report["folds"] = {"n_folds": n_folds, "chosen": list(folds.chosen), "calibrations": calibrations}
    rivals = {"features_alone": folds.features_alone} if folds else {}
    report["decision"] = decision(
        collection, labels, said, in_test, n_resamples=n_resamples, seed=config.seed, logits_only=rivals
    )
    place = Path(out) / collection.pair
    heads: dict[ProbeRole, Any] = {
        role: (probe.head, probe.kind, probe.n_rows, probe.validation_states) for role, probe in probes.items()
    }
    heads["joint"] = joint.head, joint.kinds["target"], joint.n_rows, joint.validation_rows
    for name, (head, kind, n_rows, states) in heads.items():
        facts = (collection, labels, config, head, sizes, n_rows, report["probes"][name]["test"])
        spec = _spec("draft" if name == "draft" else "target", kind, *facts)
        if name == "joint":
            reads = _spec("draft", joint.kinds["draft"], *facts).reads()
            kept = tuple(found for found in calibrations if found["threshold"] is not None)
            spec = replace(spec, role="joint", features=joint.features, draft=reads, calibrations=kept)
        difference = write_mlp_onnx(
            place / f"{name}.onnx", head.mlp, spec, states=states, expected=head.validation_probs
        )
        report["probes"][name]["onnx_parity_max_difference"] = difference
        say(f"{name}: wrote {place / f'{name}.onnx'}, largest difference to torch {difference:.1e}")
    _write_json(place / "report.json", report)
    return report


def _predict_all(collection: Collection, probe: TrainedProbe) -> NDArray[np.float64]:
    """The probe's output on every row, its own model's text or the other's; NaN on empty steps."""
    usable = collection.n_tokens > 0
    probs = np.full(len(usable), np.nan)
    probs[usable] = probe.head.predict(collection.states(probe.role, probe.kind)[usable])
    return probs


def _test_probe(
    collection: Collection,
    labels: Labels,
    in_test: NDArray[np.bool_],
    probe: TrainedProbe,
    predicted: NDArray[np.float64],
    n_resamples: int,
    config: TrainConfig,
) -> dict[str, Any]:
    rows = in_test & taught_rows(collection, config.recipe, probe.role)
    share, problems = labels.share(config.recipe, probe.role)[rows], collection.problem_ids[rows]
    seed = config.seed
    if not rows.any():
        raise ConfigError(f"no step of the {probe.role} is left in the test part; collect more problems")
    constant = np.full(len(share), probe.train_label_mean)
    best = min(probe.sweep, key=lambda line: line["validation_mse"])
    return {
        "chosen": best,
        "n_rows": {**probe.n_rows, "test": int(rows.sum())},
        "test": evaluate.probe_quality(share, predicted[rows], problems, seed=seed, n_resamples=n_resamples),
        "test_constant": evaluate.probe_quality(share, constant, problems, seed=seed, n_resamples=n_resamples),
        "n_fits": len(probe.sweep),
        "sweep": _best_settings(probe.sweep),
    }


def _test_joint(
    collection: Collection,
    labels: Labels,
    in_test: NDArray[np.bool_],
    joint: TrainedJoint,
    predicted: NDArray[np.float64],
    n_resamples: int,
    config: TrainConfig,
) -> dict[str, Any]:
    rows = in_test & judged_rows(collection)
    share, problems = labels.target_share[rows], collection.problem_ids[rows]
    if not rows.any():
        raise ConfigError("no step of the draft is left in the test part; collect more problems")
    constant = np.full(len(share), joint.train_label_mean)
    seed = config.seed
    return {
        "reads": {role: kind_line(kind) for role, kind in joint.kinds.items()},
        "features": list(joint.features),
        "chosen": joint.head.line(),
        "n_rows": {**joint.n_rows, "test": int(rows.sum())},
        "test": evaluate.probe_quality(share, predicted[rows], problems, seed=seed, n_resamples=n_resamples),
        "test_constant": evaluate.probe_quality(share, constant, problems, seed=seed, n_resamples=n_resamples),
        "n_fits": len(joint.sweep),
        "sweep": list(joint.sweep),
    }


def _best_settings(sweep: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The best fit of every kind of state and head, the best of all first."""
    best: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in sorted(sweep, key=lambda line: line["validation_mse"]):
        best.setdefault((line["layer"], line["norm"], line["window"], line["pooling"], line["head"]), line)
    return list(best.values())


def _spec(
    role: Role,
    kind: StateKind,
    collection: Collection,
    labels: Labels,
    config: TrainConfig,
    head: FittedHead,
    n_problems: dict[str, int],
    n_rows: dict[str, int],
    quality: dict[str, evaluate.Interval],
) -> ProbeSpec:
    info = collection.models[role]
    if info.fingerprint is None:
        raise ConfigError(f"the collection has no fingerprint of the {role}; wanted the sha256 of its GGUF")
    return ProbeSpec(
        role=role,
        layer=kind.layer,
        norm=kind.norm,
        pooling=kind.pooling,
        window=kind.window,
        n_embd=info.n_embd,
        n_layer=info.n_layer,
        architecture=info.architecture,
        model_name=info.name,
        fingerprint=info.fingerprint,
        quantization=info.quantization,
        training={
            **collection.origin,
            "sampling": collection.header.get("sampling"),
            "n_samples": collection.header.get("n_samples"),
            "label": RECIPES[config.recipe],
            "clusterer": labels.clusterer,
            "split": {"by": "problem", "seed": config.seed, "n_problems": n_problems},
            "n_rows": n_rows,
            "head": head.head,
            "loss": config.loss,
            "seed": config.seed,
            "n_epochs": head.n_epochs,
        },
        evaluation=evaluate.values_only(quality),
    )


def _report_head(
    collection: Collection, labels: Labels, split: Split, config: TrainConfig, command: str
) -> dict[str, Any]:
    header = collection.header
    models = {role: info.to_dict() for role, info in collection.models.items()}
    for info in models.values():
        del info["path"]  # where a file lay says nothing to a reader elsewhere
    return {
        "version": REPORT_VERSION,
        "pair": collection.pair,
        "command": command,
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "models": models,
        "data": collection.origin
        | {key: header.get(key) for key in ("sampling", "n_samples", "max_step_tokens", "seed", "prompt")},
        "index_sha256": collection.index_sha256,
        "labels": {"recipe": RECIPES[config.recipe], **label_facts(collection, labels)},
        "split": {
            "by": "problem",
            "seed": config.seed,
            "n_problems": {part: len(getattr(split, part)) for part in PARTS},
            "n_problems_in_two_parts": split.n_overlap,
        },
        "training": asdict(config),
        "intervals": "95 % bootstrap over problems",
        "probes": {},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _write_json(path: Path, document: dict[str, Any]) -> None:
    temporary = path.with_suffix(".json.tmp")
    temporary.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    temporary.replace(path)
