"""What the embedded pair is taught: solved problems of the made world as token ids, and which of them to learn."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...roles import ROLES
from ..world import MIN_STEPS, make_problem, solve
from .gguf import ASSISTANT, END, USER, train_vocabulary

N_VOCAB = 1024
"""The most ids the vocabulary may have; the world's words need about 900."""

N_VOCABULARY_PROBLEMS = 2000

FOREIGN_RATE = 0.3
"""Steps in another hand. A model reads them and is not taught to write them; some are slips, which it corrects."""

Learnt = Literal["all", "digits", "nothing"]
"""What of a step is learnt: all of one's own, the numbers of another hand's, nothing of a slip."""

Solved = tuple[str, list[tuple[str, Learnt]]]
"""A question, and its solution step by step, each with what of it is learnt."""

Lesson = tuple[NDArray[np.uint16], NDArray[np.float32]]
"""The ids of a conversation, uint16 [n], and how much each counts in the loss, float32 [n]; 0 is not learnt."""

DIGIT_WEIGHT = 4.0
"""How much more a digit counts than a word: words are chosen freely, and what cannot be known drowns what can."""

MAX_SHORT_STEPS = 4
"""The most steps of the problems that come first in a training."""


def solved(seed: int, number: int, hand: str, *, short: bool = False, slip_rate: float = 0.4) -> Solved:
    """Problem `number` of a seed with a solution by `hand`; the same whenever and wherever it is asked for.

    These problems are not those of `world.problems`, whatever the seeds: nothing that is taught is ever asked.
    """
    rng = np.random.default_rng([seed, number, 1])
    problem = make_problem(rng, int(rng.integers(MIN_STEPS, MAX_SHORT_STEPS + 1)) if short else None)
    steps = solve(problem, rng, hand=hand, foreign_rate=FOREIGN_RATE, slip_rate=slip_rate)
    return problem.question, [
        (step.text, "all" if step.own else "digits" if step.right else "nothing") for step in steps
    ]


def _solved_range(numbers: range, seed: int, hand: str, n_short: int, slip_rate: float) -> list[Solved]:
    return [solved(seed, number, hand, short=number < n_short, slip_rate=slip_rate) for number in numbers]


def make_lessons(
    hand: str, n: int, seed: int, n_processes: int, *, n_short: int = 0, slip_rate: float = 0.4
) -> list[Solved]:
    """`n` solved problems in one hand, short ones first; what is not for training comes from another seed."""
    edges = np.linspace(0, n, 8 * n_processes + 1, dtype=int).tolist()
    work = partial(_solved_range, seed=seed, hand=hand, n_short=n_short, slip_rate=slip_rate)
    with ProcessPoolExecutor(n_processes) as pool:
        parts = pool.map(work, [range(start, stop) for start, stop in pairwise(edges)])
        return [row for part in parts for row in part]


def make_tokenizer(path: Path, seed: int, n_problems: int = N_VOCABULARY_PROBLEMS) -> Any:
    """The `tokenizers.Tokenizer` at `path`; taught on problems in both hands when it is not there yet."""
    from tokenizers import Tokenizer

    if not path.exists():
        rows = [row for hand in ROLES for row in make_lessons(hand, n_problems, seed + 2, 1)]
        texts = (text for question, steps in rows for text in (question, *(step for step, _ in steps)))
        train_vocabulary(texts, N_VOCAB).save(str(path))
    return Tokenizer.from_file(str(path))


def encode(tokenizer: Any, rows: list[Solved]) -> list[Lesson]:
    """Token ids as the chat template lays a conversation out; only solutions are learnt, never questions."""
    user, assistant, end = (tokenizer.token_to_id(name) for name in (USER, ASSISTANT, END))
    is_digit = np.zeros(tokenizer.get_vocab_size(), bool)
    is_digit[[tokenizer.token_to_id(digit) for digit in "0123456789"]] = True
    weights: dict[Learnt, NDArray[np.float32]] = {
        "all": np.where(is_digit, DIGIT_WEIGHT, 1).astype(np.float32),
        "digits": np.where(is_digit, DIGIT_WEIGHT, 0).astype(np.float32),
        "nothing": np.zeros(len(is_digit), np.float32),
    }
    texts = [text for question, steps in rows for text in (question, *(step for step, _ in steps))]
    encoded = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    lessons: list[Lesson] = []
    for _, steps in rows:
        ids = [user, *next(encoded).ids, end, assistant]
        counts = [np.zeros(len(ids), np.float32)]
        for _, learnt in steps:
            part = next(encoded).ids
            ids += part
            counts.append(weights[learnt][part])
        lessons.append((np.array([*ids, end], np.uint16), np.concatenate([*counts, weights["all"][[end]]])))
    return lessons
