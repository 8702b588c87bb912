"""Questions to prompts: what becomes of one that does not fit into the context."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import accumulate

import pytest
from gguf_factory import write_model
from hypothesis import given
from hypothesis import strategies as st

from semspec_local.config import ModelConfig, RunConfig
from semspec_local.errors import ConfigError
from semspec_local.prompting import ANSWER_PART, without_beginning
from semspec_local.reasoner import Reasoner, Sources

ROLES = st.sampled_from(["user", "assistant"])
CONTENT = st.text("ab ", min_size=1, max_size=600).filter(str.strip)


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def size(messages) -> int:
    return sum(len(one["content"].strip()) for one in messages)


@st.composite
def conversations(draw):
    before = [message(draw(ROLES), draw(CONTENT)) for _ in range(draw(st.integers(0, 5)))]
    system = [message("system", draw(CONTENT))] if draw(st.booleans()) else []
    return [*system, *before, message("user", draw(CONTENT))]


@given(conversations(), st.integers(1, 3000))
def test_as_much_as_fits_is_left_of_the_end(messages, most):
    def fits(some):
        return size(some) <= most

    if fits(messages):
        return
    left = without_beginning(messages, fits)
    n_system = int(messages[0]["role"] == "system")
    system, rest = messages[:n_system], messages[n_system:]
    if size(system) >= most:
        assert left == messages, "nothing of the question fits: what was given comes back, for the error to name it"
        return
    assert fits(left) and left[:n_system] == system and left[n_system]["role"] == "user"
    whole, kept = rest[-1]["content"].strip(), left[-1]["content"].strip()
    assert whole.endswith(kept)
    room = most - size(system)
    if len(left) - n_system > 1 or kept == whole:
        assert rest[-(len(left) - n_system) :] == left[n_system:]
        sizes = list(accumulate(len(one["content"].strip()) for one in reversed(rest)))
        longer = [n for n in range(len(left) - n_system + 1, len(rest) + 1) if rest[-n]["role"] == "user"]
        assert all(sizes[n - 1] > room for n in longer), "an earlier message of the user would have fitted too"
    else:
        assert len(kept) == len(whole[len(whole) - room :].strip()), "not one character more would have fitted"


def test_a_huge_text_is_not_rendered_again_and_again():
    seen = []

    def fits(some):
        seen.append(size(some))
        return size(some) <= 1000

    left = without_beginning([message("user", "x" * 4_000_000)], fits)
    assert size(left) == 1000
    assert sorted(seen)[:-1][-1] <= 2048, "but for the whole question, nothing much longer than what fits was tried"


# -- on models ------------------------------------------------------------------------------------------

N_CTX = 128


@pytest.fixture
def reasoner(tiny):
    sources = Sources(target=tiny("llama"), draft=tiny("spm"))
    config = RunConfig(policy="loglik-ratio", max_tokens=8)
    with Reasoner(sources, config, ModelConfig(n_ctx=N_CTX, n_threads=1)) as loaded:
        yield loaded


@pytest.mark.case(33)
def test_a_question_that_is_too_long_is_refused_with_the_numbers_and_the_way_out(reasoner):
    with pytest.raises(ConfigError, match=r"too long: [\d,]+ tokens .* holds 128 .*--overflow truncate-left"):
        reasoner.prompts("word " * 200)


@pytest.mark.case(33)
def test_its_beginning_is_left_out_when_asked_for_and_the_result_says_so(reasoner):
    config = RunConfig(policy="loglik-ratio", max_tokens=8, overflow="truncate-left")
    question = "begin " + "word " * 200 + "the end"
    prompts = reasoner.prompts(question, config=config)
    assert "begin" not in prompts.text and "word the end" in prompts.text
    room = min(config.max_tokens, N_CTX // ANSWER_PART)
    assert max(len(prompts.target), len(prompts.draft)) <= N_CTX - room
    assert max(len(prompts.target), len(prompts.draft)) > N_CTX - room - 12, "no more is left out than must be"
    result = reasoner.answer(question, seed=1, config=config)
    assert result.stats["n_prompt_chars_cut"] == prompts.n_chars_cut > 700
    (remark,) = [one for one in result.stats["remarks"] if one["kind"] == "prompt_cut"]
    assert f"its first {prompts.n_chars_cut:,} characters were left out" in remark["text"]


def test_a_question_that_fits_is_left_whole(reasoner):
    config = RunConfig(policy="loglik-ratio", overflow="truncate-left")
    assert reasoner.prompts("Why?", config=config) == reasoner.prompts("Why?")
    assert reasoner.prompts("Why?", config=config).n_chars_cut == 0


def test_a_system_message_that_fills_the_context_is_an_error_all_the_same(tiny):
    config = RunConfig(policy="never", overflow="truncate-left")
    with (
        Reasoner(Sources(target=tiny("llama")), config, ModelConfig(n_ctx=N_CTX, n_threads=1)) as reasoner,
        pytest.raises(ConfigError, match="too long"),
    ):
        reasoner.prompts("Why?", system="word " * 200)


@pytest.mark.case(32)
def test_the_limits_of_a_prompt_are_exact(reasoner):
    """The context holds the prompt and at least one token of an answer."""
    sizes = {}
    for n in range(1, 200):
        try:
            sizes[n] = max(map(len, (reasoner.prompts("a" * n).target, reasoner.prompts("a" * n).draft)))
        except ConfigError:
            break
    assert max(sizes.values()) == N_CTX - 1
    longest = "a" * max(sizes)
    result = reasoner.answer(longest, seed=0, config=RunConfig(policy="never", max_tokens=50))
    assert result.usage["completion_tokens"] >= 1 or result.stop_reason == "eos"


def test_an_unknown_way_of_overflowing_is_refused():
    with pytest.raises(ConfigError, match="--overflow is 'middle'; wanted error or truncate-left"):
        RunConfig(overflow="middle")


@pytest.mark.case(33)
def test_a_line_of_a_batch_may_choose_for_itself(tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        {"id": "refused", "prompt": "word " * 400},
        {"id": "cut", "prompt": "word " * 400, "semspec": {"overflow": "truncate-left"}},
        {"id": "short", "prompt": "word"},
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["batch", source, "-o", output, "--pair", "tiny", "-c", 256, "-n", 4, "-t", 1, "--lanes", 1]
    done = subprocess.run([sys.executable, "-m", "semspec_local", *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    found = {line["id"]: line for line in map(json.loads, output.read_text().splitlines())}
    assert found["refused"]["status"] == "error" and "--overflow" in found["refused"]["error"]["message"]
    assert found["cut"]["stats"]["n_prompt_chars_cut"] > 0 and found["cut"]["error"] is None
    assert found["short"]["stats"]["n_prompt_chars_cut"] == 0
    assert "items with remarks (stats.remarks tells): " in done.stderr and "prompt_cut 1" in done.stderr


def test_a_draft_that_a_line_does_not_use_limits_it_in_nothing(tiny, tmp_path):
    short = write_model(tmp_path / "short.gguf", seed=5, llama__context_length=64)
    sources = Sources(target=tiny("llama"), draft=short)
    with Reasoner(sources, RunConfig(policy="loglik-ratio"), ModelConfig(n_ctx=256, n_threads=1)) as reasoner:
        question = "word " * 20
        with pytest.raises(ConfigError, match="holds 64"):
            reasoner.prompts(question)
        alone = reasoner.prompts(question, config=RunConfig(policy="never", overflow="truncate-left"))
    assert alone.n_chars_cut == 0 and not alone.draft and len(alone.target) > 64
