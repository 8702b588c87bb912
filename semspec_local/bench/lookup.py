"""Tokens looked up in the text so far ("prompt lookup decoding"): what came after the same tokens when they last came.

Answers repeat the question and themselves, names and numbers above all, and a copy costs nothing but its reading. Knows
nothing of models.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from ..llama.sampling import Draw

SIZES = (3, 2, 1)
"""How many of the last tokens are looked for, the most first: the sizes that the method was published with."""


class Lookup:
    """Guesses for one run: a `llama.guessing.Proposer` without a model.

    Of several places the last one counts, since what was written lately is likelier to go on. A copy may run into what
    it has itself drafted, so that text with a period is drafted at any length. All is drafted with probability 1.
    """

    def __init__(self, prompt: Sequence[int], eog: Container[int]) -> None:
        self._eog = eog
        self._n_prompt = len(prompt)
        self._known: list[int] = []
        self._follower: dict[tuple[int, ...], int] = {}  # where the token stands that last followed these tokens
        self._add(prompt)

    def begin(self) -> None:
        """It serves one step, which is the whole run."""

    def propose(self, tokens: Sequence[int], n_right: int, n: int) -> list[Draw]:
        self._add(tokens[len(self._known) - self._n_prompt :])
        start = self._place()
        copied: list[int] = []
        while start is not None and len(copied) < n and (not copied or copied[-1] not in self._eog):
            at = start + len(copied)
            copied.append(self._known[at] if at < len(self._known) else copied[at - len(self._known)])
        return [Draw.certain(token) for token in copied]

    def settle(self, n_right: int) -> None:
        """Nothing is wrong here: what it guessed was never added."""

    def undo(self) -> None:
        """It serves one step, and that has failed."""

    def _place(self) -> int | None:
        """Where the copy begins; None when not even the last token stood anywhere before."""
        for size in SIZES:
            if (place := self._follower.get(tuple(self._known[-size:]))) is not None:
                return place
        return None

    def _add(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            for size in SIZES:
                if size <= len(self._known):
                    self._follower[tuple(self._known[-size:])] = len(self._known)
            self._known.append(token)
