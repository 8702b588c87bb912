"""How the made world words a step, and how a step's text is read back to its meaning.

A step is an opener, a core with the numbers, and a closer; any of each goes with any other. Two hands prefer
different ones, so that two writers of the same meaning rarely use the same words. Knows nothing of problems.
"""

from __future__ import annotations

import re
from bisect import bisect
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np

Operation = Literal["add", "subtract", "multiply", "divide", "answer"]

OPERATIONS: tuple[Operation, ...] = ("add", "subtract", "multiply", "divide", "answer")
HANDS = ("target", "draft")
BRIEF = "brief"
"""The draft's hand in few words, so that a drafted step costs less than the target's own of the same meaning."""

ZIPF_EXPONENT = 1.0
"""A hand picks its r-th favourite with weight 1 / r ** ZIPF_EXPONENT; the other hand likes them in reverse order."""


@dataclass(frozen=True, order=True)
class Meaning:
    """What a step says: an operation on one or two numbers, and its result. Order does not matter in sums and products.

    The final answer has no operands. A meaning may be false, such as 3 + 4 = 8.
    """

    operation: Operation
    operands: tuple[int, ...]
    result: int

    def __post_init__(self) -> None:
        if self.operation in ("add", "multiply"):
            object.__setattr__(self, "operands", tuple(sorted(self.operands)))

    @property
    def holds(self) -> bool:
        """Is the arithmetic right? An answer says nothing that could be checked alone."""
        if self.operation == "answer":
            return True
        a, b = self.operands
        if self.operation == "divide":
            return b * self.result == a
        return compute(self.operation, a, b) == self.result


def compute(operation: Operation, a: int, b: int) -> int:
    """The result of an operation on whole numbers; a division has to leave no rest."""
    if operation == "divide":
        assert b and a % b == 0, f"{a} / {b} leaves a rest"
        return a // b
    return {"add": a + b, "subtract": a - b, "multiply": a * b}[operation]


OPENERS = (
    "For {who}, ",
    "Next, {who}: ",
    "Looking at {who}, ",
    "Then {who}: ",
    "Now {who}: ",
    "So for {who}, ",
    "After that, {who}: ",
    "As to {who}: ",
    "Here we find for {who} that ",
    "Going on with {who}, ",
    "In the case of {who}, ",
    "Once more {who}: ",
)
"""Each says first whose number the step is about: a small model plans one thing after the other, or not at all."""

CORRECTIONS = (
    "Wait, that is wrong for {who}: ",
    "No, that cannot be right for {who}: ",
    "Let me correct this for {who}: ",
    "Careful with {who}, that was a slip: ",
)
CORES: dict[Operation, tuple[str, ...]] = {
    "add": (
        "{a} + {b} = {c}",
        "{a} plus {b} is {c}",
        "adding {b} to {a} gives {c}",
        "the sum of {a} and {b} is {c}",
        "{a} and {b} together make {c}",
        "{b} more than {a} is {c}",
    ),
    "subtract": (
        "{a} - {b} = {c}",
        "{a} minus {b} is {c}",
        "taking {b} away from {a} leaves {c}",
        "the difference of {a} and {b} is {c}",
        "{a} without {b} makes {c}",
        "{b} fewer than {a} is {c}",
    ),
    "multiply": (
        "{a} * {b} = {c}",
        "{a} times {b} is {c}",
        "multiplying {a} by {b} gives {c}",
        "the product of {a} and {b} is {c}",
        "{b} groups of {a} make {c}",
        "{a} counted {b} times is {c}",
    ),
    "divide": (
        "{a} / {b} = {c}",
        "{a} divided by {b} is {c}",
        "splitting {a} into {b} parts gives {c}",
        "the quotient of {a} and {b} is {c}",
        "{a} shared {b} ways makes {c}",
        "one of {b} parts of {a} is {c}",
    ),
    "answer": (
        "the answer is \\boxed{{{c}}}",
        "we are left with \\boxed{{{c}}}",
        "the result is \\boxed{{{c}}}",
        "\\boxed{{{c}}} is what was asked for",
        "the final number is \\boxed{{{c}}}",
        "this gives \\boxed{{{c}}}",
    ),
}
CLOSERS = (
    ".",
    ", that is {c} {items} for {who}.",
    ", which gives {who} {c} {items}.",
    ", and {c} {items} is the new count.",
    ". We write down {c}.",
    ", so we go on with {c} {items}.",
    ". This is the number for {who}.",
    ", and we keep {c} in mind.",
)
ANSWER_OPENERS = ("", "So ", "Therefore ", "All in all, ", "In the end ", "To conclude, ")
ANSWER_CLOSERS = (".", ", counted in {items}.", ", and we are done.", ", and no more.", ", as we wanted to know.")


@cache
def _cumulative(options: tuple[str, ...], hand: str) -> tuple[float, ...]:
    weights = 1 / np.arange(1, len(options) + 1) ** ZIPF_EXPONENT
    if hand != HANDS[0]:
        weights = weights[::-1]
    if hand == BRIEF:
        weights = weights * 3.0 ** -np.array([len(option.split()) for option in options])
    return tuple(np.cumsum(weights / weights.sum()).tolist())


def pick(rng: np.random.Generator, options: tuple[str, ...], hand: str) -> str:
    """One of `options`. The two hands like them in opposite order; in brief, each word makes one a third as likely."""
    return options[min(bisect(_cumulative(options, hand), rng.random()), len(options) - 1)]


def word_step(
    meaning: Meaning,
    numbers: tuple[int, ...],
    rng: np.random.Generator,
    *,
    hand: str,
    who: str,
    items: str,
    correction: bool = False,
) -> str:
    """A step's text without the blank line after it. `numbers` are the operands in the order of the story."""
    is_answer = meaning.operation == "answer"
    opener = pick(rng, ANSWER_OPENERS if is_answer else OPENERS, hand)
    if correction:
        opener = pick(rng, CORRECTIONS, hand)
    core = pick(rng, CORES[meaning.operation], hand)
    closer = pick(rng, ANSWER_CLOSERS if is_answer else CLOSERS, hand)
    a, b = numbers if numbers else (0, 0)
    text = (opener + core + closer).format(a=a, b=b, c=meaning.result, who=who, items=items)
    return text[0].upper() + text[1:]


def _pattern(core: str) -> re.Pattern[str]:
    parts = re.split(r"\{([abc])\}", core)
    numbers = [rf"(?P<{name}>(?<!\d)[0-9]{{1,4}}(?![.,]?\d))" for name in parts[1::2]]
    words = [r"\s+".join(map(re.escape, re.split(r"\s+", part.format()))) for part in parts[::2]]
    return re.compile("".join(word + number for word, number in zip(words, [*numbers, ""])), re.IGNORECASE)


_PATTERNS = tuple((operation, _pattern(core)) for operation in OPERATIONS for core in CORES[operation])
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
"""A number with its decimals and thousands: 7.5 and 7,007 are not 7."""


def meaning_of(text: str) -> Meaning | None:
    """The meaning of a step's text; None when it has none.

    It has one when the text says one thing: all its cores agree, and every other number in it is the result.
    """
    found: set[Meaning] = set()
    read: set[int] = set()  # where the numbers of the cores begin
    for operation, pattern in _PATTERNS:
        position = 0
        while match := pattern.search(text, position):
            position = match.start() + 1  # cores may overlap: "1 + 2 = 3 + 3 = 3" has two
            groups = match.groupdict()
            operands = tuple(int(groups[name]) for name in ("a", "b") if name in groups)
            found.add(Meaning(operation, operands, int(groups["c"])))
            read.update(match.start(name) for name in groups)
    if len(found) != 1:
        return None
    meaning = found.pop()
    others = (number[0] for number in _NUMBER.finditer(text) if number.start() not in read)
    if any((number.lstrip("0") or "0") != str(meaning.result) for number in others):
        return None
    return meaning
