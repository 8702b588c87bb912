"""`semspec-local run`: what goes to which stream, every way to ask wrongly, and its exit codes."""

from __future__ import annotations

import io
import json
import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from gguf_factory import write_model
from pairs_support import pretend_shipped

from semspec_local import read_trace
from semspec_local.cli import INTERRUPTED, _run, show
from semspec_local.errors import DecodeError, SemspecError
from semspec_local.policy import POLICIES
from semspec_local.trace import TraceWriter


@dataclass
class Outcome:
    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line that says what is wrong; nothing else went out."""
        assert self.out == ""
        lines = [line for line in self.err.splitlines() if not line.startswith(("Usage:", "Try ")) and line]
        assert len(lines) == 1 and lines[0].startswith("Error: "), self.err
        return lines[0]


Run = Callable[..., Outcome]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Run]:
    """Runs `semspec-local run` in this process, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("SEMSPEC_RUN_")]:
        monkeypatch.delenv(name)
    loggers = [logging.getLogger(name) for name in ("semspec_local", "semspec_local.llama.logs")]
    levels = [logger.level for logger in loggers]

    def invoke(*arguments: object, stdin: str = "") -> Outcome:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        capsys.readouterr()
        code = _run(["run", *map(str, arguments)])
        return Outcome(code, *capsys.readouterr())

    yield invoke
    for logger, level in zip(loggers, levels):
        logger.setLevel(level)


@pytest.fixture
def pair(tiny: Callable[[str], Path]) -> list[object]:
    """Options that name a tiny pair, and keep a run short and repeatable."""
    return ["-m", tiny("llama"), "-md", tiny("llama-other-seed"), "-t", 1, "-s", 7, "-n", 60, "--max-step-tokens", 12]


# -- asked wrongly: exit code 2, one line, nothing on stdout, no model needed ---------------------------


@pytest.mark.case(49)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give one question"),
        (["hi", "-f", "there.txt"], "give one question"),
        ([""], "the question is empty"),
        ([" \n\t"], "the question is empty"),
        (["-"], "the question is empty"),
        (["-f", "empty.txt"], "the question is empty"),
        (["-f", "missing.txt"], "missing.txt cannot be read: No such file"),
        (["-f", "."], "cannot be read: Is a directory"),
        (["-f", "latin.txt"], "latin.txt is not UTF-8 text"),
        (["caf\udce9"], "the question is not UTF-8 text"),
        (["hi", "there"], "unexpected extra argument"),
        (["hi", "--polcy", "never"], "No such option"),
        (["hi", "--pair", "nope"], "unknown pair 'nope'; known: qwen2.5-coder"),
        (["hi", "-md", "draft.gguf"], "add -m TARGET.gguf"),
        (["hi", "--pair", "qwen2.5-coder", "-m", "target.gguf"], "--pair and -m/-md both name models"),
        (["hi", "-s", "-1"], "--seed is -1; wanted a whole number from 0"),
        (["hi", "-s", str(2**32 - 1)], "--seed is 4294967295; wanted"),
        (["hi", "-s", "lucky"], "'lucky' is not a valid integer"),
        (["hi", "--temp", "-0.1"], "--temp is -0.1; wanted a number from 0 to 10"),
        (["hi", "--temp", "nan"], "--temp is nan; wanted a number from 0 to 10"),
        (["hi", "--temp", "warm"], "'warm' is not a valid float"),
        (["hi", "--top-k", "-1"], "--top-k is -1; wanted 0 (keep all) or more"),
        (["hi", "--top-p", "0"], "--top-p is 0.0; wanted a number over 0"),
        (["hi", "-n", "0"], "-n is 0; wanted 1 or more"),
        (["hi", "-c", "2"], "-c is 2; wanted a context of at least 8"),
        (["hi", "-t", "-1"], "-t is -1; wanted 0 (all cores) to"),
        (["hi", "-t", "9999"], "-t is 9999; wanted 0 (all cores) to"),
        (["hi", "-td", "-1"], "-td is -1; wanted 0 (as many as -t) to"),
        (["hi", "-ngl", "-2"], "-ngl is -2; wanted -1 (all layers) or more"),
        (["hi", "--n-prime", "-1"], "--n-prime is -1; wanted 0 or more"),
        (["hi", "--think-budget", "-1"], "--think-budget is -1; wanted 0 or more"),
        (["hi", "--stop", ""], "--stop is empty"),
        (["hi", "--stop", "x\udcff"], "--stop holds bytes that are no UTF-8"),
        (["hi", "--answer-by", "nobody"], "'nobody' is not one of"),
        (["hi", "--threshold", "nan"], "the threshold is nan"),
        (["hi", "--policy", "mean-loglik", "--threshold", "2"], "mean-loglik wanted a number from 0 to 1"),
        (["hi", "--min-acceptance-ratio", "0.5", "--threshold", "0.5"], "one number; give one of them"),
        (["hi", "--min-acceptance-ratio", "0.5", "--policy", "always"], "always has no ratio floor"),
        (["hi", "--min-acceptance-ratio", "0.5", "--policy", "nope"], "known are semantic-ratio"),
        (["hi", "--min-acceptance-ratio", "0.5"], "semantic-joint has no ratio floor"),
        (["hi", "--min-acceptance-ratio", "-1", "--policy", "semantic-ratio"], "the threshold is -1.0"),
        (["hi", "--template-kwargs", "{thinking"], "is not JSON"),
        (["hi", "--template-kwargs", "[1]"], "is not a JSON object"),
        (["hi", "-m", "target.gguf"], "needs a draft; give one with -md, or use --policy never"),
        (
            ["hi", "-m", "t.gguf", "-md", "d.gguf"],
            "needs the joint probe; give --joint-probe, or use a policy without probes",
        ),
    ],
)
def test_a_wrong_question_or_option_is_one_line_and_exit_code_2(run, tmp_path, arguments, said):
    (tmp_path / "there.txt").write_text("hi")
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    outcome = run(*arguments)
    assert said in outcome.error and outcome.code == 2


def test_an_unknown_policy_lists_the_known_ones_before_any_file_is_looked_for(run):
    outcome = run("hi", "--policy", "semantic-ration")
    assert outcome.code == 2
    assert all(name in outcome.error for name in POLICIES)


def test_probes_of_another_policy_name_the_one_that_reads_them(run, pair, tmp_path):
    (tmp_path / "p.onnx").write_bytes(b"not opened")
    outcome = run("hi", *pair, "--target-probe", "p.onnx", "--draft-probe", "p.onnx")
    assert outcome.code == 2 and "or use --policy semantic-ratio, for the probes given" in outcome.error


def test_a_pair_that_is_not_here_names_the_one_command_that_gets_it(run, tmp_path, monkeypatch):
    pretend_shipped(tmp_path / "program", monkeypatch)
    for arguments in ([], ["--pair", "qwen2.5-coder"], ["--policy", "never"]):
        outcome = run("hi", *arguments)
        assert outcome.code == 2
        assert "get it with: semspec-local models pull qwen2.5-coder  (1.6 GB)" in outcome.error


# -- files that cannot be used: exit code 4 -------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no model file at model.gguf"),
        (b"", "is empty"),
        (b"<!DOCTYPE html><html><body>Please log in</body></html>", "is a web page, not a model"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a Git LFS pointer"),
        (b"PK\x03\x04 weights", "is not a GGUF file"),
        (b"GGUF", "is a broken or truncated GGUF file"),
    ],
)
def test_a_model_that_is_none_is_one_line_and_exit_code_4(run, tmp_path, content, said):
    if content is not None:
        (tmp_path / "model.gguf").write_bytes(content)
    outcome = run("hi", "-m", "model.gguf", "--policy", "never")
    assert outcome.code == 4 and said in outcome.error


def test_a_truncated_model_is_told_before_it_is_loaded(run, tiny, tmp_path):
    whole = tiny("llama").read_bytes()
    (tmp_path / "model.gguf").write_bytes(whole[: len(whole) - 1000])
    outcome = run("hi", "-m", "model.gguf", "--policy", "never")
    assert outcome.code == 4 and "is truncated" in outcome.error


@pytest.mark.parametrize("content", [None, b"\x80\x04 a pickle", b"GGUF"])
def test_a_probe_that_is_none_is_one_line_and_exit_code_4(run, pair, tmp_path, content):
    if content is not None:
        (tmp_path / "p.onnx").write_bytes(content)
    probes = ["--target-probe", "p.onnx", "--draft-probe", "p.onnx"]
    outcome = run("hi", *pair, *probes, "--policy", "semantic-ratio")
    assert outcome.code == 4 and "wanted an ONNX probe" in outcome.error


def test_a_question_that_does_not_fit_the_context_is_exit_code_2(run, pair):
    outcome = run("word " * 300, *pair, "--policy", "never", "-c", 128)
    assert outcome.code == 2 and "the question is too long" in outcome.error


# -- answers ----------------------------------------------------------------------------------------------

KINDS = ["loglik-ratio", "always", "never"]


@pytest.mark.parametrize("policy", KINDS)
def test_the_text_goes_to_stdout_and_one_line_of_statistics_to_stderr(run, pair, policy):
    outcome = run("hi", *pair, "--policy", policy)
    assert outcome.code == 0
    *remarks, line = outcome.err.strip().splitlines()
    assert all("drafted steps were accepted" in remark for remark in remarks if remark)
    assert line.endswith("; seed 7")
    assert ("nothing was drafted" in line) == (policy == "never")
    as_json = json.loads(run("hi", *pair, "--policy", policy, "--json").out)
    assert outcome.out == as_json["text"] + "\n"


@pytest.mark.parametrize("policy", KINDS)
def test_json_is_one_line_with_these_keys(run, pair, policy):
    outcome = run("hi", *pair, "--policy", policy, "--json")
    assert outcome.code == 0 and outcome.out.count("\n") == 1
    result = json.loads(outcome.out, parse_constant=pytest.fail)
    assert list(result) == ["answer", "text", "reasoning", "stop_reason", "seed", "usage", "stats"]
    assert result["seed"] == 7 and result["stop_reason"] in ("budget", "eos") and result["reasoning"] is None
    usage, stats = result["usage"], result["stats"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens"] == stats["n_committed_tokens"] <= 60
    assert stats["policy"] == policy and stats["speculated"] == (policy != "never")
    assert stats["n_accepted_steps"] == stats["n_proposed_steps"] or policy != "always"


@pytest.mark.case(48)
def test_quiet_says_nothing_but_the_text(run, pair):
    outcome = run("hi", *pair, "--policy", "always", "-q")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out == run("hi", *pair, "--policy", "always").out


def test_the_question_may_come_from_a_file_or_from_standard_input(run, pair, tmp_path):
    (tmp_path / "q.txt").write_bytes("\ufeffHow many?\n".encode())
    said = {
        run(*source, *pair, "--policy", "always", "-q", stdin="How many?\n").out
        for source in (["How many?"], ["-f", "q.txt"], ["-"])
    }
    assert len(said) == 1 and said != {run("How few?", *pair, "--policy", "always", "-q").out}


def test_stats_and_rejected_steps_go_to_stderr(run, pair):
    options = [*pair, "--policy", "loglik-ratio", "--threshold", 0.9]
    plain = run("hi", *options)
    outcome = run("hi", *options, "--stats", "--show-rejected", "-v")
    assert (outcome.code, outcome.out) == (0, plain.out)
    (stats,) = (json.loads(line) for line in outcome.err.splitlines() if line.startswith('{"n_prompt'))
    n_rejected = outcome.err.count("  | rejected (")
    assert n_rejected >= stats["n_proposed_steps"] - stats["n_accepted_steps"] > 0
    assert outcome.err.count(" rejected below_threshold") <= n_rejected
    assert outcome.err.count(" committed ") == stats["n_steps"]


@pytest.mark.case(42)
def test_a_seed_nobody_gave_is_printed_and_gives_the_same_again(run, pair):
    options = [option for option in pair if option not in ("-s", 7)]
    first = run("hi", *options, "--policy", "loglik-ratio", "--json", "--temp", 2)
    seed = json.loads(first.out)["seed"]
    assert first.err.rstrip().endswith(f"seed {seed}")
    again = run("hi", *options, "--policy", "loglik-ratio", "--json", "--temp", 2, "-s", seed)
    assert json.loads(again.out)["text"] == json.loads(first.out)["text"]


def test_the_budget_is_kept_to_the_token(run, pair):
    result = json.loads(run("hi", *pair, "--policy", "always", "--json", "-n", 17, "--temp", 0).out)
    assert result["usage"]["completion_tokens"] == 17 and result["stop_reason"] == "budget"


def test_a_threshold_above_every_score_gives_the_targets_own_text_at_temperature_0(run, pair):
    alone = run("hi", *pair, "--policy", "never", "--temp", 0, "-q").out
    strict = run("hi", *pair, "--policy", "loglik-ratio", "--threshold", 1e9, "--temp", 0, "-q").out
    assert strict == alone


def test_options_may_come_from_the_environment(run, pair, monkeypatch):
    monkeypatch.setenv("SEMSPEC_RUN_POLICY", "never")
    monkeypatch.setenv("SEMSPEC_RUN_MAX_TOKENS", "5")
    options = [option for option in pair if option not in ("-n", 60)]
    stats = json.loads(run("hi", *options, "--json").out)["stats"]
    assert (stats["policy"], stats["n_committed_tokens"]) == ("never", 5)


# -- traces -----------------------------------------------------------------------------------------------


def test_the_trace_tells_the_whole_run(run, pair):
    outcome = run("How many?", *pair, "--policy", "loglik-ratio", "--trace", "t.jsonl", "--json")
    trace, result = read_trace("t.jsonl"), json.loads(outcome.out)
    assert "".join(step.text for step in trace.steps if step.committed) == result["text"]
    assert (trace.header["question"], trace.header["seed"], trace.header["policy"]) == ("How many?", 7, "loglik-ratio")
    assert set(trace.header["models"]) == {"target", "draft"}
    assert trace.summary is not None and trace.summary.stop_reason == result["stop_reason"]
    assert trace.summary.counters.n_steps == result["stats"]["n_steps"]


def test_a_trace_that_cannot_be_written_is_exit_code_2_before_anything_is_loaded(run):
    outcome = run("hi", "-m", "missing.gguf", "--policy", "never", "--trace", "nowhere/t.jsonl")
    assert outcome.code == 2 and "nowhere/t.jsonl cannot be written: there is no folder nowhere" in outcome.error


@pytest.mark.parametrize("patched", [None, "access", "open"])
def test_a_trace_that_may_not_be_written_or_read_is_exit_code_2(run, tmp_path, monkeypatch, patched):
    (tmp_path / "folder").mkdir()
    (tmp_path / "t.jsonl").write_text("{}")
    words, wanted = ("hi", "-m", "missing.gguf", "--policy", "never", "--trace"), "no permission"
    if patched is None:
        name, wanted = "folder", "it is a folder"
    elif patched == "access":
        name = "new.jsonl"
        monkeypatch.setattr(os, "access", lambda path, mode: False)
    else:
        name, wanted = "t.jsonl", "Permission denied"
        monkeypatch.setattr(Path, "open", lambda *_: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    outcome = run(*words, name)
    assert outcome.code == 2 and f"{name} cannot be written: {wanted}" in outcome.error


def test_a_run_that_cannot_start_keeps_the_trace_of_an_earlier_one(run, pair, tmp_path):
    precious = '{"type": "run", "version": 1}'
    (tmp_path / "t.jsonl").write_text(precious)
    assert run("hi", "-m", "missing.gguf", "--policy", "never", "--trace", "t.jsonl").code == 4
    assert run("hi", *pair, "--policy", "semantic-greedy", "--trace", "t.jsonl").code == 2
    assert run("long " * 500, *pair, "--policy", "never", "-c", "64", "--trace", "t.jsonl").code == 2
    assert (tmp_path / "t.jsonl").read_text() == precious


@pytest.mark.parametrize("link", [False, True])
def test_a_trace_never_overwrites_an_input(run, pair, tmp_path, link):
    (tmp_path / "q.txt").write_text("hi")
    name = "q.txt"
    if link:
        (tmp_path / "link").symlink_to(tmp_path / "q.txt")
        name = "link"
    outcome = run("-f", "q.txt", *pair, "--policy", "never", "--trace", name)
    assert outcome.code == 2 and "is also an input" in outcome.error
    assert (tmp_path / "q.txt").read_text() == "hi"


def test_a_trace_replaces_a_trace_and_nothing_else(run, pair, tmp_path):
    (tmp_path / "notes.txt").write_text("precious")
    outcome = run("hi", *pair, "--policy", "never", "-n", "4", "--trace", "notes.txt")
    assert outcome.code == 2 and "exists and is no trace" in outcome.error
    assert (tmp_path / "notes.txt").read_text() == "precious"
    for _ in range(2):
        assert run("hi", *pair, "--policy", "never", "-n", "4", "--trace", "t.jsonl").code == 0
    assert len(read_trace(tmp_path / "t.jsonl").steps) >= 1


@pytest.mark.case(49)
def test_a_missing_file_is_refused_although_the_policy_does_not_need_it(run, pair):
    assert run("hi", *pair[:2], "-md", "missing.gguf", "--policy", "never").code == 4
    assert run("hi", *pair, "--target-probe", "missing.onnx", "--policy", "never").code == 4


def test_a_failure_in_the_middle_keeps_text_trace_and_json(run, pair, tmp_path, monkeypatch):
    from semspec_local.llama.session import LlamaStepModel

    propose = LlamaStepModel.propose

    def fails_later(self, reader, **options):
        if self.n_past > 60:
            raise DecodeError("no more")
        return propose(self, reader, **options)

    monkeypatch.setattr(LlamaStepModel, "propose", fails_later)
    outcome = run("hi", *pair, "--policy", "never", "--json", "--trace", "t.jsonl", "--max-step-tokens", "8")
    assert outcome.code == 1 and "Error: no more" in outcome.err
    result = json.loads(outcome.out)
    assert result["stop_reason"] == "error" and result["text"]
    trace = read_trace(tmp_path / "t.jsonl")
    assert trace.summary.stop_reason == "error"
    assert "".join(step.text for step in trace.steps) == result["text"]


def test_a_trace_that_fails_in_the_middle_loses_neither_text_nor_json(run, pair, monkeypatch):
    step = TraceWriter.step

    def full_later(self, record):
        if record.index == 2:
            raise SemspecError("the trace cannot be written: no space left")
        step(self, record)

    monkeypatch.setattr(TraceWriter, "step", full_later)
    outcome = run("hi", *pair, "--policy", "never", "--json", "--trace", "t.jsonl", "--max-step-tokens", "8")
    assert outcome.code == 1 and "Error: the trace cannot be written" in outcome.err
    result = json.loads(outcome.out)
    assert result["stop_reason"] == "error" and result["text"]
    assert result["stats"]["wall_s"] > 0


def test_ctrl_c_while_a_step_is_printed_keeps_the_seconds(run, pair, monkeypatch):
    monkeypatch.setattr(show, "described", lambda record: signal.raise_signal(signal.SIGINT) or "")
    outcome = run("hi", *pair, "--policy", "never", "--json", "-v")
    result = json.loads(outcome.out)
    assert outcome.code == INTERRUPTED and result["stop_reason"] == "interrupted"
    assert result["stats"]["wall_s"] > 0 and result["text"]


def test_closed_standard_streams_are_no_traceback(pair, tmp_path):
    command = " ".join(shlex.quote(word) for word in program("-", *pair, "--policy", "never"))
    closed = subprocess.run(f"{command} <&-", shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert closed.returncode == 2 and "standard input is closed" in closed.stderr
    command = " ".join(shlex.quote(word) for word in program("hi", *pair, "--policy", "never", "-n", "4"))
    silent = subprocess.run(f"{command} >&-", shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert silent.returncode == 0 and "Traceback" not in silent.stderr


def test_a_stop_text_with_blanks_is_not_cut_by_the_environment(run, pair, monkeypatch, tmp_path):
    monkeypatch.setenv("SEMSPEC_RUN_STOP", "END OF")
    assert run("hi", *pair, "--policy", "never", "-n", "4", "--trace", "t.jsonl").code == 0
    assert read_trace(tmp_path / "t.jsonl").header["config"]["stop"] == []


# -- as a program of its own --------------------------------------------------------------------------------


def program(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "semspec_local", "run", *map(str, arguments)]


def test_the_same_seed_gives_the_same_trace_in_another_process(pair, tmp_path):
    def steps(name: str, seed: int) -> list[dict[str, object]]:
        options = [*pair, "--temp", 2, "--policy", "loglik-ratio", "--threshold", 0.1, "--trace", name, "-s", seed]
        done = subprocess.run(program("hi", *options), cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in (tmp_path / name).read_text(encoding="utf-8").splitlines()]
        return [
            {key: value for key, value in line.items() if not key.endswith("_s")}
            for line in lines
            if line["type"] == "step"
        ]

    first = steps("a.jsonl", 3)
    assert first == steps("b.jsonl", 3)
    assert first != steps("c.jsonl", 4)


def test_stdout_holds_the_answer_alone_and_a_warning_goes_to_stderr(pair, tmp_path):
    command = program("hi", *pair, "--policy", "never", "-c", 100_000, "--json")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and json.loads(done.stdout)["seed"] == 7
    warning, *_, last = done.stderr.strip().splitlines()
    assert "trained for 4,096 tokens of context" in warning and last.endswith("seed 7")
    quiet = subprocess.run([*command, "-q"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (quiet.returncode, quiet.stderr) == (0, "")


def test_a_reader_that_goes_away_ends_the_run_without_a_traceback(pair, tmp_path):
    with subprocess.Popen(
        program("hi", *pair, "--policy", "never"), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        complaint = process.stderr.read().decode()
    assert process.returncode == 1 and complaint == ""


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that, taking the likeliest token, does not come to an end for tens of thousands of tokens."""
    return write_model(tmp_path_factory.mktemp("endless") / "endless.gguf", seed=5, n_ctx_train=1_000_000)


@pytest.mark.case(46)
@pytest.mark.skipif(sys.platform == "win32", reason="signals to a process are a matter of POSIX")
@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_ctrl_c_ends_with_130_and_keeps_text_and_trace(endless, tmp_path, as_json):
    options = ["-m", endless, "--policy", "never", "--temp", 0, "-n", 40_000, "-c", 50_000, "-t", 1, "-s", 1]
    options += ["--max-step-tokens", 10, "--trace", "t.jsonl", *(["--json"] if as_json else [])]
    trace = tmp_path / "t.jsonl"
    command = program("hi", *options)
    with (
        (tmp_path / "out").open("wb") as out,
        subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=subprocess.PIPE) as process,
    ):
        assert process.stderr is not None
        deadline = time.monotonic() + 60
        while (not trace.exists() or trace.read_bytes().count(b"\n") < 5) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        said = process.stderr.read().decode()
    assert process.returncode == INTERRUPTED, said
    assert "Interrupted; the text so far is kept." in said and "Traceback" not in said
    found = read_trace(trace)
    text = "".join(step.text for step in found.steps if step.committed)
    assert len(found.steps) >= 4 and found.summary is not None and found.summary.stop_reason == "interrupted"
    printed = (tmp_path / "out").read_text(encoding="utf-8")
    if as_json:
        result = json.loads(printed)
        assert (result["text"], result["stop_reason"]) == (text, "interrupted")
    else:
        assert printed == text + "\n"
