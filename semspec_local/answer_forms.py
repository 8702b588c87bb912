"""One answer, written in many ways: what is mere typography in it, and what is a number, a letter, a base.

Answers are LaTeX or plain text. Knows nothing of right and wrong.
"""

from __future__ import annotations

import re

_SIGNS = str.maketrans(
    {
        "−": "-",
        "–": "-",
        "×": r"\times ",
        "÷": r"\div ",
        "·": r"\cdot ",
        "°": r"^\circ ",
        "±": r"\pm ",
        "π": r"\pi ",
        "∞": r"\infty ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "∪": r"\cup ",
        "∈": r"\in ",
        "∅": r"\emptyset ",
        "½": r"\frac{1}{2}",
        "¼": r"\frac{1}{4}",
        "¾": r"\frac{3}{4}",
        "％": r"\%",
        "’": "'",
        **dict.fromkeys("\u00a0\u2009\u202f", " "),
        **dict.fromkeys("€£¥₹", ""),
    }
)
_DELIMITERS = re.compile(r"(?<!\\)(?:\$|\\[()\[\]])")
_MARKDOWN = re.compile(r"\*\*|`|(?<!\\)\\\$")
_GROUPS = re.compile(r"(?<=\d)(?:,?\\[,!;: ]|\{,\}|~|,?\\thinspace)\s*(?=\d{3}(?!\d))")
_SPACE_BEFORE = re.compile(r"^(?:\s|~|\\[,!;:> ]|\\q?quad(?![a-z]))+")
_SPACED_GROUPS = re.compile(r"-?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_MIXED = re.compile(r"(-?\d+)\s+(\d+)\s*/\s*(\d+)")
_SCIENTIFIC = re.compile(r"(?<![\w\\.])(-?\d{1,20}(?:\.\d{1,20})?)[eE]([+-]?\d{1,3})(?!\w)")

_WRAPPED = re.compile(r"\\(?:text[a-z]*|math(?:rm|bf|it|sf|tt)|mbox|hbox|operatorname)\s*\{([^{}]*)\}")
_SPACING = re.compile(r"\\(?:[,!;:> ]|q?quad(?![a-z])|thinspace(?![a-z]))|~|\s")
_SIZES = re.compile(r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])")
_FRACTIONS = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_SHORT_FRACTION = re.compile(r"\\frac(?:([0-9a-z])|\{([^{}]*)\})(?:([0-9a-z])|\{([^{}]*)\})")
_SHORT_ROOT = re.compile(r"\\sqrt([0-9a-z])")
_SHORT_SCRIPT = re.compile(r"([_^])\{(\w)\}")
_DEGREES = re.compile(r"\^?\s*\{?\s*\\(?:circ|degree)(?![a-z])\s*\}?|\bdegrees?\b")
_PERCENT = re.compile(r"\\?%|\bpercent\b")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d*)?")
_NUMBER = re.compile(r"([+-]?)(?=\.?\d)(\d*)(?:\.(\d*))?")
_WORDS = re.compile(r"[A-Za-z]{2}[A-Za-z' -]*")

_QUANTITY = re.compile(r"(?<![\w.,])[+-]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
_NUMBER_OR_FRACTION = re.compile(_QUANTITY.pattern + r"(?:\s?/\s?\d+(?![\d.]))?")
_WORD = re.compile(r"(?<![A-Za-z])[A-Za-z]{2}")
_FORMULA_SIGN = re.compile(r"[\\+*^_=<>()\[\]{}|!]")
_UNIT_POWER = re.compile(r"(?<=[A-Za-z])\s*\^\s*\{?\s*[23]\s*\}?")
_NO_UNIT = re.compile(
    r"[\\+*/^_=<>()\[\]{}|!\d]"  # a formula
    r"|(?<![a-z])[b-fijknopqruvwxyz](?![a-z])"  # a variable; metres, grams, litres, hours and seconds are none
    r"|\b(?:dozen|hundred|thousand|million|billion|half)\b",
    re.IGNORECASE,
)

_IN_BASE = re.compile(r"([0-9A-Fa-f]+)\s*_\s*\{?\s*(\d{1,2})\s*\}?")
_LETTER = re.compile(r"\(?([A-Ja-j])(?:\)|[.:](?=\s|$)|$)(.*)", re.DOTALL)
_OTHER_LETTER = re.compile(r"(?:[\s,;/&]|and\b|or\b)+\(?[A-J]\b")


def tidy(answer: str) -> str:
    """The same answer without decoration: dollar signs, markdown, separators of thousands, a full stop."""
    text = _MARKDOWN.sub("", _DELIMITERS.sub(" ", answer.translate(_SIGNS)))
    text = _GROUPS.sub("", _SPACE_BEFORE.sub("", text, count=1).rstrip(" \t\r\n.,;:~\\"))
    if _SPACED_GROUPS.fullmatch(text):
        text = text.replace(" ", "")
    if mixed := _MIXED.fullmatch(text):
        text = rf"{mixed[1]}\frac{{{mixed[2]}}}{{{mixed[3]}}}"
    return _SCIENTIFIC.sub(r"\1\\times 10^{\2}", text)


def normal(answer: str) -> str:
    """An answer as it is compared by its letters: two that are equal differ in typography alone."""
    text = _plain(answer)
    if _WORDS.fullmatch(text):
        text = text.casefold()
    text = _FRACTIONS.sub(r"\\frac", _SIZES.sub("", text))
    text = _SPACING.sub("", text)
    text = _SHORT_FRACTION.sub(_whole_fraction, text)
    text = _SHORT_SCRIPT.sub(r"\1\2", _SHORT_ROOT.sub(r"\\sqrt{\1}", text))
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    return _number(text) or text


def quantity(answer: str) -> str | None:
    """The one number in an answer that is a number, perhaps with a unit; None for any other answer."""
    text = without_unit_powers(answer)
    found = _QUANTITY.findall(text)
    if len(found) != 1 or _NO_UNIT.search(text.replace(found[0], " ", 1)):
        return None
    return _number(found[0].replace(",", ""))


def numbers(text: str) -> list[str]:
    """All numbers and fractions such as `3/4` in a text, without separators of thousands."""
    found = (match[0].replace(",", "") for match in _NUMBER_OR_FRACTION.finditer(_plain(text)))
    return [_number(number) or number for number in found]


def is_list_of_quantities(answer: str) -> bool:
    """Several numbers with words, as in `2 hours and 5 minutes`, and no formula."""
    text = without_unit_powers(answer)
    return len(numbers(text)) > 1 and _WORD.search(text) is not None and _FORMULA_SIGN.search(text) is None


def letter(answer: str) -> str | None:
    """The letter that an answer chooses, A to J: `C`, `(C)`, `\\text{(C) }5`, `c.`; None for any other answer."""
    match = _LETTER.fullmatch(_plain(answer).strip())
    return match[1].upper() if match and not _OTHER_LETTER.match(match[2]) else None


def in_base(answer: str) -> tuple[str, int] | None:
    """Digits and base of a number such as `52_8`; None for any other answer."""
    match = _IN_BASE.fullmatch(tidy(answer))
    return (match[1].lower(), int(match[2])) if match else None


def without_unit_powers(answer: str) -> str:
    r"""Tidied, words as words, and no powers of units, whose digits are no answer: `12 m` for `12\text{ m}^2`."""
    return _SPACING.sub(" ", _UNIT_POWER.sub("", _plain(answer)))


def unwrapped(text: str) -> str:
    """Words as words: without `\\text{}` and its like around them."""
    for _ in range(3):  # as deep as people nest them
        text = _WRAPPED.sub(r" \1 ", text)
    return text


def _plain(answer: str) -> str:
    """Tidied, words as words, without signs of degree and percent."""
    return _PERCENT.sub(" ", _DEGREES.sub(" ", unwrapped(tidy(answer)))).strip(" ~")


def _number(text: str) -> str | None:
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    whole, part = match[2].lstrip("0") or "0", (match[3] or "").rstrip("0")
    digits = f"{whole}.{part}" if part else whole
    return f"-{digits}" if match[1] == "-" and digits != "0" else digits


def _whole_fraction(match: re.Match[str]) -> str:
    top, bottom = match[1] or match[2] or "", match[3] or match[4] or ""
    return rf"\frac{{{top}}}{{{bottom}}}"
