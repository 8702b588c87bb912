"""LlamaStepModel: one sequence in one llama.cpp context, as the engine wants it.

It draws tokens, and knows steps; what is in memory is the business of `cache`. There a rejected step stays until
something else is evaluated. What the model then draws is its own; as long as it draws the rejected tokens again,
nothing needs to be evaluated (`reuse_rejected`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from ..config import SamplingConfig
from ..protocols import FloatArray, ModelStep, StepStates, TapPoint
from ..steps import StepReader
from .cache import SequenceCache
from .context import LlamaContext
from .kept import Checkpoint, ReadStep, StateRows
from .model import LlamaModel
from .sampling import Draw, KnownTokens, LlamaSampler
from .vocabulary import LlamaVocabulary


class LlamaStepModel(SequenceCache):
    """Implements `protocols.StepModel` on llama.cpp; owns its context, and its model when given a path."""

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
        self._begin_cache()

    @property
    def vocabulary(self) -> LlamaVocabulary:
        return self.model.vocabulary

    @property
    def sampling(self) -> SamplingConfig:
        """How it draws tokens now."""
        return self._sampler.config

    def reseed(self, seed: int, sampling: SamplingConfig | None = None) -> None:
        self._sampler.reseed(seed, sampling)

    def read_states(self, wanted: bool) -> None:
        self._reads_states = wanted

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

    def draw(self, logits: FloatArray | None = None) -> Draw:
        """The next token, with its distribution; from a row of logits float32 [n_vocab] where one is given."""
        return self._sampler.draw(self._logits if logits is None else logits)

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

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> LlamaStepModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
