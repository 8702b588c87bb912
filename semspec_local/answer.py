"""Find the final answer in a text: the last `\\boxed{}`, or else the text itself.

Reads a text from its beginning to its end once, whatever it holds: its time grows with the length alone.
"""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is no brace
_JOINT = re.compile(r"(?:[\s$,;]|\\[()\[\],;!]|\\q?quad|\\text|[{}]|and\b|or\b|[a-z]\s*=)*", re.IGNORECASE)
_SAYS_JOINT = re.compile(r"[,;]|\band\b|\bor\b", re.IGNORECASE)
_MAX_JOINT_CHARS = 40

_HASHES = re.compile(r"(?<!#)####(?!#)[ \t]*(\S[^\n]*)")
_BARE_NUMBER = re.compile(r"[-+]?\\?[$€£]?\d[\d,]*(?:\.\d+)?\\?%?")


def last_boxed(text: str) -> str | None:
    """What the last `\\boxed{...}` holds whose braces balance and that holds anything; None when there is none."""
    found = _boxes(text)
    return found[-1][2] if found else None


def closing_boxes(text: str) -> list[str]:
    """The last box, after those that belong to it: several in a row, with a comma, "and" or "or" between them.

    An answer that is given twice is there once.
    """
    answers: list[str] = []
    next_start: int | None = None
    for start, end, content in reversed(_boxes(text)):
        if next_start is not None and not _belong_together(text[end:next_start]):
            break
        next_start = start
        if content not in answers:
            answers.insert(0, content)
    return answers


def after_hashes(text: str) -> str | None:
    """What follows the last `####`, as GSM8K ends a solution; None when there is none.

    Markdown marks headings so too: only a bare number counts elsewhere than on the last line.
    """
    end = len(text.rstrip())
    for match in reversed(list(_HASHES.finditer(text))):
        found = match[1].strip()
        if _BARE_NUMBER.fullmatch(found) or match.end() >= end:
            return found
    return None


def final_answer(text: str) -> str:
    """What a reader of `text` would take for its answer."""
    boxed = last_boxed(text)
    return text.strip() if boxed is None else boxed


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """(start, end, content) of every closed box with something in it, in order; of boxes in a box only the inner."""
    starts = {match.end(): match.start() for match in _BOX.finditer(text)}
    if not starts:
        return []
    found: list[tuple[int, int, str]] = []
    open_braces: list[int] = []
    innermost = -1  # start of the last box that was closed
    for match in _BRACE.finditer(text):
        brace = match.start()
        if match[0] == "{":
            open_braces.append(brace)
        elif match[0] == "}" and open_braces:
            opened = open_braces.pop()
            if opened in starts and innermost < opened:
                innermost = opened
                if content := text[opened + 1 : brace].strip():
                    found.append((starts[opened], brace + 1, content))
    return found


def _belong_together(between: str) -> bool:
    return (
        len(between) <= _MAX_JOINT_CHARS
        and "\n\n" not in between
        and _SAYS_JOINT.search(between) is not None
        and _JOINT.fullmatch(between) is not None
    )
