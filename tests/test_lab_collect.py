"""Collecting probe data on tiny models: what is stored, and that it survives being stopped."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import numpy as np
import pytest

from semspec_local.errors import ConfigError
from semspec_local.lab.collect import CollectConfig, Collector, middle_layers
from semspec_local.lab.collection import StateKind, read_collection
from semspec_local.lab.problems import Problem, made_up_problems, read_problems
from semspec_local.policy import make_policy
from semspec_local.reasoner import Reasoner, Sources

pytest.importorskip("safetensors", reason="the extra packages of the lab are not installed")

PROBLEMS = [Problem(i, f"made:{i}", question) for i, question in enumerate(["How many?", "And then?", "Why 7?"])]
N = 3


def config(**changes) -> CollectConfig:
    facts = {
        "system": "Think.",
        "n_samples": N,
        "max_step_tokens": 8,
        "max_solution_tokens": 30,
        "target_layers": (0, 1),
        "draft_layers": (1,),
        "n_lanes": 4,
        "n_threads": 1,
    }
    return CollectConfig(**{**facts, **changes})


@pytest.fixture
def collect(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("semspec_local.lab.collect._ROUNDS", 1)  # two prefixes a group

    def run(n_groups: int | None = None, folder=tmp_path / "collection", problems=PROBLEMS, **changes):
        sources = Sources(target=tiny("llama"), draft=tiny("llama-other-seed"), pair="made")
        with Collector(folder, sources, config(**changes), "made") as collector:
            stored = set()
            for n_stored in collector.run(problems):
                stored |= {n_stored} - {0}
                if len(stored) == n_groups:
                    break
        return folder

    return run


def rows(folder):
    return [json.loads(line) for line in (folder / "index.jsonl").read_text().splitlines()]


def test_every_prefix_has_samples_of_both_models_read_by_both(collect):
    folder = collect()
    found = rows(folder)
    assert len(found) == 2 * len(PROBLEMS)
    collection = read_collection(folder)
    for row in found:
        assert {sample["writer"] for sample in row["samples"]} <= {"target", "draft"}
        assert 0 < len(row["samples"]) <= 2 * N
    n_rows = sum(len(row["samples"]) for row in found)
    assert len(collection.writers) == n_rows
    for reader, layers in (("target", 2), ("draft", 1)):
        assert len(collection.kinds(reader)) == layers * 2 * 2
        for kind in collection.kinds(reader):
            assert np.isfinite(collection.states(reader, kind)).all()
        assert (collection.feature(reader, "logprob_min") <= collection.feature(reader, "logprob_mean")).all()


def test_the_state_after_the_norm_is_collected_when_asked_for(collect):
    collection = read_collection(collect(post=True, system=""))
    for reader, layers in (("target", 3), ("draft", 2)):
        kinds = collection.kinds(reader)
        assert len(kinds) == layers * 2 * 2
        (last,) = {kind.layer for kind in kinds if kind.norm == "post"}
        assert last == 2
        means = collection.states(reader, StateKind(2, "token", "last", "post"))
        assert np.allclose((means**2).mean(axis=1), 1, atol=0.05)  # the final norm of a model without weights in it


def test_made_up_problems_are_numbered_as_they_are_made():
    some, others = made_up_problems(5, limit=3), made_up_problems(5, limit=2, offset=1)
    assert [problem.number for problem in some] == [0, 1, 2]
    assert some[1:] == others
    assert some[0].problem_id == "world-5:0"


def test_a_run_cut_short_has_one_prefix_of_many_problems_and_goes_on_to_the_same_end(collect, tmp_path):
    whole = rows(collect(folder=tmp_path / "whole"))
    folder = collect(n_groups=2)
    assert {row["problem_id"] for row in rows(folder)} == {problem.problem_id for problem in PROBLEMS}
    with (folder / "index.jsonl").open("a") as file:
        file.write('{"prefix_id": 99, "torn')
    collect()
    assert rows(folder) == whole


def test_killed_at_any_moment_it_goes_on_to_the_same_end(tmp_path):
    def command(folder):
        settings = ("--pair", "tiny", "--data", "world:3", "--limit", "12", "--samples", "4", "--post", "-t", "1")
        return [sys.executable, "-m", "semspec_local", "probe", "collect", str(folder), *settings]

    done = subprocess.run(command(tmp_path / "whole"), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "24 prefixes in " in done.stderr.splitlines()[-1]
    whole = (tmp_path / "whole" / "index.jsonl").read_bytes()
    for n_lines in (1, 5, 14):
        folder = tmp_path / f"killed-{n_lines}"
        index = folder / "index.jsonl"
        process = subprocess.Popen(command(folder), stderr=subprocess.DEVNULL)
        while process.poll() is None and not (index.exists() and index.read_bytes().count(b"\n") >= n_lines):
            time.sleep(0.001)
        process.kill()
        process.wait()
        kept = index.read_bytes()
        assert whole.startswith(kept[: kept.rfind(b"\n") + 1])
        assert subprocess.run(command(folder), capture_output=True, check=False).returncode == 0
        assert index.read_bytes() == whole


def test_a_time_budget_ends_it_after_the_solutions_or_a_group(tmp_path):
    settings = ("--pair", "tiny", "--data", "world:3", "--limit", "40", "--samples", "2", "--post", "-t", "1")
    words = [sys.executable, "-m", "semspec_local", "probe", "collect", str(tmp_path / "c"), *settings]
    for has_rows in (False, True):
        done = subprocess.run([*words, "--time-budget", "0.0001"], capture_output=True, text=True, check=False)
        assert done.returncode == 0
        assert "the time is up; the same command goes on from here" in done.stderr
        assert (tmp_path / "c" / "solutions.jsonl").exists()
        assert (tmp_path / "c" / "index.jsonl").exists() is has_rows
    assert 0 < len(rows(tmp_path / "c")) < 80


def test_prefixes_may_be_taken_from_solutions_that_both_models_wrote(collect, tmp_path):
    alone = collect(folder=tmp_path / "alone")
    both = collect(folder=tmp_path / "both", policy="always")
    again = collect(folder=tmp_path / "again", policy="always")
    assert (both / "index.jsonl").read_bytes() == (again / "index.jsonl").read_bytes()
    assert (both / "solutions.jsonl").read_bytes() != (alone / "solutions.jsonl").read_bytes()
    headers = [json.loads((folder / "collection.json").read_text()) for folder in (alone, both)]
    assert "solutions" not in headers[0]
    assert headers[1]["solutions"] == {"policy": "always", "threshold": None, "probes": {}}
    with pytest.raises(ConfigError, match=r"holds another collection \(different: solutions\)"):
        collect(folder=both, policy="random", threshold=0.5)


def test_solutions_are_written_under_the_threshold_that_the_collection_says(tmp_path, monkeypatch):
    """The policy's own, also where the pair's probe was calibrated to another."""
    used = []

    class Watched(Reasoner):
        def start(self, *arguments, **options):
            used.append(self.policy.threshold)
            return super().start(*arguments, **options)

    monkeypatch.setattr("semspec_local.lab.collect.Reasoner", Watched)
    settings = config(policy="semantic-joint", system="")
    with Collector(tmp_path / "c", Sources.from_pair("tiny"), settings, "made") as collector:
        next(collector.run(PROBLEMS))
    said = json.loads((tmp_path / "c" / "collection.json").read_text())["solutions"]["threshold"]
    assert set(used) == {said} == {make_policy("semantic-joint").threshold}


@pytest.mark.parametrize(("n_prime", "least"), [(0, 0), (1, 1), (99, None)])
def test_prefixes_begin_where_a_run_would_draft(collect, tmp_path, n_prime, least):
    folder = collect(folder=tmp_path / "c", n_prime=n_prime, n_prefixes=20)
    places: dict[str, list[int]] = {}
    for row in rows(folder):
        places.setdefault(row["problem_id"], []).append(row["step_index"])
    for found in places.values():
        if least is None:
            assert len(found) == 1, "a solution that is shorter than that has its last place"
        else:
            assert sorted(found) == list(range(least, least + len(found)))
    with pytest.raises(ConfigError, match=r"holds another collection \(different: n_prime\)"):
        collect(folder=folder, n_prime=2, n_prefixes=20)


def test_other_settings_do_not_mix_into_a_collection(collect):
    collect(n_groups=1)
    with pytest.raises(ConfigError, match=r"holds another collection \(different: n_samples\)"):
        collect(n_samples=N + 1)


def test_problems_keep_their_line_numbers(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"question": f"q{i}"}) + "\n" for i in range(5)))
    assert [(p.number, p.problem_id) for p in read_problems(path, 2, offset=3)] == [(3, "data:3"), (4, "data:4")]
    with pytest.raises(ConfigError, match="has no problems"):
        read_problems(path, limit=2, offset=9)


@pytest.mark.parametrize("line", ["{", "[1]", "{}", "null"])
def test_a_line_without_a_question_is_named(tmp_path, line):
    path = tmp_path / "data.jsonl"
    path.write_text('{"question": "q"}\n' + line + "\n")
    with pytest.raises(ConfigError, match="line 2: got"):
        read_problems(path, limit=5)


def test_a_question_may_have_other_names(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"problem": "a", "answer": "1"}\n{"id": 4, "prompt": "b"}\n{"question": "c", "prompt": 5}\n')
    assert [problem.question for problem in read_problems(path, limit=5)] == ["a", "b", "c"]


def test_other_problems_of_the_same_data_join_a_collection(collect, tmp_path):
    folder = collect(problems=PROBLEMS[:1])
    collect(problems=PROBLEMS[1:])
    whole = rows(collect(folder=tmp_path / "whole"))
    assert sorted(row["prefix_id"] for row in rows(folder)) == sorted(row["prefix_id"] for row in whole)


def test_the_layers_read_by_default_leave_out_the_last():
    assert middle_layers(28) == (14, 20, 24, 26)
    assert middle_layers(24) == (12, 17, 20, 22)
    assert middle_layers(3) == (1,)
    assert middle_layers(1) == (0,)
