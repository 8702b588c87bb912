"""Many sequences in one context, for making probe data: write samples of a prefix, or read given texts after it.

A *trunk* is an evaluated prefix; a *lane* is a sequence that begins with a copy of a trunk and goes on from there.
A free lane takes the next job at once, so the batch stays full. Knows nothing of problems or files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..config import SamplingConfig
from ..protocols import FloatArray, ModelStep, StepStates, TapPoint
from ..steps import StepReader
from .context import Decoded, LlamaContext
from .model import LlamaModel
from .sampling import KnownTokens, LlamaSampler

N_READERS = 16
"""Texts that are read together, at most, beside the lanes that write."""


@dataclass(frozen=True)
class Trunk:
    """An evaluated prefix in a sequence of its own, and what follows its last token."""

    sequence: int
    tokens: list[int]
    logits: FloatArray
    last_states: dict[TapPoint, FloatArray]


@dataclass
class Job:
    """One sample to be written after `trunk`; `key` is handed back with the result."""

    key: Any
    trunk: Trunk
    reader: StepReader
    seed: int


@dataclass
class _Lane:
    sequence: int
    job: Job
    sampler: LlamaSampler
    known: KnownTokens
    tokens: list[int] = field(default_factory=list)
    rows: list[dict[TapPoint, FloatArray]] = field(default_factory=list)


class LlamaLanes:
    """`n_lanes` sequences that write at once, over up to `n_trunks` prefixes; each of at most `n_ctx` tokens in all.

    `post` taps the last layer after the final norm, besides `taps`.
    """

    def __init__(
        self,
        path: Path,
        *,
        n_lanes: int,
        n_trunks: int,
        n_ctx: int,
        n_threads: int,
        sampling: SamplingConfig,
        taps: Sequence[TapPoint] = (),
        post: bool = False,
    ) -> None:
        with ExitStack() as stack:
            self.model = stack.enter_context(LlamaModel(path))
            if post:
                taps = [*taps, TapPoint(self.model.n_layer - 1, "post")]
            self.context = stack.enter_context(
                LlamaContext(
                    self.model,
                    n_ctx=n_ctx,
                    n_threads=n_threads,
                    taps=taps,
                    n_seq_max=n_lanes + n_trunks + N_READERS,
                    n_batch=1024,
                )
            )
            vocabulary = self.model.vocabulary
            self._samplers = [
                LlamaSampler(sampling, seed=0, n_vocab=vocabulary.n_tokens, n_used=vocabulary.n_used)
                for _ in range(n_lanes)
            ]
            for sampler in self._samplers:
                stack.callback(sampler.close)
            self._known = KnownTokens(vocabulary.n_tokens)
            self._stack = stack.pop_all()
        self._free_lanes = list(reversed(range(n_lanes)))
        self._free_trunks = list(range(n_lanes, n_lanes + n_trunks))
        self._readers = range(n_lanes + n_trunks, n_lanes + n_trunks + N_READERS)

    # -- trunks -------------------------------------------------------------------------------------

    def plant(self, tokens: Sequence[int]) -> Trunk:
        """Evaluate a prefix in a free trunk; `release` it when its jobs are done."""
        sequence = self._free_trunks.pop()
        try:
            decoded = self.context.decode(tokens, range(len(tokens)), [sequence] * len(tokens))
        except BaseException:
            self.context.trim(0, sequence)
            self._free_trunks.append(sequence)
            raise
        last = {tap: rows[-1].copy() for tap, rows in decoded.states.items()}
        return Trunk(sequence, list(tokens), decoded.logits[-1].copy(), last)

    def release(self, trunk: Trunk) -> None:
        self.context.trim(0, trunk.sequence)
        self._free_trunks.append(trunk.sequence)

    # -- writing ------------------------------------------------------------------------------------

    def write(self, jobs: Iterator[Job]) -> Iterator[tuple[Job, ModelStep]]:
        """Sample a step for every job; yields each as it ends. `jobs` is advanced only when a lane is free."""
        active: list[_Lane] = []
        try:
            while True:
                while self._free_lanes and (job := next(jobs, None)) is not None:
                    lane = self._start(job)
                    active.append(lane)
                    self._draw(lane, job.trunk.logits)
                    if not lane.tokens:
                        active.remove(lane)
                        self._free(lane)
                        yield job, self._step_of(lane)
                if not active:
                    return
                active, ended = self._advance(active)
                for lane in ended:
                    self._free(lane)
                for lane in ended:
                    yield lane.job, self._step_of(lane)
        finally:
            for lane in active:
                self._free(lane)

    def _start(self, job: Job) -> _Lane:
        sequence = self._free_lanes.pop()
        self.context.copy(job.trunk.sequence, sequence)
        sampler = self._samplers[sequence]
        sampler.reseed(job.seed)
        return _Lane(sequence, job, sampler, KnownTokens(self.context.n_vocab))

    def _draw(self, lane: _Lane, logits: FloatArray) -> None:
        token = lane.sampler.sample(logits)
        vocabulary = self.model.vocabulary
        if vocabulary.is_eog(token):
            lane.job.reader.finish("eos")
            return
        lane.known.add(logits, token)
        lane.tokens.append(token)
        lane.job.reader.feed(vocabulary.piece(token))

    def _advance(self, active: list[_Lane]) -> tuple[list[_Lane], list[_Lane]]:
        """One decode: each lane's newest token; then the next token of every lane that goes on."""
        # llama.cpp evaluates neighbouring sequences together, in the order of their numbers.
        active = sorted(active, key=lambda lane: lane.sequence)
        positions = [len(lane.job.trunk.tokens) + len(lane.tokens) - 1 for lane in active]
        decoded = self.context.decode(
            [lane.tokens[-1] for lane in active], positions, [lane.sequence for lane in active], [True] * len(active)
        )
        going: list[_Lane] = []
        ended: list[_Lane] = []
        for i, lane in enumerate(active):
            lane.rows.append({tap: rows[i] for tap, rows in decoded.states.items()})
            if lane.job.reader.end is None:
                self._draw(lane, decoded.logits[i])
            over = len(lane.rows) == len(lane.tokens)  # nothing new was drawn
            (ended if over else going).append(lane)
        return going, ended

    def _free(self, lane: _Lane) -> None:
        self.context.trim(0, lane.sequence)
        self._free_lanes = sorted([*self._free_lanes, lane.sequence], reverse=True)

    def _step_of(self, lane: _Lane) -> ModelStep:
        reader = lane.job.reader
        if reader.end is not None and reader.end.kind == "length" and reader.n_complete_tokens:
            n = reader.n_complete_tokens  # a step cut off by its length ends with a whole character
            lane.tokens, lane.rows = lane.tokens[:n], lane.rows[:n]
        end = reader.end
        logprobs, in_top2 = lane.known.arrays(len(lane.tokens))
        kind = end.kind if end else None
        step = ModelStep(tokens=lane.tokens, logprobs=logprobs, in_top2=in_top2, end=kind)
        if lane.rows:
            for tap, before in lane.job.trunk.last_states.items():
                step.states[tap] = StepStates(before=before, own=np.stack([row[tap] for row in lane.rows]))
        return step

    # -- reading ------------------------------------------------------------------------------------

    def read(self, trunk: Trunk, texts: Sequence[Sequence[int]]) -> list[ModelStep]:
        """Evaluate each token list after `trunk`, with log-probabilities; empty lists give empty steps.

        As many together as fit into a batch. Samples of a short step are often the same: each list is evaluated once.
        """
        steps: dict[tuple[int, ...], ModelStep] = {(): ModelStep(tokens=[])}
        waiting = [key for key in dict.fromkeys(map(tuple, texts)) if key]
        while waiting:
            together = self._fitting(waiting)
            steps.update(zip(together, self._read_together(trunk, together)))
            waiting = waiting[len(together) :]
        return [steps[tuple(tokens)] for tokens in texts]

    def _fitting(self, texts: Sequence[tuple[int, ...]]) -> Sequence[tuple[int, ...]]:
        """The first of `texts`, as many as fit into one batch; at least one."""
        n_tokens = n_texts = 0
        for tokens in texts[: len(self._readers)]:
            n_tokens += len(tokens)
            if n_texts and n_tokens > self.context.n_batch:
                break
            n_texts += 1
        return texts[:n_texts]

    def _read_together(self, trunk: Trunk, texts: Sequence[tuple[int, ...]]) -> list[ModelStep]:
        start, lanes = len(trunk.tokens), self._readers[: len(texts)]
        tokens = [token for text in texts for token in text]
        positions = [start + i for text in texts for i in range(len(text))]
        sequences = [lane for text, lane in zip(texts, lanes) for _ in text]
        try:
            for lane in lanes:
                self.context.copy(trunk.sequence, lane)
            decoded = self.context.decode(tokens, positions, sequences, [True] * len(tokens))
            return list(self._steps_read(trunk, texts, decoded))
        finally:
            for lane in lanes:
                self.context.trim(0, lane)

    def _steps_read(self, trunk: Trunk, texts: Sequence[tuple[int, ...]], decoded: Decoded) -> Iterator[ModelStep]:
        at = 0
        for text in texts:
            own = slice(at, at + len(text))
            self._known.add(trunk.logits, text[0])
            self._known.add_all(decoded.logits[own][:-1], text[1:])
            states = {
                tap: StepStates(before=trunk.last_states[tap], own=rows[own]) for tap, rows in decoded.states.items()
            }
            yield ModelStep(list(text), states, *self._known.arrays(len(text)))
            at += len(text)

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> LlamaLanes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
