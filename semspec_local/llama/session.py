"""LlamaStepModel: one sequence in one llama.cpp context, as the engine wants it.

`tokens` are exactly those read or written so far, and the logits that follow the last of them are kept, so the next
token can be drawn without evaluating anything again, also after a rollback to the start of a step.

Behind them a rejected step stays in llama.cpp's memory until something else is evaluated. What the model then draws is
its own; as long as it draws the rejected tokens again, nothing needs to be evaluated (`reuse_rejected`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

from ..config import SamplingConfig
from ..errors import ConfigError, DecodeError, ModelError
from ..protocols import FloatArray, ModelStep, StepStates, TapPoint
from ..steps import StepReader
from .context import Decoded, LlamaContext
from .kept import Checkpoint, ReadStep, StateRows
from .model import LlamaModel
from .sampling import Draw, KnownTokens, LlamaSampler
from .vocabulary import LlamaVocabulary

PROMPT_BLOCK = 128
"""A prompt is read in blocks of so many tokens, so that what a kept block holds does not depend on what follows it."""


class LlamaStepModel:
    """Implements `protocols.StepModel` on llama.cpp; owns its context, and its model when given a path."""

    sequence = 0
    """The number of its sequence in the context."""

    def __init__(
        self,
        model: LlamaModel | Path,
        *,
        n_ctx: int,
        n_threads: int,
        n_gpu_layers: int = 0,
        sampling: SamplingConfig,
        seed: int = 0,
        taps: Sequence[TapPoint] = (),
        n_ubatch: int = 512,
    ) -> None:
        self._stack = ExitStack()
        with ExitStack() as stack:
            if isinstance(model, Path):
                model = stack.enter_context(LlamaModel(model, n_gpu_layers=n_gpu_layers))
            self.model = model
            self.context = stack.enter_context(
                LlamaContext(self.model, n_ctx=n_ctx, n_threads=n_threads, taps=taps, n_ubatch=n_ubatch)
            )
            self._begin(sampling, seed, stack)
            self._check_rollback()
            self._stack = stack.pop_all()

    def _begin(self, sampling: SamplingConfig, seed: int, stack: ExitStack) -> None:
        vocabulary = self.model.vocabulary
        self._sampler = LlamaSampler(sampling, seed=seed, n_vocab=vocabulary.n_tokens, n_used=vocabulary.n_used)
        stack.callback(self._sampler.close)
        self._known = KnownTokens(vocabulary.n_tokens)
        taps = self.context.taps.taps if self.context.taps else ()
        self._rows = {tap: StateRows(self.model.n_embd) for tap in taps}
        self.tokens: list[int] = []
        self._n_reusable = 0  # tokens at the beginning that were read as whole blocks of a prompt
        self._start: Checkpoint | None = None
        self._last_read: ReadStep | None = None  # rolled back or not, it is in memory
        self._reads_states = True

    @property
    def vocabulary(self) -> LlamaVocabulary:
        return self.model.vocabulary

    @property
    def n_ctx(self) -> int:
        return self.context.n_ctx

    @property
    def n_past(self) -> int:
        return len(self.tokens)

    @property
    def sampling(self) -> SamplingConfig:
        """How it draws tokens now."""
        return self._sampler.config

    def reseed(self, seed: int, sampling: SamplingConfig | None = None) -> None:
        self._sampler.reseed(seed, sampling)

    # -- reading and writing ------------------------------------------------------------------------

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

    def read_states(self, wanted: bool) -> None:
        self._reads_states = wanted

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

    def propose(self, reader: StepReader, *, logprobs: bool = False) -> ModelStep:
        start = self.begin_step()
        step = ModelStep(tokens=[])
        known = self._known if logprobs else None
        try:
            write = self._write if self._writes_alone else self._write_by_parts
            if reader.end is None:
                token = self.reuse_rejected(reader, step.tokens, known)
                step.n_reused = len(step.tokens)
                if token is not None:
                    write(token, reader, step.tokens, known)
        except BaseException:
            self.return_to_start()
            raise
        assert reader.end is not None
        step.end = reader.end.kind
        if step.end == "length":
            self.cut_to_whole_character(step, reader, start)
        n = len(step.tokens)
        if known is not None:
            step.logprobs, step.in_top2 = known.arrays(n)
        states = {tap: rows.take(n) for tap, rows in self._rows.items() if self._reads_states}
        if n:
            step.states = self._step_states(start, states)
        return step

    def begin_step(self) -> Checkpoint:
        self._known.clear()  # a Ctrl-C may have left some of the last step's
        for rows in self._rows.values():
            rows.clear()
        return self.checkpoint()

    def reuse_rejected(self, reader: StepReader, tokens: list[int], known: KnownTokens | None) -> int | None:
        """Draw tokens as long as they are those of the step that was read here and rolled back: these are in memory.

        The first that is another one, not evaluated yet; None when the step has ended before. Drawn with the random
        numbers that would have been drawn anyway, from the same logits up to the rounding of a pass over many tokens.
        """
        token, read, eog = self._sampler.sample(self._logits), self._last_read, self.vocabulary.eog_tokens
        if read is None or read.n_past != self.n_past:
            self._last_read = None  # it was accepted
            return token
        try:
            for known_token, logits in zip(read.tokens, read.logits):
                if token != known_token or token in eog:
                    return token
                if known is not None:
                    known.add(self._logits, token)
                self.tokens.append(token)
                tokens.append(token)
                self._logits = logits
                if reader.feed(self.vocabulary.piece(token)) is not None:
                    return None
                token = self._sampler.sample(logits)
            return token
        finally:
            self._take_states(read, len(tokens))
            self._forget_read()

    def _take_states(self, read: ReadStep, n: int) -> None:
        """The states of the first `n` tokens of a step that was read are those of the step that is being written."""
        for tap, rows in read.states.items():
            for row in rows[:n]:
                self._rows[tap].add(row)
        if n and read.states:
            self._last_states = {tap: rows[n - 1] for tap, rows in read.states.items()}

    def _write(self, token: int, reader: StepReader, tokens: list[int], known: KnownTokens | None) -> None:
        """Evaluate a token, sample the next, until the step ends; fills `tokens`, and what is known of each.

        The shortest way through Python: a small draft writes a token in a tenth of a millisecond.
        """
        context, sample, handle = self.context, self._sampler.sample_last, self.context.handle
        decode_one, feed, n_ctx = context.decode_one, reader.feed, context.n_ctx
        piece, eog, cached = self.vocabulary.piece, self.vocabulary.eog_tokens, self.tokens
        context.read_states(self._reads_states)
        tap, states = next(iter(self._rows.items()), (None, None)) if self._reads_states else (None, None)
        state = None
        logits, is_first = self._logits, True
        while token not in eog:
            if known is not None:
                known.add(logits, token)
            if len(cached) >= n_ctx:
                self._refuse(1)
            decode_one(token, len(cached))
            cached.append(token)
            tokens.append(token)
            if is_first:  # each of the others follows at the same place
                is_first, logits = False, context.last_logits()
                state = context.last_state() if states is not None else None
            if states is not None and state is not None:
                states.add(state)
            if feed(piece(token)) is not None:
                break
            token = sample(handle)
        else:
            reader.finish("eos")
        self._logits = logits
        if tap is not None and state is not None:
            self._last_states = {tap: state.copy()}

    @property
    def _writes_alone(self) -> bool:
        """May `_write` drive the context itself?"""
        return not self.context.calls_back

    def _write_by_parts(self, token: int, reader: StepReader, tokens: list[int], known: KnownTokens | None) -> None:
        """The same where states come through a callback, or others use the context too."""
        while True:
            if token in self.vocabulary.eog_tokens:
                reader.finish("eos")
                return
            if known is not None:
                known.add(self._logits, token)
            for tap, own in self._decode([token]).items():
                self._rows[tap].add(own[0])
            tokens.append(token)
            if reader.feed(self.vocabulary.piece(token)) is not None:
                return
            token = self._sampler.sample(self._logits)

    def score(self, tokens: Sequence[int], *, logprobs: bool = False) -> ModelStep:
        start = self.begin_step()
        states = self._decode(tokens, all_logits=logprobs)
        step = ModelStep(tokens=list(tokens), states=self._step_states(start, states))
        if logprobs:
            self._known.add(start.logits, tokens[0])
            self._known.add_all(self._all_logits[:-1], tokens[1:])
            step.logprobs, step.in_top2 = self._known.arrays(len(tokens))
            if self.context.can_trim:
                self._last_read = ReadStep(start.n_past, tuple(tokens), self._kept_logits(), states)
        return step

    # -- for who guesses what this model will write ---------------------------------------------------

    def draw(self, logits: FloatArray | None = None) -> Draw:
        """The next token, with its distribution; from a row of logits float32 [n_vocab] where one is given."""
        return self._sampler.draw(self._logits if logits is None else logits)

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

    def _kept_logits(self) -> FloatArray:
        """The logits behind each token that was just read, valid until this model evaluates something."""
        return self._all_logits

    def _forget_read(self) -> None:
        """Cut what is in memory to the tokens of the cache."""
        if self._last_read is not None and not self._drop(self.n_past, None):
            raise DecodeError(f"{self.model.path.name}: llama.cpp did not trim the cache to {self.n_past} tokens")

    def peek(self, tokens: Sequence[int]) -> FloatArray:
        start, here = self._start, self.checkpoint()
        try:
            self._decode(tokens)
            logits: FloatArray = self._logits.copy()
            self.rollback(here.n_past)
        finally:
            # The step that was just read may be rolled back next, and only one position is remembered.
            if start is not None and start.n_past <= self.n_past:
                self._start = start
        return logits

    def cut_to_whole_character(self, step: ModelStep, reader: StepReader, start: Checkpoint) -> None:
        """A step cut off by its length ends with a whole character, so that another vocabulary can read it."""
        keep = reader.n_complete_tokens
        if 0 < keep < len(step.tokens):
            self.rollback(start.n_past + keep)
            self._start = start
            del step.tokens[keep:]
            step.n_reused = min(step.n_reused, keep)

    def _step_states(self, start: Checkpoint, rows: dict[TapPoint, FloatArray]) -> dict[TapPoint, StepStates]:
        return {tap: StepStates(before=start.last_states[tap], own=own) for tap, own in rows.items()}

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

    def _refuse(self, n: int) -> NoReturn:
        raise DecodeError(
            f"the context holds {self.n_ctx:,} tokens; {self.n_past:,} are in it and {n:,} more do not fit"
        )

    # -- going back ---------------------------------------------------------------------------------

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

    _logits: FloatArray
    _all_logits: FloatArray
    _last_states: Mapping[TapPoint, FloatArray] = MappingProxyType({})

    def _check_rollback(self) -> None:
        """A memory that cannot be cut must come back from a checkpoint; tried before the first real token."""
        if self.context.can_trim:
            return
        self.prefill([0, 0])
        self.checkpoint()
        self.score([0])
        start = self._start
        assert start is not None
        if not self._drop(2, start.memory):
            raise ModelError(
                f"{self.model.path.name} ({self.model.architecture}) keeps a recurrent memory that llama.cpp cannot "
                "roll back, so a rejected step could not be undone; use a model with a plain cache"
            )
        self.forget()

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> LlamaStepModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
