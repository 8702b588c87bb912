"""Find the final answer in a text: the last `\\boxed{}`, or else the text itself."""

from __future__ import annotations

_MARKS = ("\\boxed", "\\fbox")


def last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{...}` whose braces balance; None when there is none."""
    position = len(text)
    while True:
        position, mark = max((text.rfind(mark, 0, position), mark) for mark in _MARKS)
        if position < 0:
            return None
        content = _braced(text, position + len(mark))
        if content is not None:
            return content.strip()


def final_answer(text: str) -> str:
    """What a reader of `text` would take for its answer."""
    boxed = last_boxed(text)
    return text.strip() if boxed is None else boxed


def _braced(text: str, start: int) -> str | None:
    while start < len(text) and text[start] == " ":
        start += 1
    if start >= len(text) or text[start] != "{":
        return None
    depth = 0
    i = start
    while i < len(text):
        if text[i] == "\\":
            i += 1  # an escaped brace is no brace
        elif text[i] == "{":
            depth += 1
        elif text[i] == "}":
            depth -= 1
            if depth == 0:
                return text[start + 1 : i]
        i += 1
    return None
