"""Carry a step from one model's vocabulary to the other's.

With one vocabulary the ids pass through. With two, only the new step's text is encoded again: text that was accepted
keeps the ids it has in each model. Knows nothing of caches or policies.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from .config import THINK_CLOSE, THINK_OPEN
from .protocols import Vocabulary

_TAGS = re.compile(f"({re.escape(THINK_OPEN)}|{re.escape(THINK_CLOSE)})")


class Bridge:
    """Between the vocabularies of a draft and a target."""

    def __init__(self, draft: Vocabulary, target: Vocabulary) -> None:
        self.identical = draft.fingerprint == target.fingerprint

    def carry(self, tokens: Sequence[int], text: bytes, destination: Vocabulary) -> list[int]:
        """The ids that `destination` has for a step: the writer's `tokens`, and the `text` that is kept of them.

        Bytes that are no UTF-8 become U+FFFD. The thinking tags stay what they are, also where they are control
        tokens: a model that does not see them would not know that thinking has ended.
        """
        if self.identical:
            return list(tokens)
        parts = _TAGS.split(text.decode("utf-8", errors="replace"))
        return [
            token
            for part in parts
            if part
            for token in destination.encode(part, control=part in (THINK_OPEN, THINK_CLOSE))
        ]
