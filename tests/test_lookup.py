"""Tokens looked up in the text so far: what is found, and the benchmark's arm of that name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semspec_local.bench.arms import make_arms
from semspec_local.bench.lookup import SIZES, Lookup
from semspec_local.config import ModelConfig, RunConfig, SamplingConfig
from semspec_local.lab.world import problems
from semspec_local.reasoner import Sources

END = 99
TOKEN = st.integers(0, 4)


def found(prompt, tokens, n: int = 4, lookup: Lookup | None = None) -> list[int]:
    drafts = (lookup or Lookup(prompt, {END})).propose(tokens, 0, n)
    for draft in drafts:
        assert (draft.prob, draft.ids.tolist(), draft.probs.tolist()) == (1.0, [draft.token], [1.0])
    return [draft.token for draft in drafts]


def test_what_followed_the_longest_run_of_last_tokens_is_copied():
    assert found([1, 2, 3, 10, 11, 2, 3, 20, 3, 30, 0, 1, 2], [3]) == [10, 11, 2, 3]
    assert found([2, 3, 20, 21, 3, 30, 31, 0, 2], [3], 2) == [20, 21]
    assert found([3, 30, 31, 32, 0], [3], 2) == [30, 31]


def test_of_several_places_the_last_one_counts():
    assert found([1, 2, 3, 10, 0, 1, 2, 3, 20, 0, 1, 2], [3], 1) == [20]


def test_the_written_text_is_searched_like_the_prompt():
    assert found([7], [1, 2, 3, 10, 11, 5, 1, 2, 3], 2) == [10, 11]
    assert found([1, 2], [3, 10, 11, 1, 2, 3], 2) == [10, 11]


def test_what_never_stood_before_is_not_found():
    assert found([1, 2, 3], [4]) == []
    assert found([], [1]) == []


@pytest.mark.parametrize("period", [1, 2, 3, 5])
def test_text_with_a_period_goes_on_at_any_length(period):
    text = [i % period for i in range(3 * period)]
    assert found(text[:1], text[1:], 20) == [i % period for i in range(3 * period, 3 * period + 20)]


def test_an_end_of_generation_token_is_the_last():
    assert found([1, 2, END, 3, 4, 0], [1], 4) == [2, END]
    assert found([1, END, 3, 4, 0], [1], 4) == [END]


def last_place(text: list[int]) -> int | None:
    """Where the longest of the last runs of tokens stood last, and was followed; by trying every place."""
    for size in SIZES:
        places = [i for i in range(size, len(text)) if text[i - size : i] == text[len(text) - size :]]
        if places and size <= len(text):
            return places[-1]
    return None


@given(st.lists(TOKEN, max_size=12), st.lists(st.lists(TOKEN, min_size=1, max_size=4), min_size=1, max_size=8))
def test_a_run_finds_what_a_search_from_the_start_finds(prompt, rounds):
    lookup, tokens = Lookup(prompt, {END}), []
    for written in rounds:
        tokens += written
        text, place = prompt + tokens, last_place(prompt + tokens)
        expected: list[int] = []
        while place is not None and len(expected) < 5:
            expected.append([*text, *expected][place + len(expected)])
        assert found(prompt, tokens, 5, lookup) == expected == found(prompt, tokens, 5)


# -- the arm ----------------------------------------------------------------------------------------------


def test_the_embedded_target_repeats_itself_and_writes_the_same_with_and_without_lookup():
    config = RunConfig(max_tokens=200, sampling=SamplingConfig(temperature=0.0))
    models = ModelConfig(n_ctx=512, n_threads=1)
    alone = Sources(target=Sources.from_pair("tiny").target)  # no draft is needed
    with make_arms(["target", "lookup@6", "lookup"], alone, config, models) as arms:
        for problem in problems(3, 2):
            target, *runs = (arm.run(problem.question, 0) for arm in arms)
            for run in runs:
                assert (run.text, run.stop_reason, run.n_tokens) == (target.text, target.stop_reason, target.n_tokens)
                assert run.n_proposed > run.n_accepted > run.n_tokens / 10
                assert run.counters is None and run.records is None
