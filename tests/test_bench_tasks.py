"""Questions and right answers of a benchmark: known tasks, files, and what is said of those that cannot be used."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from semspec_local.bench.report import which_items
from semspec_local.bench.tasks import TASKS, BenchItem, find_task, load_task, task_provenance
from semspec_local.bench.world_task import world_items
from semspec_local.errors import ConfigError
from semspec_local.jobs.tasks import TASKS as JOB_TASKS
from semspec_local.lab.problems import read_problems
from semspec_local.questions import BOXED

GSM8K = [
    {"question": f"What is {i} and {i}?", "answer": f"{i}+{i} = <<{i}+{i}={2 * i}>>{2 * i}\n#### {2 * i}"}
    for i in range(5)
]
MATH = [
    {"id": 7, "problem": "Halve one.", "answer": "\\frac{1}{2}", "subject": "Prealgebra", "level": 3},
    {"id": 9, "problem": "Name two.", "solution": "They are \\boxed{2} and \\boxed{-1}."},
]


@pytest.fixture
def data(tmp_path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder / "gsm8k_test.jsonl", GSM8K)
    write(folder / "math500.jsonl", MATH)
    write(folder / "aime24.jsonl", [{"id": 60, "problem": "?", "answer": "025"}])
    return folder


def write(path: Path, rows: list) -> Path:
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")
    return path


def refusal(*words, **options) -> str:
    with pytest.raises(ConfigError) as caught:
        load_task(*words, **options)
    return str(caught.value)


# -- known tasks ------------------------------------------------------------------------------------


def test_a_task_has_its_questions_and_what_ends_their_solutions(data):
    assert load_task("gsm8k", data, limit=2, offset=3) == [
        BenchItem(id="gsm8k:3", question="What is 3 and 3?", expected="6"),
        BenchItem(id="gsm8k:4", question="What is 4 and 4?", expected="8"),
    ]
    assert load_task("aime24", data) == [BenchItem(id="aime24:60", question="?", expected="025")]
    halves, names = load_task("math500", data)
    assert halves == BenchItem(
        id="math500:7", question="Halve one.", expected="\\frac{1}{2}", level="3", subject="Prealgebra"
    )
    assert names.expected == "2, -1"


def test_any_part_is_a_part_of_the_whole(data):
    whole = load_task("gsm8k", data)
    assert len(whole) == len({item.id for item in whole}) == 5
    for offset in range(5):
        for limit in range(1, 6 - offset):
            assert load_task("gsm8k", data, limit, offset) == whole[offset : offset + limit]
        assert load_task("gsm8k", data, offset=offset) == whole[offset:]
        for every in range(1, 7):
            part = whole[offset::every]
            assert load_task("gsm8k", data, offset=offset, every=every) == part
            assert load_task("gsm8k", data, len(part), offset, every) == part


def test_the_made_world_needs_no_data():
    items = load_task("world", limit=3, offset=2)
    problems = world_items(3, offset=2)
    assert [(item.question, item.expected) for item in items] == [(p.question, str(p.answer)) for p in problems]
    assert [item.id for item in items] == ["world:2", "world:3", "world:4"]
    assert load_task("world", limit=3, offset=2, every=4) == load_task("world", limit=9, offset=2)[::4]
    assert "no end" in refusal("world") and "--limit" in refusal("world")


def test_a_question_is_asked_with_the_sentence_that_batches_use(data):
    item = load_task("gsm8k", data)[0]
    assert find_task("gsm8k").prompt(item) == f"What is 0 and 0?\n\n{JOB_TASKS['gsm8k'].suffix}"
    assert JOB_TASKS["math"].suffix == TASKS["math500"].suffix == BOXED
    assert find_task("world").prompt(item) == item.question


def test_every_task_says_how_it_is_graded():
    assert {name: task.kind for name, task in TASKS.items()} == {
        "gsm8k": "number",
        "math500": "math",
        "aime24": "number",
        "world": "exact",
    }


# -- files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["my.jsonl", "gsm8k.jsonl"])
def test_a_file_of_ones_own_is_a_task(tmp_path, name):
    rows = [
        {"prompt": "a", "answer": 5},
        "",
        {"question": "b", "gold": "x^2"},
        {"problem": "c", "expected_answer": 0.5, "answer": None},
        {"question": "d", "solution": "It is 2.\n\n#### 1,250"},
    ]
    path = write(tmp_path / name, rows)
    items = load_task(str(path))
    assert [(item.question, item.expected) for item in items] == [
        ("a", "5"),
        ("b", "x^2"),
        ("c", "0.5"),
        ("d", "1,250"),
    ]
    assert [item.id for item in items] == [f"{path.stem}:{i}" for i in range(4)]
    assert (find_task(str(path)).kind, find_task(str(path)).suffix) == ("math", BOXED)


def test_what_is_a_question_here_is_one_for_probe_data_too(tmp_path):
    path = write(tmp_path / "q.jsonl", [{"problem": "a", "prompt": 3, "answer": "1"}, {"prompt": "b", "answer": "2"}])
    assert [problem.question for problem in read_problems(path, 2)] == [item.question for item in load_task(str(path))]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"question": "b"}, "no answer"),
        ({"question": "b", "answer": " "}, "no answer"),
        ({"question": "b", "answer": True}, "no answer"),
        ({"question": "b", "answer": "\\text{ }"}, "no answer"),
        ({"question": "b", "solution": "We go on. " * 100}, "no answer"),
        ({"answer": "5"}, "no question"),
        ({"question": " ", "answer": "5"}, "no question"),
        ([1], "no question"),
        ('{"question": "b", ', "wanted a JSON object"),
        ("[" * 100_000, "wanted a JSON object"),
    ],
)
def test_a_line_that_cannot_be_used_is_named_by_its_number(tmp_path, line, words):
    path = write(tmp_path / "q.jsonl", [{"question": "a", "answer": "1"}, "", line])
    message = refusal(str(path))
    assert f"{path}, line 3" in message and words in message
    assert len(load_task(str(path), limit=1)) == 1, "a line that is not asked for hinders nobody"


def test_ids_that_occur_twice_are_refused(tmp_path):
    path = write(tmp_path / "q.jsonl", [{"id": "x", "question": "a", "answer": "1"}] * 2)
    assert "the id 'x' twice" in refusal(str(path))


# -- what cannot be had -----------------------------------------------------------------------------


def test_a_missing_folder_or_file_is_said_with_flag_and_name(data, tmp_path):
    assert "--data" in refusal("math500") and "math500.jsonl" in refusal("math500")
    message = refusal("gsm8k", tmp_path / "nowhere")
    assert str(tmp_path / "nowhere") in message and "--data" in message and "gsm8k_test.jsonl" in message
    (data / "aime24.jsonl").unlink()
    assert "holds no aime24.jsonl" in refusal("aime24", data)


def test_an_unknown_task_lists_the_known(tmp_path):
    for name in ("gsm9k", str(tmp_path / "none.jsonl"), "none.jsonl"):
        message = refusal(name)
        assert name in message and all(known in message for known in TASKS)


@pytest.mark.parametrize(
    ("limit", "offset", "every", "words"),
    [
        (1, 5, 1, ("5 items", "--offset 5")),
        (3, 3, 1, ("5 items", "2 of them", "--limit 3", "at most 2")),
        (6, 0, 1, ("5 items", "--limit 6", "at most 5")),
        (4, 0, 2, ("5 items", "3 of them", "--every 2", "--limit 4", "at most 3")),
        (0, 0, 1, ("--limit 0",)),
        (None, -1, 1, ("--offset -1",)),
        (None, 0, 0, ("--every 0",)),
    ],
)
def test_a_part_that_is_not_there_is_refused(data, limit, offset, every, words):
    message = refusal("gsm8k", data, limit, offset, every)
    assert all(word in message for word in words), message


def test_the_items_in_words():
    document = {"settings": {"task": "math500", "limit": 50, "offset": 3}, "arms": [{"n_items": 50}]}
    assert which_items(document) == "50 items of math500 from number 3 on"
    document["settings"]["every"] = 10
    document["arms"][0]["n_items"] = 7
    assert which_items(document) == "7 items of math500 from number 3 on, one in 10 (stopped; 50 were asked for)"


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xff\xfe{}\n"])
def test_a_file_without_items_is_refused(tmp_path, content):
    path = tmp_path / "q.jsonl"
    path.write_bytes(content)
    assert str(path) in refusal(str(path))


# -- provenance -------------------------------------------------------------------------------------


def test_provenance_names_the_data_by_its_digest(data):
    content = (data / "math500.jsonl").read_bytes()
    assert task_provenance("math500", data) == {
        "task": "math500",
        "data": {"sha256": hashlib.sha256(content).hexdigest(), "size_bytes": len(content), "name": "math500.jsonl"},
    }
    assert task_provenance("world") == {"task": "world", "seed": 1_000_000}
    assert str(data) not in json.dumps(task_provenance("gsm8k", data)), "a folder of this machine says nothing"
