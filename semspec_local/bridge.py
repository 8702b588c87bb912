"""Carry a step from one model's vocabulary to the other's.

With one vocabulary the ids pass through. With two, only the new step's text is encoded again: text that was accepted
keeps the ids it has in each model. Knows nothing of caches or policies.
"""

from __future__ import annotations

from collections.abc import Sequence

from .protocols import Vocabulary


class Bridge:
    """Between the vocabularies of a draft and a target."""

    def __init__(self, draft: Vocabulary, target: Vocabulary) -> None:
        self.identical = draft.fingerprint == target.fingerprint

    def carry(self, tokens: Sequence[int], source: Vocabulary, destination: Vocabulary) -> list[int]:
        """The ids that `destination` has for the text of `tokens`; bytes that are no UTF-8 become U+FFFD."""
        if self.identical:
            return list(tokens)
        return destination.encode(b"".join(map(source.piece, tokens)).decode("utf-8", errors="replace"))
