"""Trained models of other makers, marked `real`: a target with a sliding window, and a draft with another vocabulary.

They need `semspec-local models pull tests/models/other-models.toml` (320 MB).
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from semspec_local.config import ModelConfig, RunConfig, SamplingConfig
from semspec_local.errors import PairNotPulledError
from semspec_local.llama.facts import model_facts
from semspec_local.llama.session import LlamaStepModel
from semspec_local.protocols import TapPoint
from semspec_local.reasoner import Reasoner, Sources

pytestmark = pytest.mark.real

MANIFEST = Path(__file__).parent / "models" / "other-models.toml"
GREEDY = SamplingConfig(temperature=0)
WINDOW = 512
STORY = "".join(
    f"On day {day} the mill ground {3 * day % 17 + 2} sacks of wheat and {5 * day % 13 + 1} sacks of rye.\n"
    for day in range(1, 41)
)
QUESTION = f"{STORY}\nWrite a short report on the mill, day by day, in paragraphs with an empty line between them."


@pytest.fixture(scope="module")
def sources() -> Sources:
    try:
        return Sources.from_pair(str(MANIFEST))
    except PairNotPulledError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def reasoner(sources):
    config = RunConfig(policy="random", threshold=0.5, max_tokens=96, max_step_tokens=16, sampling=GREEDY)
    with Reasoner(sources, config, ModelConfig(n_ctx=2048, n_threads=2)) as loaded:
        yield loaded


def run(reasoner: Reasoner, **changes):
    speculation = reasoner.start(QUESTION, seed=2, config=replace(reasoner.config, **changes))
    return speculation, list(speculation)


@pytest.mark.case(9)
def test_rejections_past_a_sliding_window_leave_the_targets_own_text(reasoner):
    assert model_facts(reasoner.sources.target)["memory"] == "sliding window"
    alone, _ = run(reasoner, policy="never", threshold=None)
    pair, records = run(reasoner, threshold=0.0)
    assert len(alone.target.prompt) > WINDOW
    assert sum(not record.committed for record in records) >= 3
    assert pair.target.committed == alone.target.committed


@pytest.mark.case(9)
def test_states_past_a_sliding_window_are_the_same_after_a_rejected_step(sources):
    tap = TapPoint(12)
    with LlamaStepModel(sources.target, n_ctx=2048, n_threads=2, sampling=GREEDY, taps=[tap], n_ubatch=32) as model:
        prompt = model.vocabulary.encode(QUESTION)
        step = model.vocabulary.encode("The mill ground wheat on every day, and on most days rye as well.\n\n")
        model.prefill(prompt)
        first = model.score(step).states[tap].own
        model.rollback(len(prompt))
        model.score(model.vocabulary.encode("The mill stood still for all of the forty days." * 3))
        model.rollback(len(prompt))
        again = model.score(step).states[tap].own
    assert len(prompt) > WINDOW
    assert np.array_equal(first, again)


@pytest.mark.case(1)
def test_a_draft_with_another_vocabulary_drafts_and_says_so(sources, caplog):
    config = RunConfig(policy="always", max_tokens=80, max_step_tokens=16, sampling=GREEDY)
    with caplog.at_level(logging.WARNING), Reasoner(sources, config, ModelConfig(n_ctx=2048, n_threads=2)) as loaded:
        speculation, records = run(loaded)
    assert any("vocabular" in message for message in caplog.messages)
    drafted = [record for record in records if record.origin == "draft" and record.committed]
    assert drafted
    target, draft = speculation.target, speculation.draft
    assert target.model.vocabulary.decode(target.committed) == speculation.text
    assert draft.model.vocabulary.decode(draft.committed) == speculation.text


@pytest.mark.case(1)
def test_what_looks_like_a_control_token_of_the_other_model_stays_text(reasoner):
    target, draft = (reasoner.step_models[role].vocabulary for role in ("target", "draft"))
    for own, other, text in ((target, draft, "<end_of_turn>"), (draft, target, "<|im_end|>")):
        assert own.encode(text, control=True) != own.encode(text)
        for vocabulary in (own, other):
            tokens = vocabulary.encode(text)
            assert len(tokens) > 1
            assert not set(tokens) & vocabulary.eog_tokens
            assert vocabulary.decode(tokens) == text
