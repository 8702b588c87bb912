"""A job from its file to its output on the embedded pair: nothing is lost, nothing is run twice."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from semspec_local import jobs
from semspec_local.config import ModelConfig, RunConfig
from semspec_local.errors import ConfigError
from semspec_local.jobs.output import OutputError, OutputFile
from semspec_local.jobs.records import ItemError, ItemRecord
from semspec_local.jobs.runner import Stopped, file_name, item_seed
from semspec_local.jobs.tasks import number_answer
from semspec_local.lab.world import problems
from semspec_local.linefile import manifest_path
from semspec_local.reasoner import Reasoner, Sources
from semspec_local.trace import read_trace

MANIFEST = {"version": 1, "job": {"seed": 1, "config": {"policy": "never"}}}
QUICK = ("--pair", "tiny", "--policy", "loglik-ratio", "-t", "1")


def record(item_id: str, **changes) -> ItemRecord:
    return ItemRecord(**{"id": item_id, "line": 1, "status": "ok", "answer": "5", "text": "It is 5.", **changes})


def line(item_id: str, **changes):
    return record(item_id, **changes).to_json("semspec", "m")


def batch(*words: object, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "semspec_local", "batch", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def read(path: Path) -> list[dict]:
    return [json.loads(found) for found in path.read_text().splitlines()]


@pytest.fixture
def questions(tmp_path) -> Path:
    path = tmp_path / "in.jsonl"
    lines = [{"id": f"q{i}", "prompt": problem.question} for i, problem in enumerate(problems(31, 6))]
    path.write_text("".join(json.dumps(found) + "\n" for found in lines))
    return path


# -- the output file ------------------------------------------------------------------------------------


def test_what_is_written_is_taken_up_again(tmp_path):
    path = tmp_path / "new" / "out.jsonl"
    with OutputFile(path, MANIFEST) as out:
        out.append(line("a"))
        out.append(line("b", status="error", error=ItemError(type="server_error", message="no")))
    with path.open("ab") as file:
        file.write(b'{"id": "torn')
    with OutputFile(path, MANIFEST) as out:
        assert out.finished == {"a": False, "b": True}
        out.append(line("c"))
    assert [found["id"] for found in read(path)] == ["a", "b", "c"]
    with OutputFile(path, MANIFEST, retry=True) as out:
        assert out.finished == {"a": False, "c": False}
    assert [found["id"] for found in read(path)] == ["a", "c"]


def test_other_settings_are_named_and_refused(tmp_path):
    path = tmp_path / "out.jsonl"
    with OutputFile(path, MANIFEST) as out:
        out.append(line("a"))
    other = {"version": 1, "job": {"seed": 2, "config": {"policy": "always"}}}
    with pytest.raises(ConfigError, match=r"made with other settings \(config.policy, seed\); choose another -o"):
        OutputFile(path, other)
    OutputFile(path, other, force=True).close()
    manifest_path(path).unlink()
    with pytest.raises(ConfigError, match="it cannot be told what made it"):
        OutputFile(path, MANIFEST)
    manifest_path(path).write_text("[]")
    with pytest.raises(ConfigError, match="is no manifest of a batch"):
        OutputFile(path, MANIFEST)


def test_a_file_of_something_else_is_left_alone(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text("my notes\n")
    with pytest.raises(ConfigError, match="line 1: no output of a batch"):
        OutputFile(path, MANIFEST, force=True)
    assert path.read_text() == "my notes\n"
    with pytest.raises(ConfigError, match="is a folder"):
        OutputFile(tmp_path, MANIFEST)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full on this system")
def test_a_full_disk_is_said_with_what_is_safe(tmp_path):
    path = tmp_path / "out.jsonl"
    said = r"No space left on device; 1 finished items are safe in it"
    with pytest.raises(OutputError, match=said), OutputFile(path, MANIFEST) as out:
        out.append(line("a"))
        out._stream.close()
        out._stream = Path("/dev/full").open("ab")  # noqa: SIM115 - closed at the end of the `with`
        out.append(line("b"))
    assert out.finished == {"a": False}


def test_order_is_that_of_the_input(tmp_path):
    path = tmp_path / "out.jsonl"
    with OutputFile(path, MANIFEST) as out:
        for item_id in ("c", "gone", "a", "b"):
            out.append(line(item_id))
        out.order(["a", "b", "c"])
        out.append(line("d"))
    assert [found["id"] for found in read(path)] == ["a", "b", "c", "gone", "d"]


# -- records --------------------------------------------------------------------------------------------


@pytest.mark.case(40)
def test_an_openai_line_says_the_same_in_both_places():
    good = record("a", reasoning="Hm.", usage={"total_tokens": 3}).to_json("openai", "m")
    assert good["error"] is None and good["response"]["status_code"] == 200
    (choice,) = good["response"]["body"]["choices"]
    assert choice["message"] == {"role": "assistant", "content": "It is 5.", "reasoning_content": "Hm."}
    assert choice["finish_reason"] == "stop"
    assert (
        record("a", status="truncated").to_json("openai", "m")["response"]["body"]["choices"][0]["finish_reason"]
        == "length"
    )
    for kind, code in (("invalid_request_error", 400), ("server_error", 500)):
        bad = record("a", status="error", error=ItemError(type=kind, message="no")).to_json("openai", "m")
        assert bad["response"]["status_code"] == code
        assert bad["error"]["message"] == bad["response"]["body"]["error"]["message"] == "no"


@pytest.mark.case(44)
def test_seeds_depend_on_the_job_and_the_id_alone():
    a, b = (jobs.Item(item_id, 1, ()) for item_id in ("a", "b"))
    assert item_seed(1, a) == item_seed(1, jobs.Item("a", 99, ())) != item_seed(1, b)
    assert item_seed(1, a) != item_seed(2, a)
    assert item_seed(1, jobs.Item("a", 1, (), {"seed": 0})) == 0


@pytest.mark.parametrize("names", [("a/b", "a_b", "a%2Fb"), ("..", ".", "%2E%2E"), ("x" * 300, "x" * 301)])
def test_file_names_are_plain_and_differ(names):
    found = [file_name(name) for name in names]
    assert len(set(found)) == len(names)
    assert all("/" not in name and name not in (".", "..") and len(name) < 200 for name in found)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"So \boxed{1{,}250} dollars", "1250"),
        (r"\boxed{\$1,250.50}", "1250.50"),
        (r"\boxed{-5\text{ apples}}", "-5"),
        ("Therefore\n#### 1,024", "1024"),
        (r"\boxed{\frac{1}{2}}", "1/2"),
        (r"\boxed{-\dfrac{3}{4}\text{ cups}}", "-3/4"),
        (r"\boxed{12\frac{1}{2}}", "12 1/2"),
        (r"\boxed{\frac12}", "1/2"),
        (r"\boxed{\frac{-1}{2}}", "-1/2"),
        (r"\boxed{\frac{1,000}{3}}", "1000/3"),
        (r"\boxed{\frac{2.5}{3}}", "2.5/3"),
        (r"\boxed{\frac{a}{b}}", None),
        (r"\boxed{24/3 = 8}", "8"),
        ("#### 1/1,000", "1/1000"),
        ("#### 3/4", "3/4"),
        (r"\boxed{12 \text{ m}^2}", "12"),
        (r"\boxed{25\%}", "25"),
        (r"\boxed{.5}", "0.5"),
        (r"\boxed{-.25\text{ cups}}", "-0.25"),
        (r"\boxed{−5}", "-5"),
        (r"\boxed{1\,234}", "1234"),
        (r"\boxed{1 1/2}", "1 1/2"),
        ("It is 5.", None),
        (r"\boxed{none}", None),
    ],
)
def test_the_number_of_an_answer(text, answer):
    assert number_answer(text) == answer


# -- whole jobs -----------------------------------------------------------------------------------------


@pytest.mark.case(38)
@pytest.mark.case(49)
def test_a_job_with_good_and_bad_lines(questions, tmp_path):
    with questions.open("a") as file:
        file.write('[1]\n\n{"id": "off", "prompt": "Hm?", "semspec": {"policy": "nope"}}\n')
    out, traces = tmp_path / "out.jsonl", tmp_path / "traces"
    done = batch(questions, "-o", out, *QUICK, "--traces", traces)
    assert done.returncode == 3, done.stderr
    found = {item["id"]: item for item in read(out)}
    assert sorted(found) == sorted([*(f"q{i}" for i in range(6)), "line-7", "line-8", "off"])
    for i, problem in enumerate(problems(31, 6)):
        item = found[f"q{i}"]
        assert (
            item["status"] == "ok" and item["error"] is None and item["seed"] == item_seed(0, jobs.Item(f"q{i}", 1, ()))
        )
        assert item["usage"]["completion_tokens"] == item["stats"]["n_committed_tokens"] > 0
        assert read_trace(traces / f"q{i}.jsonl").header["item"] == f"q{i}"
        assert item["answer"].isdigit() and 0 < int(item["answer"]) < 100, problem
    assert found["line-7"]["error"]["message"].startswith("line 7: got a list")
    assert "nope" in found["off"]["error"]["message"]
    assert "9 items in" in done.stderr and "3 failed" in done.stderr
    again = batch(questions, "-o", out, *QUICK)
    assert again.returncode == 3 and "9 of 9 items are finished already" in again.stderr
    assert {item["id"]: item for item in read(out)} == found


def test_quiet_and_fine_says_nothing(questions, tmp_path):
    done = batch(questions, "-o", tmp_path / "out.jsonl", *QUICK, "-q")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_input_may_not_change_between_two_runs(questions, tmp_path):
    out = tmp_path / "out.jsonl"
    assert batch(questions, "-o", out, *QUICK).returncode == 0
    questions.write_text('{"id": "q0", "prompt": "Something else?"}\n')
    done = batch(questions, "-o", out, *QUICK)
    assert done.returncode == 2 and "other settings (input_sha256)" in done.stderr
    assert batch(questions, "-o", questions, *QUICK).returncode == 2


def test_another_column_is_another_job(tmp_path):
    table, out = tmp_path / "in.csv", tmp_path / "out.jsonl"
    table.write_text("id,a,b\nq,How many?,How much?\n")
    assert batch(table, "-o", out, *QUICK, "--column", "a").returncode == 0
    done = batch(table, "-o", out, *QUICK, "--column", "b")
    assert done.returncode == 2 and "other settings (column)" in done.stderr


def test_an_output_among_the_inputs_is_refused_before_it_is_there(questions, tmp_path):
    done = batch(tmp_path, "-o", tmp_path / "out.jsonl", *QUICK)
    assert done.returncode == 2 and "lies among the inputs, and would be one of them next time" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == [questions.name]


def test_an_item_that_ended_when_somebody_stopped_the_job_is_kept(questions):
    items = [found for found in jobs.read_job(str(questions)).entries if isinstance(found, jobs.Item)]
    config = RunConfig(policy="never", max_tokens=5, max_step_tokens=64)  # one step, and it is the last one
    with Reasoner(Sources.from_pair("tiny"), config, ModelConfig(n_threads=1)) as reasoner:
        n_asked = iter(range(100))
        runner = jobs.Runner(reasoner=reasoner, seed=0, should_stop=lambda: next(n_asked) > 0)
        results = runner.run(items)
        assert next(results).status == "truncated"
        with pytest.raises(Stopped):
            next(results)


def n_lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.case(37)
@pytest.mark.case(44)
@pytest.mark.slow
def test_killed_again_and_again_it_finishes_every_item_once(tmp_path):
    source, whole, out = (tmp_path / name for name in ("in.jsonl", "whole.jsonl", "out.jsonl"))
    lines = [{"id": f"q{i}", "prompt": problem.question} for i, problem in enumerate(problems(31, 100))]
    source.write_text("".join(json.dumps(found) + "\n" for found in lines))
    words = (source, *QUICK, "--temp", "0", "--lanes", "1")  # in lanes, float noise of neighbours may turn a word
    assert batch(*words, "-o", whole).returncode == 0
    rng = random.Random(0)
    for n_more in (0, *rng.choices(range(1, 6), k=11)):  # by lines, not by seconds: a fast machine would be done
        process = subprocess.Popen(
            [sys.executable, "-m", "semspec_local", "batch", *map(str, words), "-o", str(out)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wanted = n_lines(out) + n_more
        while process.poll() is None and n_lines(out) < wanted:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.05))
        process.kill()
        assert process.wait() != 0
    assert 11 <= n_lines(out) < len(lines)
    assert batch(*words, "-o", out).returncode == 0
    told = ("id", "status", "answer", "text", "seed", "usage")
    results = [[{name: item[name] for name in told} for item in read(path)] for path in (whole, out)]
    assert sorted(item["id"] for item in results[1]) == sorted(found["id"] for found in lines)
    assert results[0] == results[1]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for one process")
def test_ctrl_c_stops_after_the_step_and_the_same_command_goes_on(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"prompt": problem.question}) + "\n" for problem in problems(31, 200)))
    command = [sys.executable, "-m", "semspec_local", "batch", str(source), "-o", str(out), *QUICK]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while n_lines(out) < 3:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    n = len(read(out))
    assert 3 <= n < 200 and f"Stopped; {n} of 200 items are in {out}. The same command goes on." in errors
    assert batch(*command[4:]).returncode == 0
    assert len({item["id"] for item in read(out)}) == len(read(out)) == 200


def test_the_same_from_python(questions):
    asked = [json.loads(found) for found in questions.read_text().splitlines()]
    config = RunConfig(policy="loglik-ratio")
    found = list(jobs.run([*asked, "Hm?", {"id": "bad"}], "tiny", config=config, seed=4))
    assert [item.id for item in found] == [*(f"q{i}" for i in range(6)), "line-7", "bad"]
    assert [item.status for item in found[:6]] == ["ok"] * 6 and found[-1].status == "error"
    in_lanes = {item.id: item.status for item in jobs.run(asked, "tiny", config=config, seed=4, n_lanes=3)}
    assert in_lanes == {f"q{i}": "ok" for i in range(6)}
    (again,) = jobs.run(asked[2:3], "tiny", config=config, seed=4)
    assert (again.text, again.seed) == (found[2].text, found[2].seed)


def test_a_line_may_sample_in_its_own_way(tmp_path):
    question = next(iter(problems(31, 1))).question
    cold = {"temperature": 0}
    lines = [
        {"id": f"{kind}{seed}", "prompt": question, "semspec": {"seed": seed, **more}}
        for kind, more in (("cold", cold), ("warm", {"temperature": 5.0, "top_k": 0, "top_p": 1.0}))
        for seed in (1, 2)
    ]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(found) + "\n" for found in lines))
    assert batch(source, "-o", out, *QUICK, "-n", "40").returncode == 0
    text = {item["id"]: item["text"] for item in read(out)}
    assert text["cold1"] == text["cold2"] and len({text["cold1"], text["warm1"], text["warm2"]}) == 3
