"""What is written in place of a rejected step: the model's own, evaluated only from where it differs."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
from llama_support import FREE, GREEDY, NOISE, TOKENS, at_most, script, session, unscript

from semspec_local.config import RunConfig
from semspec_local.engine import Prompts, Speculation
from semspec_local.llama.context import LlamaContext
from semspec_local.llama.hub import Hub
from semspec_local.llama.kept import N_KEPT
from semspec_local.llama.lane_model import LaneStepModel
from semspec_local.llama.model import LlamaModel
from semspec_local.llama.native import C
from semspec_local.policy import make_policy
from semspec_local.protocols import TapPoint

KINDS = ["llama", "qwen2", "gemma2", "spm"]
PROMPT, STEP, OTHER = TOKENS[:40], TOKENS[40:70], [9, 8, 7]
TAPS = {"none": [], "through a callback": [TapPoint(0), TapPoint(2)], "handed out": [TapPoint(2, "post")]}


@contextmanager
def evaluated(model):
    """The tokens that llama.cpp is asked to evaluate meanwhile."""
    context, seen = model.context, []
    decode, decode_one = context.decode, context.decode_one

    def counting(tokens, *arguments, **options):
        seen.extend(tokens)
        return decode(tokens, *arguments, **options)

    def counting_one(token, position):
        seen.append(token)
        decode_one(token, position)

    context.decode, context.decode_one = counting, counting_one
    try:
        yield seen
    finally:
        del context.decode, context.decode_one


def n_in_memory(model) -> int:
    return int(C.llama_memory_seq_pos_max(model.context._memory, model.sequence)) + 1


def reject(model, tokens=STEP) -> None:
    """Read a step as a verification does, and go back."""
    n_past = model.n_past
    model.score(tokens, logprobs=True)
    model.rollback(n_past)
    assert model.n_past == n_past


def same(found, wanted, *, taps=()) -> None:
    """Two written steps, and what is known of their tokens."""
    assert found.tokens == wanted.tokens and found.end == wanted.end
    np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=0.05)
    assert set(found.states) == set(wanted.states) == set(taps)
    for tap in taps:
        np.testing.assert_allclose(found.states[tap].before, wanted.states[tap].before, **NOISE)
        np.testing.assert_allclose(found.states[tap].own, wanted.states[tap].own, **NOISE)


@pytest.mark.parametrize("taps", TAPS.values(), ids=TAPS)
@pytest.mark.parametrize("n_alike", [0, 1, 13, 29, 30])
@pytest.mark.parametrize("kind", KINDS)
def test_only_what_differs_is_evaluated(tiny, kind, n_alike, taps):
    with session(tiny(kind), taps=taps) as model, session(tiny(kind), taps=taps) as fresh:
        for one in (model, fresh):
            one.prefill(PROMPT)
        reject(model)
        own = STEP[:n_alike] + OTHER
        steps = []
        for one in (model, fresh):
            script(one, own)
            with evaluated(one) as seen:
                steps.append(one.propose(at_most(len(own)), logprobs=True))
            unscript(one)
            assert steps[-1].n_reused == (n_alike if one is model else 0)
            assert seen == (OTHER if one is model else own)
        same(*steps, taps=taps)
        assert model.tokens == PROMPT + own and n_in_memory(model) == model.n_past
        # And everything goes on from there.
        same(*(one.propose(at_most(8), logprobs=True) for one in (model, fresh)), taps=taps)


@pytest.mark.parametrize("n", [1, 12, 30])
def test_a_step_that_ends_within_the_rejected_one_evaluates_nothing(tiny, n):
    taps = TAPS["handed out"]
    with session(tiny("qwen2"), taps=taps) as model, session(tiny("qwen2"), taps=taps) as fresh:
        steps = []
        for one in (model, fresh):
            one.prefill(PROMPT)
            if one is model:
                reject(model)
            script(one, STEP)
            with evaluated(one) as seen:
                steps.append(one.propose(at_most(n), logprobs=True))
            unscript(one)
            assert len(seen) == (0 if one is model else n)
        same(*steps, taps=taps)
        assert n_in_memory(model) == model.n_past == len(PROMPT) + n
        same(*(one.propose(at_most(8), logprobs=True) for one in (model, fresh)), taps=taps)


@pytest.mark.parametrize("kind", [*KINDS, "mamba", "lfm2"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_model_writes_what_it_would_have_written(tiny, kind, share):
    """Also one whose memory cannot be cut, which evaluates all of it."""
    with session(tiny(kind)) as model, session(tiny(kind)) as fresh:
        model.prefill(PROMPT)
        fresh.prefill(PROMPT)
        wanted = fresh.propose(at_most(20), logprobs=True)
        guess = list(wanted.tokens)
        wrong_at = int(share * len(guess))
        guess[wrong_at] = (guess[wrong_at] + 1) % 256
        reject(model, guess)
        with evaluated(model) as seen:
            same(model.propose(at_most(20), logprobs=True), wanted)
        n = len(guess) - wrong_at if model.context.can_trim else len(guess)
        assert seen[:n] == wanted.tokens[-n:]


@pytest.mark.parametrize("seed", range(6))
def test_a_sampled_step_is_the_one_that_the_seed_gives_anyway(tiny, seed):
    """The random numbers are those that would have been drawn, whatever of the rejected step is reused."""
    with session(tiny("qwen2"), sampling=FREE) as model, session(tiny("qwen2"), sampling=FREE) as fresh:
        for one in (model, fresh):
            one.prefill(PROMPT)
            one.reseed(seed)
        wanted = fresh.propose(at_most(20), logprobs=True)
        reject(model, [*wanted.tokens[: 3 * seed], *OTHER])
        found = model.propose(at_most(20), logprobs=True)
        assert found.n_reused >= 3 * seed
        same(found, wanted)
        same(*(one.propose(at_most(20), logprobs=True) for one in (model, fresh)))


@pytest.mark.parametrize("then", ["score", "peek", "prefill", "forget", "rollback", "accept"])
def test_a_rejected_step_shows_in_nothing_else(tiny, then):
    with session(tiny("llama")) as model, session(tiny("llama")) as fresh:
        model.prefill(PROMPT)
        fresh.prefill(PROMPT)
        reject(model)
        for one in (model, fresh):
            if then == "score":
                one.score(OTHER, logprobs=True)
            elif then == "peek":
                one.peek(OTHER)
            elif then in ("prefill", "forget"):
                if then == "forget":
                    one.forget()
                one.prefill(PROMPT[:20])
            elif then == "rollback":
                one.rollback(17)
            else:
                one.score(STEP, logprobs=True)
            assert n_in_memory(one) == one.n_past
        assert model.tokens == fresh.tokens
        np.testing.assert_allclose(model._logits, fresh._logits, atol=0.05)
        same(*(one.propose(at_most(9), logprobs=True) for one in (model, fresh)))


def test_what_was_read_before_a_peek_is_not_taken_for_what_follows(tiny):
    """A peek takes the place of the logits that were read with the step."""
    with session(tiny("llama")) as model:
        model.prefill(PROMPT)
        model.score(STEP, logprobs=True)
        model.peek(OTHER)
        model.rollback(len(PROMPT))
        script(model, STEP)
        with evaluated(model) as seen:
            model.propose(at_most(5))
        assert seen == STEP[:5]


def test_an_interrupt_on_the_way_leaves_the_cache_as_it_was(tiny, monkeypatch):
    with session(tiny("llama")) as model, session(tiny("llama")) as fresh:
        model.prefill(PROMPT)
        fresh.prefill(PROMPT)
        reject(model)
        draws = iter(STEP[:4])

        def draw(_):
            for token in draws:
                return token
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(model._sampler, "sample", draw)
            model.propose(at_most(20))
        assert model.n_past == n_in_memory(model) == len(PROMPT)
        same(*(one.propose(at_most(9), logprobs=True) for one in (model, fresh)))


def test_lanes_do_not_take_each_others_logits(tiny):
    """They share the buffer that llama.cpp writes logits to, so each keeps those of some first tokens."""
    with LlamaModel(tiny("llama")) as model, session(tiny("llama")) as fresh:
        context = LlamaContext(model, n_ctx=256, n_threads=1, n_seq_max=2)
        lanes = [LaneStepModel(context, number, Hub(), GREEDY) for number in range(2)]
        try:
            for one in (*lanes, fresh):
                one.prefill(PROMPT)
            wanted = fresh.propose(at_most(25), logprobs=True)
            reject(lanes[0], [*wanted.tokens[:20], *OTHER])
            reject(lanes[1], STEP)
            with evaluated(lanes[0]) as seen:
                same(lanes[0].propose(at_most(25), logprobs=True), wanted)
            assert seen == wanted.tokens[N_KEPT:]
            same(lanes[1].propose(at_most(25), logprobs=True), wanted)
        finally:
            for lane in lanes:
                lane.close()
            context.close()


def test_a_draft_that_is_the_target_costs_nothing_when_all_is_rejected(tiny):
    """The whole loop: what is rejected is what the target writes then, so it is evaluated once."""
    prompts = Prompts(target=PROMPT, draft=PROMPT)
    config = RunConfig(max_tokens=60, max_step_tokens=10, n_prime=0, sampling=GREEDY)
    with session(tiny("llama")) as target, session(tiny("llama")) as draft:

        def run(policy, threshold=None):
            models = {"target": target, "draft": draft}
            speculation = Speculation(prompts, **models, policy=make_policy(policy, threshold), config=config, seed=1)
            with evaluated(target) as seen:
                records = list(speculation)
            return speculation.text, records, len(seen)

        wanted, _, n_alone = run("never")
        text, records, n = run("mean-loglik", 1.0)
    assert text == wanted
    assert {record.accepted for record in records if record.origin == "draft"} == {False}
    assert n == n_alone
    written = [record for record in records if record.reason == "rejected"]
    assert written and all(record.n_reused_tokens == record.n_target_tokens for record in written)
