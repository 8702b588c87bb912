"""The problems that probe data are collected on: lines of a file, or of the made world."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from ..questions import QUESTION_KEYS, question_of
from .world import problems as world_problems


@dataclass(frozen=True)
class Problem:
    """A question; `number` is its line in the data, which its prefixes and seeds are derived from."""

    number: int
    problem_id: str
    question: str


def read_problems(path: Path, limit: int, offset: int = 0) -> list[Problem]:
    """Problems from a JSONL file whose lines hold one of `QUESTION_KEYS`, numbered by their lines."""
    problems = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if offset <= number < offset + limit:
                problems.append(Problem(number, f"{path.stem}:{number}", _question(path, number, line)))
    if not problems:
        raise ConfigError(f"{path} has no problems at {offset} to {offset + limit}; wanted JSONL lines with a question")
    return problems


def made_up_problems(seed: int, limit: int, offset: int = 0) -> list[Problem]:
    """Problems of the made world, numbered as `world.problems` numbers them."""
    found = list(world_problems(seed, offset + limit))[offset:]
    return [Problem(offset + i, f"world-{seed}:{offset + i}", problem.question) for i, problem in enumerate(found)]


def _question(path: Path, number: int, line: str) -> str:
    try:
        question = question_of(json.loads(line))
    except ValueError:
        question = None
    if question is None:
        raise ConfigError(
            f"{path}, line {number + 1}: got {line.strip()[:60]!r}; wanted a JSON object with a text called "
            f"{', '.join(QUESTION_KEYS[:-1])} or {QUESTION_KEYS[-1]}"
        )
    return question
