"""Runs by turns: what they want together is evaluated together, and what one of them does stays its own."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from semspec_local import jobs
from semspec_local.config import ModelConfig, RunConfig, SamplingConfig
from semspec_local.errors import DecodeError
from semspec_local.jobs.runner import Runner
from semspec_local.lab.world import problems
from semspec_local.llama.context import Decoded
from semspec_local.llama.hub import Hub
from semspec_local.reasoner import Reasoner, Sources
from semspec_local.testing import TAP


class FakeContext:
    """Answers each token with itself, and remembers what came together."""

    n_batch = 4

    def __init__(self, bad: int | None = None):
        self.calls: list[list[tuple[int, int, int]]] = []
        self.trimmed: list[tuple[int, int]] = []
        self.states_wanted: list[bool] = []
        self.bad = bad

    def decode(self, tokens, positions, sequences, outputs=None):
        if self.bad in tokens:
            raise DecodeError("this token cannot be")
        self.calls.append(list(zip(sequences, positions, tokens)))
        kept = tokens if outputs and all(outputs) else tokens[-1:]
        states = {TAP: np.array(tokens, np.float32)[:, None]} if self.states_wanted[-1] else {}
        return Decoded(np.array(kept, np.float32)[:, None], states)

    def read_states(self, wanted):
        self.states_wanted.append(wanted)

    def trim(self, n_past, sequence):
        self.trimmed.append((n_past, sequence))
        return True


def counter(hub: Hub, context: FakeContext):
    """Work that wants `n` tokens one by one, and returns what came back."""

    def work(lane: int, n: int) -> list[int]:
        return [int(hub.evaluate(context, lane, [10 * n + i], i).logits[-1, 0]) for i in range(n)]

    return work


def test_states_are_read_where_one_of_those_together_wants_them_and_only_it_gets_them():
    hub, context = Hub(), FakeContext()

    def work(lane: int, wants: bool) -> list[bool]:
        return [bool(hub.evaluate(context, lane, [i], i, None, wants).states) for i in range(2)]

    found = list(hub.run(work, iter([True, False]), n_lanes=2))
    assert sorted(found) == [[False, False], [True, True]] and [len(call) for call in context.calls] == [2, 2]
    assert list(hub.run(work, iter([False]), n_lanes=1)) == [[False, False]] and context.states_wanted[-1] is False


def test_single_tokens_go_together_and_a_free_lane_takes_the_next_item():
    hub, context = Hub(), FakeContext()
    found = list(hub.run(counter(hub, context), iter([3, 1, 2, 2, 1]), n_lanes=2))
    assert sorted(found) == sorted([[30, 31, 32], [10], [20, 21], [20, 21], [10]])
    assert found[0] == [10]  # as they finish
    assert context.calls[0] == [(0, 0, 30), (1, 0, 10)]
    assert [len(call) for call in context.calls] == [2, 2, 2, 2, 1]


def test_no_more_than_fits_into_a_batch():
    hub, context = Hub(), FakeContext()
    assert len(list(hub.run(counter(hub, context), iter([2] * 6), n_lanes=6))) == 6
    assert max(len(call) for call in context.calls) == 4


def test_several_tokens_of_one_run_go_alone():
    hub, context = Hub(), FakeContext()

    def work(lane: int, tokens: list[int]) -> int:
        return int(hub.evaluate(context, lane, tokens, 5).logits[-1, 0])

    assert sorted(hub.run(work, iter([[1, 2, 3], [4], [5], [6, 7]]), n_lanes=4)) == [3, 4, 5, 7]
    assert [len(call) for call in context.calls] == [3, 2, 2]
    assert context.calls[0] == [(0, 5, 1), (0, 6, 2), (0, 7, 3)]


def test_the_fuller_context_comes_first():
    hub, one, many = Hub(), FakeContext(), FakeContext()
    order = []

    def work(lane: int, context: FakeContext) -> None:
        hub.evaluate(context, lane, [lane], 0)
        order.append(lane)

    list(hub.run(work, iter([one, many, many]), n_lanes=3))
    assert order == [1, 2, 0]


def test_a_failure_is_that_of_the_run_that_caused_it():
    hub, context = Hub(), FakeContext(bad=20)

    def work(lane: int, n: int) -> list[int] | str:
        try:
            return counter(hub, context)(lane, n)
        except DecodeError as error:
            return str(error)

    assert sorted(hub.run(work, iter([1, 2, 3]), n_lanes=3), key=str) == [[10], [30, 31, 32], "this token cannot be"]
    assert {(0, 0), (0, 1), (0, 2)} == set(context.trimmed)


def test_what_work_raises_ends_the_others_with_their_last_words():
    hub, context, said = Hub(), FakeContext(), []

    def work(lane: int, n: int) -> None:
        try:
            counter(hub, context)(lane, n)
            if n == 2:
                raise RuntimeError("stop all")
        finally:
            hub.evaluate(context, lane, [99], 7)  # as a rollback may
            said.append(lane)

    with pytest.raises(RuntimeError, match="stop all"):
        list(hub.run(work, iter([5, 2, 5, 1]), n_lanes=3))
    assert sorted(said) == [0, 1, 2]
    assert list(hub.run(counter(hub, context), iter([1]), n_lanes=1)) == [[10]]  # and it can be used again


def test_what_has_finished_comes_before_what_work_raises():
    """A first Ctrl-C ends a job at the next step; other lanes may have finished their items in the same turn."""
    hub, context = Hub(), FakeContext()

    def work(lane: int, n: int) -> list[int]:
        if lane == 2:
            hub.evaluate(context, lane, [0], 0)
            raise RuntimeError("stop all")
        return counter(hub, context)(lane, n)

    found, results = [], hub.run(work, iter([1, 5, 0, 1]), n_lanes=3)
    with pytest.raises(RuntimeError, match="stop all"):
        for result in results:
            found.append(result)
    assert found == [[10]]


def test_a_consumer_that_stops_early_ends_the_runs():
    hub, context = Hub(), FakeContext()
    found = hub.run(counter(hub, context), iter([1, 50, 50]), n_lanes=2)
    assert next(found) == [10]
    found.close()
    assert hub.evaluate(context, 0, [5], 0).logits[-1, 0] == 5  # outside of a run: at once


# -- on the embedded pair -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def asked():
    lines = [
        json.dumps({"id": f"q{i}", "prompt": problem.question}).encode() for i, problem in enumerate(problems(5, 12))
    ]
    return [jobs.entry_of(line, i + 1) for i, line in enumerate(lines)]


def answers(asked, policy: str, n_lanes: int, temperature: float):
    config = RunConfig(policy=policy, sampling=SamplingConfig(temperature=temperature))
    models = ModelConfig(n_ctx=512, n_threads=1)
    with Reasoner(Sources.from_pair("tiny"), config, models, n_lanes=n_lanes) as reasoner:
        found = list(Runner(reasoner=reasoner, seed=3).run(asked))
    assert {item.status for item in found} == {"ok"}
    return {item.id: (item.text, item.seed, item.stats["n_accepted_steps"]) for item in found}


@pytest.mark.case(44)
@pytest.mark.parametrize(
    "policy", ["never", "loglik-ratio", "semantic-joint", "semantic-ratio", "specreason", "always"]
)
def test_lanes_change_nothing_in_the_answers(asked, policy):
    alone = answers(asked, policy, 1, 0.0)
    for n_lanes in (2, 5):
        found = answers(asked, policy, n_lanes, 0.0)
        assert sum(found[item_id] == alone[item_id] for item_id in alone) >= 10  # float noise may turn one or two
    assert len({seed for _, seed, _ in alone.values()}) == 12


def test_one_bad_item_among_lanes_is_only_itself(tmp_path):
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"id": f"q{i}", "prompt": problem.question} for i, problem in enumerate(problems(5, 6))]
    lines.insert(2, {"id": "long", "prompt": "shells " * 3000})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ("--pair", "tiny", "--policy", "loglik-ratio", "-t", "1", "-c", "512", "--lanes", "4", "--ordered")
    command = [sys.executable, "-m", "semspec_local", "batch", str(path), "-o", str(out), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [item["id"] for item in found] == [line["id"] for line in lines]
    assert [item["id"] for item in found if item["status"] == "error"] == ["long"]
    assert "too long" in found[2]["error"]["message"]
