"""Hidden states: the same however they are read, or refused by name."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from llama_support import FREE, GREEDY, NOISE, TOKENS, at_most, read_one_by_one, session

from semspec_local.errors import ModelError
from semspec_local.llama import taps as taps_module
from semspec_local.llama.native import C
from semspec_local.llama.taps import LayerTaps, node_name
from semspec_local.protocols import TapPoint

MIDDLE, LAST, NORMED = TapPoint(1), TapPoint(2), TapPoint(2, "post")
ALL = (MIDDLE, LAST, NORMED)
PROMPT, STEP = TOKENS[:7], TOKENS[7:57]


@pytest.mark.case(16)
@pytest.mark.case(45)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma2", "mamba", "lfm2", "llama-q8"])
def test_one_pass_and_one_token_at_a_time_give_the_same_states(tiny, architecture):
    path = tiny(architecture)
    with session(path, taps=ALL, n_ubatch=32) as one_pass, session(path, taps=ALL) as one_by_one:
        one_pass.prefill(PROMPT)
        one_by_one.prefill(PROMPT)
        step = one_pass.score(STEP)  # 50 tokens in two ubatches
        singles = read_one_by_one(one_by_one, STEP)
    # A quantized model rounds its activations: blocks of states differ where a batch is summed otherwise.
    noise = {"rtol": 0.05, "atol": 0.1} if architecture == "llama-q8" else NOISE
    for tap in ALL:
        own = np.concatenate([single.states[tap].own for single in singles])
        assert step.states[tap].own.shape == own.shape == (50, 64)
        assert np.allclose(step.states[tap].window("token"), own, **noise)
        before = np.stack([single.states[tap].before for single in singles])
        assert np.allclose(step.states[tap].window("predictor"), before, **noise)


@pytest.mark.parametrize("taps", [(NORMED,), (MIDDLE,), ALL])
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_states_that_nobody_wants_any_more_are_not_read_and_the_text_is_the_same(tiny, architecture, taps):
    with session(tiny(architecture), taps=taps) as plain, session(tiny(architecture), taps=taps) as model:
        for one in (plain, model):
            one.prefill(PROMPT)
        model.read_states(False)
        for one in (plain, model):
            one.reseed(3)
        read, unread = plain.score(STEP[:9], logprobs=True), model.score(STEP[:9], logprobs=True)
        written, bare = plain.propose(at_most(12)), model.propose(at_most(12))
        assert set(read.states) == set(written.states) == set(taps) and unread.states == bare.states == {}
        assert np.allclose(read.logprobs, unread.logprobs, **NOISE) and written.tokens == bare.tokens
        model.rollback(model.n_past - 3)
        assert model.score([1]).states == {}, "going back does not change it"
        model.read_states(True)
        model.prefill(PROMPT)
        again, plain_again = model.score(STEP), (plain.prefill(PROMPT), plain.score(STEP))[1]
        for tap in taps:
            assert np.allclose(again.states[tap].own, plain_again.states[tap].own, **NOISE)


def test_the_states_of_different_taps_differ(tiny):
    with session(tiny("llama"), taps=ALL) as model:
        model.prefill(PROMPT)
        states = model.score(STEP).states
    assert not np.allclose(states[MIDDLE].own, states[LAST].own, atol=0.1)
    assert not np.allclose(states[LAST].own, states[NORMED].own, atol=0.1)


@pytest.mark.case(19)
def test_the_state_after_the_norm_is_the_norm_of_the_state_before(tiny):
    with session(tiny("llama"), taps=(LAST, NORMED)) as model:
        model.prefill(PROMPT)
        states = model.score(STEP).states
    before = states[LAST].own
    expected = before / np.sqrt((before**2).mean(axis=1, keepdims=True) + 1e-5)
    assert np.allclose(states[NORMED].own, expected, **NOISE)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma2", "mamba", "lfm2"])
def test_the_state_after_the_norm_is_the_same_with_and_without_a_callback(tiny, architecture):
    with session(tiny(architecture), taps=[NORMED]) as alone, session(tiny(architecture), taps=ALL) as among:
        assert among.context.calls_back and alone.context.calls_back == (architecture == "lfm2")
        states = []
        for model in (alone, among):
            model.prefill(PROMPT)
            read, written = model.score(STEP, logprobs=True), model.propose(at_most(9), logprobs=True)
            model.rollback(len(PROMPT) + len(STEP))
            again = model.propose(at_most(9), logprobs=True)
            assert written.tokens == again.tokens
            states.append((read, written, again))
    for one, other in zip(*states):
        assert one.tokens == other.tokens
        assert np.allclose(one.logprobs, other.logprobs, **NOISE) and (one.in_top2 == other.in_top2).all()
        for window in ("predictor", "token"):
            assert np.allclose(one.states[NORMED].window(window), other.states[NORMED].window(window), **NOISE)


@pytest.mark.parametrize("name", ["llama", "llama-unpadded"])
def test_the_short_way_of_writing_draws_the_same_tokens(tiny, name):
    with session(tiny(name), sampling=FREE) as short, session(tiny(name), sampling=FREE, taps=[MIDDLE]) as tapped:
        written = []
        for model in (short, tapped):
            model.prefill(PROMPT)
            model.reseed(3)
            written.append([model.propose(at_most(7), logprobs=asked).tokens for asked in (False, True, False)])
    assert written[0] == written[1]


def test_one_layer_alone_is_what_it_is_among_others(tiny):
    with session(tiny("llama"), taps=[MIDDLE]) as alone, session(tiny("llama"), taps=ALL) as among:
        assert not alone.context.taps.needs_all_outputs
        for model in (alone, among):
            model.prefill(PROMPT)
        a, b = alone.score(STEP, logprobs=True), among.score(STEP, logprobs=True)
    assert np.allclose(a.states[MIDDLE].own, b.states[MIDDLE].own, **NOISE)
    assert np.allclose(a.logprobs, b.logprobs, **NOISE)


def test_tapping_changes_no_token(tiny):
    with session(tiny("llama")) as plain, session(tiny("llama"), taps=ALL) as tapped:
        for model in (plain, tapped):
            model.prefill(PROMPT)
        assert plain.propose(at_most(30)).tokens == tapped.propose(at_most(30)).tokens


@pytest.mark.parametrize("n_kept", [0, 1, 20])
def test_states_after_a_rollback_are_those_of_a_fresh_cache(tiny, n_kept):
    with session(tiny("llama"), taps=ALL) as model, session(tiny("llama"), taps=ALL) as fresh:
        model.prefill(PROMPT)
        model.score(TOKENS[100:130])
        model.rollback(len(PROMPT) + n_kept)
        step = model.score(STEP)
        fresh.prefill(PROMPT + TOKENS[100 : 100 + n_kept])
        expected = fresh.score(STEP)
    for tap in ALL:
        assert np.allclose(step.states[tap].own, expected.states[tap].own, **NOISE)
        assert np.allclose(step.states[tap].before, expected.states[tap].before, **NOISE)


def test_a_written_step_has_the_states_of_a_read_one(tiny):
    with session(tiny("llama"), taps=ALL) as writer, session(tiny("llama"), taps=ALL) as reader:
        writer.prefill(PROMPT)
        reader.prefill(PROMPT)
        written = writer.propose(at_most(12))
        read = reader.score(written.tokens)
    for tap in ALL:
        assert np.allclose(written.states[tap].own, read.states[tap].own, **NOISE)
        assert np.allclose(written.states[tap].before, read.states[tap].before, **NOISE)


def test_states_outlive_the_next_pass(tiny):
    with session(tiny("llama"), taps=ALL) as model:
        model.prefill(PROMPT)
        step = model.score(STEP)
        kept = {tap: states.own.copy() for tap, states in step.states.items()}
        model.score(TOKENS[200:260])
    for tap in ALL:
        assert np.array_equal(step.states[tap].own, kept[tap])


@pytest.mark.case(19)
def test_a_layer_that_does_not_exist_is_refused_with_those_that_do(tiny):
    with pytest.raises(ModelError, match=r"layer 3 .*layers 0 to 2"):
        session(tiny("llama"), taps=[TapPoint(3)])
    with pytest.raises(ModelError, match=r"follows layer 2 alone; got layer 1"):
        session(tiny("llama"), taps=[TapPoint(1, "post")])


@pytest.mark.case(17)
def test_an_architecture_that_keeps_no_such_states_is_refused_by_name():
    for architecture in ("gemma3n", "deepseek4", "eagle3"):
        with pytest.raises(ModelError, match=architecture):
            node_name(TapPoint(0), architecture=architecture, n_layer=3)


@pytest.mark.case(17)
def test_a_graph_without_the_node_is_refused_with_the_nodes_it_has(tiny, monkeypatch):
    monkeypatch.setitem(taps_module._LAYER_OUTPUT, "llama", "hidden_out")
    with pytest.raises(ModelError, match=r"'hidden_out-1' of architecture 'llama': got 0 rows for 3 tokens.*l_out"):
        session(tiny("llama"), taps=[MIDDLE])


def test_what_fails_in_the_callback_is_raised_after_the_pass_and_the_session_goes_on(tiny, monkeypatch):
    with session(tiny("llama"), taps=[MIDDLE]) as model, session(tiny("llama"), taps=[MIDDLE]) as calm:
        for one in (model, calm):
            one.prefill(PROMPT)

        def fail(*_: object) -> None:
            raise ZeroDivisionError("inside the callback")

        for action in (lambda: model.score(STEP), lambda: model.propose(at_most(5))):
            with monkeypatch.context() as patched:
                patched.setattr(LayerTaps, "_copy", fail)
                with pytest.raises(ZeroDivisionError, match="inside the callback"):
                    action()
            assert model.n_past == len(model.tokens) == len(PROMPT)
        a, b = model.score(STEP, logprobs=True), calm.score(STEP, logprobs=True)
        assert np.array_equal(a.states[MIDDLE].own, b.states[MIDDLE].own)
        assert np.array_equal(a.logprobs, b.logprobs)


def test_a_failure_in_the_middle_of_a_written_step_leaves_nothing_of_the_step(tiny, monkeypatch):
    with session(tiny("llama"), taps=[MIDDLE]) as model, session(tiny("llama"), taps=[MIDDLE]) as calm:
        for one in (model, calm):
            one.prefill(PROMPT)
            one.score(STEP)
        copy, calls = LayerTaps._copy, []

        def fail_at_the_fourth(self, tap, tensor):
            calls.append(tap)
            if len(calls) == 4:
                raise ZeroDivisionError
            copy(self, tap, tensor)

        with monkeypatch.context() as patched:
            patched.setattr(LayerTaps, "_copy", fail_at_the_fourth)
            with pytest.raises(ZeroDivisionError):
                model.propose(at_most(10))
        with session(tiny("llama"), taps=[MIDDLE]) as fresh:
            fresh.prefill(model.tokens)
            assert np.allclose(model._logits, fresh._logits, **NOISE), "what follows is known wherever it stopped"
        model.rollback(len(PROMPT) + len(STEP))
        assert model.propose(at_most(10)).tokens == calm.propose(at_most(10)).tokens


def test_a_context_without_taps_has_no_callback(tiny, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a callback was made")

    monkeypatch.setattr(taps_module, "LayerTaps", fail)
    monkeypatch.setattr("semspec_local.llama.context.LayerTaps", fail)
    seen = {}
    original = C.llama_init_from_model

    def remember(model, parameters):
        seen["callback"] = ctypes.cast(parameters.cb_eval, ctypes.c_void_p).value
        return original(model, parameters)

    monkeypatch.setattr(C, "llama_init_from_model", remember)
    with session(tiny("llama"), sampling=GREEDY) as model:
        model.prefill(PROMPT)
        assert model.score(STEP).states == {}
    assert seen == {"callback": None}
