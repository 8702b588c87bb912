"""The embedded pair as it ships: its files, its card and its probes belong together, and it can do what they say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from semspec_local.config import ModelConfig, RunConfig
from semspec_local.lab.collection import read_collection
from semspec_local.lab.evaluate import auroc
from semspec_local.lab.exam import predict_rows
from semspec_local.lab.labels import make_labels
from semspec_local.lab.tiny.card import solve_rate
from semspec_local.lab.world import WorldClusterer, problems
from semspec_local.pairs import load_manifest, resolve
from semspec_local.policy import POLICIES
from semspec_local.probes import read_probe_file
from semspec_local.provenance import fingerprint_file
from semspec_local.reasoner import Reasoner, Sources
from semspec_local.resources import shipped
from semspec_local.roles import PROBE_ROLES, ROLES

HELD_OUT_SEED = 424242


@pytest.fixture(scope="module")
def card():
    return json.loads((shipped("models") / "tiny" / "card.json").read_text())


@pytest.fixture(scope="module")
def probes() -> Path:
    return shipped("probes") / "tiny"


def test_files_manifest_and_card_belong_together(card):
    files, manifest = resolve("tiny"), load_manifest("tiny")
    for role in ROLES:
        path = getattr(files, role)
        assert fingerprint_file(path)["sha256"] == getattr(manifest, role).sha256
        assert path.stat().st_size == card["models"][role]["size_bytes"]
    assert sum(card["models"][role]["size_bytes"] for role in ROLES) <= 20_000_000


def test_the_card_says_what_the_pair_is_for(card):
    target, draft = card["models"]["target"], card["models"]["draft"]
    assert target["solved_at_0"] >= 0.95 and target["solved_at_0.6"] >= 0.9
    assert 0.4 <= draft["solved_at_0.6"] <= 0.8
    assert target["n_problems"] == draft["n_problems"] == 500


@pytest.mark.parametrize(("role", "least", "most"), [("target", 0.9, 1.0), ("draft", 0.5, 0.9)])
def test_it_solves_problems_that_it_never_saw(role, least, most):
    asked = list(problems(HELD_OUT_SEED, 60))
    assert least <= solve_rate(getattr(resolve("tiny"), role), asked, temperature=0.0, n_threads=1) <= most


def test_the_probes_are_of_these_files_and_of_whole_problems(probes):
    files, report = resolve("tiny"), json.loads((probes / "report.json").read_text())
    hashes = {role: fingerprint_file(getattr(files, role))["sha256"] for role in ROLES}
    assert {role: report["models"][role]["fingerprint"] for role in ROLES} == hashes
    assert report["split"]["n_problems_in_two_parts"] == 0
    assert report["labels"]["clusterer"].startswith("world")
    for role in PROBE_ROLES:
        spec = read_probe_file(probes / f"{role}.onnx").spec
        assert spec.fingerprint == hashes["draft" if role == "draft" else "target"]
        if spec.draft is not None:
            assert spec.draft["fingerprint"] == hashes["draft"]


def test_the_joint_probe_tells_good_steps_from_bad_ones(probes, tmp_path):
    pytest.importorskip("safetensors", reason="the extra packages of the lab are not installed")
    from semspec_local.lab.collect import CollectConfig, Collector
    from semspec_local.lab.problems import made_up_problems

    config = CollectConfig(system="", n_samples=8, n_prefixes=1, post=True, n_threads=1)
    with Collector(tmp_path / "c", Sources.from_pair("tiny"), config, "world") as collector:
        assert [*collector.run(made_up_problems(HELD_OUT_SEED, 40))][-1] == 40
    rows = read_collection(tmp_path / "c")
    share = make_labels(rows, WorldClusterer()).target_share
    drafted = (rows.writers == "draft") & (rows.n_tokens > 0)
    predicted = predict_rows(probes / "joint.onnx", "joint", rows)
    assert 0.01 < np.mean(share[drafted] == 0) < 0.4
    assert auroc(share[drafted] > 0, predicted[drafted]) > 0.85


def test_the_default_policy_takes_the_threshold_that_its_probe_was_calibrated_to(probes):
    known = read_probe_file(probes / "joint.onnx").spec.calibrated_threshold("semantic-joint")
    assert known is not None and known != POLICIES["semantic-joint"].default_threshold
    with Reasoner(Sources.from_pair("tiny"), RunConfig(), ModelConfig(n_threads=1)) as reasoner:
        assert (reasoner.policy.name, reasoner.policy.threshold) == ("semantic-joint", known)
        question = next(iter(problems(HELD_OUT_SEED, 1))).question
        assert reasoner.start(question, seed=0).policy.threshold == known
        assert reasoner.start(question, seed=0, config=RunConfig(threshold=0.9)).policy.threshold == 0.9
