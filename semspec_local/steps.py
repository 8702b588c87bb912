"""The one definition of a step boundary: where a reasoning step ends.

Incremental and UTF-8 safe. This module knows nothing of models, vocabularies or caches: it is fed the bytes
of one token after another, and says after which of them the step has ended.
"""

from __future__ import annotations

import codecs
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .config import DEFAULT_BOUNDARY

EndKind = Literal["boundary", "length", "stop", "close", "eos"]


@dataclass(frozen=True)
class StepEnd:
    """Why a step ended, and how much of it is kept.

    `n_bytes` counts the bytes of the step's text that are kept. For "stop" it may cut inside the last token,
    and it is negative when the stop string began in earlier text (the carry): that text loses as many bytes.
    For "length" it leaves out the tokens after `StepReader.n_complete_tokens`.
    """

    kind: EndKind
    n_bytes: int


class StepReader:
    """Reads one step, one token's bytes at a time.

    A step ends after the token that completes the first of these; where one token completes several, the
    first in this list names the end:

    - "stop": a stop string, wherever it began. Of several, the one completed first. It and all after it is cut.
    - "close": `close_tag`, wherever it began.
    - "boundary": `boundary` with something other than ASCII whitespace before it in this step, so that leading
      blank lines never end a step. The bytes are looked for as they are ("\\n \\n" is no blank line); only
      "\\n\\n" is also found as "\\r\\n\\r\\n".
    - "length": `max_tokens` tokens.

    What the last token holds after a boundary or close tag stays in the step. A boundary or close tag
    waits for the end of a character that its token leaves unfinished. `carry` is the end of the earlier text,
    from `carry_for`; what lies wholly inside it ended nothing then, and ends nothing now.
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        boundary: str = DEFAULT_BOUNDARY,
        stops: Sequence[str] = (),
        close_tag: str | None = None,
        carry: bytes = b"",
    ) -> None:
        if max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}; wanted 1 or more")
        if not boundary or close_tag == "" or not all(stops):
            raise ValueError("a boundary, stop string or close tag is empty; wanted some text")
        self._max_tokens = max_tokens
        self._boundaries = [boundary.encode()] + ([b"\r\n\r\n"] if boundary == "\n\n" else [])
        self._stops = [stop.encode() for stop in stops]
        self._close_tag = close_tag.encode() if close_tag else None
        marks = [*self._boundaries, *self._stops, *([self._close_tag] if self._close_tag else [])]
        self._last_bytes = frozenset(mark[-1] for mark in marks)
        self._buffer = bytearray(carry)
        self._start = len(carry)  # where the step begins in the buffer
        self._content: int | None = None  # where its first byte that is not whitespace is
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._seen: EndKind | None = None  # completed, but inside a character
        self._n_open_tokens = self._n_open_bytes = 0  # after the last complete character
        self.n_tokens = 0
        self.end: StepEnd | None = None

    def feed(self, piece: bytes) -> StepEnd | None:
        """Add one token's bytes (maybe none); the end of the step if this token completes it."""
        if self.end is not None:
            raise RuntimeError("the step has ended; a new step needs a new reader")
        # Most tokens can end nothing, and each is written while a model waits.
        if (
            self._content is not None
            and not self._n_open_tokens
            and piece.isascii()
            and self._last_bytes.isdisjoint(piece)
            and self.n_tokens + 1 < self._max_tokens
        ):
            self._buffer += piece
            self.n_tokens += 1
            return None
        n_before = len(self._buffer)
        self._add(piece)
        stop_at = self._find_stop(n_before)
        if stop_at is not None:
            self.end = StepEnd("stop", stop_at - self._start)
            return self.end
        if self._close_tag is not None and self._find(self._close_tag, n_before) >= 0:
            self._seen = "close"
        elif self._seen is None and self._find_boundary(n_before):
            self._seen = "boundary"
        if self._seen is not None and not self._n_open_tokens:
            return self.finish(self._seen)
        if self.n_tokens >= self._max_tokens:
            return self.finish("length")
        return None

    def finish(self, kind: EndKind = "eos") -> StepEnd:
        """End the step here: the model drew an end-of-generation token, or the caller says so."""
        if self.end is not None:
            raise RuntimeError("the step has ended; a new step needs a new reader")
        n_bytes = len(self._buffer) - self._start
        if kind == "length" and self.n_complete_tokens:
            n_bytes -= self._n_open_bytes
        self.end = StepEnd(kind, n_bytes)
        return self.end

    @property
    def n_tokens_left(self) -> int:
        """How many more tokens the step may have."""
        return self._max_tokens - self.n_tokens

    @property
    def n_complete_tokens(self) -> int:
        """How many leading tokens end on a complete character.

        The writer cuts a step of kind "length" back to them; if there are none, it keeps all.
        """
        return self.n_tokens - self._n_open_tokens

    @property
    def data(self) -> bytes:
        """Every byte that was fed, kept or not."""
        return bytes(self._buffer[self._start :])

    @property
    def text(self) -> str:
        """The step's text: what is kept once it has ended, every complete character until then."""
        if self.end is None:
            return codecs.getincrementaldecoder("utf-8")("replace").decode(self.data)
        return self.data[: max(self.end.n_bytes, 0)].decode("utf-8", "replace")

    def _add(self, piece: bytes) -> None:
        if self._content is None and piece.strip():
            self._content = len(self._buffer) + len(piece) - len(piece.lstrip())
        self._buffer += piece
        self.n_tokens += 1
        self._decoder.decode(piece)
        if self._decoder.getstate()[0]:
            self._n_open_tokens += 1
            self._n_open_bytes += len(piece)
        else:
            self._n_open_tokens = self._n_open_bytes = 0

    def _find(self, mark: bytes, n_before: int) -> int:
        """Where the first `mark` that ends after `n_before` begins in the buffer; -1 if there is none."""
        return self._buffer.find(mark, max(0, n_before - len(mark) + 1))

    def _find_stop(self, n_before: int) -> int | None:
        found = [(at + len(stop), at) for stop in self._stops if (at := self._find(stop, n_before)) >= 0]
        return min(found)[1] if found else None

    def _find_boundary(self, n_before: int) -> bool:
        if self._content is None:
            return False
        after_content = self._content + 1
        return any(
            self._buffer.find(mark, max(after_content, n_before - len(mark) + 1)) >= 0 for mark in self._boundaries
        )


def carry_for(stops: Sequence[str], close_tag: str | None, text: bytes) -> bytes:
    """The end of `text` that the next step's reader needs, to find stop strings and the close tag across steps."""
    marks = [*stops, *([close_tag] if close_tag else [])]
    n_carry = max((len(mark.encode()) for mark in marks), default=1) - 1
    return text[-n_carry:] if n_carry else b""


def split_steps(text: str, boundary: str = DEFAULT_BOUNDARY) -> list[str]:
    """Cut finished text into steps by the rule of `StepReader`; joined, they are `text` again."""
    # Only its last character can complete a boundary, so a piece up to the next one does for a token.
    last = re.escape(boundary[-1:])
    steps: list[str] = []
    pieces: list[str] = []
    reader = None
    for piece in re.findall(f"[^{last}]*{last}|[^{last}]+", text):
        reader = reader or StepReader(max_tokens=sys.maxsize, boundary=boundary)
        pieces.append(piece)
        if reader.feed(piece.encode("utf-8", "surrogatepass")):
            steps.append("".join(pieces))
            pieces, reader = [], None
    if pieces:
        steps.append("".join(pieces))
    return steps
