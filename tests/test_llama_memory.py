"""Speculation on every kind of memory: what was rejected leaves no trace in what is written next."""

from __future__ import annotations

import numpy as np
import pytest
from gguf_factory import spm_vocab, write_model
from llama_support import FREE, GREEDY, TOKENS, at_most, session

from semspec_local.config import RunConfig
from semspec_local.engine import Prompts, Speculation
from semspec_local.errors import ModelError
from semspec_local.llama.context import LlamaContext
from semspec_local.llama.native import C
from semspec_local.llama.session import LlamaStepModel
from semspec_local.policy import Decision, Policy, StepScores, make_policy
from semspec_local.protocols import StepStates, TapPoint

PROMPT = TOKENS[:40]  # the windows of gemma2 are 16 tokens long
KINDS = ["llama", "llama-q8", "qwen2", "gemma2", "mamba", "lfm2", "spm"]
TAP = TapPoint(1)


class Constant:
    """A probe for these models."""

    tap = TAP

    def semantic_prob(self, states: StepStates) -> float:
        assert np.isfinite(states.pool("predictor", "mean")).all()
        return 0.5


def run(
    target: LlamaStepModel,
    draft: LlamaStepModel | None,
    policy: str | Policy,
    threshold: float | None = None,
    **config,
):
    """Text, token ids and records of a run; after every record the caches hold the prompt and what is committed."""
    loop = Speculation(
        Prompts(PROMPT, PROMPT),
        target=target,
        draft=draft,
        policy=make_policy(policy, threshold) if isinstance(policy, str) else policy,
        config=RunConfig(**{"max_tokens": 100, "max_step_tokens": 8, "sampling": target.sampling, **config}),
        probes={"draft": Constant(), "target": Constant()},
        seed=3,
    )
    records = []
    for record in loop:
        records.append(record)
        for side in (loop.target, loop.draft):
            if side is not None and side.active:
                assert side.model.tokens == PROMPT + side.committed
    return loop, records


@pytest.mark.case(4)
@pytest.mark.case(9)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("policy", "threshold"), [("random", 0.0), ("semantic-ratio", 50.0)])
def test_rejecting_every_step_gives_the_targets_own_text(tiny, tmp_path, kind, policy, threshold):
    path = tiny(kind)
    other = write_model(tmp_path / "draft.gguf", seed=9, **({"vocab": spm_vocab()} if kind == "spm" else {}))
    with session(path, taps=[TAP]) as target, session(other, sampling=FREE, taps=[TAP]) as draft:
        alone, _ = run(target, None, "never")
        pair, records = run(target, draft, policy, threshold)
    rejected = [record for record in records if not record.committed]
    assert len(rejected) >= 3
    assert sum(record.n_target_tokens or 0 for record in rejected) > 10, "the target has read what it then forgot"
    assert pair.target.committed == alone.target.committed
    assert (pair.text, pair.stop_reason) == (alone.text, alone.stop_reason)


class Decided(Policy):
    """Decides as another run did, and asks for nothing."""

    name = "decided"

    def __init__(self, decisions: list[bool]) -> None:
        super().__init__()
        self._decisions = iter(decisions)

    def _rule(self, scores: StepScores, draw: float) -> Decision:
        return Decision(next(self._decisions), "always")


@pytest.mark.parametrize("kind", KINDS)
def test_being_asked_for_ratings_changes_nothing_but_the_decisions(tiny, kind):
    def runs(policy: Policy):
        options = {"sampling": FREE, "taps": [TAP]}
        with session(tiny(kind), **options) as target, session(tiny(kind), **options) as draft:
            loop, records = run(target, draft, policy)
        return loop.target.committed, loop.draft.committed, [r.accepted for r in records if r.accepted is not None]

    asked = runs(make_policy("specreason", 5))
    assert len(asked[2]) >= 3
    assert runs(Decided(asked[2])) == asked


@pytest.mark.parametrize("kind", KINDS)
def test_accepting_every_step_of_an_equal_draft_gives_the_targets_own_text(tiny, kind):
    with session(tiny(kind), taps=[TAP]) as target, session(tiny(kind), taps=[TAP]) as draft:
        alone, _ = run(target, None, "never")
        pair, records = run(target, draft, "always")
    assert [record.origin for record in records[:3]] == ["target", "draft", "draft"]
    assert all(record.committed for record in records)
    assert pair.target.committed == pair.draft.committed == alone.target.committed
    assert (pair.text, pair.stop_reason) == (alone.text, alone.stop_reason)


@pytest.mark.parametrize("kind", KINDS)
def test_a_coin_that_takes_half_the_steps_of_an_equal_draft_gives_the_targets_own_text(tiny, kind):
    with session(tiny(kind), taps=[TAP]) as target, session(tiny(kind), taps=[TAP]) as draft:
        alone, _ = run(target, None, "never")
        pair, records = run(target, draft, "random", 0.5)
    assert {record.committed for record in records} == {True, False}
    assert pair.target.committed == alone.target.committed


@pytest.mark.case(5)
@pytest.mark.case(6)
@pytest.mark.parametrize("kind", KINDS)
def test_the_second_run_in_one_session_equals_the_first(tiny, kind):
    options = {"sampling": FREE, "taps": [TAP]}
    with session(tiny(kind), **options) as target, session(tiny(kind), **options) as draft:
        texts = [run(target, draft, "random", 0.5)[0].target.committed for _ in range(2)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("kind", ["llama", "gemma2", "mamba", "lfm2"])
def test_an_abandoned_run_leaves_the_caches_at_what_was_committed(tiny, kind):
    with session(tiny(kind)) as target, session(tiny(kind)) as draft:
        loop = Speculation(
            Prompts(PROMPT, PROMPT),
            target=target,
            draft=draft,
            policy=make_policy("random", 0.0),
            config=RunConfig(max_step_tokens=8, sampling=GREEDY),
            seed=0,
        )
        records = iter(loop)
        next(records), next(records)
        records.close()
        assert target.tokens == draft.tokens == PROMPT + loop.target.committed
        with session(tiny(kind)) as fresh:
            fresh.prefill(target.tokens)
            assert target.propose(at_most(8)).tokens == fresh.propose(at_most(8)).tokens


def test_memories_say_whether_they_can_be_cut(tiny):
    can_trim = {}
    for kind in ("llama", "gemma2", "mamba", "lfm2"):
        with session(tiny(kind)) as model:
            can_trim[kind] = model.context.can_trim
    assert can_trim == {"llama": True, "gemma2": True, "mamba": False, "lfm2": False}


@pytest.mark.case(9)
def test_a_window_that_has_moved_past_the_cut_is_read_again(tiny, monkeypatch):
    """With a window that is not kept whole (as another llama.cpp might), a cut into lost cells has to be noticed."""
    original = C.llama_init_from_model

    def small_window(model, parameters):
        parameters.swa_full = False
        return original(model, parameters)

    monkeypatch.setattr(C, "llama_init_from_model", small_window)
    # A window's cells are padded to 256, so only a longer text loses any.
    with session(tiny("gemma2"), n_ctx=1024, n_ubatch=32) as model, session(tiny("gemma2"), n_ctx=1024) as fresh:
        model.prefill(TOKENS[:20])
        for start in range(0, 400, 40):
            model.score(TOKENS[start : start + 40])
        model.rollback(60)
        fresh.prefill(model.tokens)
        assert np.allclose(model._logits, fresh._logits, atol=0.05)
        assert model.propose(at_most(5)).tokens == fresh.propose(at_most(5)).tokens


@pytest.mark.case(8)
def test_a_memory_that_does_not_come_back_is_refused_at_load(tiny, monkeypatch):
    closed = []
    monkeypatch.setattr(LlamaContext, "load_state", lambda self, state, sequence=0: False)
    close = LlamaContext.close
    monkeypatch.setattr(LlamaContext, "close", lambda self: closed.append(close(self)))
    with pytest.raises(ModelError, match=r"mamba.*cannot roll back"):
        session(tiny("mamba"), sampling=GREEDY)
    assert closed, "what was loaded is given back"
