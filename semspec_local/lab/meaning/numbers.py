"""Which numbers a step holds, by value."""

from __future__ import annotations

import re
from fractions import Fraction

_ENUMERATOR = re.compile(r"^[\s#*>]*(?:step\s+)?\d{1,2}[.):](?=[\s*])", re.IGNORECASE | re.MULTILINE)
_FRAC = re.compile(r"\\[dt]?frac\s*\{\s*([\d.,]+)\s*\}\s*\{\s*([\d.,]+)\s*\}")
# A number has at most 300 digits here: longer ones are cut into several, and int() would refuse them.
_NUMBER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]{1,300})(?:\.[0-9]{1,300})?|\.[0-9]{1,300}"
_MINUS = r"(?:(?<=[=(:])|(?<=[=(:]\s))-"
_QUANTITY = re.compile(
    rf"(?P<sign>{_MINUS})?(?P<number>{_NUMBER})(?:\s*/\s*(?P<below>{_NUMBER}))?(?P<percent>\s*(?:\\?%|percent\b))?"
)


def numbers_in(text: str) -> frozenset[Fraction]:
    r"""The set of numbers in a text, by value: `5.0`, `$5` and `5` are one number, as are `0.4`, `40%` and `2/5`.

    A quotient below one is a fraction (`1/2`, `\frac{1}{2}`); a larger one is a division and counts as its two
    numbers, so that `24/3 = 8` differs from `16/2 = 8`. Numbers of a list (`2.`, `Step 2:`) at the start of a line are
    left out; numbers written as words are not seen.
    """
    text = _ENUMERATOR.sub(" ", text)
    text = text.replace("{,}", ",").replace("\\$", "$").replace("\\!", "")
    text = _FRAC.sub(r" \1/\2 ", text)
    found: set[Fraction] = set()
    for match in _QUANTITY.finditer(text):
        value = _value(match["number"])
        below = _value(match["below"]) if match["below"] else None
        if below is not None:
            if 0 < value < below:
                value /= below
            else:
                found.add(below)
        if match["percent"]:
            value /= 100
        found.add(-value if match["sign"] else value)
    return frozenset(found)


def _value(digits: str) -> Fraction:
    return Fraction(digits.replace(",", ""))
