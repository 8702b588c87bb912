"""What is said about a run whose speculation did not help, or whose numbers lie on an edge."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semspec_local.config import RunConfig
from semspec_local.engine import Prompts, Speculation
from semspec_local.policy import POLICIES, SCORE_NOISE, make_policy
from semspec_local.remarks import LOW_ACCEPTANCE, MIN_STEPS_TO_JUDGE, N_LAST_STEPS, remarks_of
from semspec_local.testing import END, ConstantJointProbe, ScriptedModel

PROMPT = list(b"Q: ")
STEPS = [f"step {n}\n\n" for n in range(12)]


def started(policy="always", threshold=None, *, target=None, draft=None, prob=0.5, n_ctx=4096, pays=None, **config):
    """A run of `STEPS`, not yet begun."""
    return Speculation(
        Prompts(PROMPT, PROMPT),
        target=ScriptedModel(target or [*STEPS, END], n_ctx=n_ctx),
        draft=ScriptedModel(draft or [*STEPS[1:], END], n_ctx=n_ctx),
        policy=make_policy(policy, threshold),
        config=RunConfig(policy=policy, **config),
        joint_probe=ConstantJointProbe(prob) if policy == "semantic-joint" else None,
        seed=1,
        pays=pays,
    )


def ran(*args, **options):
    """A finished run of `STEPS`, and its records."""
    loop = started(*args, **options)
    return loop, list(loop)


def kinds(loop, records, **more) -> list[str]:
    return [remark.kind for remark in remarks_of(loop, records, **more)]


def test_a_run_that_went_well_has_no_remarks():
    assert kinds(*ran()) == []
    assert kinds(*ran("never")) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"target": ["all" + END]}, "the target's first step was all"),
        ({"target": ["one\n\n", "two" + END], "draft": [END]}, "no step that it wrote could be verified"),
        (
            {"target": ["<think>a</think>\n\n", "done" + END], "max_step_tokens": 40},
            "there was no step that it could have written",
        ),
    ],
)
def test_a_draft_that_was_of_no_use_is_said(options, said):
    (remark,) = remarks_of(*ran(**options))
    assert remark.kind == "draft_inactive" and said in remark.text


@pytest.mark.case(10)
@pytest.mark.parametrize(("after", "seen"), [(0, "The target wrote alone"), (2, "with 100% of its tokens accepted")])
def test_drafting_that_was_given_up_is_said_with_the_way_back(after, seen):
    loop = started(pays=lambda counters: counters.n_proposed_steps < after)
    (remark,) = remarks_of(loop, list(loop))
    assert remark.kind == "gave_up" and seen in remark.text and "--no-give-up" in remark.text


def test_few_accepted_steps_are_said():
    loop, records = ran("random", 0.0)
    (remark,) = remarks_of(loop, records)
    assert remark.kind == "low_acceptance"
    assert f"Only 0 of the last {N_LAST_STEPS} drafted steps were accepted" in remark.text


@given(st.lists(st.booleans(), min_size=1, max_size=20))
def test_it_is_the_last_steps_that_count(accepted):
    loop, records = ran()
    judged = [replace(record, score=None) for record in records if record.accepted is not None][:1]
    steps = [replace(judged[0], accepted=one) for one in accepted]
    last = accepted[-N_LAST_STEPS:]
    low = len(last) >= MIN_STEPS_TO_JUDGE and sum(last) / len(last) < LOW_ACCEPTANCE
    assert ("low_acceptance" in kinds(loop, steps)) == low


def test_a_draft_that_answers_or_a_run_broken_off_is_not_called_useless():
    target = ["<think>a</think>\n\n", "never" + END]
    loop, records = ran(target=target, draft=["done" + END], answer_by="draft")
    assert loop.counters.n_tokens_by_draft and kinds(loop, records) == []
    loop.stop_reason, loop.counters.n_tokens_by_draft = "interrupted", 0
    assert kinds(loop, records) == []


@pytest.mark.case(10)
@pytest.mark.parametrize(("times", "said"), [(0.5, True), (0.99, False), (2.0, False)])
def test_lost_time_is_said_where_the_targets_cost_is_known(times, said):
    loop, records = ran()
    cost = times / loop.counters.decode_tps
    assert ("slower_than_target" in kinds(loop, records, c_t_alone=cost)) == said
    if said:
        (remark,) = remarks_of(loop, records, c_t_alone=cost)
        assert "0.50 times the speed that was measured of the target alone" in remark.text


@pytest.mark.case(45)
@pytest.mark.parametrize(
    ("prob", "near"), [(0.5, True), (0.5 + SCORE_NOISE / 2, True), (0.5 - SCORE_NOISE / 2, True), (0.6, False)]
)
def test_scores_near_the_threshold_are_counted(prob, near):
    loop, records = ran("semantic-joint", 0.5, prob=prob)
    found = [remark for remark in remarks_of(loop, records) if remark.kind == "near_threshold"]
    assert bool(found) == near
    if near:
        n = sum(record.accepted is not None for record in records)
        assert f"{n} decisions lay so close" in found[0].text


def test_whole_numbers_and_draws_are_never_near():
    exact = [name for name, policy in POLICIES.items() if not policy.noise]
    assert exact == ["specreason", "random"]
    assert not make_policy("specreason").is_near(7.0, 7.0)


def test_what_probes_said_when_they_were_loaded_stays_with_the_run():
    loop, records = ran()
    (remark,) = remarks_of(loop, records, probe_warnings=["made for another quantization"])
    assert (remark.kind, remark.text) == ("probe_mismatch", "made for another quantization")
    assert kinds(*ran("never"), probe_warnings=["made for another quantization"]) == []


@pytest.mark.case(35)
def test_a_full_context_is_said_with_the_way_out():
    loop, records = ran(n_ctx=40)
    (remark,) = [one for one in remarks_of(loop, records) if one.kind == "context_full"]
    assert loop.stop_reason == "context_full"
    assert "The context of 40 tokens is full" in remark.text and "-c" in remark.text


def test_a_question_without_its_beginning_is_said():
    loop, records = ran()
    loop.prompts = replace(loop.prompts, n_chars_cut=1234)
    (remark,) = remarks_of(loop, records)
    assert remark.kind == "prompt_cut" and "its first 1,234 characters" in remark.text
