"""Steps that the target writes with guesses of its draft: the same steps, and both caches as the engine wants them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from gguf_factory import write_model
from llama_support import TOKENS, at_most, session
from test_engine import STEPS, run, speculation

from semspec_local import jobs
from semspec_local.config import MAX_GUESS, ModelConfig, RunConfig, SamplingConfig
from semspec_local.errors import ConfigError, ModelError
from semspec_local.llama.guessing import TokenGuesser
from semspec_local.llama.native import C
from semspec_local.metrics import Counters
from semspec_local.protocols import TapPoint
from semspec_local.reasoner import Reasoner, Sources
from semspec_local.steps import StepReader
from semspec_local.testing import END, ScriptedModel

PROMPT = TOKENS[:30]
WARM = SamplingConfig(temperature=0.6)
TAPS = [TapPoint(0), TapPoint(1)]


@pytest.fixture(scope="session")
def coarse(tmp_path_factory):
    """The target in four bits: about every third of its guesses is right."""
    return write_model(tmp_path_factory.mktemp("coarse") / "coarse.gguf", quantization="Q4_0")


# -- in llama.cpp ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("taps", [(), TAPS[:1], TAPS])
@pytest.mark.parametrize("n", [1, 4, MAX_GUESS])
def test_step_after_step_is_what_the_target_writes_alone(tiny, coarse, n, taps):
    options = {"n_threads": 1, "taps": taps}
    with (
        session(tiny("llama"), **options) as alone,
        session(tiny("llama"), **options) as target,
        session(coarse, **options) as draft,
    ):
        for model in (alone, target, draft):
            model.prefill(PROMPT)
        guesser, rng = TokenGuesser.with_draft(target, draft, n), np.random.default_rng(0)
        n_guesses = n_kept = 0
        for length in (17, 1, 2, 30, 9):
            wanted = alone.propose(at_most(length))
            step = guesser.write(at_most(length), rng)
            assert (step.tokens, step.end) == (wanted.tokens, wanted.end)
            assert target.tokens == alone.tokens
            assert int(C.llama_memory_seq_pos_max(target.context._memory, 0)) == target.n_past - 1
            # What comes next is drawn from the right logits, and a probe would read the right states.
            np.testing.assert_allclose(target._logits, alone._logits, atol=0.05)
            for tap in taps:
                np.testing.assert_allclose(target._last_states[tap], alone._last_states[tap], rtol=0.02, atol=0.02)
            assert draft.tokens == target.tokens[: draft.n_past]
            if unread := target.tokens[draft.n_past :]:
                draft.score(unread)
            n_guesses, n_kept = n_guesses + step.n_guesses, n_kept + step.n_guesses_kept
        assert 0 < n_kept < n_guesses


def test_what_the_draft_remembers_is_right_for_the_next_step(tiny, coarse):
    """Its cache ends where its guesses went wrong; what it writes there is what it would write anyway."""
    with session(tiny("llama")) as target, session(coarse) as draft, session(coarse) as fresh:
        for model in (target, draft):
            model.prefill(PROMPT)
        guesser, rng = TokenGuesser.with_draft(target, draft, 5), np.random.default_rng(0)
        for length in range(1, 20):
            guesser.write(at_most(length), rng)
            fresh.prefill(list(draft.tokens))
            # Weights in four bits: sums in another order are 0.09 apart, after one wrong token mostly over 0.2.
            assert np.sqrt(np.mean((draft._logits - fresh._logits) ** 2)) < 0.12
            if unread := target.tokens[draft.n_past :]:
                draft.score(unread)


class EndsAfter(StepReader):
    """Has room for many tokens, and finds a boundary after `n`, which nobody can foresee."""

    def __init__(self, n: int) -> None:
        super().__init__(max_tokens=50)
        self.n = n

    def feed(self, piece):
        self.n_tokens += 1
        return self.finish("boundary") if self.n_tokens == self.n else None


def test_the_boundary_ends_a_step_inside_a_row_of_right_guesses(tiny):
    """A draft that is its target guesses past the end of the step; what lies behind it is forgotten."""
    with session(tiny("llama")) as target, session(tiny("llama")) as draft:
        for model in (target, draft):
            model.prefill(PROMPT)
        tokens = target.propose(at_most(12)).tokens
        target.rollback(len(PROMPT))
        for n_tokens in range(1, 12):
            step = TokenGuesser.with_draft(target, draft, 4).write(EndsAfter(n_tokens), np.random.default_rng(0))
            assert (step.tokens, step.end) == (tokens[:n_tokens], "boundary")
            assert target.tokens == PROMPT + step.tokens and draft.tokens == target.tokens[: draft.n_past]
            assert int(C.llama_memory_seq_pos_max(target.context._memory, 0)) == target.n_past - 1
            logits = target._logits.copy()
            target.prefill(list(target.tokens))
            np.testing.assert_allclose(logits, target._logits, atol=0.05)
            for model in (target, draft):
                model.rollback(len(PROMPT))


def test_tokens_of_a_rejected_step_are_reused_before_any_is_guessed(tiny, coarse):
    with session(tiny("llama")) as target, session(coarse) as draft:
        for model in (target, draft):
            model.prefill(PROMPT)
        wanted = target.propose(at_most(20)).tokens
        target.rollback(len(PROMPT))
        target.score([*wanted[:7], (wanted[7] + 1) % 256], logprobs=True)
        target.rollback(len(PROMPT))
        step = TokenGuesser.with_draft(target, draft, 4).write(at_most(20), np.random.default_rng(0))
        assert step.tokens == wanted and step.n_reused == 7
        assert 0 < step.n_guesses_kept <= step.n_guesses


@pytest.mark.parametrize("reused", [False, True])
def test_what_is_written_is_distributed_as_the_targets_own(tiny, coarse, reused):
    """The first tokens of a step, nearly all of them guessed; the draft alone would write them otherwise.

    `reused`: behind a candidate that was rejected, whose first token the target often draws again.
    """
    n, sampling = 600, SamplingConfig(temperature=1.5, top_k=2, top_p=1.0)

    def shares(write, reseed) -> Counter[tuple[int, ...]]:
        found: Counter[tuple[int, ...]] = Counter()
        for seed in range(n):
            reseed(seed)
            found[tuple(write(seed).tokens[:4])] += 1
        return found

    with session(tiny("llama"), sampling=sampling) as target, session(coarse, sampling=sampling) as draft:
        for model in (target, draft):
            model.prefill(PROMPT)
        guesser = TokenGuesser.with_draft(target, draft, 3)
        likeliest = int(target._logits.argmax())

        def alone(_seed):
            step = target.propose(at_most(8))
            target.rollback(len(PROMPT))
            return step

        def guessed(seed):
            if reused:
                target.score([likeliest, 0, 0], logprobs=True)
                target.rollback(len(PROMPT))
            step = guesser.write(at_most(8), np.random.default_rng(seed))
            assert step.n_reused >= (reused and step.tokens[:1] == [likeliest])
            for model in (target, draft):
                model.rollback(len(PROMPT))
            return step

        def of_draft(_seed):
            step = draft.propose(at_most(8))
            draft.rollback(len(PROMPT))
            return step

        plain = shares(alone, target.reseed)
        with_guesses = shares(guessed, lambda seed: (target.reseed(seed + n), draft.reseed(seed)))
        others = shares(of_draft, draft.reseed)

    def distance(one, other):
        return sum(abs(one[key] - other[key]) for key in one | other) / 2 / n

    # Sixteen outcomes in two samples of 600 are about 0.06 apart.
    assert distance(plain, with_guesses) < 0.12 < distance(plain, others)


@pytest.mark.parametrize("broken", ["target", "draft"])
@pytest.mark.parametrize("n_calls", [0, 1, 2, 5])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_step_that_fails_leaves_both_models_where_it_began(tiny, coarse, monkeypatch, broken, n_calls, error):
    with session(tiny("llama")) as target, session(coarse) as draft:
        models = {"target": target, "draft": draft}
        for model in models.values():
            model.prefill(PROMPT)
        whole = TokenGuesser.with_draft(target, draft, 3).write(at_most(30), np.random.default_rng(0)).tokens
        for model in models.values():
            model.rollback(len(PROMPT))
        draw, count = models[broken].draw, iter(range(100))

        def failing(*args):
            if next(count) == n_calls:
                raise error
            return draw(*args)

        with monkeypatch.context() as patch, pytest.raises(error):
            patch.setattr(models[broken], "draw", failing)
            TokenGuesser.with_draft(target, draft, 3).write(at_most(30), np.random.default_rng(0))
        assert target.tokens == draft.tokens == PROMPT
        again = TokenGuesser.with_draft(target, draft, 3).write(at_most(30), np.random.default_rng(0))
        assert again.tokens == whole


def test_models_that_cannot_work_together_are_refused(tiny):
    with session(tiny("llama")) as target:
        with session(tiny("other-vocab")) as draft, pytest.raises(ConfigError, match="different vocabularies"):
            TokenGuesser.with_draft(target, draft, 4)
        with session(tiny("mamba")) as draft, pytest.raises(ModelError, match="cannot be trimmed"):
            TokenGuesser.with_draft(target, draft, 4)
        with session(tiny("llama")) as draft, pytest.raises(ConfigError, match="wanted 1 or more"):
            TokenGuesser.with_draft(target, draft, 0)


# -- in the engine -----------------------------------------------------------------------------------------


class HeldGuesser:
    """Writes what the target writes; the draft then holds the first tokens of it, as if it had guessed them."""

    def __init__(self, target: ScriptedModel, draft: ScriptedModel, n_held: int) -> None:
        self.target, self.draft, self.n_held, self.n = target, draft, n_held, 4

    def write(self, reader, rng):
        assert self.draft.n_past == self.target.n_past
        step = self.target.propose(reader)
        self.draft.tokens += step.tokens[: min(self.n_held, self.draft.n_ctx - self.draft.n_past)]
        step.states = {}
        step.n_guesses, step.n_guesses_kept = len(step.tokens) + 1, min(self.n_held, len(step.tokens))
        return step


@pytest.mark.parametrize("n_held", [0, 1, 3, 99])
@pytest.mark.parametrize("config", [{}, {"stop": ("e\n\nt",)}, {"stop": ("hre",)}, {"max_tokens": 7}])
@pytest.mark.parametrize(("policy", "threshold"), [("never", None), ("random", 0.0), ("always", None)])
def test_the_loop_goes_as_without_guesses(policy, threshold, config, n_held):
    def models():
        return ScriptedModel([*STEPS]), ScriptedModel([*STEPS[1:], *STEPS])

    plain, _ = run(*models(), policy, threshold, **config)
    target, draft = models()
    loop, records = run(target, draft, policy, threshold, guesser=HeldGuesser(target, draft, n_held), **config)
    assert (loop.text, loop.stop_reason) == (plain.text, plain.stop_reason)
    written = [record for record in records if record.origin == "target"]
    assert all(record.n_guesses > record.n_guesses_kept for record in written)
    assert loop.counters.n_guesses == sum(record.n_guesses for record in records) > 0
    rate = sum(record.n_guesses_kept for record in records) / loop.counters.n_guesses
    assert loop.counters.guess_acceptance_rate == rate
    assert policy != "never" or {record.reason for record in records} == {"no_draft"}
    if not config:  # what the draft guessed rightly it does not read again
        assert any(name == "score" for name, _ in draft.calls) == (n_held < len("one\n\n"))


def test_a_draft_that_was_given_up_goes_on_guessing():
    target, draft = ScriptedModel([*STEPS[:3], *STEPS]), ScriptedModel([*STEPS[1:], *STEPS])
    guesser = HeldGuesser(target, draft, 2)
    loop, records = run(target, draft, "always", pays=lambda counters: False, guesser=guesser)
    assert loop.gave_up and {record.reason for record in records} == {"no_gain"}
    assert all(record.n_guesses for record in records)
    assert not target.reads_states and not draft.reads_states, "nobody will judge a step any more"


@pytest.mark.parametrize(
    ("policy", "answer_by", "writer"),
    [
        ("never", "target", "target"),
        ("never", "draft", "target"),
        ("always", "target", "target"),
        ("always", "draft", "draft"),
    ],
)
def test_in_the_answer_the_target_is_helped_and_who_only_guesses_writes_none(policy, answer_by, writer):
    target = ScriptedModel(["<think>a\n\n", "</think>\n\n", "done\n\n", "now" + END])
    draft = ScriptedModel(["</think>\n\n", "said\n\n", "so" + END] if policy == "always" else [])
    guesser = HeldGuesser(target, draft, 2)
    if policy == "always":
        target = ScriptedModel(["<think>a\n\n", "done\n\n", "now" + END])
        guesser.target = target
    loop, records = run(target, draft, policy, guesser=guesser, answer_by=answer_by)
    answer = [record for record in records if record.reason == "answer_phase"]
    assert answer and {record.origin for record in answer} == {writer}
    assert all((record.n_guesses > 0) == (writer == "target") for record in answer)
    assert loop.text.endswith("now" if writer == "target" else "so")


@pytest.mark.parametrize("n_ctx", [8, 12, 19])
@pytest.mark.parametrize("pays", [None, lambda counters: False])
def test_a_draft_that_only_guesses_limits_the_run_in_nothing(n_ctx, pays):
    """Once its context is full the target goes on without it."""
    plain, _ = run(ScriptedModel(STEPS), None, "never")
    target, draft = ScriptedModel(STEPS), ScriptedModel([], n_ctx=n_ctx)
    guesser = HeldGuesser(target, draft, 3)
    loop, records = run(target, draft, "always" if pays else "never", pays=pays, guesser=guesser)
    assert (loop.text, loop.stop_reason) == (plain.text, "eos")
    assert records[0].n_guesses > 0 and records[-1].n_guesses == 0


def test_a_draft_that_only_guesses_does_not_end_the_thinking_early():
    target = ScriptedModel(["<think>one\n\n", "two\n\n", "done" + END])
    draft = ScriptedModel([], n_ctx=16)
    loop, _ = run(target, draft, "never", guesser=HeldGuesser(target, draft, 2), think_budget=12)
    assert loop.stop_reason == "eos" and loop.text.endswith("done")


@pytest.mark.parametrize("policy", ["never", "always"])
def test_guesses_that_do_not_pay_are_given_up_for_good(policy):
    asked: list[int] = []

    def guesses_pay(counters: Counters) -> bool:
        asked.append(counters.n_guesses)
        return len(asked) < 2

    target, draft = ScriptedModel(STEPS), ScriptedModel(["bad\n\n"] * 9)
    guesser = HeldGuesser(target, draft, 1)
    threshold = ("random", 0.0) if policy == "always" else ("never", None)
    loop, records = run(target, draft, *threshold, guesser=guesser, guesses_pay=guesses_pay)
    written = [record for record in records if record.origin == "target"]
    assert [record.n_guesses > 0 for record in written] == [True] + [False] * (len(written) - 1)
    assert asked == [0, written[0].n_guesses] and loop.n_guess == 4
    assert loop.draft.active is (policy == "always"), "who drafts steps goes on"


def test_the_random_numbers_of_the_policy_do_not_depend_on_guesses():
    def decisions(guesser):
        target, draft = ScriptedModel(lambda text: "one\n\n"), ScriptedModel(lambda text: "two\n\n")
        made = HeldGuesser(target, draft, 1) if guesser else None
        return [r.score for r in speculation(target, draft, "random", 0.5, max_tokens=60, guesser=made)]

    assert decisions(False) == decisions(True)


# -- on the embedded pair -----------------------------------------------------------------------------------

QUESTION = (
    "Clara has 6 boxes of 8 apples. Clara sells 5 apples. Clara buys 4 apples. How many apples does Clara have now?"
)


def answered(policy: str, guess: int, n_lanes: int = 1, **sampling):
    config = RunConfig(policy=policy, guess=guess, n_prime=0, sampling=SamplingConfig(**sampling))
    with Reasoner(Sources.from_pair("tiny"), config, ModelConfig(n_threads=1), n_lanes=n_lanes) as reasoner:
        return reasoner.answer(QUESTION, seed=3)


@pytest.mark.parametrize("policy", ["never", "semantic-joint"])
@pytest.mark.parametrize("n_lanes", [1, 2])
def test_at_temperature_0_guesses_change_nothing_but_the_work(policy, n_lanes):
    plain = answered(policy, 0, temperature=0)
    guessed = answered(policy, 4, n_lanes, temperature=0)
    assert guessed.text == plain.text and guessed.answer == "47"
    assert plain.stats["n_guesses"] == 0 and plain.stats["guess_acceptance_rate"] is None
    assert 0 < guessed.stats["n_guesses_kept"] < guessed.stats["n_guesses"]


def test_a_seed_gives_one_text():
    texts = [answered("never", guess, temperature=1.0).text for guess in (4, 4)]
    assert texts[0] == texts[1]


def test_guesses_without_a_draft_are_refused(tiny):
    with pytest.raises(ConfigError, match="--guess needs a draft; give one with -md"):
        Reasoner(Sources(target=tiny("llama")), RunConfig(policy="never", guess=2))
    with pytest.raises(ConfigError, match=f"--guess is 99; wanted 0 .none. to {MAX_GUESS} tokens"):
        RunConfig(guess=99)
    alone = Reasoner(Sources(target=tiny("llama")), RunConfig(policy="never"), ModelConfig(n_ctx=256, n_threads=1))
    with alone as reasoner, pytest.raises(ConfigError, match="none was loaded"):
        reasoner.start("hi", seed=0, config=RunConfig(policy="never", guess=2))


def test_a_question_that_the_drafts_context_cannot_hold_is_answered_without_guesses(tiny, tmp_path):
    small = write_model(tmp_path / "small.gguf", llama__context_length=64)
    sources, models = Sources(target=tiny("llama"), draft=small), ModelConfig(n_ctx=512, n_threads=1)
    for question, guesses in (("hi", True), ("word " * 40, False)):
        texts = []
        for guess in (0, 4):
            config = RunConfig(policy="never", guess=guess, max_tokens=150, sampling=SamplingConfig(temperature=0))
            with Reasoner(sources, config, models) as reasoner:
                result = reasoner.answer(question, seed=1)
            texts.append((result.text, result.stop_reason))
            assert (result.stats["n_guesses"] > 0) == (guesses and guess > 0)
        assert texts[0] == texts[1]


def test_a_pair_that_cannot_guess_is_refused_before_the_first_question(tiny):
    sources = Sources(target=tiny("llama"), draft=tiny("other-vocab"))
    with pytest.raises(ConfigError, match="different vocabularies, so neither can guess"):
        Reasoner(sources, RunConfig(policy="never", guess=2), ModelConfig(n_ctx=256, n_threads=1))


def test_lanes_guess_side_by_side():
    """Each run gets the text that it gets alone, though all share a buffer of logits and a cache."""
    names = ["Clara", "Anna", "Ben", "Dora", "Emil"]
    questions = [QUESTION.replace("Clara", name).replace("5", str(3 + i)) for i, name in enumerate(names)]
    sampling = SamplingConfig(temperature=0)

    def texts(guess: int, n_lanes: int) -> dict[str, str]:
        config = RunConfig(policy="never", guess=guess, max_tokens=120, sampling=sampling)
        models = ModelConfig(n_threads=1)
        records = list(jobs.run(questions, "tiny", config=config, models=models, n_lanes=n_lanes))
        assert len(records) == len(names) and all((r.stats["n_guesses"] > 0) == (guess > 0) for r in records)
        return {record.id: record.text for record in records}

    assert texts(4, 3) == texts(MAX_GUESS, 3) == texts(4, 1) == texts(0, 1)
