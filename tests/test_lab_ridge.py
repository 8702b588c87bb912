"""Ridge probes and the joint head that is stacked on them: algebra, choice, and the whole way to files that run."""

from __future__ import annotations

import numpy as np
import pytest
from lab_support import EXACT, N_EMBD, SIGNAL_LAYER, make_collection

from semspec_local.errors import ConfigError
from semspec_local.lab.collection import read_collection
from semspec_local.lab.exam import predict_rows
from semspec_local.lab.joint_rows import joined, judged_rows
from semspec_local.lab.labels import make_labels, read_labels, write_labels
from semspec_local.protocols import FEATURES
from semspec_local.roles import ROLES

pytest.importorskip("torch", reason="training needs torch: pip install '.[train]'")

from semspec_local.cli.probe_lab import train
from semspec_local.lab import ridge
from semspec_local.lab.build import build_probes
from semspec_local.lab.train import HEADS, JOINT_HEADS, TrainConfig

CONFIG = TrainConfig(heads=("ridge",), joint_heads=("stacked",))
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = make_collection(tmp_path_factory.mktemp("lab") / "collection")
    collection = read_collection(path)
    write_labels(make_labels(collection, EXACT), collection)
    return path


@pytest.fixture(scope="module")
def built(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("probes")
    return out / "made-up", build_probes(folder, out, CONFIG, n_folds=3, n_resamples=100)


@pytest.mark.parametrize(("n", "width"), [(60, 7), (7, 60), (30, 30)])
def test_both_forms_are_the_usual_ridge_regression(n, width):
    rows, share = RNG.normal(3, 5, (n, width)), RNG.random(n)
    rows[:, 2] = 4  # a constant is not scaled, and changes nothing
    found = ridge.fit_ridge(rows, share, [10.0, 1000.0])
    scaled = (rows - rows.mean(0)) / np.where(rows.std(0) < 1e-6, 1, rows.std(0))
    for at, penalty in enumerate([10.0, 1000.0]):
        usual = np.linalg.solve(scaled.T @ scaled + penalty * np.eye(width), scaled.T @ (share - share.mean()))
        np.testing.assert_allclose(found.weights[:, at], usual, atol=1e-10)
        np.testing.assert_allclose(found(rows)[:, at], scaled @ usual + share.mean(), atol=1e-10)


def test_the_logistic_regression_is_at_its_minimum_and_finds_what_made_the_shares():
    rows = RNG.normal(2, 3, (4000, 3))
    odds = 0.4 * rows[:, 0] - 0.2 * rows[:, 1] - 0.3
    share = RNG.binomial(8, 1 / (1 + np.exp(-odds))) / 8
    found = ridge.fit_logistic(rows, share)
    np.testing.assert_allclose(found(rows)[:, 0], odds, atol=0.25)
    scaled, probs = (rows - found.mean) / found.std, 1 / (1 + np.exp(-found(rows)[:, 0]))
    slope = scaled.T @ (probs - share) + 1e-3 * len(rows) * found.weights[:, 0]
    np.testing.assert_allclose(slope, 0, atol=1e-6)
    assert abs((probs - share).sum()) < 1e-6, "the bias is not held back"


def test_two_stages_are_one_layer():
    states = [RNG.normal(0, 2, (30, n)) for n in (5, 4)]
    own, share = RNG.normal(1, 3, (30, 2)), RNG.random(30)
    probes = [ridge.fit_ridge(one, share, [5.0]) for one in states]
    inputs = np.concatenate([*(probe(one) for probe, one in zip(probes, states)), own], axis=1)
    second = ridge.fit_logistic(inputs, share)
    layer = ridge._as_one_layer(probes, second)
    whole = np.concatenate([*states, own], axis=1)
    np.testing.assert_allclose(layer(whole), second(inputs), atol=1e-9)
    probs = 1 / (1 + np.exp(-second(inputs)[:, 0]))
    np.testing.assert_allclose(layer.mlp(sigmoid=True).forward(whole), probs, atol=1e-5)


@pytest.mark.parametrize("role", ROLES)
def test_the_layer_that_knows_is_chosen(folder, role):
    collection = read_collection(folder)
    rows, labels = collection.n_tokens > 0, read_labels(collection)
    share = labels.share("joint", role)[rows]
    found = ridge.choose(collection, role, rows, share, seed=0)
    assert found.kind.layer == SIGNAL_LAYER[role]
    assert len(found.sweep) == len(collection.kinds(role)) * len(ridge.PENALTIES)


@pytest.mark.parametrize(("n", "width"), [(60, 7), (20, 60)])
def test_cross_validation_is_a_regression_without_the_part(n, width):
    states, share = RNG.normal(0, 5, (n, width)).astype(np.float32), RNG.random(n)
    part = np.arange(n) % ridge.N_FOLDS
    scaled = (states - states.mean(0)) / states.std(0)
    for at, penalty in enumerate(ridge.PENALTIES):
        for number in range(ridge.N_FOLDS):
            kept, centre = part != number, share[part != number].mean()
            x = scaled[kept]
            usual = np.linalg.solve(x.T @ x + penalty * np.eye(width), x.T @ (share[kept] - centre))
            found = ridge._unseen(states, share, part)[~kept, at]
            np.testing.assert_allclose(found, scaled[~kept] @ usual + centre, atol=1e-4)


def test_no_row_was_seen_by_what_judges_it():
    """States that name their problem, and shares that belong to problems alone: these can be learnt by heart only."""
    problem = np.repeat(np.arange(40), 8)
    states = (np.eye(40)[problem] + RNG.normal(0, 0.01, (320, 40))).astype(np.float32)
    share = RNG.random(40)[problem]
    by_problem = ridge._parts(problem.astype(str), 0)
    by_row = RNG.permutation(320) % ridge.N_FOLDS
    unseen, seen = (ridge._unseen(states, share, part)[:, 0] for part in (by_problem, by_row))
    assert np.corrcoef(unseen, share)[0, 1] < 0.05
    assert np.corrcoef(seen, share)[0, 1] > 0.9, "parts of rows would show what the problem's other rows have"


def test_the_probes_run_and_the_report_says_how_they_were_chosen(folder, built):
    place, report = built
    collection = read_collection(folder)
    for role in ROLES:
        chosen = report["probes"][role]["chosen"]
        assert chosen["layer"] == SIGNAL_LAYER[role] and chosen["head"] == "ridge"
        assert chosen["penalty"] in ridge.PENALTIES
        assert report["probes"][role]["onnx_parity_max_difference"] < 1e-5
        probs = predict_rows(place / f"{role}.onnx", role, collection)
        assert np.nanmin(probs) >= 0 and np.nanmax(probs) <= 1
    joint = report["probes"]["joint"]
    assert joint["chosen"]["head"] == "stacked"
    assert {role: reads["layer"] for role, reads in joint["reads"].items()} == SIGNAL_LAYER
    assert joint["test"]["r2"]["value"] > 0.2
    assert {fold["head"] for fold in report["folds"]["chosen"]} == {"stacked"}
    judged = judged_rows(collection)
    probs = predict_rows(place / "joint.onnx", "joint", collection)
    assert np.isnan(probs[~judged]).all() and not np.isnan(probs[judged]).any()


def test_without_states_it_is_a_regression_on_the_features(folder):
    collection = read_collection(folder)
    rows, judged = collection.n_tokens > 0, judged_rows(collection)
    found = ridge.fit_stacked(collection, read_labels(collection), rows, judged, (), FEATURES, seed=0)
    assert found.kinds == {} and found.mlp.n_embd == len(FEATURES) == joined(collection, {}, FEATURES).shape[1]
    both = ridge.fit_stacked(collection, read_labels(collection), rows, judged, ROLES, FEATURES, seed=0)
    assert both.mlp.n_embd == sum(N_EMBD.values()) + len(FEATURES)


def test_one_problem_is_too_few(folder):
    collection = read_collection(folder)
    rows = collection.problem_ids == collection.problem_ids[0]
    with pytest.raises(ConfigError, match="only one is left"):
        ridge.choose(collection, "target", rows, np.ones(int(rows.sum())), seed=0)


@pytest.mark.parametrize(
    ("heads", "said"),
    [
        ({"heads": ("ridge", "mlp")}, "ridge goes alone"),
        ({"joint_heads": ("linear", "stacked")}, "stacked goes alone"),
        ({"heads": ("stacked",)}, "wanted some of linear, mlp, ridge"),
        ({"joint_heads": ("ridge",)}, "wanted some of linear, mlp, stacked"),
        ({"heads": ()}, "heads are none"),
    ],
)
def test_heads_that_do_not_go_together_are_refused(heads, said):
    with pytest.raises(ConfigError, match=said):
        TrainConfig(**heads)


def test_the_command_offers_the_heads_that_there_are():
    options = {option.name: option.type for option in train.params}
    assert tuple(options["heads"].choices) == HEADS and tuple(options["joint_heads"].choices) == JOINT_HEADS
