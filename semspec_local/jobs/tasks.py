"""Presets for well-known kinds of questions: what is added to each, and how its answer is read."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ..answer import after_hashes, final_answer, last_boxed
from ..answer_forms import without_unit_powers
from ..questions import BOXED

_DECIMAL = r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
_NUMBER = re.compile(rf"(?:-?\d+ )?{_DECIMAL}/{_DECIMAL}|{_DECIMAL}")
_BARE_POINT = re.compile(r"(?<!\d)\.")
_FRACTION = re.compile(r"(\d?)\s*\\[dt]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))")


@dataclass(frozen=True)
class Task:
    """`suffix` follows every question after a blank line; `answer` finds the answer in what follows the thinking."""

    suffix: str
    answer: Callable[[str], str | None]


def number_answer(text: str) -> str | None:
    """The number in the last box or after `####`, without thousands separators and units; None where there is none.

    A fraction stays one, written `1/2`, and a mixed number `1 1/2`.
    """
    found = last_boxed(text) or after_hashes(text) or ""
    numbers = _NUMBER.findall(_FRACTION.sub(_plain, without_unit_powers(found)))
    return _BARE_POINT.sub("0.", numbers[-1].replace(",", "")) if numbers else None


def _plain(fraction: re.Match[str]) -> str:
    r"""`\frac{1}{2}` as `1/2`; a digit before it is the end of a whole number."""
    digit, above, short_above, below, short_below = (group or "" for group in fraction.groups())
    return f"{digit} "[: 2 * len(digit)] + f"{(above or short_above).strip()}/{(below or short_below).strip()}"


FREE = Task("", final_answer)

TASKS: dict[str, Task] = {"gsm8k": Task(BOXED, number_answer), "math": Task(BOXED, last_boxed)}
