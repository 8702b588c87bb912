"""Many sequences at once give what one sequence gives: texts, states and log-probabilities."""

from __future__ import annotations

import numpy as np
import pytest
from gguf_factory import write_model

from semspec_local.config import ModelConfig, RunConfig, SamplingConfig
from semspec_local.errors import ConfigError, DecodeError
from semspec_local.llama.lanes import Job, LlamaLanes
from semspec_local.llama.session import LlamaStepModel
from semspec_local.protocols import TapPoint
from semspec_local.reasoner import Reasoner, Sources
from semspec_local.steps import StepReader

TAPS = [TapPoint(0), TapPoint(1)]
GREEDY = SamplingConfig(temperature=0)
PREFIXES = ["one plus two", "The cat sat on the mat, and then", "x"]


@pytest.fixture(scope="module")
def path(tiny):
    return tiny("llama")


@pytest.fixture
def lanes(path):
    with LlamaLanes(path, n_lanes=5, n_trunks=3, n_ctx=128, n_threads=1, sampling=GREEDY, taps=TAPS) as opened:
        yield opened


@pytest.fixture(scope="module")
def single(path):
    with LlamaStepModel(path, n_ctx=128, n_threads=1, sampling=GREEDY, taps=TAPS) as opened:
        yield opened


def jobs(lanes, lengths):
    """One trunk per prefix, planted when its first job is taken; each job has a length of its own."""
    for number, prefix in enumerate(PREFIXES):
        trunk = lanes.plant(lanes.model.vocabulary.encode(prefix))
        for length in lengths:
            reader = StepReader(max_tokens=length, boundary="\0")
            yield Job((number, length), trunk, reader, seed=number)


@pytest.mark.case(5)
@pytest.mark.case(44)
def test_every_lane_writes_what_it_would_write_alone(lanes, single):
    lengths = [3, 11, 1, 7, 20, 2, 9]
    seen = set()
    for job, step in lanes.write(jobs(lanes, lengths)):
        seen.add(job.key)
        single.prefill(job.trunk.tokens)
        alone = single.propose(StepReader(max_tokens=job.key[1], boundary="\0"), logprobs=True)
        assert step.tokens[: len(alone.tokens)] == alone.tokens
        n = len(alone.tokens)
        np.testing.assert_allclose(step.logprobs[:n], alone.logprobs, atol=2e-2)
        for tap in TAPS:
            np.testing.assert_allclose(step.states[tap].before, alone.states[tap].before, atol=2e-2)
            np.testing.assert_allclose(step.states[tap].own[:n], alone.states[tap].own, atol=2e-2)
    assert seen == {(number, length) for number in range(len(PREFIXES)) for length in lengths}


def test_reading_after_a_trunk_leaves_it_as_it_was(lanes, single):
    vocabulary = lanes.model.vocabulary
    trunk = lanes.plant(vocabulary.encode(PREFIXES[1]))
    texts = [
        vocabulary.encode(text) for text in ("it slept.", "", "it ran away, and nobody saw it again.", "it slept.")
    ]
    steps = lanes.read(trunk, texts)
    assert steps[1].tokens == []
    for text, step in zip(texts, steps):
        if text:
            single.prefill(trunk.tokens)
            alone = single.score(text, logprobs=True)
            np.testing.assert_allclose(step.logprobs, alone.logprobs, atol=2e-2)
            np.testing.assert_array_equal(step.in_top2, alone.in_top2)
            np.testing.assert_allclose(step.states[TAPS[1]].own, alone.states[TAPS[1]].own, atol=2e-2)
    np.testing.assert_array_equal(steps[0].logprobs, steps[3].logprobs)


def test_lanes_and_trunks_are_free_again_after_use(lanes):
    for _ in range(3):
        trunks = {}
        for job, _step in lanes.write(jobs(lanes, [4, 4])):
            trunks[id(job.trunk)] = job.trunk
        for trunk in trunks.values():
            lanes.release(trunk)
    assert len(lanes._free_lanes) == 5
    assert len(lanes._free_trunks) == 3


def test_lanes_and_trunks_come_back_from_what_was_broken_off(lanes):
    writing = lanes.write(jobs(lanes, [1, 50, 50]))
    next(writing)
    writing.close()
    assert len(lanes._free_lanes) == 5
    free = list(lanes._free_trunks)
    with pytest.raises(DecodeError):
        lanes.plant([10**6])
    assert lanes._free_trunks == free


def test_sequences_whose_common_room_would_change_how_the_model_reads_are_refused(tmp_path):
    """LongRoPE has factors for short contexts and for long ones, and llama.cpp goes by the room of all sequences."""
    key = "llama__rope__scaling__"
    changes = {f"{key}original_context_length": 256}
    long_rope = write_model(tmp_path / "longrope.gguf", **changes)
    yarn = write_model(tmp_path / "yarn.gguf", **changes, **{f"{key}type": "yarn"})

    def lanes_of(path, n_lanes, n_ctx):
        config = RunConfig(policy="always")
        sources = Sources(target=path, draft=path)
        with Reasoner(sources, config, ModelConfig(n_ctx=n_ctx, n_threads=1), n_lanes=n_lanes) as reasoner:
            return reasoner.n_lanes

    assert [lanes_of(long_rope, n, n_ctx) for n, n_ctx in ((1, 256), (2, 128), (4, 512))] == [1, 2, 4]
    for n, n_ctx, most in ((2, 256, 1), (3, 128, 2)):
        with pytest.raises(ConfigError, match=f"at most {most} go together: use fewer lanes, or a smaller -c"):
            lanes_of(long_rope, n, n_ctx)
    assert lanes_of(long_rope, 0, 256) == 1
    assert lanes_of(yarn, 3, 128) == 3


def test_a_seed_belongs_to_its_job_whatever_the_lane(path):
    sampling = SamplingConfig(temperature=1.5, top_k=0, top_p=1.0)

    def texts(n_lanes):
        with LlamaLanes(path, n_lanes=n_lanes, n_trunks=1, n_ctx=128, n_threads=1, sampling=sampling) as lanes:
            trunk = lanes.plant(lanes.model.vocabulary.encode(PREFIXES[0]))
            made = (Job(seed, trunk, StepReader(max_tokens=6), seed) for seed in range(6))
            return {job.key: step.tokens for job, step in lanes.write(made)}

    assert texts(1) == texts(4)
