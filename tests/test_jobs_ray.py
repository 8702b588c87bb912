"""The same job on a Ray cluster of two workers on this machine, and what a worker's death costs."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from semspec_local.lab.world import problems

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install '.[ray]'"),
    pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="workers are found through /proc"),
]

QUICK = ("--pair", "tiny", "--policy", "loglik-ratio", "-t", "1", "-c", "512", "--temp", "0")
ON_RAY = ("--engine", "ray", "--actors", "2")


def command(source: Path, out: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "semspec_local", "batch", str(source), "-o", str(out), *QUICK, *words]


def batch(source: Path, out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(source, out, *words), capture_output=True, text=True, check=False, timeout=300)


def results(path: Path) -> dict[str, tuple]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({item["id"] for item in found}) == len(found)
    return {item["id"]: (item["status"], item["text"], item["seed"], item["error"]) for item in found}


def questions(path: Path, n: int) -> Path:
    lines = [{"id": f"q{i}", "prompt": problem.question} for i, problem in enumerate(problems(41, n))]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def workers() -> list[int]:
    """The processes of Ray's actors, those that do not idle."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(b"ray::PairWorker.run"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_the_answers_are_those_of_this_machine(tmp_path):
    source = questions(tmp_path / "in.jsonl", 10)
    with source.open("a") as file:
        file.write("[1]\n")
    here, there = tmp_path / "here.jsonl", tmp_path / "there.jsonl"
    assert batch(source, here, "--lanes", "1").returncode == 3
    done = batch(source, there, *ON_RAY)
    assert done.returncode == 3, done.stderr
    assert results(there) == results(here)
    again = batch(source, there, *ON_RAY)
    assert again.returncode == 3 and "11 of 11 items are finished already" in again.stderr


def test_more_workers_than_cores_keep_nobody_waiting(tmp_path):
    source, out = questions(tmp_path / "in.jsonl", 6), tmp_path / "out.jsonl"
    n_cores = len(os.sched_getaffinity(0))
    assert batch(source, out, "--engine", "ray", "--actors", str(n_cores + 3)).returncode == 0
    assert len(results(out)) == 6


@pytest.mark.skipif((os.cpu_count() or 1) >= 4, reason="-t may not be more than the cores where there are four")
def test_an_actor_that_no_machine_has_room_for_is_refused(tmp_path):
    done = batch(questions(tmp_path / "in.jsonl", 1), tmp_path / "out.jsonl", *ON_RAY, "-t", "4")
    assert done.returncode == 2 and "an actor wants 4 cores (-t), and no machine here has more than" in done.stderr


def test_a_worker_that_dies_costs_only_what_it_ran(tmp_path):
    source, out, whole = questions(tmp_path / "in.jsonl", 300), tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    process = subprocess.Popen(command(source, out, *ON_RAY), stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 120
    while time.monotonic() < end and not (out.exists() and out.read_bytes().count(b"\n") >= 5 and workers()):
        time.sleep(0.005)
    os.kill(workers()[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "its items run again" in errors
    assert batch(source, whole, "--lanes", "1").returncode == 0
    assert results(out) == results(whole)


def test_what_cannot_be_loaded_is_said_once(tmp_path):
    source = questions(tmp_path / "in.jsonl", 3)
    done = batch(source, tmp_path / "out.jsonl", *ON_RAY, "--policy", "semantic-joint", "--joint-probe", "no.onnx")
    assert done.returncode == 4 and "no file at no.onnx" in done.stderr and "Traceback" not in done.stderr


def test_options_of_the_cluster_go_with_the_cluster(tmp_path):
    source = questions(tmp_path / "in.jsonl", 1)
    done = batch(source, tmp_path / "out.jsonl", "--actors", "3")
    assert done.returncode == 2 and "--actors is for --engine ray" in done.stderr
    done = batch(source, tmp_path / "out.jsonl", *ON_RAY, "--traces", str(tmp_path / "traces"))
    assert done.returncode == 2 and "--traces is for this machine alone" in done.stderr
