"""Speculation by tokens: the text is distributed as the target's own, and the caches hold it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import product

import numpy as np
import pytest
from gguf_factory import write_model
from llama_support import FREE, GREEDY, TOKENS, at_most, session

from semspec_local.bench.lookup import Lookup
from semspec_local.bench.token_sd import TokenSdResult, TokenSpeculation
from semspec_local.config import SamplingConfig
from semspec_local.engine import Prompts
from semspec_local.errors import ConfigError, DecodeError, ModelError
from semspec_local.llama.native import C
from semspec_local.llama.sampling import Draw, LlamaSampler, accept_or_replace
from semspec_local.llama.session import LlamaStepModel

PROMPT = TOKENS[:30]
WARM = SamplingConfig(temperature=0.6)
HOT = SamplingConfig(temperature=10.0, top_k=0, top_p=1.0)  # nearly uniform, so that runs end by themselves


@pytest.fixture(scope="session")
def path_of(tiny, tmp_path_factory):
    """The path of a model; `coarse` is the target in four bits, so about every third of its tokens is accepted."""
    coarse = write_model(tmp_path_factory.mktemp("coarse") / "coarse.gguf", quantization="Q4_0")
    return lambda name: coarse if name == "coarse" else tiny(name)


LOOKUP = "lookup"
"""In place of a draft: tokens are looked up in the text."""


@contextmanager
def drafting(path_of, kind: str, **options):
    with session(path_of(kind), **options) if kind != LOOKUP else nullcontext() as draft:
        yield draft


@pytest.fixture
def models(path_of):
    """A target, and a draft that resembles it."""
    with session(path_of("llama")) as target, session(path_of("coarse")) as draft:
        yield target, draft


@contextmanager
def passes(target: LlamaStepModel) -> Iterator[list[int]]:
    """How many tokens the target reads in each pass over guesses."""
    read_at, lengths = target.read_at, []

    def counting(n_past, tokens, *, all_logits=False):
        if all_logits:
            lengths.append(len(tokens))
        return read_at(n_past, tokens, all_logits=all_logits)

    target.read_at = counting  # type: ignore[method-assign]
    yield lengths
    del target.read_at


def run(target: LlamaStepModel, draft: LlamaStepModel | None, prompt=PROMPT, **options) -> TokenSdResult:
    defaults = {"n_draft": 4, "sampling": WARM, "max_tokens": 40, "seed": 0}
    return TokenSpeculation(Prompts(prompt, prompt), target=target, draft=draft, **{**defaults, **options}).run()


def check_caches(target: LlamaStepModel, draft: LlamaStepModel | None, tokens: list[int]) -> None:
    """The target holds these tokens; so does the draft, but for those at the end that it did not guess."""
    check_cache(target, tokens)
    if draft is not None:
        assert len(PROMPT) <= draft.n_past
        check_cache(draft, tokens[: draft.n_past])


def check_cache(model: LlamaStepModel, tokens: list[int]) -> None:
    """The list of tokens, llama.cpp's memory and the logits kept for the next token are all those after `tokens`."""
    assert model.tokens == tokens
    assert int(C.llama_memory_seq_pos_max(model.context._memory, 0)) == len(tokens) - 1
    left = model.checkpoint().logits
    model.prefill(tokens)
    # Sums in another order are 0.01 apart, 0.09 with weights in four bits; after one wrong token mostly over 0.2.
    assert np.sqrt(np.mean((left - model.checkpoint().logits) ** 2)) < 0.12


# -- the rule -------------------------------------------------------------------------------------


def draw_of(probs, token: int, order=None) -> Draw:
    """A draw of `token` from a distribution over the ids 0, 1, ...; ids without probability are filtered out."""
    probs = np.asarray(probs, dtype=np.float32)
    ids = np.flatnonzero(probs) if order is None else np.asarray([i for i in order if probs[i]])
    return Draw(token, float(probs[token]), ids.astype(np.int32), probs[ids])


class Script:
    """Random numbers that are given."""

    def __init__(self, *numbers: float) -> None:
        self.numbers = list(numbers)

    def random(self) -> float:
        return self.numbers.pop(0)


def enumerated(draft_probs, target_probs, n: int = 1000) -> np.ndarray:
    """What the rule commits when the draft draws from `draft_probs`: every token, and a grid of random numbers.

    Each of the two numbers that a token can need is on a grid of `n`, so every share is exact to 1 / n.
    """
    result = np.zeros(len(target_probs))
    grid = (np.arange(n) + 0.5) / n
    order = np.random.default_rng(0).permutation(len(target_probs))
    for token in np.flatnonzero(draft_probs):
        drafted, target = draw_of(draft_probs, token), draw_of(target_probs, token, order)
        n_stays = sum(accept_or_replace(drafted, target, Script(number, 0.5)) == token for number in grid)
        result[token] += draft_probs[token] * n_stays / n
        if n_stays < n:
            for number in grid:
                instead = accept_or_replace(drafted, target, Script(1 - 1e-9, number))
                assert instead != token
                result[instead] += draft_probs[token] * (1 - n_stays / n) / n
    return result


PAIRS = {
    "alike": ([0.3, 0.3, 0.2, 0.1, 0.1], [0.25, 0.35, 0.2, 0.15, 0.05]),
    "the draft misses tokens": ([0.0, 0.9, 0.1, 0.0, 0.0], [0.3, 0.2, 0.2, 0.2, 0.1]),
    "the target misses tokens": ([0.2, 0.2, 0.2, 0.2, 0.2], [0.0, 0.7, 0.3, 0.0, 0.0]),
    "nothing in common": ([0.5, 0.5, 0.0, 0.0, 0.0], [0.0, 0.0, 0.6, 0.3, 0.1]),
    "points": ([1.0, 0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 1.0]),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_what_is_committed_is_distributed_as_the_targets_own(pair):
    draft_probs, target_probs = (np.asarray(probs) for probs in PAIRS[pair])
    assert enumerated(draft_probs, target_probs) == pytest.approx(target_probs, abs=0.002)


def test_drawn_distributions_are_those_of_the_target_too():
    rng = np.random.default_rng(1)
    for _ in range(5):
        draft_probs, target_probs = rng.dirichlet([0.4] * 8), rng.dirichlet([0.4] * 8)
        assert enumerated(draft_probs, target_probs, 400) == pytest.approx(target_probs, abs=0.005)


def test_with_random_numbers_it_is_the_targets_distribution_within_five_sigma():
    n, rng = 50_000, np.random.default_rng(2)
    draft_probs, target_probs = (np.asarray(probs) for probs in PAIRS["the draft misses tokens"])
    drafts = {token: draw_of(draft_probs, token) for token in np.flatnonzero(draft_probs)}
    target = draw_of(target_probs, 0)
    found = Counter(
        accept_or_replace(drafts[token], target, rng) for token in rng.choice(len(draft_probs), n, p=draft_probs)
    )
    shares = np.asarray([found[token] / n for token in range(len(target_probs))])
    assert np.abs(shares - target_probs).max() < 5 * np.sqrt(0.25 / n)


def test_a_certain_draft_stays_as_often_as_the_target_would_draw_it():
    target_probs = np.asarray([0.0, 0.5, 0.3, 0.15, 0.05])
    for token in range(5):
        assert enumerated(np.eye(5)[token], target_probs) == pytest.approx(target_probs, abs=0.002)


def test_equal_distributions_accept_everything_without_a_random_number():
    probs = np.random.default_rng(3).dirichlet([0.4] * 8)
    for token in range(8):
        assert accept_or_replace(draw_of(probs, token), draw_of(probs, 0, range(7, -1, -1)), Script()) == token


def test_a_difference_of_rounding_alone_replaces_nothing():
    drafted, target = draw_of([0.5, 0.5], 0), draw_of([np.nextafter(np.float32(0.5), np.float32(0)), 0.5], 0)
    assert accept_or_replace(drafted, target, Script(1 - 1e-12)) == 0


# -- the distribution of llama.cpp's sampler -----------------------------------------------------------


@pytest.mark.parametrize("n_vocab", [300, 9_000])
@pytest.mark.parametrize(("top_k", "top_p"), [(50, 0.95), (20, 1.0), (0, 0.9), (0, 1.0)])
def test_a_draw_tells_the_filtered_distribution(n_vocab, top_k, top_p):
    rng, n_used = np.random.default_rng(4), n_vocab - 7
    config = SamplingConfig(temperature=0.7, top_k=top_k, top_p=top_p)
    sampler = LlamaSampler(config, seed=1, n_vocab=n_vocab, n_used=n_used)
    plain = LlamaSampler(config, seed=1, n_vocab=n_vocab, n_used=n_used)
    for _ in range(10):
        logits = rng.normal(0, 6, n_vocab).astype(np.float32)
        logits[n_used:] = 100  # padding is never drawn, however likely
        draw = sampler.draw(logits)
        assert draw.token == plain.sample(logits)
        expected = filtered(logits[:n_used].astype(np.float64), config)
        assert set(draw.ids.tolist()) == set(np.flatnonzero(expected).tolist())
        assert np.abs(draw.probs - expected[draw.ids]).max() < 1e-5
        assert draw.probs.sum() == pytest.approx(1, abs=1e-5)
        assert draw.prob == draw.prob_of(draw.token) > 0 == draw.prob_of(n_used)
    sampler.close()
    plain.close()


def filtered(logits: np.ndarray, config: SamplingConfig) -> np.ndarray:
    """Top-k, top-p at temperature 1, then the temperature, as in llama.cpp; float64 [n_used]."""
    order = np.argsort(-logits)[: config.top_k or None]
    probs = np.exp(logits[order] - logits.max())
    probs /= probs.sum()
    if config.top_p < 1:
        order = order[: int(np.searchsorted(np.cumsum(probs), config.top_p)) + 1]
    result = np.zeros(len(logits))
    result[order] = np.exp((logits[order] - logits.max()) / config.temperature)
    return result / result.sum()


def test_at_temperature_0_a_draw_is_a_point():
    sampler = LlamaSampler(GREEDY, seed=0, n_vocab=5)
    draw = sampler.draw(np.asarray([0, 3, 1, 3, 2], dtype=np.float32))
    assert (draw.token, draw.prob, draw.ids.tolist(), draw.probs.tolist()) == (1, 1.0, [1], [1.0])
    sampler.close()


# -- runs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_draft", [1, 4, 8])
@pytest.mark.parametrize("draft_kind", ["llama-other-seed", "coarse", "llama", LOOKUP])
def test_greedy_speculation_writes_what_the_target_alone_writes(path_of, n_draft, draft_kind):
    with session(path_of("llama")) as target, drafting(path_of, draft_kind) as draft:
        target.prefill(PROMPT)
        alone = target.propose(at_most(60)).tokens  # ends with a whole character
        assert len(alone) > 50
        with passes(target) as lengths:
            result = run(target, draft, n_draft=n_draft, sampling=GREEDY, max_tokens=len(alone))
        assert result.tokens == alone
        assert result.text == target.vocabulary.decode(alone)
    assert result.n_proposed == sum(lengths) - len(lengths) <= n_draft * len(lengths)
    # Each pass commits what was accepted and one token more; the first token comes from the prompt's pass.
    assert len(result.tokens) == 1 + result.n_accepted + len(lengths)
    if draft_kind == "llama":
        assert result.n_accepted == result.n_proposed
    elif draft_kind in ("coarse", LOOKUP):
        assert 0 < result.n_accepted < result.n_proposed


@pytest.mark.parametrize("n_draft", [1, 5])
def test_a_draft_that_is_the_target_is_always_accepted(tiny, n_draft):
    with session(tiny("llama")) as target, session(tiny("llama")) as draft:
        results = [run(target, draft, n_draft=n_draft, seed=seed) for seed in range(3)]
    assert all(result.n_proposed == result.n_accepted > 0 for result in results)


def test_a_seed_gives_one_text(models):
    first, other, again = (run(*models, seed=seed) for seed in (3, 4, 3))
    assert first.tokens == again.tokens != other.tokens
    assert (first.n_accepted, first.n_proposed) == (again.n_accepted, again.n_proposed)
    assert 0 < first.n_accepted < first.n_proposed


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("n_draft", [1, 4, 9])
@pytest.mark.parametrize("draft_kind", ["llama-other-seed", "coarse", "llama", LOOKUP])
def test_a_run_writes_its_budget_and_the_caches_hold_it(path_of, max_tokens, n_draft, draft_kind):
    with session(path_of("llama")) as target, drafting(path_of, draft_kind) as draft:
        with passes(target) as lengths:
            result = run(target, draft, max_tokens=max_tokens, n_draft=n_draft)
        assert (len(result.tokens), result.stop_reason) == (max_tokens, "budget")
        assert len(result.tokens) == 1 + result.n_accepted + len(lengths)
        check_caches(target, draft, PROMPT + result.tokens)


def test_an_end_of_generation_token_ends_the_run_and_is_not_in_it(models):
    lengths = []
    for seed in range(12):
        result = run(*models, sampling=HOT, max_tokens=300, seed=seed)
        assert not models[0].vocabulary.eog_tokens & set(result.tokens)
        assert (result.stop_reason == "budget") == (len(result.tokens) == 300)
        if result.stop_reason == "eos":
            lengths.append(len(result.tokens))
            check_caches(*models, PROMPT + result.tokens)
    assert len(set(lengths)) > 3


def insist(model: LlamaStepModel, tokens: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a model find a token likeliest after the one at a position, for each position in `tokens`."""
    decode = model.context.decode

    def decode_and_raise(some, positions, sequences=None, outputs=None):
        decoded = decode(some, positions, sequences, outputs)
        wanted = positions[-1:] if outputs is None else [at for at, flag in zip(positions, outputs) if flag]
        for row, position in enumerate(wanted):
            if position in tokens:
                decoded.logits[row, tokens[position]] = 1000
        return decoded

    monkeypatch.setattr(model.context, "decode", decode_and_raise)


def only_eog(model: LlamaStepModel, position: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a model find an end-of-generation token likeliest after the token at `position`."""
    insist(model, {position: min(model.vocabulary.eog_tokens)}, monkeypatch)


@pytest.mark.parametrize("n_tokens", range(8))
@pytest.mark.parametrize("draft_ends", [True, False])
def test_the_end_may_be_drafted_or_the_targets_own(tiny, monkeypatch, n_tokens, draft_ends):
    with session(tiny("llama")) as target, session(tiny("llama")) as draft:
        alone = run(target, draft, sampling=GREEDY).tokens
        with monkeypatch.context() as patch:
            for model in (target, draft) if draft_ends else (target,):
                only_eog(model, len(PROMPT) + n_tokens - 1, patch)
            result = run(target, draft, sampling=GREEDY)
            assert (result.tokens, result.stop_reason) == (alone[:n_tokens], "eos")
            check_caches(target, draft, PROMPT + alone[:n_tokens])


def test_a_draft_that_ends_too_early_is_overruled(tiny, monkeypatch):
    with session(tiny("llama")) as target, session(tiny("llama")) as draft:
        alone = run(target, draft, sampling=GREEDY).tokens
        only_eog(draft, len(PROMPT) + 6, monkeypatch)
        result = run(target, draft, sampling=GREEDY)
    assert result.tokens == alone
    assert result.n_accepted == result.n_proposed - 1


@pytest.mark.parametrize(("n_ctx", "n_ctx_draft"), [(64, 64), (64, 61), (61, 64)])
def test_a_run_ends_where_a_context_is_full(tiny, n_ctx, n_ctx_draft):
    with (
        session(tiny("llama"), n_ctx=n_ctx) as target,
        session(tiny("llama-other-seed"), n_ctx=n_ctx_draft) as draft,
    ):
        result = run(target, draft, max_tokens=500, sampling=GREEDY)
        room = min(n_ctx, n_ctx_draft) - len(PROMPT)
        assert (len(result.tokens), result.stop_reason) == (room, "context_full")
        assert target.tokens == PROMPT + result.tokens
        assert draft.tokens == target.tokens[: draft.n_past] and len(PROMPT) < draft.n_past


def test_without_a_draft_a_run_ends_where_the_targets_context_is_full_and_fails_alone(tiny, monkeypatch):
    with session(tiny("llama"), n_ctx=64) as target:
        result = run(target, None, max_tokens=500, sampling=GREEDY)
        assert (len(result.tokens), result.stop_reason) == (64 - len(PROMPT), "context_full")
        assert target.tokens == PROMPT + result.tokens
        decode, count = target.context.decode, iter(range(100))

        def failing(*args, **options):
            if next(count) == 3:
                raise DecodeError("broken")
            return decode(*args, **options)

        with monkeypatch.context() as patch, pytest.raises(DecodeError, match="broken"):
            patch.setattr(target.context, "decode", failing)
            run(target, None, sampling=GREEDY)
        check_cache(target, PROMPT)


@pytest.mark.parametrize("n_tokens", range(8))
def test_an_end_may_be_looked_up(tiny, monkeypatch, n_tokens):
    with session(tiny("llama")) as target:
        (*begin, last), text, eog = TOKENS[100:103], TOKENS[110 : 110 + n_tokens], min(target.vocabulary.eog_tokens)
        prompt = [*PROMPT, *begin, last, *text, eog, *PROMPT, *begin]  # as chat templates have the end in them
        insist(target, dict(enumerate([last, *text, eog], len(prompt) - 1)), monkeypatch)
        result = run(target, None, prompt=prompt, sampling=GREEDY, n_draft=3)
    assert (result.tokens, result.stop_reason) == ([last, *text], "eos")
    assert result.n_accepted == result.n_proposed > 0


def test_a_run_that_fails_leaves_both_models_at_the_prompt(models, monkeypatch):
    whole = run(*models)
    for n_calls, broken in product((1, 3), models):
        decode, count = broken.context.decode, iter(range(100))

        def failing(*args, decode=decode, count=count, n_calls=n_calls, **options):
            decoded = decode(*args, **options)
            if next(count) == n_calls:
                raise DecodeError("broken")
            return decoded

        with monkeypatch.context() as patch:
            patch.setattr(broken.context, "decode", failing)
            with pytest.raises(DecodeError, match="broken"):
                run(*models)
        for model in models:
            check_cache(model, PROMPT)
        assert run(*models).tokens == whole.tokens


def test_each_model_has_its_own_prompt(models):
    target, draft = models
    target.prefill(PROMPT)
    alone = target.propose(at_most(30)).tokens
    prompts = Prompts(PROMPT, PROMPT[5:])
    options = {"n_draft": 4, "sampling": GREEDY, "max_tokens": 30, "seed": 0}
    result = TokenSpeculation(prompts, target=target, draft=draft, **options).run()
    assert result.tokens == alone
    assert target.tokens == PROMPT + alone
    assert draft.tokens == (PROMPT[5:] + alone)[: draft.n_past] and draft.n_past > len(PROMPT)


def test_times_come_from_the_clock(models):
    ticks = iter([10.0, 13.0, 20.0])
    result = run(*models, clock=lambda: next(ticks))
    assert (result.prefill_s, result.wall_s) == (3.0, 10.0)


def test_models_that_cannot_work_together_are_refused(tiny, models):
    target, _ = models
    with session(tiny("other-vocab")) as draft, pytest.raises(ConfigError, match="vocabularies"):
        run(target, draft)
    with session(tiny("mamba")) as draft, pytest.raises(ModelError, match="trimmed"):
        run(target, draft)


def test_padding_makes_no_other_vocabulary(tiny):
    with session(tiny("llama")) as target, session(tiny("more-padding")) as draft:
        result = run(target, draft, sampling=FREE)
    assert max(result.tokens) < target.vocabulary.n_used


@pytest.mark.parametrize("options", [{"n_draft": 0}, {"max_tokens": 0}, {"seed": -1}])
def test_numbers_that_cannot_be_used_are_refused(models, options):
    with pytest.raises(ConfigError, match="wanted"):
        run(*models, **options)


def test_a_run_runs_once(models):
    loop = TokenSpeculation(
        Prompts(PROMPT, PROMPT), target=models[0], draft=models[1], n_draft=2, sampling=WARM, max_tokens=3, seed=0
    )
    loop.run()
    with pytest.raises(RuntimeError, match="once"):
        loop.run()


# -- the whole, against exact probabilities ------------------------------------------------------------


def pairs_of(model: LlamaStepModel, prompt: list[int], sampling: SamplingConfig) -> dict[tuple[int, int], float]:
    """The probability of every pair of tokens after a prompt, from the model's own logits."""
    sampler = LlamaSampler(sampling, seed=0, n_vocab=model.vocabulary.n_tokens, n_used=model.vocabulary.n_used)
    with ExitStack() as stack:
        stack.callback(sampler.close)
        result = {}
        model.prefill(prompt)
        first = sampler.draw(model.checkpoint().logits)
        for token, prob in zip(first.ids.tolist(), first.probs.tolist()):
            model.prefill([*prompt, token])
            second = sampler.draw(model.checkpoint().logits)
            for other, other_prob in zip(second.ids.tolist(), second.probs.tolist()):
                result[token, other] = prob * other_prob
    return result


def test_the_first_tokens_of_many_runs_are_distributed_as_the_targets(models):
    n, prompt, sampling = 600, PROMPT[:4], SamplingConfig(temperature=1.5, top_k=4, top_p=1.0)
    exact, of_draft = (pairs_of(model, prompt, sampling) for model in models)
    found: Counter[tuple[int, ...]] = Counter()
    for seed in range(n):
        # The first token comes from the prompt's pass and the last from the target; the second one is drafted.
        result = run(*models, prompt=prompt, sampling=sampling, max_tokens=3, n_draft=2, seed=seed)
        found[tuple(result.tokens[:2])] += 1
    assert set(found) <= set(exact)
    distance = sum(abs(found[pair] / n - prob) for pair, prob in exact.items()) / 2
    # 16 pairs in 600 runs are off by about 0.06; the draft alone would be off by more than half.
    assert distance < 0.12
    assert sum(max(0.0, prob - of_draft.get(pair, 0.0)) for pair, prob in exact.items()) > 0.4


def test_certain_drafts_leave_the_targets_distribution_as_it_is(models, monkeypatch):
    n, prompt, sampling, target = 600, PROMPT[:4], SamplingConfig(temperature=1.5, top_k=4, top_p=1.0), models[0]
    exact = pairs_of(target, prompt, sampling)
    likeliest = {first: second for (first, second), _ in sorted(exact.items(), key=lambda item: item[1])}

    class Likeliest(Lookup):
        """Finds what the target would likeliest write after the first token."""

        def propose(self, tokens, n_right, n):
            return [Draw.certain(likeliest[tokens[-1]])]

    monkeypatch.setattr("semspec_local.bench.token_sd.Lookup", Likeliest)
    results = [run(target, None, prompt=prompt, sampling=sampling, max_tokens=3, seed=seed) for seed in range(n)]
    found = Counter(tuple(result.tokens[:2]) for result in results)
    assert set(found) <= set(exact)
    assert sum(abs(found[pair] / n - prob) for pair, prob in exact.items()) / 2 < 0.12
    share = sum(result.n_accepted for result in results) / n
    assert share == pytest.approx(sum(exact[pair] for pair in likeliest.items()), abs=0.1)
    assert 0.2 < share < 0.8
