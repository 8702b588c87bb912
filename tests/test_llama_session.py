"""One sequence in one context: what it reads, writes and forgets."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import repeat

import numpy as np
import pytest
from gguf_factory import bpe_vocab, write_model
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_support import FREE, GREEDY, NOISE, TOKENS, at_most, read_one_by_one, script, session, unscript

from semspec_local.config import SamplingConfig
from semspec_local.errors import ConfigError, DecodeError
from semspec_local.llama.cache import PROMPT_BLOCK
from semspec_local.llama.native import C
from semspec_local.llama.session import LlamaStepModel
from semspec_local.protocols import TapPoint
from semspec_local.steps import StepReader

KINDS = ["llama", "qwen2", "gemma2", "mamba", "lfm2", "spm"]
PROMPT, STEP = TOKENS[:40], TOKENS[40:70]
LAST = TapPoint(2, "post")


@pytest.fixture(params=KINDS)
def pair(request, tiny):
    """Two sessions of one model: one to do things with, one to compare it to."""
    with session(tiny(request.param)) as model, session(tiny(request.param)) as other:
        yield model, other


def check(model: LlamaStepModel) -> None:
    """The position, the list of tokens and llama.cpp's memory agree."""
    assert model.n_past == len(model.tokens)
    assert int(C.llama_memory_seq_pos_max(model.context._memory, 0)) == model.n_past - 1


# -- log-probabilities ----------------------------------------------------------------------------


def test_one_pass_and_one_token_at_a_time_give_the_same_logprobs(pair):
    one_pass, one_by_one = pair
    one_pass.prefill(PROMPT)
    one_by_one.prefill(PROMPT)
    step = one_pass.score(STEP, logprobs=True)
    singles = read_one_by_one(one_by_one, STEP, logprobs=True)
    assert np.allclose(step.logprobs, np.concatenate([single.logprobs for single in singles]), atol=0.05)
    assert step.logprobs.dtype == np.float32
    assert len(step.in_top2) == len(STEP)


def test_a_written_step_has_the_logprobs_of_a_read_one(pair):
    writer, reader = pair
    writer.prefill(PROMPT)
    reader.prefill(PROMPT)
    written = writer.propose(at_most(15), logprobs=True)
    read = reader.score(written.tokens, logprobs=True)
    assert np.allclose(written.logprobs, read.logprobs, atol=0.05)
    assert written.in_top2.all()  # the likeliest token was always taken
    assert read.in_top2.all()


def test_logprobs_are_those_of_the_whole_vocabulary(tiny):
    with session(tiny("llama")) as model:
        model.prefill(PROMPT)
        logits = model._logits.astype(np.float64)
        expected = logits[STEP[0]] - np.log(np.exp(logits).sum())
        first = model.score(STEP, logprobs=True).logprobs[0]
    assert first == pytest.approx(expected, abs=1e-5)


def test_what_was_not_asked_for_is_none(pair):
    model, _ = pair
    model.prefill(PROMPT)
    step = model.score(STEP)
    assert step.logprobs is None and step.in_top2 is None and step.end is None


# -- going back -----------------------------------------------------------------------------------


def test_going_back_to_the_start_of_a_step_is_exact(pair):
    model, untouched = pair
    model.prefill(PROMPT)
    untouched.prefill(PROMPT)
    for _ in range(2):
        model.score(STEP)
        model.rollback(len(PROMPT))
        check(model)
        model.propose(at_most(9))
        model.rollback(len(PROMPT))
        check(model)
    assert np.array_equal(model._logits, untouched._logits)
    a = model.propose(at_most(25), logprobs=True)
    b = untouched.propose(at_most(25), logprobs=True)
    assert a.tokens == b.tokens
    assert np.array_equal(a.logprobs, b.logprobs)


def test_going_back_to_any_other_position_is_a_fresh_prefill(pair):
    model, fresh = pair
    everything = PROMPT + STEP
    model.prefill(PROMPT)
    model.score(STEP)
    for n_past in (len(everything) - 1, 55, 41, 39, 12, 1):
        model.rollback(n_past)
        check(model)
        fresh.prefill(everything[:n_past])
        assert model.tokens == fresh.tokens
        assert np.allclose(model._logits, fresh._logits, atol=0.05)


def test_any_sequence_of_steps_and_rollbacks_equals_reading_what_is_left(pair):
    model, fresh = pair
    rng = np.random.default_rng(11)
    model.prefill(PROMPT)
    for _ in range(25):
        match rng.integers(3):
            case 0:
                tokens = [int(token) for token in rng.integers(0, 256, rng.integers(1, 20))]
                model.score(tokens, logprobs=bool(rng.integers(2)))
            case 1:
                model.propose(at_most(int(rng.integers(1, 8))))
            case _:
                model.rollback(int(rng.integers(max(1, model.n_past - 25), model.n_past + 1)))
        rejected = model._last_read is not None and model._last_read.n_past == model.n_past
        if not rejected:  # otherwise that step is in memory still
            check(model)
        if model.n_past > 400:
            model.rollback(50)
    fresh.prefill(model.tokens)
    assert np.allclose(model._logits, fresh._logits, atol=0.05)


def test_going_back_to_where_one_is_does_nothing(pair):
    model, _ = pair
    model.prefill(PROMPT)
    before = model._logits.copy()
    model.rollback(model.n_past)
    assert np.array_equal(model._logits, before)


@pytest.mark.parametrize("n_past", [0, -1, 41])
def test_going_back_to_nowhere_is_refused(tiny, n_past):
    with session(tiny("llama")) as model:
        model.prefill(PROMPT)
        with pytest.raises(ValueError, match="wanted 1 to 40"):
            model.rollback(n_past)


def test_a_prefill_forgets_everything(pair):
    model, fresh = pair
    model.prefill(PROMPT)
    model.propose(at_most(5))
    model.prefill(STEP)
    fresh.prefill(STEP)
    assert model.propose(at_most(20)).tokens == fresh.propose(at_most(20)).tokens


@pytest.mark.parametrize("what", ["score", "propose"])
def test_a_step_that_was_broken_off_leaves_nothing_to_the_next_one(pair, monkeypatch, what):
    """Ctrl-C in a notebook while log-probabilities are computed, and then another question."""
    model, fresh = pair
    model.prefill(PROMPT)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(model._known, "arrays", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        if what == "score":
            model.score(STEP[:5], logprobs=True)
        else:
            model.propose(at_most(9), logprobs=True)
    model.prefill(PROMPT)
    fresh.prefill(PROMPT)
    found, wanted = (one.propose(at_most(4), logprobs=True) for one in pair)
    assert found.tokens == wanted.tokens
    assert np.array_equal(found.logprobs, wanted.logprobs) and np.array_equal(found.in_top2, wanted.in_top2)


# -- prompts that begin alike ------------------------------------------------------------------------

ALIKE = TOKENS[: 2 * PROMPT_BLOCK + 40]


@contextmanager
def evaluated(model):
    """How many tokens llama.cpp is asked to evaluate meanwhile, call by call."""
    decode, counts = model.context.decode, []

    def counting(tokens, *arguments, **options):
        counts.append(len(tokens))
        return decode(tokens, *arguments, **options)

    model.context.decode = counting
    try:
        yield counts
    finally:
        del model.context.decode


@pytest.mark.parametrize(
    ("n_alike", "n_kept"),
    [(2 * PROMPT_BLOCK + 40, 256), (257, 256), (256, 256), (255, 128), (129, 128), (127, 0), (0, 0)],
)
def test_blocks_in_which_a_prompt_begins_like_the_last_one_are_not_read_again(tiny, n_alike, n_kept):
    prompt = ALIKE[:n_alike] + [token ^ 1 for token in ALIKE[n_alike:]] + STEP
    with session(tiny("llama"), taps=(LAST,)) as model, session(tiny("llama"), taps=(LAST,)) as fresh:
        model.prefill(ALIKE)
        model.propose(at_most(20))
        with evaluated(model) as counts:
            model.prefill(prompt)
        assert sum(counts) == len(prompt) - n_kept
        check(model)
        fresh.prefill(prompt)
        assert np.array_equal(model._logits, fresh._logits)
        a, b = model.propose(at_most(25), logprobs=True), fresh.propose(at_most(25), logprobs=True)
        assert a.tokens == b.tokens
        assert np.array_equal(a.logprobs, b.logprobs)
        assert np.array_equal(a.states[LAST].before, b.states[LAST].before)
        assert np.array_equal(a.states[LAST].own, b.states[LAST].own)


def test_the_same_prompt_again_reads_its_last_block(tiny):
    with session(tiny("llama")) as model:
        model.prefill(TOKENS[: 2 * PROMPT_BLOCK])
        before = model._logits.copy()
        model.score(STEP)
        with evaluated(model) as counts:
            model.prefill(TOKENS[: 2 * PROMPT_BLOCK])
        assert counts == [PROMPT_BLOCK]
        assert np.array_equal(model._logits, before)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 400), st.integers(0, 400), st.integers(0, 430)), min_size=1, max_size=6))
def test_no_history_of_prompts_shows_in_the_next_one(tiny, history):
    """Prompts that share a beginning of any length, each with a step behind it, and cuts to anywhere."""
    with session(tiny("llama")) as model, session(tiny("llama")) as fresh:
        for n, n_alike, n_past in history:
            prompt = (TOKENS[:n_alike] + [token ^ 1 for token in TOKENS[n_alike:]])[:n]
            model.prefill(prompt)
            check(model)
            fresh.forget()
            fresh.prefill(prompt)
            assert np.array_equal(model._logits, fresh._logits)
            model.score(STEP)
            model.rollback(max(1, min(n_past, model.n_past)))
            check(model)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_written_or_read_as_a_step_is_never_kept(tiny, kind):
    """It was evaluated otherwise than a prompt is, so the next run would come out a little different."""
    with session(tiny(kind)) as model, session(tiny(kind)) as fresh:
        model.prefill(PROMPT)
        model.score(TOKENS[40 : 2 * PROMPT_BLOCK])
        with evaluated(model) as counts:
            model.prefill(ALIKE)
        assert sum(counts) == len(ALIKE)
        fresh.prefill(ALIKE)
        assert np.array_equal(model._logits, fresh._logits)


def test_a_memory_that_cannot_be_cut_reads_every_prompt_whole(tiny):
    with session(tiny("mamba")) as model:
        model.prefill(ALIKE)
        with evaluated(model) as counts:
            model.prefill(ALIKE)
        assert sum(counts) == len(ALIKE)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_prompt_that_fails_on_the_way_leaves_nothing_to_be_kept(tiny, monkeypatch, at):
    with session(tiny("llama")) as model, session(tiny("llama")) as fresh:
        model.prefill(ALIKE[:PROMPT_BLOCK] + STEP)
        decode, n_calls = model.context.decode, iter(range(10))

        def broken(*arguments, **options):
            if next(n_calls) == at:
                raise DecodeError("broken")
            return decode(*arguments, **options)

        longer = ALIKE + TOKENS[:100]
        with monkeypatch.context() as patch, pytest.raises(DecodeError, match="broken"):
            patch.setattr(model.context, "decode", broken)
            model.prefill(longer)
        model.prefill(longer)
        fresh.prefill(longer)
        check(model)
        assert np.array_equal(model._logits, fresh._logits)


# -- looking ahead ----------------------------------------------------------------------------------

QUESTION = TOKENS[70:110]


def test_a_peek_is_a_reading_that_leaves_everything_as_it_was(pair):
    model, untouched = pair
    for one in pair:
        one.prefill(PROMPT)
        one.score(STEP)
    logits = model.peek(QUESTION)
    check(model)
    assert model.tokens == untouched.tokens == PROMPT + STEP
    assert np.array_equal(model._logits, untouched._logits)
    written = [one.propose(at_most(25), logprobs=True) for one in pair]
    assert written[0].tokens == written[1].tokens
    assert np.array_equal(written[0].logprobs, written[1].logprobs)
    untouched.rollback(len(PROMPT + STEP))
    untouched.score(QUESTION)
    assert np.array_equal(logits, untouched._logits)


def test_after_a_peek_the_step_before_it_is_rolled_back_without_an_evaluation(pair, monkeypatch):
    model, untouched = pair
    for one in pair:
        one.prefill(PROMPT)
    for _ in range(2):
        model.score(STEP)
        model.peek(QUESTION)
        with monkeypatch.context() as patch:
            patch.setattr(model.context, "decode", None)
            model.rollback(len(PROMPT))
        check(model)
        assert np.array_equal(model._logits, untouched._logits)
    assert model.propose(at_most(25)).tokens == untouched.propose(at_most(25)).tokens


def test_a_model_that_was_asked_at_once_or_twice_writes_the_same(pair):
    model, untouched = pair
    for one in pair:
        one.prefill(PROMPT)
    first, again = model.peek(QUESTION), model.peek(QUESTION)
    assert np.array_equal(first, again) and not np.array_equal(first, model._logits)
    assert model.propose(at_most(25)).tokens == untouched.propose(at_most(25)).tokens


@pytest.mark.parametrize("kind", ["llama", "mamba"])
def test_states_after_a_peek_are_those_without_it(tiny, kind):
    taps = (TapPoint(1), TapPoint(2))
    with session(tiny(kind), taps=taps) as model, session(tiny(kind), taps=taps) as untouched:
        for one in (model, untouched):
            one.prefill(PROMPT)
            one.score(STEP)
        model.peek(QUESTION)
        a, b = (one.score(TOKENS[110:120]) for one in (model, untouched))
    for tap in taps:
        assert np.array_equal(a.states[tap].before, b.states[tap].before)
        assert np.array_equal(a.states[tap].own, b.states[tap].own)


def test_a_peek_that_fails_leaves_everything_as_it_was(pair, monkeypatch):
    model, untouched = pair
    for one in pair:
        one.prefill(PROMPT)
        one.score(STEP)
    with pytest.raises(DecodeError, match="holds 512 tokens; 70 are in it and 450 more do not fit"):
        model.peek((TOKENS * 2)[:450])
    decode = model.context.decode

    def broken(*arguments, **options):
        decode(*arguments, **options)
        raise DecodeError("broken")

    with monkeypatch.context() as patch, pytest.raises(DecodeError, match="broken"):
        patch.setattr(model.context, "decode", broken)
        model.peek(QUESTION)
    check(model)
    assert model.tokens == PROMPT + STEP
    assert np.array_equal(model._logits, untouched._logits)
    assert model.propose(at_most(25)).tokens == untouched.propose(at_most(25)).tokens
    model.rollback(len(PROMPT + STEP))
    model.rollback(len(PROMPT))
    check(model)


# -- limits ---------------------------------------------------------------------------------------


def test_a_prompt_longer_than_a_batch_is_read_whole(tiny):
    prompt = (TOKENS * 6)[:2300]
    with session(tiny("llama"), n_ctx=2600) as long, session(tiny("llama"), n_ctx=2600) as parts:
        long.prefill(prompt)
        parts.prefill(prompt[:1000])
        for start in range(1000, 2300, 325):
            parts.score(prompt[start : start + 325])
        assert long.n_past == parts.n_past == 2300
        assert np.allclose(long._logits, parts._logits, atol=0.05)
        step = long.score((TOKENS * 6)[:250], logprobs=True)
        assert len(step.logprobs) == 250


@pytest.mark.case(45)
def test_a_step_longer_than_a_batch_has_all_its_states_and_logprobs(tiny):
    taps = (TapPoint(1), TapPoint(2))
    step = (TOKENS * 6)[:2100]
    with session(tiny("llama"), n_ctx=2600, taps=taps) as whole, session(tiny("llama"), n_ctx=2600, taps=taps) as parts:
        for model in (whole, parts):
            model.prefill(PROMPT)
        a = whole.score(step, logprobs=True)
        b = [parts.score(step[start : start + 700], logprobs=True) for start in range(0, 2100, 700)]
    for tap in taps:
        own = np.concatenate([part.states[tap].own for part in b])
        assert np.allclose(a.states[tap].own, own, rtol=0.05, atol=0.05)
    assert np.allclose(a.logprobs, np.concatenate([part.logprobs for part in b]), atol=0.05)


@pytest.mark.case(32)
@pytest.mark.parametrize("n_ctx", [64, 100, 256])
def test_a_prompt_has_to_leave_room_for_one_token(tiny, n_ctx):
    with session(tiny("llama"), n_ctx=n_ctx) as model:
        with pytest.raises(ConfigError, match=rf"{n_ctx} tokens with its template, and the context holds {n_ctx}"):
            model.prefill(TOKENS[:n_ctx])
        model.prefill(TOKENS[: n_ctx - 1])
        assert len(model.propose(at_most(1)).tokens) == 1
        assert model.n_past == n_ctx


def test_an_empty_prompt_is_refused(tiny):
    with session(tiny("llama")) as model, pytest.raises(ConfigError, match="at least one"):
        model.prefill([])


def test_a_full_context_is_an_error_that_says_so_and_the_cache_stays_usable(pair):
    model, fresh = pair
    model.prefill(TOKENS[:350])
    with pytest.raises(DecodeError, match="holds 512 tokens; 350 are in it and 200 more do not fit"):
        model.score(TOKENS[:200])
    assert model.n_past == 350
    script(model, repeat(65))
    with pytest.raises(DecodeError, match="holds 512 tokens"):
        model.propose(at_most(1000))
    unscript(model)
    assert 350 <= model.n_past <= 512
    model.rollback(350)
    check(model)
    fresh.prefill(TOKENS[:350])
    assert model.propose(at_most(10)).tokens == fresh.propose(at_most(10)).tokens


# -- ends -----------------------------------------------------------------------------------------


@pytest.mark.case(12)
@pytest.mark.case(31)
@pytest.mark.parametrize("end", ["<|im_end|>", "<|endoftext|>", "<|eot_id|>"])
def test_every_kind_of_end_token_ends_generation_and_is_kept_nowhere(tmp_path, end):
    vocab = bpe_vocab(controls=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>"])
    with session(write_model(tmp_path / "ends.gguf", vocab=vocab)) as model:
        model.prefill(PROMPT)
        script(model, [65, 66, vocab.id(end), 67])
        step = model.propose(at_most(10), logprobs=True)
        assert (step.tokens, step.end) == ([65, 66], "eos")
        assert model.tokens == [*PROMPT, 65, 66]
        assert len(step.logprobs) == 2
        check(model)


def test_a_step_may_be_empty(tiny):
    with session(tiny("llama")) as model:
        model.prefill(PROMPT)
        script(model, [271])
        step = model.propose(at_most(10), logprobs=True)
    assert (step.tokens, step.states, step.end, len(step.logprobs)) == ([], {}, "eos", 0)


@pytest.mark.case(29)
def test_a_step_cut_by_its_length_ends_with_a_whole_character(tiny):
    with session(tiny("llama")) as model, session(tiny("llama")) as fresh:
        vocabulary = model.vocabulary
        emoji = vocabulary.encode("a👩b")
        assert len(emoji) == 6
        model.prefill(PROMPT)
        script(model, emoji)
        step = model.propose(at_most(3), logprobs=True)
        assert (step.tokens, step.end) == (emoji[:1], "length")
        assert len(step.logprobs) == len(step.in_top2) == 1
        check(model)
        fresh.prefill(PROMPT + emoji[:1])
        assert np.allclose(model._logits, fresh._logits, **NOISE)
        model.rollback(len(PROMPT))
        script(model, emoji)
        assert model.propose(at_most(5)).tokens == emoji[:5]


def test_a_step_of_nothing_but_part_of_a_character_is_kept(tiny):
    with session(tiny("llama")) as model:
        model.prefill(PROMPT)
        script(model, model.vocabulary.encode("👩")[:2])
        assert len(model.propose(at_most(2)).tokens) == 2


def test_a_step_ends_at_a_blank_line(tiny):
    with session(tiny("llama")) as model:
        model.prefill(PROMPT)
        tokens = model.vocabulary.encode("the end.\n\n")
        script(model, [*tokens, 65])
        step = model.propose(StepReader(max_tokens=50))
        assert (step.tokens, step.end) == (tokens, "boundary")


# -- drawing --------------------------------------------------------------------------------------


@pytest.mark.case(2)
def test_padding_is_never_drawn(tmp_path):
    vocab = bpe_vocab(n_pad=500)
    n_used = len(vocab.tokens) - 500
    path = write_model(tmp_path / "padded.gguf", vocab=vocab)
    for sampling in (FREE, GREEDY):
        with session(path, sampling=sampling) as model:
            assert model.vocabulary.n_used == n_used
            model.prefill(PROMPT)
            drawn = [model._sampler.sample(model._logits) for _ in range(300)]
            assert max(drawn) < n_used
            boosted = model._logits.copy()
            boosted[n_used:] += 100
            assert model._sampler.sample(boosted) < n_used


def test_the_sampler_is_the_distribution_of_its_configuration(tiny):
    with session(tiny("llama"), sampling=SamplingConfig(temperature=0.5, top_k=3, top_p=1.0)) as model:
        logits = np.full(model.vocabulary.n_tokens, -30, dtype=np.float32)
        logits[[7, 8, 9, 10]] = [2.0, 1.0, 1.5, 0.5]
        drawn = [model._sampler.sample(logits) for _ in range(4000)]
    shares = np.bincount(drawn, minlength=11)[[7, 8, 9, 10]] / 4000
    weights = np.exp(np.array([2.0, 1.0, 1.5]) / 0.5)
    assert np.allclose(shares[:3], weights / weights.sum(), atol=0.04)
    assert shares[3] == 0


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 2])
def test_a_seed_gives_the_same_text_each_time_and_another_seed_another(tiny, seed):
    with session(tiny("llama"), sampling=FREE) as model:
        texts = []
        for this in (seed, seed, 77):
            model.reseed(this)
            model.prefill(PROMPT)
            texts.append(model.propose(at_most(30)).tokens)
    assert texts[0] == texts[1] != texts[2]
