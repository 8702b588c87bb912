"""Rates stay within their bounds, parts add up, and unknown is None."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from semspec_local.metrics import RATES, Counters, total
from semspec_local.trace import StepRecord

SECONDS = st.floats(0, 1e6)
RECORDS = st.lists(
    st.builds(
        StepRecord,
        index=st.just(0),
        step_index=st.just(0),
        origin=st.sampled_from(["draft", "target", "forced"]),
        committed=st.booleans(),
        text=st.just("x"),
        n_target_tokens=st.none() | st.integers(0, 500),
        n_draft_tokens=st.none() | st.integers(0, 500),
        accepted=st.none() | st.booleans(),
        reason=st.just("ratio_ok"),
        end=st.just("boundary"),
        propose_s=SECONDS,
        write_s=SECONDS,
    ),
    max_size=12,
)
COUNTERS = st.builds(
    lambda records, n_prompt, prefill_s, decode_s, ttft_s: Counters.from_steps(
        records,
        n_prompt_tokens=n_prompt,
        n_prompt_tokens_read=n_prompt // 2,
        prefill_s=prefill_s,
        wall_s=prefill_s + decode_s,
        ttft_s=ttft_s,
    ),
    RECORDS,
    st.integers(0, 10_000),
    SECONDS,
    SECONDS,
    st.none() | SECONDS,
)


def record(**changes: object) -> StepRecord:
    values: dict[str, object] = {
        "index": 0,
        "step_index": 0,
        "origin": "draft",
        "committed": True,
        "text": "x",
        "n_target_tokens": 4,
        "n_draft_tokens": 5,
        "reason": "ratio_ok",
        "end": "boundary",
    }
    return StepRecord(**{**values, **changes})  # type: ignore[arg-type]


def proposed(accepted: bool, **changes: object) -> StepRecord:
    return record(accepted=accepted, committed=accepted, **changes)


def written(**changes: object) -> StepRecord:
    return record(origin="target", **changes)


@settings(max_examples=150)
@given(COUNTERS)
def test_rates_are_in_bounds_or_none(counters: Counters) -> None:
    for name, rate in counters.rates().items():
        assert rate is None or (math.isfinite(rate) and rate >= 0), name
    for rate in (counters.step_acceptance_rate, counters.token_acceptance_rate, counters.target_token_share):
        assert rate is None or rate <= 1


@settings(max_examples=150)
@given(RECORDS)
def test_the_parts_add_up_to_the_whole(records: list[StepRecord]) -> None:
    counters = Counters.from_steps(records)
    committed = [item for item in records if item.committed]
    assert counters.n_steps == len(committed)
    assert counters.n_committed_tokens == sum(
        item.n_target_tokens if item.n_target_tokens is not None else item.n_draft_tokens or 0 for item in committed
    )
    runs = counters.accepted_run_lengths
    assert sum(length * n_runs for length, n_runs in runs.items()) == counters.n_accepted_steps
    n_rejected = counters.n_proposed_steps - counters.n_accepted_steps
    assert sum(runs.values()) - n_rejected in (0, 1)
    assert all(n_runs > 0 for n_runs in runs.values())


@settings(max_examples=100)
@given(st.lists(COUNTERS, max_size=5))
def test_a_total_is_the_sum_of_its_runs(runs: list[Counters]) -> None:
    whole = total(runs)
    assert whole.n_committed_tokens == sum(run.n_committed_tokens for run in runs)
    assert whole.n_accepted_steps == sum(run.n_accepted_steps for run in runs)
    assert math.isclose(whole.wall_s, sum(run.wall_s for run in runs))
    assert sum(whole.accepted_run_lengths.values()) == sum(sum(run.accepted_run_lengths.values()) for run in runs)
    assert whole.ttft_s == (runs[0].ttft_s if len(runs) == 1 else None)


@given(COUNTERS)
def test_the_total_of_one_run_is_that_run_and_another_object(run: Counters) -> None:
    whole = total([run])
    assert whole == run
    assert whole.accepted_run_lengths is not run.accepted_run_lengths


def test_nothing_counted_gives_no_rate() -> None:
    assert Counters().rates() == dict.fromkeys(RATES)
    assert total([]) == Counters()


def test_a_short_run_by_hand() -> None:
    steps = [
        written(reason="priming", write_s=2.0),
        proposed(True, propose_s=1.0, score_s=0.5, probe_s=0.25),
        proposed(True),
        proposed(False, reason="below_floor", n_draft_tokens=10),
        written(reason="rejected", n_target_tokens=8, n_reused_tokens=3, n_guesses=4, n_guesses_kept=3, read_s=0.125),
        proposed(False, reason="draw_lost"),
        written(reason="rejected"),
        proposed(True),
        record(origin="forced", accepted=None, n_target_tokens=3, reason="think_budget", end="forced"),
        written(reason="answer_phase", n_target_tokens=16, n_draft_tokens=None),
    ]
    counters = Counters.from_steps(
        steps, n_prompt_tokens=90, n_prompt_tokens_read=50, prefill_s=5.0, wall_s=25.0, ttft_s=6.0
    )
    assert (counters.n_proposed_steps, counters.n_accepted_steps, counters.n_steps) == (5, 3, 8)
    assert counters.accepted_run_lengths == {0: 1, 1: 1, 2: 1}
    assert (counters.n_draft_tokens_proposed, counters.n_draft_tokens_accepted) == (30, 15)
    assert (counters.n_tokens_by_draft, counters.n_tokens_by_target, counters.n_tokens_forced) == (12, 32, 3)
    assert counters.n_tokens_reused == 3
    assert (counters.propose_s, counters.score_s, counters.probe_s) == (1.0, 0.5, 0.25)
    assert (counters.write_s, counters.read_s) == (2.0, 0.125)
    assert counters.rates() == {
        "step_acceptance_rate": 0.6,
        "token_acceptance_rate": 0.5,
        "guess_acceptance_rate": 0.75,
        "target_token_share": 32 / 47,
        "mean_accepted_run": 1.0,
        "prefill_tps": 10.0,
        "decode_tps": 47 / 20.0,
        "time_per_step_s": 2.5,
    }


def test_a_draft_written_answer_is_committed_but_was_never_proposed() -> None:
    counters = Counters.from_steps([record(accepted=None, reason="answer_phase", n_target_tokens=None)])
    assert (counters.n_proposed_steps, counters.n_tokens_by_draft) == (0, 5)
    assert counters.step_acceptance_rate is None


def test_a_rate_too_large_for_a_number_is_none() -> None:
    assert Counters(n_tokens_by_draft=10, wall_s=5e-324).decode_tps is None
