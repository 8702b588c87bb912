"""Cases that people met elsewhere: each of the list is shown by a test, and here are those that no other file shows."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from cases import CASES, shown_by_case
from click.testing import CliRunner
from gguf_factory import write_model

from semspec_local.cli import cli

TINY = ["--pair", "tiny", "--policy", "loglik-ratio", "-t", "1", "-n", "40"]
QUESTION = "Tom has 4 apples and buys 3 more. How many apples has he now?"


def program(*words: object, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run the program as people do, in a process of its own."""
    command = [sys.executable, "-m", "semspec_local", *map(str, words)]
    return subprocess.run(command, capture_output=True, env={**os.environ, **environment}, timeout=300)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"case-{case.number}")
def test_every_case_is_shown_by_a_test_or_says_why_not(case):
    assert bool(shown_by_case().get(case.number)) != bool(case.untested), case


def test_no_test_shows_a_case_that_is_not_on_the_list():
    assert set(shown_by_case()) <= {case.number for case in CASES}
    assert len({case.number for case in CASES}) == len(CASES)


@pytest.mark.case(10)
def test_drafting_is_switched_off_for_one_item(tmp_path):
    lines = [{"id": "on", "prompt": QUESTION}, {"id": "off", "prompt": QUESTION, "semspec": {"draft": False}}]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert program("batch", source, "-o", output, *TINY, "--lanes", 1, "--guess", 2).returncode == 0
    found = {line["id"]: line["stats"] for line in map(json.loads, output.read_text().splitlines())}
    assert found["on"]["n_proposed_steps"] > 0 and found["on"]["policy"] == "loglik-ratio"
    assert found["off"]["n_tokens_by_draft"] == 0 and found["off"]["policy"] == "never"
    assert found["on"]["n_guesses"] > 0 == found["off"]["n_guesses"]


@pytest.mark.case(11)
@pytest.mark.parametrize("words", [[], ["run"]])
def test_help_says_what_a_draft_is_and_what_the_method_costs(words):
    text = " ".join(CliRunner().invoke(cli, [*words, "--help"]).stdout.split())
    assert "The draft, a GGUF file" in text if words else "The DRAFT is small and fast: it writes the next STEP" in text
    if not words:
        assert "The method is lossy: the text is not what the target alone would have written" in text


@pytest.mark.case(15)
@pytest.mark.parametrize("flag", ["-md", "--model-draft", "--draft-model", "--draft"])
@pytest.mark.parametrize("target", ["-m", "--model"])
def test_the_models_flags_are_spelt_as_people_spell_them(tiny, flag, target):
    done = program("run", "hi", target, tiny("llama"), flag, tiny("llama-other-seed"), *TINY[2:], "-n", 4, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["usage"]["completion_tokens"] <= 4


@pytest.mark.case(1)
def test_a_pair_of_two_vocabularies_says_so_in_one_line(tiny):
    done = program("run", "hi", "-m", tiny("llama"), "-md", tiny("spm"), *TINY[2:])
    assert done.returncode == 0
    assert done.stderr.decode().count("different vocabularies, so steps are carried between them as text") == 1


@pytest.mark.case(22)
@pytest.mark.case(25)
def test_a_line_may_set_options_of_the_template_and_a_refusal_is_that_lines_alone(tiny, tmp_path):
    lines = [
        {"id": "two in a row", "messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]},
        {"id": "unknown", "prompt": "a", "semspec": {"template_kwargs": {"enable_thinking": False}}},
        {"id": "fine", "prompt": "a"},
    ]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["batch", source, "-o", output, "-m", tiny("spm"), "--policy", "never", "-n", 5, "-t", 1, "-sys", ""]
    assert program(*words).returncode == 3
    found = {line["id"]: line for line in map(json.loads, output.read_text().splitlines())}
    assert "roles must alternate" in found["two in a row"]["error"]["message"]
    assert "has the option enable_thinking" in found["unknown"]["error"]["message"]
    assert found["fine"]["error"] is None


@pytest.mark.case(23)
@pytest.mark.case(43)
def test_the_streamed_text_is_the_whole_text_and_seed_0_is_a_seed():
    streamed = program("run", QUESTION, *TINY, "-s", 0, "-q").stdout.decode()
    whole, other = (
        json.loads(program("run", QUESTION, *TINY, "-s", seed, "-q", "--json").stdout)["text"] for seed in (0, 1)
    )
    assert streamed == whole + "\n"
    assert other != whole


@pytest.mark.case(42)
def test_without_a_seed_each_run_has_another():
    seeds = {json.loads(program("run", QUESTION, *TINY, "-q", "--json").stdout)["seed"] for _ in range(3)}
    assert len(seeds) == 3


@pytest.mark.case(28)
def test_draft_and_target_each_get_the_first_token_that_they_want(tiny):
    from semspec_local.config import ModelConfig, RunConfig
    from semspec_local.reasoner import Reasoner, Sources

    sources = Sources(target=tiny("add-bos"), draft=tiny("llama"))
    with Reasoner(sources, RunConfig(policy="loglik-ratio"), ModelConfig(n_ctx=128, n_threads=1)) as reasoner:
        prompts = reasoner.prompts("hello")
        bos = reasoner.step_models["target"].vocabulary.encode("<|endoftext|>", control=True)
    assert prompts.target[:1] == bos and prompts.target[1:2] != bos
    assert prompts.draft[:1] != bos


@pytest.mark.case(48)
@pytest.mark.case(50)
def test_a_file_is_utf_8_whatever_the_locale_and_quiet_is_quiet(tiny, tmp_path):
    """The model writes bytes at random, so its text is full of characters that the locale does not have."""
    words = ["run", "→ 你好", "-m", tiny("llama"), "--policy", "never", "-n", 60, "-s", 3, "-t", 1, "-q"]
    streamed, whole = (program(*words, *more, PYTHONIOENCODING="cp1252", PYTHONUTF8="0") for more in ([], ["--json"]))
    assert (streamed.returncode, streamed.stderr, whole.stderr) == (0, b"", b"")
    text = json.loads(whole.stdout.decode("utf-8"))["text"]
    assert streamed.stdout.decode("utf-8") == text + "\n"
    assert not text.isascii()


@pytest.mark.case(49)
def test_failures_have_exit_codes(tiny, tmp_path):
    pair = ["-m", tiny("llama"), "-md", tiny("llama-other-seed"), "-t", 1]
    source = tmp_path / "in.jsonl"
    source.write_text("[]\n\n")
    assert program("run", "hi", *pair, "--joint-probe", tmp_path / "gone.onnx").returncode == 4
    assert program("run", "-f", tmp_path / "gone.txt", *pair, "--policy", "always").returncode == 2
    all_failed = program("batch", source, "-o", tmp_path / "out.jsonl", *pair, "--policy", "always")
    assert all_failed.returncode == 3


@pytest.mark.case(61)
def test_a_pickle_is_no_probe(tiny, tmp_path):
    path = tmp_path / "probe.pkl"
    path.write_bytes(pickle.dumps({"weights": [1.0]}))
    done = program("run", "hi", "-m", tiny("llama"), "-md", tiny("llama"), "--joint-probe", path, "-t", 1)
    said = done.stderr.decode().strip().splitlines()
    assert done.returncode == 4 and len(said) == 1 and "probe convert" in said[0]


@pytest.mark.case(14)
@pytest.mark.case(12)
def test_counts_usage_and_text_agree_where_a_step_ends_the_answer():
    result = json.loads(program("run", QUESTION, *TINY, "-n", 400, "-s", 5, "-q", "--json").stdout)
    stats, usage = result["stats"], result["usage"]
    assert result["stop_reason"] == "eos"
    written = stats["n_tokens_by_draft"] + stats["n_tokens_by_target"] + stats["n_tokens_forced"]
    assert written == usage["completion_tokens"] == stats["n_committed_tokens"]
    assert stats["n_draft_tokens_accepted"] <= usage["completion_tokens"]


def test_the_page_is_made_from_this_list():
    page = (Path(__file__).resolve().parent.parent / "docs" / "robustness.md").read_text(encoding="utf-8")
    for case in CASES:
        assert f"| {case.number} | {case.case} |" in page


@pytest.mark.case(36)
@pytest.mark.case(53)
def test_a_file_on_which_llama_cpp_gives_up_ends_in_one_line(tmp_path):
    path = write_model(tmp_path / "deep.gguf", n_layer=1, llama__block_count=600)
    done = program("run", "hi", "-m", path, "--policy", "never", "-t", 1)
    said = done.stderr.decode().splitlines()
    assert done.returncode == 4 and len(said) == 1, said
    assert said[0].startswith(f"Error: {path} cannot be loaded: llama.cpp gave up (llama-model.cpp:")
