"""Invariants of the speculation loop, on scripted models."""

from __future__ import annotations

import gc
import signal
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semspec_local.config import RunConfig
from semspec_local.engine import Prompts, Speculation
from semspec_local.errors import ConfigError, DecodeError
from semspec_local.interrupts import HeldInterrupt
from semspec_local.metrics import Counters
from semspec_local.policy import make_policy
from semspec_local.rating import RATING_PROMPT
from semspec_local.testing import END, ByteVocabulary, ConstantJointProbe, ConstantProbe, ScriptedModel
from semspec_local.trace import StepRecord
from semspec_local.waiting import WaitingRecords

PROMPT = list(b"Q: ")


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def speculation(
    target,
    draft,
    policy="always",
    threshold=None,
    probes=(0.5, 0.5),
    seed=7,
    thinking=False,
    pays=None,
    guesser=None,
    guesses_pay=None,
    **config,
):
    return Speculation(
        Prompts(PROMPT, PROMPT, thinking),
        target=target,
        draft=draft,
        policy=make_policy(policy, threshold),
        config=RunConfig(policy=policy, **config),
        probes={"draft": ConstantProbe(probes[0]), "target": ConstantProbe(probes[1])},
        seed=seed,
        pays=pays,
        guesser=guesser,
        guesses_pay=guesses_pay,
        clock=FakeClock(),
    )


def run(target, draft, *args, **kwargs) -> tuple[Speculation, list[StepRecord]]:
    """Run to the end; after every record both caches must hold the prompt and the committed tokens."""
    loop = speculation(target, draft, *args, **kwargs)
    records = []
    for record in loop:
        records.append(record)
        for side in (loop.target, loop.draft):
            if side is not None and side.active:
                assert side.model.n_past == side.n_committed
                assert side.model.tokens == PROMPT + side.committed
    return loop, records


STEPS = ["one\n\n", "two\n\n", "three\n\n", "four" + END]


def test_a_draft_equal_to_its_target_is_always_accepted():
    loop, records = run(ScriptedModel(["one\n\n"]), ScriptedModel(STEPS[1:]), "semantic-ratio")
    assert [r.origin for r in records] == ["target", "draft", "draft", "draft"]
    assert loop.text == "one\n\ntwo\n\nthree\n\nfour"
    assert loop.stop_reason == "eos"
    assert loop.counters.step_acceptance_rate == 1.0


def test_a_floor_above_every_ratio_gives_exactly_the_target_only_text():
    def write(text: str) -> str:
        n = text.count("\n\n")
        return f"step {n} of the target\n\n" if n < 5 else "answer" + END

    alone, _ = run(ScriptedModel(write), None, "never")
    loop, records = run(
        ScriptedModel(write), ScriptedModel(lambda text: "nonsense\n\n"), "semantic-ratio", 9.0, max_tokens=999
    )
    assert loop.text == alone.text
    assert {r.reason for r in records if not r.committed} == {"below_floor"}
    assert loop.counters.n_tokens_by_draft == 0
    assert loop.counters.step_acceptance_rate == 0.0


def test_never_uses_no_draft_at_all():
    draft = ScriptedModel(STEPS)
    loop, records = run(ScriptedModel(STEPS), draft, "never")
    assert draft.calls == []
    assert {r.reason for r in records} == {"no_draft"}
    assert loop.text == "one\n\ntwo\n\nthree\n\nfour"


def test_the_target_primes_the_first_steps():
    _, records = run(ScriptedModel(STEPS), ScriptedModel(["x\n\n", "y" + END]), n_prime=2)
    assert [(r.origin, r.reason) for r in records] == [
        ("target", "priming"),
        ("target", "priming"),
        ("draft", "always"),
        ("draft", "always"),
    ]


def test_a_rejected_step_is_written_by_the_target_and_read_by_the_draft():
    target = ScriptedModel(["one\n\n", "two\n\n", "end" + END])
    draft = ScriptedModel(["bad\n\n", "bad" + END])
    loop, records = run(target, draft, "semantic-ratio", probes=(0.5, 0.1))
    assert [(r.origin, r.committed, r.text, r.reason) for r in records] == [
        ("target", True, "one\n\n", "priming"),
        ("draft", False, "bad\n\n", "below_floor"),
        ("target", True, "two\n\n", "rejected"),
        ("draft", False, "bad", "below_floor"),
        ("target", True, "end", "rejected"),
    ]
    assert [r.step_index for r in records] == [0, 1, 1, 2, 2]
    assert draft.text == target.text == "Q: one\n\ntwo\n\nend"
    assert loop.counters.accepted_run_lengths == {0: 2}


@pytest.mark.case(12)
def test_an_end_of_generation_inside_a_drafted_step_ends_everything_there():
    target, draft = ScriptedModel(["one\n\n"]), ScriptedModel(["Answer: 4" + END + "\nNext question"])
    loop, _ = run(target, draft)
    assert loop.text == "one\n\nAnswer: 4"
    assert target.text == draft.text == "Q: one\n\nAnswer: 4"
    assert loop.counters.n_committed_tokens == len(b"one\n\nAnswer: 4")


def test_a_draft_that_wants_to_stop_at_once_leaves_the_word_to_the_target():
    target = ScriptedModel(["one\n\n", "two\n\n", END])
    loop, records = run(target, ScriptedModel([END, END]))
    assert [(r.reason, r.text, r.committed) for r in records] == [
        ("priming", "one\n\n", True),
        ("forced_target", "", False),
        ("forced_target", "two\n\n", True),
        ("forced_target", "", False),
    ]
    assert loop.stop_reason == "eos"
    assert loop.counters.n_proposed_steps == 0


@pytest.mark.case(14)
@pytest.mark.parametrize("max_tokens", [1, 4, 5, 6, 11, 12])
@pytest.mark.parametrize("policy", ["always", "never", "semantic-ratio", "specreason"])
def test_the_budget_is_exact(max_tokens, policy):
    target, draft = ScriptedModel(lambda t: "12345\n\n"), ScriptedModel(lambda t: "abc\n\n")
    loop, records = run(target, draft, policy, probes=(0.5, 0.1), max_tokens=max_tokens)
    assert loop.stop_reason == "budget"
    assert loop.counters.n_committed_tokens == max_tokens
    assert target.n_past == len(PROMPT) + max_tokens
    assert "".join(r.text for r in records if r.committed) == loop.text


@pytest.mark.case(35)
@pytest.mark.parametrize(("target_ctx", "draft_ctx"), [(20, 99), (99, 20), (20, 20)])
@pytest.mark.parametrize("policy", ["always", "semantic-ratio", "specreason"])
def test_a_full_context_ends_the_run_at_its_last_token(target_ctx, draft_ctx, policy):
    target = ScriptedModel(lambda t: "12345\n\n", n_ctx=target_ctx)
    draft = ScriptedModel(lambda t: "abc\n\n", n_ctx=draft_ctx)
    loop, _ = run(target, draft, policy, probes=(0.5, 0.1))
    assert loop.stop_reason == "context_full"
    assert target.n_past == 20
    assert loop.counters.n_committed_tokens == 17


@pytest.mark.parametrize("policy", ["always", "never", "semantic-ratio"])
@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("two", "one\n\n"),
        ("o\n\nthree", "one\n\ntw"),
        ("\n\nthree", "one\n\ntwo"),
        ("ee", "one\n\ntwo\n\nthr"),
        ("one", ""),
        ("e\n\ntwo\n\nth", "on"),
    ],
)
def test_a_stop_string_cuts_text_counts_and_caches_at_its_first_byte(stop, text, policy):
    def write(so_far: str) -> str:
        return STEPS[so_far.count("\n\n")]

    target, draft = ScriptedModel(write), ScriptedModel(write)
    loop, records = run(target, draft, policy, probes=(0.5, 0.1), stop=(stop,))
    assert loop.stop_reason == "stop"
    assert loop.text == text
    assert "".join(r.text for r in records if r.committed) == text
    assert loop.counters.n_committed_tokens == len(text)
    assert target.text == "Q: " + text
    if policy != "never":
        assert draft.text == "Q: " + text


def test_records_wait_until_no_stop_string_can_have_begun_in_them():
    seen = []
    loop = speculation(ScriptedModel(["one\n\n", "two\n\n", "Q: no"]), None, "never", stop=("\n\nQ:",), max_tokens=100)
    for record in loop:
        seen.append(record.text)
    assert seen == ["one\n\n", "two"]


def test_the_same_seed_gives_the_same_trace_and_another_seed_other_decisions():
    def trace(seed):
        _, records = run(
            ScriptedModel(lambda t: "t\n\n"), ScriptedModel(lambda t: "d\n\n"), "random", 0.5, seed=seed, max_tokens=120
        )
        return records

    assert trace(1) == trace(1)
    assert [r.accepted for r in trace(1)] != [r.accepted for r in trace(2)]


@pytest.mark.case(1)
def test_different_vocabularies_meet_in_the_text():
    target = ScriptedModel(["one\n\n"], vocabulary=Pairs("pairs"))
    draft = ScriptedModel(["歪 two\n\n", "three" + END])
    loop, records = run(target, draft)
    assert loop.text == "one\n\n歪 two\n\nthree"
    assert target.text == draft.text == "Q: " + loop.text
    assert records[1].n_draft_tokens == 9
    assert records[1].n_target_tokens == 5


@pytest.mark.parametrize("answer_by", ["target", "draft"])
def test_after_thinking_the_named_model_answers(answer_by):
    target = ScriptedModel(["plan\n\n", "ANSWER" + END])
    draft = ScriptedModel(["so 4</think>", "answer" + END])
    loop, records = run(target, draft, thinking=True, answer_by=answer_by)
    assert loop.prefix.split() == ("plan\n\nso 4", "ANSWER" if answer_by == "target" else "answer")
    assert records[-1].reason == "answer_phase"
    assert records[-1].origin == answer_by
    assert records[1].end == "close"


def test_the_thinking_budget_forces_the_close():
    target = ScriptedModel(lambda t: "42" + END if "</think>" in t else "hmm\n\n")
    draft = ScriptedModel(lambda t: "uhm\n\n")
    loop, records = run(target, draft, thinking=True, think_budget=12)
    assert [r.origin for r in records] == ["target", "draft", "draft", "forced", "target"]
    assert loop.prefix.split() == ("hmm\n\nuhm\n\nuh", "42")
    assert loop.counters.n_tokens_forced == len("\n</think>\n\n")


@pytest.mark.case(21)
def test_a_model_that_opens_its_thinking_itself_is_a_thinking_model():
    loop, _ = run(ScriptedModel(["<think>\nhm\n\n", "yes</think>", "4" + END]), None, "never")
    assert loop.prefix.split() == ("hm\n\nyes", "4")


def test_text_that_mentions_a_closing_tag_is_no_thinking():
    loop, _ = run(ScriptedModel(["a\n\n", "b</think>c\n\n", "d" + END]), None, "never")
    assert loop.prefix.split() == (None, "a\n\nb</think>c\n\nd")


@pytest.mark.parametrize("n_records", [1, 2, 3, 4])
def test_a_run_that_is_dropped_leaves_only_committed_tokens_behind(n_records):
    target, draft = ScriptedModel(lambda t: "t\n\n"), ScriptedModel(lambda t: "d\n\n")
    loop = speculation(target, draft, "semantic-ratio", probes=(0.5, 0.1))
    records = iter(loop)
    for _ in range(n_records):
        next(records)
    records.close()
    assert target.tokens == PROMPT + loop.target.committed
    assert draft.tokens == PROMPT + loop.draft.committed


def test_a_failure_in_the_verification_leaves_the_draft_at_the_committed_prefix():
    class Broken(ScriptedModel):
        def score(self, tokens, *, logprobs=False):
            raise RuntimeError("no")

    target, draft = Broken(["one\n\n"]), ScriptedModel(lambda t: "d\n\n")
    loop = speculation(target, draft)
    with pytest.raises(RuntimeError, match="no"):
        list(loop)
    assert target.text == draft.text == "Q: one\n\n"


def test_probes_see_the_state_before_the_step_and_its_own_tokens():
    draft_probe, target_probe = ConstantProbe(0.5), ConstantProbe(0.5)
    loop = Speculation(
        Prompts(PROMPT, PROMPT),
        target=ScriptedModel(["a\n\n"]),
        draft=ScriptedModel(["bc\n\n", END]),
        policy=make_policy("semantic-ratio"),
        config=RunConfig(),
        probes={"draft": draft_probe, "target": target_probe},
        seed=0,
    )
    list(loop)
    for probe in (draft_probe, target_probe):
        states = probe.seen[0]
        assert states.before[0] == ord("\n")
        assert states.own[:, 0].tolist() == list(b"bc\n\n")
        assert states.window("predictor")[:, 0].tolist() == [*b"\nbc\n"]


def joint_run(joint, policy="semantic-joint", **script):
    loop = Speculation(
        Prompts(PROMPT, PROMPT),
        target=ScriptedModel(["one\n\n", "own\n\n"], **script),
        draft=ScriptedModel(["two\n\n", "three\n\n", "four" + END], **script),
        policy=make_policy(policy),
        config=RunConfig(policy=policy),
        joint_probe=joint,
        seed=1,
    )
    return loop, list(loop)


def test_a_joint_probe_decides_by_the_states_of_both_models_and_its_features():
    probe = ConstantJointProbe(0.9, 0.1, 0.8, features=("n_tokens", "step_index", "target_logprob_mean"))
    loop, records = joint_run(probe)
    assert loop.text == "one\n\ntwo\n\nown\n\nfour"
    judged = [record for record in records if record.joint_semantic_prob is not None]
    assert [(r.joint_semantic_prob, r.accepted, r.reason) for r in judged] == [
        (0.9, True, "score_ok"),
        (0.1, False, "below_threshold"),
        (0.8, True, "score_ok"),
    ]
    assert [features.tolist()[:2] for *_, features in probe.seen] == [[5, 1], [7, 2], [4, 3]]
    for target, draft, _ in probe.seen:
        np.testing.assert_array_equal(target.own, draft.own)  # both hold the same bytes


def test_log_probabilities_are_computed_only_for_a_joint_probe_that_reads_them():
    asked: list[bool] = []

    class Watched(ScriptedModel):
        def score(self, tokens, *, logprobs=False):
            asked.append(logprobs)
            return super().score(tokens, logprobs=logprobs)

    for features, wanted in ((("n_tokens",), False), (("target_top2_share",), True)):
        asked.clear()
        list(
            Speculation(
                Prompts(PROMPT, PROMPT),
                target=Watched(["one\n\n"]),
                draft=ScriptedModel(["two" + END]),
                policy=make_policy("semantic-joint"),
                config=RunConfig(),
                joint_probe=ConstantJointProbe(0.9, features=features),
                seed=1,
            )
        )
        assert asked == [wanted]


def test_the_targets_rating_decides_and_is_forgotten():
    target = ScriptedModel(["one\n\n", "own\n\n"], peeks=("8", "6", "7"))
    draft = ScriptedModel(["two\n\n", "three\n\n", "four" + END])
    loop, records = run(target, draft, "specreason")
    assert loop.text == "one\n\ntwo\n\nown\n\nfour"
    judged = [(r.text, r.score, r.threshold, r.accepted, r.reason) for r in records if r.accepted is not None]
    assert judged == [
        ("two\n\n", 8.0, 7.0, True, "score_ok"),
        ("three\n\n", 6.0, 7.0, False, "below_threshold"),
        ("four", 7.0, 7.0, True, "score_ok"),
    ]
    # Asked once about each step, when it was read; and never the draft.
    starts, asked = ([n_past for name, n_past in target.calls if name == kind] for kind in ("score", "peek"))
    assert asked == [start + len(text) for start, (text, *_) in zip(starts, judged, strict=True)]
    assert "peek" not in {name for name, _ in draft.calls}


@pytest.mark.parametrize(("threshold", "n_accepted"), [(0, 3), (5, 3), (5.5, 0), (9, 0)])
def test_the_threshold_is_of_ratings(threshold, n_accepted):
    target = ScriptedModel(lambda t: "t\n\n", peeks=("5",))
    loop, _ = run(target, ScriptedModel(lambda t: "d\n\n"), "specreason", threshold, max_tokens=12)
    assert (loop.counters.n_accepted_steps, loop.counters.n_proposed_steps) == (n_accepted, 3)


@pytest.mark.parametrize(("spare", "reasons"), [(0, {"score_ok"}), (-1, {"forced_target"})])
def test_a_step_that_leaves_no_room_to_ask_is_the_targets(spare, reasons):
    n_ctx = len(PROMPT) + len("t\n\n" + "d\n\n" * 3) + len(RATING_PROMPT) + spare
    target = ScriptedModel(lambda t: "t\n\n", n_ctx=n_ctx)
    loop, records = run(target, ScriptedModel(lambda t: "d\n\n"), "specreason", max_tokens=12)
    assert [r.reason for r in records[:3]] == ["priming", "score_ok", "score_ok"]
    assert {r.reason for r in records[3:]} == reasons
    assert loop.counters.n_proposed_steps == (3 if spare == 0 else 2)
    assert (loop.stop_reason, loop.counters.n_committed_tokens) == ("budget", 12)


def test_a_rating_counts_as_time_of_scoring_beside_the_pass():
    clock = FakeClock()

    class Slow(ScriptedModel):
        def peek(self, tokens):
            clock.now += 100
            return super().peek(tokens)

    target, draft = Slow(["one\n\n"]), ScriptedModel(["two" + END])
    loop = speculation(target, draft, "specreason")
    loop._clock = clock
    records = list(loop)
    assert (records[1].score_s, records[1].probe_s) == (1.0, 101.0)
    assert loop.counters.probe_s == 101.0


def test_a_vocabulary_without_digits_cannot_be_asked():
    with pytest.raises(ConfigError, match="no token that is 0 alone"):
        speculation(ScriptedModel(STEPS, vocabulary=Pairs("pairs")), ScriptedModel(STEPS), "specreason")


@pytest.mark.case(14)
def test_counters_agree_with_the_trace_and_times_are_the_clocks():
    loop, records = run(
        ScriptedModel(lambda t: "tt\n\n"), ScriptedModel(lambda t: "d\n\n"), "random", 0.5, max_tokens=60
    )
    derived = Counters.from_steps(records)
    for name in ("n_steps", "n_proposed_steps", "n_accepted_steps", "n_committed_tokens", "propose_s", "write_s"):
        assert getattr(loop.counters, name) == getattr(derived, name)
    assert loop.counters.ttft_s is not None
    assert loop.counters.wall_s > loop.counters.prefill_s > 0


# -- what a review found ------------------------------------------------------------------------------------


class Pairs(ByteVocabulary):
    """Two bytes to a token; `control` gives a tag one token of its own."""

    TAG = 9999

    def encode(self, text, *, control=False):
        if control and text in ("<think>", "</think>"):
            return [self.TAG]
        data = text.encode()
        return [1000 + int.from_bytes(data[i : i + 2].ljust(2, b"\0"), "big") for i in range(0, len(data), 2)]

    def piece(self, token):
        if token == self.TAG:
            return b"</think>"
        return (token - 1000).to_bytes(2, "big").rstrip(b"\0") if token >= 1000 else super().piece(token)


def test_a_run_broken_off_hands_out_the_steps_that_still_waited():
    class Interrupted(ScriptedModel):
        def propose(self, reader, *, logprobs=False):
            if "two" in self.text:
                raise KeyboardInterrupt
            return super().propose(reader, logprobs=logprobs)

    loop = speculation(Interrupted(["one\n\n", "two\n\n"]), None, "never", stop=("\n\nQ",))
    records = []
    with pytest.raises(KeyboardInterrupt):
        records.extend(loop)
    records += loop.drain()
    assert loop.text == "one\n\ntwo\n\n"
    assert loop.counters.n_committed_tokens == len(loop.text)
    assert loop.stop_reason == "interrupted"


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this platform has no timer signals")
def test_ctrl_c_at_any_moment_leaves_records_that_make_up_the_text():
    def interrupt(_number, _frame):
        signal.raise_signal(signal.SIGINT)

    earlier = signal.signal(signal.SIGALRM, interrupt)
    gc.disable()  # an interrupt in a callback of the collector (hypothesis has one) would be lost there
    try:
        for moment in np.random.default_rng(0).uniform(1e-4, 5e-3, 80):
            loop = speculation(
                ScriptedModel(lambda t: "t\n\n"), ScriptedModel(lambda t: "d\n\n"), "random", 0.5, max_tokens=10**6
            )
            records = []
            try:
                signal.setitimer(signal.ITIMER_REAL, moment)
                for record in loop:
                    with HeldInterrupt() as held:
                        records.append(record)
                    held.check()
            except KeyboardInterrupt:
                records += [record for record in loop.drain() if record.index >= len(records)]
            assert [record.index for record in records] == list(range(len(records)))
            assert "".join(record.text for record in records if record.committed) == loop.text
            assert loop.counters.n_committed_tokens == len(loop.text)
    finally:
        gc.enable()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)


def test_a_failed_run_says_so():
    class Broken(ScriptedModel):
        def propose(self, reader, *, logprobs=False):
            raise DecodeError("no")

    loop = speculation(Broken([]), None, "never")
    with pytest.raises(DecodeError):
        list(loop)
    assert loop.stop_reason == "error"


@pytest.mark.parametrize(
    ("script", "stop", "reason"), [("abcdefgh" + END, (), "eos"), ("abcdefghSTOP", ("STOP",), "stop")]
)
def test_the_models_own_end_comes_before_the_others_full_context(script, stop, reason):
    draft = ScriptedModel(["x"], n_ctx=len(PROMPT) + 6)
    target = ScriptedModel([script], vocabulary=Pairs("pairs"))
    loop, _ = run(target, draft, stop=stop)
    assert loop.stop_reason == reason


def test_a_stop_string_inside_a_token_of_one_model_leaves_nothing_in_the_other():
    draft = ScriptedModel(["abSTOPcd"], vocabulary=Pairs("pairs"))
    target = ScriptedModel(["one\n\n"])
    loop, _ = run(target, draft, stop=("TO",))
    assert loop.text == "one\n\nabS"
    assert target.text == "Q: one\n\nabS"
    assert loop.counters.n_committed_tokens == len(loop.text)


def test_a_stop_string_that_begins_before_the_answer_is_cut_from_both_models():
    target, draft = ScriptedModel(["plan\n\n"]), ScriptedModel(["so</think>", "4" + END])
    loop, _ = run(target, draft, thinking=True, answer_by="draft", stop=("k>4",))
    assert loop.text == "plan\n\nso</thin"
    assert target.text == draft.text == "Q: " + loop.text
    assert loop.counters.n_committed_tokens == len(loop.text)


def test_the_thinking_budget_holds_for_a_model_that_opens_its_thinking_itself():
    target = ScriptedModel(lambda t: "<think>" + "hm " * 20 if t == "Q: " else "4" + END)
    _, records = run(target, None, "never", think_budget=12, max_step_tokens=100)
    assert records[0].n_target_tokens == 12
    assert records[1].origin == "forced"


def test_the_thinking_budget_holds_in_the_targets_tokens():
    target = ScriptedModel(lambda t: "4" + END if "</think>" in t else "hm\n\n")
    draft = ScriptedModel(["abcdefgh" * 3], vocabulary=Pairs("pairs"))
    _, records = run(target, draft, thinking=True, think_budget=12, max_step_tokens=100)
    thought = sum(
        r.n_target_tokens for r in records if r.committed and r.reason != "answer_phase" and r.origin != "forced"
    )
    assert thought <= 12


def test_a_closing_tag_stays_one_token_over_the_bridge():
    target = ScriptedModel(["plan\n\n", "4" + END], vocabulary=Pairs("pairs"))
    draft = ScriptedModel(["so</think>"])
    loop, _ = run(target, draft, thinking=True)
    assert Pairs.TAG in target.tokens
    assert loop.prefix.answering


def test_no_more_tokens_were_reused_than_a_stop_string_leaves():
    records = WaitingRecords(("k>",))
    step = {"text": "rejected", "n_target_tokens": 9, "n_reused_tokens": 7, "reason": "rejected", "end": "boundary"}
    records.add(StepRecord(index=0, step_index=0, origin="target", committed=True, **step))
    records.cut(5, {"target": 5, "draft": 5})
    assert (records.first.n_target_tokens, records.first.n_reused_tokens) == (4, 4)


def test_a_step_of_which_a_stop_string_leaves_nothing_is_no_committed_step():
    loop, records = run(ScriptedModel(["on\n\n", "e two"]), None, "never", stop=("on\n\ne",))
    assert loop.text == ""
    assert loop.counters.n_steps == 0
    assert not any(r.committed for r in records)


def test_a_run_is_iterated_once():
    loop, _ = run(ScriptedModel(STEPS), None, "never")
    with pytest.raises(RuntimeError, match="once"):
        list(loop)


def test_the_draft_is_rolled_back_although_the_target_fails_to():
    class Stuck(ScriptedModel):
        def score(self, tokens, *, logprobs=False):
            self.tokens += tokens
            raise DecodeError("no")

        def rollback(self, n_past):
            raise DecodeError("stuck")

    draft = ScriptedModel(lambda t: "d\n\n")
    with pytest.raises(DecodeError):
        list(speculation(Stuck(["one\n\n"]), draft))
    assert draft.text == "Q: one\n\n"


def test_what_follows_a_step_in_one_string_of_a_script_begins_the_next():
    loop, _ = run(ScriptedModel(["one\n\ntwo\n\nthree"]), None, "never")
    assert loop.text == "one\n\ntwo\n\nthree"


def test_a_script_that_gives_nothing_is_an_error():
    with pytest.raises(ValueError, match="END"):
        run(ScriptedModel(lambda t: ""), None, "never")


steps = st.lists(st.text(st.sampled_from("ab\n歪</think>"), min_size=1, max_size=9), min_size=1, max_size=6)


@settings(max_examples=150, deadline=None)
@given(
    target=steps,
    draft=steps,
    rate=st.floats(0, 1),
    seed=st.integers(0, 2**31),
    budget=st.integers(1, 60),
    cap=st.integers(1, 12),
    n_ctx=st.integers(8, 60),
    stop=st.lists(st.text(st.sampled_from("ab\n"), min_size=1, max_size=4), max_size=2),
    thinking=st.booleans(),
    think_budget=st.none() | st.integers(0, 20),
    same=st.booleans(),
)
def test_whatever_is_written_text_counts_and_caches_agree(
    target, draft, rate, seed, budget, cap, n_ctx, stop, thinking, think_budget, same
):
    loop, records = run(
        ScriptedModel([*target, END], n_ctx=n_ctx),
        ScriptedModel([*draft, END], n_ctx=n_ctx, vocabulary=None if same else ByteVocabulary("other")),
        "random",
        rate,
        seed=seed,
        max_tokens=budget,
        max_step_tokens=cap,
        stop=tuple(stop),
        thinking=thinking,
        think_budget=think_budget,
    )
    assert loop.stop_reason in ("eos", "budget", "context_full", "stop")
    written = "".join(r.text for r in records if r.committed)
    assert written == loop.text or "\ufffd" in written  # a cap of one token may cut through a character
    assert loop.counters.n_committed_tokens <= budget
    assert [r.index for r in records] == list(range(len(records)))
    if not any(r.origin == "forced" for r in records):  # text of ours is not searched for stop strings
        assert not any(s in loop.text for s in stop)
    assert np.isfinite(loop.counters.wall_s)
    assert replace(loop.counters).n_steps == sum(r.committed for r in records)


# -- drafting that does not pay -------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize(("policy", "threshold"), [("always", None), ("random", 0.0)])
def test_where_drafting_does_not_pay_the_target_writes_the_rest_alone(after, policy, threshold):
    target, draft = ScriptedModel([*STEPS[:3], *STEPS]), ScriptedModel([*STEPS[1:], *STEPS])
    loop, records = run(target, draft, policy, threshold, pays=lambda counters: counters.n_proposed_steps < after)
    judged = [record for record in records if record.accepted is not None]
    assert len(judged) == after and loop.stop_reason == "eos"
    rest = records[records.index(judged[-1]) + 1 :] if judged else records
    assert {record.reason for record in rest} <= {"no_gain", "rejected"}
    assert rest[-1].reason == "no_gain" and {record.origin for record in rest} == {"target"}
    assert (draft.calls == []) == (after == 0), "a draft that cannot pay does not even read the prompt"
    assert not target.reads_states, "nobody will judge a step any more"


def test_whether_drafting_pays_is_not_asked_after_a_no():
    asked: list[int] = []
    pays = lambda counters: asked.append(counters.n_proposed_steps) or len(asked) < 3  # noqa: E731
    _, records = run(ScriptedModel(STEPS), ScriptedModel(STEPS[1:]), "always", pays=pays)
    assert len(asked) == 3 and records[-1].reason == "no_gain"


def test_a_draft_that_was_given_up_does_not_answer():
    target = ScriptedModel(["<think>a\n\n", "b\n\n", "</think>\n\n", "done" + END])
    loop, records = run(target, ScriptedModel(["x\n\n"]), "always", answer_by="draft", pays=lambda counters: False)
    assert {record.origin for record in records} == {"target"}
    assert loop.text.endswith("done")
