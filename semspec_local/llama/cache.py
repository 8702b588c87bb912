"""SequenceCache: the tokens of one sequence in llama.cpp's memory. Reading more of them, and going back.

`tokens` are exactly those read or written so far, and the logits that follow the last of them are kept, so the next
token can be drawn without evaluating anything again, also after a rollback to the start of a step.

Behind them a rejected step may stay in llama.cpp's memory until something else is evaluated (see `session`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NoReturn

from ..errors import ConfigError, DecodeError, ModelError
from ..protocols import FloatArray, TapPoint
from .context import Decoded, LlamaContext
from .kept import Checkpoint, ReadStep
from .model import LlamaModel

PROMPT_BLOCK = 128
"""A prompt is read in blocks of so many tokens, so that what a kept block holds does not depend on what follows it."""


class SequenceCache:
    """What a context holds of one sequence. Whoever inherits sets `context` and `model`, then calls `_begin_cache`."""

    sequence = 0
    """The number of its sequence in the context."""

    context: LlamaContext
    model: LlamaModel
    _logits: FloatArray
    _all_logits: FloatArray
    _last_states: Mapping[TapPoint, FloatArray] = MappingProxyType({})

    def _begin_cache(self) -> None:
        self.tokens: list[int] = []
        self._n_reusable = 0  # tokens at the beginning that were read as whole blocks of a prompt
        self._start: Checkpoint | None = None
        self._last_read: ReadStep | None = None  # rolled back or not, it is in memory
        self._reads_states = True

    @property
    def n_ctx(self) -> int:
        return self.context.n_ctx

    @property
    def n_past(self) -> int:
        return len(self.tokens)

    def prefill(self, tokens: Sequence[int]) -> int:
        """Start over with these tokens as the whole cache; ConfigError when they leave no room to write.

        Whole blocks in which the last prompt began the same are not read again; everything comes out as if they were.
        """
        self.check_prompt(tokens)
        n_kept = self._keep_blocks(tokens)
        for start in range(n_kept, len(tokens), PROMPT_BLOCK):
            self._decode(tokens[start : start + PROMPT_BLOCK])
        self._n_reusable = len(tokens) - len(tokens) % PROMPT_BLOCK
        return len(tokens) - n_kept

    def _keep_blocks(self, tokens: Sequence[int]) -> int:
        """Cut the cache to the blocks that these tokens begin with, the last token left out; how many tokens stay."""
        most = min(self._n_reusable, len(tokens) - 1)
        same = next((i for i, (a, b) in enumerate(zip(self.tokens, tokens[:most])) if a != b), most)
        n_kept = same - same % PROMPT_BLOCK
        # Before the cache is cut, for a Ctrl-C may come at any line.
        self._n_reusable, self._start = n_kept, None
        del self.tokens[n_kept:]
        if n_kept and self.context.can_trim and self._drop(n_kept, None):
            return n_kept
        self.forget()
        return 0

    def check_prompt(self, tokens: Sequence[int]) -> None:
        """Raise ConfigError, with the numbers, for a prompt that leaves no room to write."""
        if not tokens:
            raise ConfigError("the prompt has no tokens; wanted at least one")
        if len(tokens) >= self.n_ctx:
            raise ConfigError(
                f"the question is too long: {len(tokens):,} tokens with its template, and the context holds "
                f"{self.n_ctx:,} (with room for an answer); use a larger -c or a shorter question "
                "(run and batch leave out its beginning with --overflow truncate-left)"
            )

    def read_at(self, n_past: int, tokens: Sequence[int], *, all_logits: bool = False) -> ReadStep:
        """Forget what lies behind `n_past`, and read tokens there; with the logits after each, or after the last."""
        if n_past < self.n_past:
            self._cut(n_past)
        states = self._decode(tokens, all_logits=all_logits)
        return ReadStep(n_past, tuple(tokens), self._kept_logits(), states)

    def keep(self, read: ReadStep, n_past: int) -> None:
        """Forget what lies behind `n_past`, which is behind a token of the last pass; nothing is evaluated again."""
        if n_past < self.n_past:
            self._cut(n_past)
            last = n_past - read.n_past - 1
            self._logits = read.logits[last]
            self._last_states = {tap: rows[last].copy() for tap, rows in read.states.items()}

    def _cut(self, n_past: int) -> None:
        if not self._drop(n_past, None):
            raise DecodeError(f"{self.model.path.name}: llama.cpp did not trim the cache to {n_past} tokens")
        del self.tokens[n_past:]

    def _decode(self, tokens: Sequence[int], *, all_logits: bool = False) -> dict[TapPoint, FloatArray]:
        """Evaluate tokens at the end of the cache, and keep what follows them."""
        n_past, n = self.n_past, len(tokens)
        if n_past + n > self.n_ctx:
            self._refuse(n)
        outputs = [True] * n if all_logits else None
        try:
            self._forget_read()
            decoded = self._evaluate(tokens, outputs)
        except BaseException:
            # Part of the tokens may be in the memory, and llama.cpp's logits are those of nothing.
            self.return_to_start()
            raise
        self.tokens += tokens
        self._all_logits = decoded.logits
        self._logits = decoded.logits[-1]
        if decoded.states:
            self._last_states = {tap: rows[-1].copy() for tap, rows in decoded.states.items()}
        return decoded.states

    def _evaluate(self, tokens: Sequence[int], outputs: Sequence[bool] | None) -> Decoded:
        """Have the context evaluate tokens behind those in the cache."""
        self.context.read_states(self._reads_states)
        return self.context.decode(tokens, range(self.n_past, self.n_past + len(tokens)), outputs=outputs)

    def _kept_logits(self) -> FloatArray:
        """The logits behind each token that was just read, valid until this model evaluates something."""
        return self._all_logits

    def _refuse(self, n: int) -> NoReturn:
        raise DecodeError(
            f"the context holds {self.n_ctx:,} tokens; {self.n_past:,} are in it and {n:,} more do not fit"
        )

    def checkpoint(self) -> Checkpoint:
        """Remember this position; `rollback` to it is exact and evaluates nothing."""
        if self._start is None or self._start.n_past != self.n_past:
            self._start = Checkpoint(
                n_past=self.n_past,
                logits=self._logits.copy(),
                last_states=dict(self._last_states),
                memory=None if self.context.can_trim else self.context.save_state(self.sequence),
            )
        return self._start

    def rollback(self, n_past: int) -> None:
        if not 1 <= n_past <= self.n_past:
            raise ValueError(f"rollback to {n_past}; wanted 1 to {self.n_past}")
        if n_past == self.n_past:
            return
        start = self._start
        if start is not None and start.n_past == n_past and self._drop_or_keep(n_past, start.memory):
            del self.tokens[n_past:]
            self._logits, self._last_states = start.logits, start.last_states
            return
        # Not a known position: read the last kept token again, or everything where the memory cannot be cut.
        kept = self.tokens[:n_past]
        if self.context.can_trim and self._drop(n_past - 1, None):
            self.tokens = kept[:-1]
            self._decode(kept[-1:])
        else:
            self.prefill(kept)

    def _drop_or_keep(self, n_past: int, memory: bytes | None) -> bool:
        """Drop the cells from a position on; those of a step that was read there stay until something is evaluated."""
        if self._last_read is None or self._last_read.n_past != n_past:
            return self._drop(n_past, memory)
        self._n_reusable = min(self._n_reusable, n_past)
        return True

    def _drop(self, n_past: int, memory: bytes | None) -> bool:
        if memory is not None and not self.context.load_state(memory, self.sequence):
            return False
        self._n_reusable = min(self._n_reusable, n_past)
        if not self.context.trim(n_past, self.sequence):
            return False
        self._last_read = None  # not before: a Ctrl-C may come at any line
        return True

    def _forget_read(self) -> None:
        """Cut what is in memory to the tokens of the cache."""
        if self._last_read is not None and not self._drop(self.n_past, None):
            raise DecodeError(f"{self.model.path.name}: llama.cpp did not trim the cache to {self.n_past} tokens")

    def forget(self) -> None:
        """Back to an empty cache: the next prompt is read whole."""
        self._n_reusable = 0  # first: a Ctrl-C may come before the rest
        self._last_read = None
        self._clear()
        self.tokens, self._start = [], None

    def _clear(self) -> None:
        self.context.clear()

    def return_to_start(self) -> None:
        """After a failure: back to where the step began, where everything is known, or to nothing."""
        start = self._start
        if start is not None and start.n_past <= self.n_past and self._drop(start.n_past, start.memory):
            del self.tokens[start.n_past :]
            self._logits, self._last_states = start.logits, start.last_states
        else:
            self.forget()

    def _check_rollback(self) -> None:
        """A memory that cannot be cut must come back from a checkpoint; tried before the first real token."""
        if self.context.can_trim:
            return
        self.prefill([0, 0])
        self.checkpoint()
        self._decode([0])
        start = self._start
        assert start is not None
        if not self._drop(2, start.memory):
            raise ModelError(
                f"{self.model.path.name} ({self.model.architecture}) keeps a recurrent memory that llama.cpp cannot "
                "roll back, so a rejected step could not be undone; use a model with a plain cache"
            )
        self.forget()
