"""What a session keeps of its steps: where one began, what one read, the states of one that is being written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..config import MAX_GUESS
from ..protocols import FloatArray, TapPoint

N_KEPT = MAX_GUESS + 1
"""Of so many tokens of a step that was read each lane keeps the logits; 10 MB where there are 152,000 tokens.

Guesses are read behind one token that was not guessed.
"""


@dataclass(frozen=True)
class Checkpoint:
    """A position that can be returned to: what follows it, the last states, and the uncuttable part of the memory."""

    n_past: int
    logits: FloatArray
    last_states: dict[TapPoint, FloatArray]
    memory: bytes | None


@dataclass(frozen=True)
class ReadStep:
    """A step that was just read at `n_past`, and what follows each token.

    `logits` float32 [n or fewer, n_vocab] are llama.cpp's own buffer, valid until the model evaluates something, and
    in lanes a copy; `states` float32 [n, n_embd] by tap point.
    """

    n_past: int
    tokens: tuple[int, ...]
    logits: FloatArray
    states: Mapping[TapPoint, FloatArray]


class StateRows:
    """States of the tokens of a step, one after another, in an array that serves the next step too."""

    def __init__(self, n_embd: int) -> None:
        self._rows = np.empty((64, n_embd), dtype=np.float32)
        self._n = 0

    def add(self, state: FloatArray) -> None:
        """The next token's state, float32 [n_embd]."""
        if self._n == len(self._rows):
            self._rows = np.concatenate([self._rows, np.empty_like(self._rows)])
        self._rows[self._n] = state
        self._n += 1

    def take(self, n: int) -> FloatArray:
        """A copy of the first `n`, float32 [n, n_embd]; all are forgotten."""
        taken: FloatArray = self._rows[:n].copy()
        self._n = 0
        return taken

    def clear(self) -> None:
        self._n = 0
