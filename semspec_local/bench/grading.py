"""Is an answer right? Found in a text, compared by math-verify, and beside it letter by letter.

    kind      the answer in the text is                                it is right when
    math      boxed, after ####, stated, or the last formula           its letters are equal, or math-verify says so
    number    the same, but the last number instead of a formula       the same
    exact     boxed, or the whole text                                 its letters are equal, and nothing else

A chosen letter (`\\text{(C)}` is expected) is compared as a letter. Nothing that a text holds raises an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar

from ..answer import after_hashes, closing_boxes, final_answer, last_boxed
from ..answer_forms import in_base, is_list_of_quantities, letter, normal, numbers, quantity, tidy, unwrapped
from ..errors import ConfigError
from .verifier import MAX_CHARS, Verifier, shared

Kind = Literal["math", "number", "exact"]
Where = Literal["boxed", "hashes", "stated", "last", "whole", "nowhere"]

_T = TypeVar("_T")

_STATED = re.compile(
    r"\banswer\b(?:\*\*)?(?:\s+(?:to|for|of)\s[^.:\n]{1,80}?)?(?:\s*(?:\*\*)?\s*[:=]|\s+(?:is|was)\b:?)[\s*:]*",
    re.IGNORECASE,
)
_CLAUSE = re.compile(r".*?(?=(?<!\\)[.!?](?:\s|$)|\n|$)", re.DOTALL)
_FORMULA = re.compile(r"\$\$([^$]+)\$\$|(?<!\\)\$([^$\n]+)(?<!\\)\$|\\\(([^\n]+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_PROSE = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{2,}[,;]?\s+[A-Za-z]{2,}(?![A-Za-z}])")
_CHOSEN = re.compile(r"\(([A-J])\)|^\s*\**([A-J])[.)]?\**\s*$", re.MULTILINE)
_CHOSEN_FIRST = re.compile(r"\W*(?:(?:option|choice)\s+)?\(?([A-J])\b(?!(?<=A)\s+[a-z])", re.IGNORECASE)
_EXPECTED_LETTER = re.compile(r"[$(\s]*(?:\\(?:text[a-z]*|mathrm|mathbf|mbox)\{)?\s*\(?[A-J]\)?\s*\}?")
_EMPTY_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{\s*\}")
_TAIL_CHARS = 4000
"""What is not marked is looked for in so much of a text's end."""
_MAX_WORDS = 5
"""An answer in words is no longer."""


@dataclass(frozen=True)
class Grade:
    """A graded answer. `extracted` is the answer found in the text (None when there is none), `where` it was found.

    `exact`: equal but for typography. `verified`: what math-verify says; None where it was not asked, cannot read one
    of the two, or took too long.
    """

    expected: str
    extracted: str | None
    where: Where
    exact: bool
    verified: bool | None = None

    @property
    def correct(self) -> bool:
        return self.exact or self.verified is True


def grade(text: str, expected: str, kind: Kind = "math", *, verifier: Verifier | None = None) -> Grade:
    """Grade an answer, or the text that it ends; what a model thought before is not to be in it.

    Raises ConfigError for an expected answer that is empty, and, but for the kind `exact`, without math-verify.
    """
    if not normal(expected):
        raise ConfigError(f"the expected answer is {expected!r}; wanted one that is not empty")
    if kind == "exact":
        found = final_answer(text)
        return Grade(expected, found or None, "whole" if last_boxed(text) is None else "boxed", found == expected)
    chosen = letter(expected) if _EXPECTED_LETTER.fullmatch(expected) else None
    extracted, where = extract(text, kind, letters=chosen is not None)
    if extracted is None or not normal(extracted):
        return Grade(expected, None, "nowhere", False)
    if chosen is not None:
        return Grade(expected, extracted, where, letter(extracted) == chosen)
    exact = normal(extracted) == normal(expected)
    if kind == "number" and not exact:
        number = quantity(extracted)
        exact = number is not None and number == quantity(expected)
    return Grade(expected, extracted, where, exact, _verified(expected, extracted, verifier or shared()))


def extract(text: str, kind: Kind = "math", *, letters: bool = False) -> tuple[str | None, Where]:
    """The answer in a text, and where it was: the first of boxed, after `####`, stated, last that there is.

    Of several boxes that end a text together, all are the answer. `letters`: look for a chosen letter.
    """
    if boxes := closing_boxes(text):
        boxed = ", ".join(boxes)
        if len(boxed) > MAX_CHARS:
            return None, "nowhere"
        return _stated(unwrapped(boxed), kind, letters) or boxed, "boxed"
    tail = _EMPTY_BOX.sub("", text[-_TAIL_CHARS:]).strip()
    if (marked := after_hashes(tail)) is not None:
        return _stated(marked, kind, letters) or _in_clause(marked, kind, letters) or marked[:MAX_CHARS], "hashes"
    if (stated := _stated(tail, kind, letters)) is not None:
        return stated, "stated"
    if letters:
        if chosen := _CHOSEN.findall(tail):
            return chosen[-1][0] or chosen[-1][1], "last"
        return (tail, "whole") if letter(tail) is not None and len(tail) <= MAX_CHARS else (None, "nowhere")
    if (last := _last(tail, kind)) is not None:
        return last, "last"
    return (tail, "whole") if 0 < len(tail) <= MAX_CHARS else (None, "nowhere")


def disagreements(grades: Iterable[tuple[_T, Grade]]) -> list[tuple[_T, Grade]]:
    """Those whose answer is right by one of math-verify and exact comparison, and wrong by the other."""
    return [(key, grade) for key, grade in grades if grade.verified is not None and grade.verified != grade.exact]


def _verified(expected: str, extracted: str, verifier: Verifier) -> bool | None:
    bases = in_base(expected), in_base(extracted)
    if bases[0] is not None and bases[1] is not None:  # math-verify reads 52_8 as 52
        return bases[0] == bases[1]
    if quantity(expected) is not None and is_list_of_quantities(extracted):  # it would take the first of them
        return None
    return verifier.same(tidy(expected), tidy(extracted))


def _stated(text: str, kind: Kind, letters: bool) -> str | None:
    """What follows the last "the answer is", "Answer:" and the like."""
    for match in reversed(list(_STATED.finditer(text))):
        rest = text[match.end() : match.end() + MAX_CHARS]
        clause = _FORMULA.match(rest) or _CLAUSE.match(rest)
        if clause and (found := _in_clause(clause[0], kind, letters)):
            return found
    return None


def _in_clause(clause: str, kind: Kind, letters: bool) -> str | None:
    """The answer that a clause begins with."""
    if letters:
        chosen = _CHOSEN_FIRST.match(unwrapped(clause))
        return chosen[1].upper() if chosen else None
    if kind == "math" and (formulas := _formulas(clause)):
        return formulas[0]
    if not _PROSE.search(clause):
        return clause.strip() or None
    if quantity(clause) is None and (found := numbers(clause.rpartition("=")[2])):
        return found[0]
    return clause.strip() if len(clause.split()) <= _MAX_WORDS or quantity(clause) else None


def _last(text: str, kind: Kind) -> str | None:
    """The last formula of a text, or the last number when its words go on after that; None when it is one answer."""
    end = 0
    formula: str | None = None
    for match in _FORMULA.finditer(text):
        if content := _formula(match):
            formula, end = content, match.end()
    if formula is not None and (kind == "math" or not numbers(text[end:])):
        return formula
    if formula is None and not _PROSE.search(text) and not (kind == "number" and "\n" in text):
        return None
    found = numbers(text[end:])
    return found[-1] if found else None


def _formulas(text: str) -> list[str]:
    """All formulas between LaTeX's delimiters."""
    return [content for match in _FORMULA.finditer(text) if (content := _formula(match))]


def _formula(match: re.Match[str]) -> str | None:
    """What stands between delimiters, unless it is prose between two prices."""
    content = "".join(match.groups(default="")).strip()
    return None if _PROSE.search(content) else content or None
