"""What measured costs say of speculation: formulas against numbers known by hand, and sentences for people."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semspec_local.costs.model import Costs, at_length, token_speedup
from semspec_local.costs.pair import GUESS_ACCEPTANCE, Loaded, Outlook, PairCosts
from semspec_local.jobs.records import ItemRecord
from semspec_local.jobs.summary import Tally

GAIN = PairCosts(c_d=0.014, c_t=0.033, c_t_alone=0.032, p_d={1: 0.014, 32: 0.003}, p_t={1: 0.031, 4: 0.02, 32: 0.01})
MEASURED = replace(
    GAIN,
    loaded=Loaded(taps={"target": ["26 pre"], "draft": []}, logprobs=["target"], all_logits=["target"]),
    n_prefix=256,
    spread=0.1,
    load=0.0,
    n_cores=4,
    n_threads=4,
    measured_at="2026-01-02T03:04:05+00:00",
)

# -- the model ------------------------------------------------------------------------------------------


def test_ceiling_and_break_even_by_hand():
    at_32 = GAIN.at_step(32)
    assert (at_32.p_t, at_32.p_d) == (0.01, 0.003)
    assert at_32.at_acceptance(1.0).ceiling(0.032) == pytest.approx(32 / (14 + 10))
    assert at_32.at_acceptance(0.5).ceiling(0.032) == pytest.approx(32 / (14 + 10 + 0.5 * (33 + 3)))
    assert at_32.break_even(0.032) == pytest.approx(1 - (32 - 14 - 10) / (33 + 3))


seconds = st.floats(1e-6, 10)


@given(c_d=seconds, p_t=seconds, c_t=seconds, p_d=seconds, alone=seconds)
def test_at_break_even_nothing_is_gained_and_nothing_lost(c_d, p_t, c_t, p_d, alone):
    costs = Costs(c_d=c_d, p_t=p_t, c_t=c_t, p_d=p_d, token_acceptance=None, step_acceptance=None)
    even = costs.break_even(alone)
    assert costs.at_acceptance(even).ceiling(alone) == pytest.approx(1, rel=1e-6)
    more = costs.at_acceptance(even + 0.01)
    assert more.predicted_s < alone
    assert (even > 1) == (costs.at_acceptance(1.0).predicted_s > alone) or even == pytest.approx(1)


@pytest.mark.parametrize("unknown", ["c_d", "p_t", "c_t", "p_d"])
def test_a_break_even_of_unknown_costs_is_unknown(unknown):
    assert replace(GAIN.at_step(32), **{unknown: None}).break_even(0.032) is None
    assert GAIN.at_step(32).break_even(None) is None


def test_between_two_lengths_the_seconds_of_a_pass_lie_on_a_line():
    curve = {1: 30.0, 4: 20.0, 16: 10.0}
    assert [at_length(curve, n) for n in curve] == list(curve.values())
    assert at_length(curve, 10) == pytest.approx((80 + 160) / 2 / 10)
    assert at_length(curve, 2) == pytest.approx((30 + (80 - 30) / 3) / 2)
    assert at_length(curve, 1000) == 10.0 and at_length({4: 20.0}, 1) == 20.0
    assert at_length({}, 8) is None


def test_speculation_by_tokens_by_hand():
    costs = {"c_d": 1.0, "c_t": 10.0, "p_t": {1: 9.0, 5: 4.0, 9: 3.0}}
    committed = 1 + 0.8 + 0.64 + 0.512 + 0.4096
    assert committed == pytest.approx((1 - 0.8**5) / (1 - 0.8))
    assert token_speedup(4, 0.8, **costs) == pytest.approx(committed * 10 / (4 * 1 + 5 * 4))
    assert token_speedup(8, 1.0, **costs) == pytest.approx(9 * 10 / (8 * 1 + 9 * 3))
    for unknown in ({"c_d": None}, {"c_t": None}, {"p_t": {}}):
        assert token_speedup(4, 0.8, **(costs | unknown)) is None


def test_guesses_make_what_the_target_writes_cheaper_and_nothing_else():
    costs = replace(GAIN, p_t={1: 0.02, 5: 0.005, 32: 0.004}, loaded=Loaded(all_logits=["target"]))
    assert costs.guessing(0) == costs
    helped = costs.guessing(4)
    speedup = token_speedup(4, GUESS_ACCEPTANCE, c_d=costs.c_d, c_t=costs.c_t, p_t=costs.p_t)
    assert speedup > 1 and helped.c_t == helped.c_t_alone == pytest.approx(costs.c_t / speedup)
    assert replace(helped, c_t=costs.c_t, c_t_alone=costs.c_t_alone) == costs
    assert Outlook(costs=helped).break_even > Outlook(costs=costs).break_even
    for unknown in (replace(costs, c_d=None), replace(costs, loaded=Loaded()), replace(costs, p_t={32: 0.004})):
        assert unknown.guessing(4) == unknown, "a pass over few tokens, with the logits of all, was not measured"


# -- what it says ---------------------------------------------------------------------------------------


def test_a_pair_that_gains_little_hears_what_would_change_that():
    outlook = Outlook(costs=GAIN)
    assert outlook.break_even == pytest.approx(0.78, abs=0.005)
    assert outlook.advice == (
        "On this machine this pair gains nothing below 0.78 acceptance and reaches at most 1.33 times the target's "
        "speed; a larger target, a target of more bits, a smaller draft or a GPU would change that."
    )
    assert outlook.token_advice == (
        "Speculation by tokens would not pay, even with 90% of tokens accepted."
    )  # 5 tokens at once cost the target 3 times as much as one


def test_a_pair_that_gains_much_is_told_how_much():
    outlook = Outlook(costs=replace(GAIN, c_t=0.1, c_t_alone=0.1))
    assert outlook.advice == (
        "On this machine this pair gains from 0.26 acceptance on and reaches at most 4.17 times the target's speed."
    )
    assert outlook.token_advice.startswith("Speculation by tokens would pay from 60% of tokens accepted on: ")
    assert outlook.token_advice.endswith(" accepted (--guess 4).")
    assert replace(outlook, can_guess=False).token_advice.endswith("% accepted.")


def test_a_pair_that_never_gains_is_told_to_let_it_be():
    outlook = Outlook(costs=replace(GAIN, c_d=0.023))
    assert outlook.break_even > 1 and outlook.ceiling < 1
    assert "nothing at any acceptance" in outlook.advice and "--policy never" in outlook.advice


def test_without_a_draft_nothing_is_foretold():
    outlook = Outlook(costs=replace(GAIN, c_d=None, p_d={}))
    assert outlook.advice == "What a draft would bring is unknown, for no draft was measured."
    assert outlook.token_advice == "Speculation by tokens: unknown."
    facts = outlook.to_json()
    assert facts["c_d"] is facts["ceiling"] is facts["break_even_acceptance"] is None
    assert set(facts["predicted"].values()) == {None} and facts["p_d"] == {}


def test_longer_steps_are_read_off_the_curve():
    predicted = [Outlook(costs=GAIN, tokens_per_step=n).ceiling for n in (1, 4, 8, 32, 100)]
    assert predicted == sorted(predicted) and predicted[0] < predicted[3] == predicted[4]


@pytest.mark.parametrize(
    ("load", "n_threads", "spread", "noisy"),
    [(0.0, 4, 0.1, False), (0.4, 4, None, False), (1.0, 4, 0.1, True), (1.0, 3, 0.1, False), (None, 4, 0.5, True)],
)
def test_a_busy_machine_is_noticed(load, n_threads, spread, noisy):
    costs = replace(MEASURED, load=load, n_threads=n_threads, spread=spread)
    assert bool(costs.noise) == noisy == Outlook(costs=costs).to_json()["noisy"]


# -- as JSON --------------------------------------------------------------------------------------------


def test_what_is_written_is_read_back():
    assert PairCosts.from_json(json.loads(json.dumps(MEASURED.to_json()))) == MEASURED
    assert PairCosts.from_json(PairCosts().to_json()) == PairCosts()


@pytest.mark.parametrize(
    "change",
    [
        {"c_t": -1.0},
        {"c_t": math.nan},
        {"c_d": "fast"},
        {"p_t": {"many": 1.0}},
        {"p_t": {"4": None}},
        {"p_d": []},
        {"load": "high"},
        {"loaded": 3},
        {"spread": [1]},
        {"colour": "red"},
    ],
)
def test_what_was_never_written_is_refused(change):
    with pytest.raises(ValueError):
        PairCosts.from_json(MEASURED.to_json() | change)


# -- in the summary of a job ----------------------------------------------------------------------------


def tally(n_lanes: int | None, *policies: str) -> Tally:
    """A job of 5 seconds whose items had 100 tokens each, in 10 seconds of a run, 2 of them for the prompt."""
    made = Tally(n_lanes=n_lanes, clock=lambda: 110.0)
    for policy in policies:
        n = {"never": 0, "given up": 0}.get(policy, 3)
        stats = {"n_proposed_steps": n, "wall_s": 10.0, "prefill_s": 2.0, "n_committed_tokens": 100}
        usage = {"completion_tokens": 100}
        made.add(ItemRecord(id="a", line=1, status="ok", usage=usage, stats=stats, seconds=5.0))
    return made


def test_a_job_in_one_lane_is_compared_without_its_prompts():
    job = tally(1, "always", "loglik-ratio", "never", "given up")
    assert (job.drafting_s, job.n_tokens_drafting) == (16.0, 200)
    assert job.speculation(0.1) == (
        "speculation: 1.25 times as fast as the target alone would have been (measured cost 100 ms a token)"
    )
    assert job.speculation(0.04) == (
        "speculation lost time: 0.50 times as fast as the target alone would have been (measured cost 40 ms a token); "
        "try --policy never"
    )
    assert "semspec-local costs" in job.speculation(None)


def test_a_job_in_lanes_is_compared_as_a_whole_with_one_lane():
    assert tally(4, "always", "always").speculation(0.1) == (
        "speculation in 4 lanes: 4.00 times as fast as the target alone in one lane would have been "
        "(measured cost 100 ms a token)"
    )


def test_nothing_is_said_where_nothing_was_drafted_or_other_machines_ran_it():
    failed = ItemRecord(id="a", line=1, status="error")
    job = tally(1, "never")
    job.add(failed)
    assert job.speculation(0.1) is job.speculation(None) is tally(None, "always").speculation(0.1) is None
