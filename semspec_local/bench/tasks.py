"""The tasks of a benchmark: questions and right answers, from files of data or from the made world.

Knows nothing of models, nor of what counts as right.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from ..answer import after_hashes, closing_boxes
from ..answer_forms import normal
from ..errors import ConfigError
from ..lab.world import Problem
from ..provenance import fingerprint_file
from ..questions import BOXED, QUESTION_KEYS, question_of
from .grading import Kind
from .world_task import BENCH_SEED, world_items

ANSWER_KEYS = ("answer", "final_answer", "expected_answer", "gold", "solution")
"""What a line may call its right answer, or the solution that ends with it."""

_MAX_ANSWER_CHARS = 400
"""A longer text without a mark is a solution, and where its answer stands is not known."""


@dataclass(frozen=True, kw_only=True)
class BenchTask:
    """A kind of questions. `file` is what its data are called (None: made up); `suffix` follows every question.

    `seed` is that of the made world's problems.
    """

    name: str
    kind: Kind
    file: str | None
    suffix: str = BOXED
    seed: int | None = None

    def prompt(self, item: BenchItem) -> str:
        """What a model is asked."""
        return f"{item.question}\n\n{self.suffix}" if self.suffix else item.question


@dataclass(frozen=True, kw_only=True)
class BenchItem:
    """One question and its right answer."""

    id: str
    question: str
    expected: str
    level: str | None = None
    subject: str | None = None


def _world_task(name: str, seed: int) -> BenchTask:
    return BenchTask(
        name=name, kind="exact", file=None, suffix="", seed=seed
    )  # the embedded pair knows no such sentence


TASKS: dict[str, BenchTask] = {
    task.name: task
    for task in (
        BenchTask(name="gsm8k", kind="number", file="gsm8k_test.jsonl"),
        BenchTask(name="math500", kind="math", file="math500.jsonl"),
        BenchTask(name="aime24", kind="number", file="aime24.jsonl"),
        _world_task("world", BENCH_SEED),
    )
}


def find_task(name_or_file: str) -> BenchTask:
    """A known task, `world:SEED`, or that of a JSONL file; ConfigError for what is none of these."""
    if name_or_file in TASKS:
        return TASKS[name_or_file]
    kind, _, seed = name_or_file.partition(":")
    if kind == "world" and seed.isascii() and seed.isdecimal():
        return _world_task(name_or_file, int(seed))
    path = Path(name_or_file)
    if path.is_file():
        return BenchTask(name=path.stem, kind="math", file=name_or_file)
    if path.suffix or len(path.parts) > 1:
        raise ConfigError(f"no file at {name_or_file}; wanted a JSONL file, or one of the tasks {', '.join(TASKS)}")
    raise ConfigError(f"the task is {name_or_file!r}; known are {', '.join(TASKS)}, and any JSONL file by its path")


def load_task(
    name_or_file: str, data: Path | None = None, limit: int | None = None, offset: int = 0, every: int = 1
) -> list[BenchItem]:
    """`limit` items (None: all), every `every`th from number `offset` on, counted from 0, of a task or a JSONL file.

    A file's lines have a question under one of `QUESTION_KEYS` and an answer under one of `ANSWER_KEYS`. `data` is the
    folder of the known tasks' files. Raises ConfigError; lines that are not asked for may hold anything.
    """
    task = find_task(name_or_file)
    if offset < 0 or every < 1 or (limit is not None and limit < 1):
        raise ConfigError(
            f"got --limit {limit} --offset {offset} --every {every}; "
            "wanted a limit and a distance of 1 or more, an offset of 0 or more"
        )
    if task.file is None:
        if limit is None:
            raise ConfigError(f"the task {task.name} has no end; say how many problems with --limit")
        return [item for item, _ in world_task_items(task, limit, offset, every)]
    path = _path(task, data)
    lines = [(number, line) for number, line in enumerate(_lines(path), start=1) if line.strip()]
    numbers = _part(path, len(lines), limit, offset, every)
    items = [_item(task, path, index, *lines[index]) for index in numbers]
    _refuse_twins(path, items)
    return items


def task_provenance(name_or_file: str, data: Path | None = None) -> dict[str, Any]:
    """What says which questions were asked: the data file's sha256, size and name, or the made world's seed."""
    task = find_task(name_or_file)
    if task.file is None:
        return {"task": task.name, "seed": task.seed}
    path = _path(task, data)
    try:
        return {"task": task.name, "data": dict(fingerprint_file(path))}
    except OSError as error:
        raise _unreadable(path, error) from None


def world_task_items(task: BenchTask, limit: int, offset: int, every: int = 1) -> list[tuple[BenchItem, Problem]]:
    """Items of the made world beside the problems that they ask."""
    assert task.seed is not None, "this task is not of the made world"
    made = world_items((limit - 1) * every + 1, offset=offset, seed=task.seed)[::every]
    return [
        (BenchItem(id=f"{task.name}:{number}", question=problem.question, expected=str(problem.answer)), problem)
        for number, problem in zip(count(offset, every), made)
    ]


def _path(task: BenchTask, data: Path | None) -> Path:
    assert task.file is not None, "the made world has no file"
    if task not in TASKS.values():
        return Path(task.file)
    if data is None:
        raise ConfigError(f"the task {task.name} reads {task.file}; say in which folder that is with --data")
    if not data.is_dir():
        raise ConfigError(f"--data is {data}, and no folder is there; wanted the folder that holds {task.file}")
    path = data / task.file
    if not path.is_file():
        raise ConfigError(f"{data} holds no {task.file}; wanted it there for the task {task.name}")
    return path


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8-sig") as lines:
            yield from lines
    except OSError as error:
        raise _unreadable(path, error) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no UTF-8; wanted a JSONL file in UTF-8") from None


def _unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path} cannot be read: {error.strerror or error}")


def _part(path: Path, n_items: int, limit: int | None, offset: int, every: int) -> range:
    """The numbers of the items that are asked for; ConfigError when there are not so many."""
    if n_items == 0:
        raise ConfigError(f"{path} holds no items; wanted JSON lines with a question and an answer")
    if offset >= n_items:
        raise ConfigError(f"{path} has {n_items} items, numbered from 0; got --offset {offset}, wanted less")
    numbers = range(offset, n_items, every)
    if limit is not None and limit > len(numbers):
        apart = f"--offset {offset}" if every == 1 else f"--offset {offset} --every {every}"
        raise ConfigError(
            f"{path} has {n_items} items, {len(numbers)} of them with {apart}; got --limit {limit}, "
            f"wanted at most {len(numbers)}"
        )
    return numbers[:limit]


def _item(task: BenchTask, path: Path, index: int, number: int, line: str) -> BenchItem:
    where = f"{path}, line {number}"
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise ConfigError(f"{where}: got {line.strip()[:60]!r}; wanted a JSON object") from None
    question = question_of(row)
    if question is None or not question.strip():
        raise ConfigError(f"{where} has no question; wanted a text called {_listed(QUESTION_KEYS)}")
    expected = _expected(row)
    if expected is None:
        raise ConfigError(
            f"{where} has no answer; wanted a text or number called {_listed(ANSWER_KEYS)}, short, "
            "or with its answer in \\boxed{} or after ####"
        )
    found_id, level, subject = (_text(row.get(key)) for key in ("id", "level", "subject"))
    return BenchItem(
        id=f"{task.name}:{index if found_id is None else found_id}",
        question=question,
        expected=expected,
        level=level,
        subject=subject,
    )


def _expected(row: dict[str, Any]) -> str | None:
    """The right answer in a line: what its text ends with, or the whole of a short one."""
    for key in ANSWER_KEYS:
        given = _text(row.get(key))
        if given is None:
            continue
        marked = after_hashes(given)
        answer = (marked if marked is not None else ", ".join(closing_boxes(given)) or given).strip()
        if len(answer) <= _MAX_ANSWER_CHARS and normal(answer):
            return answer
    return None


def _text(value: Any) -> str | None:
    """A text or a number as a text; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return None
    return str(value)


def _listed(keys: tuple[str, ...]) -> str:
    return f"{', '.join(keys[:-1])} or {keys[-1]}"


def _refuse_twins(path: Path, items: list[BenchItem]) -> None:
    seen: set[str] = set()
    for item in items:
        if item.id in seen:
            raise ConfigError(f"{path} has the id {item.id.partition(':')[2]!r} twice; wanted ids that differ")
        seen.add(item.id)
