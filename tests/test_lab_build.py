"""The path from a collection to probes that run, on a small made-up collection with a planted signal."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from lab_support import EXACT, N_EMBD, N_SAMPLES, SIGNAL_LAYER, info, make_collection
from safetensors.numpy import load_file, save_file

from semspec_local.errors import ConfigError
from semspec_local.features import step_features
from semspec_local.lab.collection import StateKind, read_collection
from semspec_local.lab.exam import examine, predict_rows
from semspec_local.lab.joint_rows import feature_rows
from semspec_local.lab.labels import label_facts, make_labels, read_labels, taught_rows, write_labels
from semspec_local.lab.split import split_by_problem
from semspec_local.policy import StepScores
from semspec_local.probes import load_joint_probe, load_probe, read_probe_file
from semspec_local.protocols import FEATURES, StepStates

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    folder = make_collection(tmp_path_factory.mktemp("lab") / "collection")
    collection = read_collection(folder)
    write_labels(make_labels(collection, EXACT), collection)
    return folder


@pytest.fixture(scope="module")
def built(labelled, tmp_path_factory):
    pytest.importorskip("torch", reason="training needs torch: pip install '.[train]'")
    from semspec_local.lab.build import build_probes
    from semspec_local.lab.train import TrainConfig

    out = tmp_path_factory.mktemp("probes")
    config = TrainConfig(hidden=(8,), learning_rates=(1e-2,), penalties=(1e-3,), max_epochs=40, patience=5)
    report = build_probes(labelled, out, config, command="made in a test", n_resamples=100)
    return out / "made-up", report, config


def test_labels_are_shares_of_samples(labelled):
    collection = read_collection(labelled)
    labels = read_labels(collection)
    first = collection.prefixes[0]
    for row, sample in enumerate(first.samples):
        for role, got in [
            (sample.writer, labels.own_share[row]),
            ("target", labels.target_share[row]),
            ("draft", labels.draft_share[row]),
        ]:
            same = [other.text == sample.text for other in first.samples if other.writer == role]
            assert got == sum(same) / len(same)
    by_draft = collection.writers == "draft"
    np.testing.assert_array_equal(labels.own_share[by_draft], labels.draft_share[by_draft])
    facts = label_facts(collection, labels)
    assert (facts["n_problems"], facts["n_prefixes"]) == (40, 80)
    assert facts["draft"]["n_samples"] == 80 * N_SAMPLES


def test_labels_of_another_index_are_refused(tmp_path):
    folder = make_collection(tmp_path / "c", n_problems=2)
    collection = read_collection(folder)
    with pytest.raises(ConfigError, match="make the labels first"):
        read_labels(collection)
    write_labels(make_labels(collection, EXACT), collection)
    lines = (folder / "index.jsonl").read_text().splitlines(keepends=True)
    (folder / "index.jsonl").write_text("".join(lines[:-1]))
    with pytest.raises(ConfigError, match="make the labels again"):
        read_labels(read_collection(folder))


def test_a_torn_last_line_is_left_out(tmp_path):
    folder = make_collection(tmp_path / "c", n_problems=2)
    with (folder / "index.jsonl").open("a") as index:
        index.write('{"prefix_id": 4, "prob')
    assert len(read_collection(folder).prefixes) == 4


def test_a_prefix_without_steps_of_both_models_is_left_out(tmp_path):
    folder = make_collection(tmp_path / "c", n_problems=2)
    lines = [json.loads(line) for line in (folder / "index.jsonl").read_text().splitlines()]
    lines[1]["samples"] = [sample for sample in lines[1]["samples"] if sample["writer"] == "draft"]
    (folder / "index.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    collection = read_collection(folder)
    assert (len(collection.prefixes), collection.n_left_out) == (3, 1)


def test_broken_collections_are_refused(tmp_path):
    folder = make_collection(tmp_path / "c", n_problems=2)
    index, header = (folder / "index.jsonl").read_text(), (folder / "collection.json").read_text()
    for text, words in [
        (index.replace("prefix-000000", "../prefix"), "plain name"),
        (index.replace('"n_tokens"', '"n"'), "line 1: no prefix"),
        (index.replace('"writer": "draft"', '"writer": "me"'), "neither target nor draft"),
        (index + index, "prefix_id twice"),
        ("", "has 0 prefixes"),
    ]:
        (folder / "index.jsonl").write_text(text)
        with pytest.raises(ConfigError, match=words):
            read_collection(folder)
    (folder / "index.jsonl").write_text(index)
    for text, words in [("{}", "not the header"), (header.replace('"pair"', '"pear"'), "has no pair"), ("[", "header")]:
        (folder / "collection.json").write_text(text)
        with pytest.raises(ConfigError, match=words):
            read_collection(folder)


def test_states_are_checked(tmp_path):
    folder = make_collection(tmp_path / "c", n_problems=2)
    kind = StateKind(2, "token", "mean")
    path = folder / "prefix-000001.safetensors"
    states = load_file(path)
    overflowed = states["target.2.token.mean"].copy()
    overflowed[0, 0] = np.inf
    for change, words in [
        ({"target.2.token.mean": overflowed}, "NaN or infinity"),
        ({"target.2.token.mean": overflowed[:3]}, r"is \[3, 8\]; wanted \[16, 8\]"),
    ]:
        save_file(states | change, path)
        with pytest.raises(ConfigError, match=words):
            read_collection(folder).states("target", kind)
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        read_collection(folder).states("target", kind)


def test_the_state_after_the_norm_is_a_kind_of_its_own(tmp_path):
    folder = make_collection(tmp_path / "c", n_problems=2)
    header = json.loads((folder / "collection.json").read_text())
    header["layers"]["target"] = [2, "post"]
    (folder / "collection.json").write_text(json.dumps(header))
    kinds = read_collection(folder).kinds("target")
    assert [(kind.layer, kind.norm) for kind in kinds] == [(2, "pre")] * 2 + [(2, "post")] * 2
    assert len({kind.tensor("target") for kind in kinds}) == 4


def test_the_joint_recipe_teaches_each_model_on_the_steps_of_both(labelled):
    collection = read_collection(labelled)
    labels = read_labels(collection)
    by_draft = collection.writers == "draft"
    assert (taught_rows(collection, "own", "target") == ~by_draft).all()
    assert taught_rows(collection, "joint", "target").all()
    np.testing.assert_array_equal(labels.share("own", "target"), labels.own_share)
    np.testing.assert_array_equal(labels.share("joint", "draft"), labels.draft_share)
    assert not np.allclose(labels.share("joint", "target")[by_draft], labels.own_share[by_draft])


def test_probes_are_put_to_a_test_on_another_collection(built, tmp_path):
    place, _, _ = built
    other = make_collection(tmp_path / "other", n_problems=20, seed=7)
    collection = read_collection(other)
    labels = make_labels(collection, EXACT)
    probes = {role: place / f"{role}.onnx" for role in N_EMBD}
    report = examine(probes, collection, labels, n_resamples=50)
    for role in N_EMBD:
        own = report["probes"][role][f"{role}_steps"]
        assert own["r2"]["value"] > 0.2
        assert own["n_steps"] == sum(line["n"] for line in own["calibration_curve"]) == 40 * N_SAMPLES
    assert report["decision"]["scores"]["target_semantic_prob"]["auroc_in_target_cluster"]["value"] > 0.6
    header = json.loads((other / "collection.json").read_text())
    header["layers"]["target"] = [1]
    (other / "collection.json").write_text(json.dumps(header))
    with pytest.raises(ConfigError, match=r"no states target\.2\.token\.mean"):
        examine(probes, read_collection(other), labels)


def test_a_split_never_cuts_a_problem():
    problems = np.array([f"p{n // 5}" for n in range(100)])
    split = split_by_problem(problems, seed=3)
    assert split.n_overlap == 0
    assert (len(split.train), len(split.validation), len(split.test)) == (14, 3, 3)
    masks = [split.mask(part, problems) for part in ("train", "validation", "test")]
    np.testing.assert_array_equal(np.sum(masks, axis=0), 1)
    assert split_by_problem(problems[::-1], seed=3) == split
    assert split_by_problem(problems, seed=4) != split
    with pytest.raises(ConfigError, match="2 problems"):
        split_by_problem(np.array(["a", "b"]), seed=0)


def test_training_finds_the_planted_signal(built):
    _, report, _ = built
    for role in ("target", "draft"):
        found = report["probes"][role]
        assert (found["chosen"]["layer"], found["chosen"]["pooling"]) == (SIGNAL_LAYER[role], "mean")
        quality, constant = found["test"], found["test_constant"]
        assert quality["r2"]["value"] > 0.2  # labels are shares of eight samples, so they are noisy
        assert quality["mse"]["high"] < constant["mse"]["low"]
        assert quality["r2"]["low"] < quality["r2"]["value"] < quality["r2"]["high"]
        assert constant["spearman"]["value"] is None
        assert len(found["sweep"]) == 2 * 2 * 2
        assert found["onnx_parity_max_difference"] < 1e-5
    scores = report["decision"]["scores"]
    assert scores["target_semantic_prob"]["spearman"]["low"] > 0
    assert scores["fewer_tokens"]["spearman"]["value"] is None  # every made-up step has three tokens
    assert scores["target_logprob_mean"]["auroc_in_target_cluster"]["value"] > 0.6
    assert scores["target_semantic_prob"]["auroc_in_target_cluster_minus_ratio"]["low"] is not None


def test_the_report_says_where_the_numbers_come_from(built):
    place, report, _ = built
    text = (place / "report.json").read_text()
    assert json.loads(text) == json.loads(json.dumps(report))
    assert report["command"] == "made in a test"
    assert report["split"]["n_problems"] == {"train": 28, "validation": 6, "test": 6}
    assert report["split"]["n_problems_in_two_parts"] == 0
    assert report["versions"]["torch"]
    assert "path" not in report["models"]["target"]
    assert str(ROOT) not in text
    assert sorted(item.name for item in place.iterdir()) == ["draft.onnx", "joint.onnx", "report.json", "target.onnx"]


def test_the_joint_probe_judges_drafted_steps_better_than_the_ratio(built, labelled):
    place, report, _ = built
    scores = report["decision"]["scores"]
    assert scores["joint_semantic_prob"]["spearman"]["value"] > scores["acceptance_ratio"]["spearman"]["value"] + 0.2
    assert report["probes"]["joint"]["test"]["r2"]["value"] > 0.3
    collection = read_collection(labelled)
    predicted = predict_rows(place / "joint.onnx", "joint", collection)
    assert np.isnan(predicted[collection.writers == "target"]).all()
    probe = load_joint_probe(place / "joint.onnx", collection.models)
    assert probe.warnings == () and probe.features == FEATURES
    assert probe.spec.evaluation["mse"] == report["probes"]["joint"]["test"]["mse"]["value"]
    assert {role: tap.layer for role, tap in probe.taps.items()} == SIGNAL_LAYER


def test_features_of_a_collection_are_those_of_a_run(labelled):
    collection = read_collection(labelled)
    row = int(np.flatnonzero(collection.writers == "draft")[3])
    n = int(collection.n_tokens[row])

    def mean(role):
        return np.full(n, collection.feature(role, "logprob_mean")[row])

    in_top2 = np.arange(n) < round(float(collection.feature("target", "top2_share")[row]) * n)
    scores = StepScores(n, target_logprobs=mean("target"), draft_logprobs=mean("draft"), target_in_top2=in_top2)
    names = [name for name in FEATURES if name != "target_logprob_min"]
    expected = step_features(names, scores, collection.prefixes[row // (2 * N_SAMPLES)].step_index)
    got = [feature_rows(collection, name)[row] for name in names]
    np.testing.assert_allclose(got[:-3] + got[-2:], np.delete(expected, -3), rtol=1e-5)  # shares of 3 tokens are random


def test_the_written_probes_run_and_know_their_facts(built, labelled):
    place, report, _ = built
    collection = read_collection(labelled)
    for role in ("target", "draft"):
        probe = load_probe(place / f"{role}.onnx", role, info(role))
        assert probe.warnings == ()
        spec = probe.spec
        assert (spec.layer, spec.window, spec.pooling, spec.norm) == (SIGNAL_LAYER[role], "token", "mean", "pre")
        assert spec.evaluation["mse"] == report["probes"][role]["test"]["mse"]["value"]
        assert spec.training["split"]["n_problems"]["test"] == 6
        states = collection.states(role, StateKind(spec.layer, spec.window, spec.pooling))
        low, high = (states[np.argsort(states[:, 2])[[5, -5]]][i] for i in (0, 1))
        assert probe.semantic_prob(StepStates(low, low[None])) < probe.semantic_prob(StepStates(high, high[None]))


def test_the_same_seed_gives_the_same_files(built, labelled, tmp_path):
    from semspec_local.lab.build import build_probes

    place, _, config = built
    build_probes(labelled, tmp_path, config, command="made in a test", n_resamples=100)
    for name in ("target.onnx", "draft.onnx", "report.json"):
        assert (tmp_path / "made-up" / name).read_bytes() == (place / name).read_bytes()


@pytest.mark.parametrize("head", ["linear", "mlp"])
@pytest.mark.parametrize("loss", ["mse", "bce"])
def test_every_head_and_loss_beats_the_constant(head, loss):
    pytest.importorskip("torch", reason="training needs torch: pip install '.[train]'")
    from semspec_local.lab.train import Rows, TrainConfig, fit_head

    rng = np.random.default_rng(1)
    states = (rng.normal(size=(400, 5)) * [1, 1, 1e4, 1, 1] + [0, 0, 3e4, 0, 0]).astype(np.float32)
    states[:, 4] = 7  # a constant must not divide by zero
    labels = (1 / (1 + np.exp(-2 * states[:, 1]))).astype(np.float32)
    config = TrainConfig(hidden=(16,), loss=loss, max_epochs=60)
    train, validation = Rows(states[:300], labels[:300]), Rows(states[300:], labels[300:])
    fitted = fit_head(train, validation, head=head, setting=1e-4 if head == "linear" else 1e-2, config=config)
    assert fitted.validation_mse < 0.2 * np.var(labels)
    np.testing.assert_allclose(fitted.predict(states[300:]), fitted.validation_probs, atol=1e-5)


def test_training_settings_are_checked():
    pytest.importorskip("torch", reason="training needs torch: pip install '.[train]'")
    from semspec_local.lab.train import TrainConfig

    for wrong in ({"heads": ("tree",)}, {"loss": "hinge"}, {"n_threads": 0}, {"recipe": "any"}):
        with pytest.raises(ConfigError):
            TrainConfig(**wrong)


def test_the_commands_label_train_and_evaluate(tmp_path):
    pytest.importorskip("torch", reason="training needs torch: pip install '.[train]'")
    folder = make_collection(tmp_path / "c", n_problems=8)

    def run(*words):
        command = [sys.executable, "-m", "semspec_local", "probe", *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)

    early = run("train", folder)
    assert (early.returncode, "make the labels first" in early.stderr) == (2, True)
    assert run("label", folder, "--clusterer", "exact").returncode == 0
    done = run("train", folder, "--out", "probes", "--head", "linear", "--max-epochs", "3")
    assert done.returncode == 0, done.stderr
    assert "in two parts: 0" in done.stderr
    report = json.loads((tmp_path / "probes" / "made-up" / "report.json").read_text())
    assert report["command"].startswith("semspec-local probe train c --out probes")
    shown = ("--html", "judged.html", "--figures", "pictures")
    judged = run("evaluate", folder, "--probes", "probes/made-up", "--out", "judged.json", *shown)
    assert judged.returncode == 0, judged.stderr
    assert "target probe, draft_steps: r2 " in judged.stdout and "AUROC" in judged.stdout
    assert "the logits alone" in judged.stdout.splitlines()[-1]
    assert json.loads((tmp_path / "judged.json").read_text())["probes"].keys() == {"target", "draft", "joint"}
    check_pictures(tmp_path / "judged.html", tmp_path / "pictures")
    alpha = ("--alpha", "0.5", "--delta", "0.5")
    options = ("calibrate", folder, "--probes", "probes/made-up", "--policy", "semantic-greedy")
    refused = run(*options, "--alpha", "0.001")
    assert (
        refused.returncode == 2
        and "no threshold of semantic-greedy is known to keep errors below 0.001" in refused.stderr
    )
    found = run(*options, *alpha)
    assert found.returncode == 0 and found.stdout.startswith("semantic-greedy --threshold "), found.stderr
    (kept,) = read_probe_file(tmp_path / "probes" / "made-up" / "target.onnx").spec.calibrations
    assert (kept["policy"], kept["alpha"], kept["n_problems"]) == ("semantic-greedy", 0.5, 8)
    assert found.stdout.split()[2] == f"{kept['threshold']:g}:"


def check_pictures(page: Path, folder: Path) -> None:
    names = {"calibration", "scores", "sweep-target", "sweep-draft"}
    names |= {f"histogram-{role}" for role in ("target", "draft", "joint")}
    assert {path.name for path in folder.iterdir()} == {f"{name}{end}" for name in names for end in (".png", ".svg")}
    for path in folder.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000
    for path in folder.glob("*.svg"):
        assert ElementTree.fromstring(path.read_text()).tag.endswith("svg")
    text = page.read_text()
    assert text.count("<svg") == len(names) and "target probe, draft steps" in text
    assert not re.findall(r"""(?:src|href)=["'](?!#)""", text)


@pytest.fixture(scope="module")
def folded(labelled, tmp_path_factory):
    pytest.importorskip("torch", reason="training needs torch: pip install '.[train]'")
    from semspec_local.lab.build import build_probes
    from semspec_local.lab.train import TrainConfig

    out = tmp_path_factory.mktemp("folded")
    config = TrainConfig(heads=("linear",), penalties=(1e-3,), max_epochs=40)
    return out / "made-up", build_probes(labelled, out, config, n_folds=4, n_resamples=100)


def test_with_folds_every_problem_is_tested_and_all_are_taught(labelled, folded):
    from semspec_local.lab.folds import ALPHAS

    place, report = folded
    collection = read_collection(labelled)
    judged = int(((collection.writers == "draft") & (collection.n_tokens > 0)).sum())
    assert report["probes"]["joint"]["n_rows"]["test"] == report["decision"]["n_steps"] == judged
    assert report["split"]["n_problems"] == {"train": 34, "validation": 6, "test": 0}
    assert [found["target"]["layer"] for found in report["folds"]["chosen"]] == [SIGNAL_LAYER["target"]] * 4
    assert report["decision"]["scores"]["joint_semantic_prob"]["auroc_in_target_cluster"]["value"] > 0.6
    assert "features_alone" in report["decision"]["beyond_logits"]["auroc_gain_over"]
    spec = read_probe_file(place / "joint.onnx").spec
    known = [found for found in report["folds"]["calibrations"] if found["threshold"] is not None]
    assert [dict(found) for found in spec.calibrations] == known
    assert {found["alpha"] for found in report["folds"]["calibrations"]} == set(ALPHAS)
    assert all(found["data"] == "made up, 4 folds" for found in known)


def test_no_head_of_a_fold_saw_what_it_is_asked_about():
    from semspec_local.lab.split import fold_by_problem, split_without_test

    ids = np.array([f"p{i % 23}" for i in range(99)])
    folds = fold_by_problem(ids, 5, seed=3)
    assert sorted(problem for fold in folds for problem in fold.test) == sorted(set(ids.tolist()))
    for fold in (*folds, split_without_test(ids, 3)):
        assert fold.n_overlap == 0 and fold.train and fold.validation
        assert len(fold.train | fold.validation | fold.test) == 23
    with pytest.raises(ConfigError, match="got 23 folds of 23 problems"):
        fold_by_problem(ids, 23, seed=0)
