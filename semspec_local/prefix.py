"""The committed part of a run: its text, and its tokens in each model, which always equal the models' caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .config import THINK_CLOSE, THINK_OPEN
from .protocols import StepModel


@dataclass
class Side:
    """One model of the run. `committed` are the ids after the prompt's; an inactive side reads no further.

    One that `only_guesses` helps as long as it has room, and limits the run in nothing.
    """

    model: StepModel
    prompt: Sequence[int]
    committed: list[int] = field(default_factory=list)
    active: bool = True
    only_guesses: bool = False

    @property
    def limits(self) -> bool:
        """Does the run end where this context is full?"""
        return self.active and not self.only_guesses

    @property
    def n_committed(self) -> int:
        """Tokens of the prefix; what `n_past` is between steps."""
        return len(self.prompt) + len(self.committed)

    @property
    def room(self) -> int:
        """Tokens that still fit into the context."""
        return self.model.n_ctx - self.n_committed

    def rollback(self) -> None:
        """Forget everything that is not committed."""
        if self.model.n_past > self.n_committed:
            self.model.rollback(self.n_committed)

    def cut(self, n_bytes: int) -> int:
        """Drop the committed tokens that begin at or after this many bytes of text; how many those are."""
        position, n_before = 0, len(self.committed)
        for i, token in enumerate(self.committed):
            if position >= n_bytes:
                del self.committed[i:]
                break
            position += len(self.model.vocabulary.piece(token))
        self.rollback()
        return n_before - len(self.committed)


@dataclass
class Prefix:
    """The committed text and what it says of thinking. `opened`: the prompt ends inside a thinking block."""

    opened: bool = False
    data: bytes = b""
    n_steps: int = 0

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", errors="replace")

    @property
    def thinks(self) -> bool:
        """Has the model begun to think, in the prompt or by itself?"""
        return self.opened or self.data.lstrip().startswith(THINK_OPEN.encode())

    @property
    def thinking(self) -> bool:
        return self.thinks and THINK_CLOSE.encode() not in self.data

    @property
    def answering(self) -> bool:
        """Has thinking been closed?"""
        return self.thinks and THINK_CLOSE.encode() in self.data

    def split(self) -> tuple[str | None, str]:
        """Reasoning, None for a model that does not think, and the rest."""
        if not self.thinks:
            return None, self.text
        head, _, tail = self.text.partition(THINK_CLOSE)
        return head.strip().removeprefix(THINK_OPEN).strip(), tail.strip()
