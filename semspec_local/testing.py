"""Fakes that implement the engine's protocols: public, so that users can test policies and tools without models.

`ScriptedModel` writes what its script says, over a vocabulary of bytes; `ConstantProbe` answers what it was told to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from .config import SamplingConfig
from .protocols import FloatArray, ModelStep, StepStates, TapPoint
from .roles import Role
from .steps import StepReader

EOG = 256
"""The end-of-generation token of `ByteVocabulary`; in a script it is written as `END`."""

END = "\x04"
"""Where a script ends generation."""

TAP = TapPoint(0)
"""The one tap point that a `ScriptedModel` has."""


class ByteVocabulary:
    """One token per byte. Vocabularies of different `name` count as different, so the bridge encodes anew."""

    def __init__(self, name: str = "bytes") -> None:
        self.fingerprint = name

    def encode(self, text: str, *, control: bool = False) -> list[int]:
        return list(text.encode())

    def piece(self, token: int) -> bytes:
        return bytes([token]) if token < EOG else b""


class ScriptedModel:
    """A model that writes from a script: strings taken in turn, or a function from the text so far to what comes next.

    What a step leaves of a string begins the next one, unless the script is a function. A script that has run out
    ends generation; a function that returns nothing is an error. `calls` lists what was asked: the method's name, and
    `n_past` before the call. `logprob` is the log-probability of every token, `in_top2` whether it is among the two
    likeliest. `peeks` are texts of one token, taken in turn and then the last one again: what `peek` finds likeliest.
    """

    n_embd = 4

    def __init__(
        self,
        script: Iterable[str] | Callable[[str], str],
        *,
        n_ctx: int = 4096,
        vocabulary: ByteVocabulary | None = None,
        logprob: float = -0.1,
        in_top2: bool = True,
        peeks: Sequence[str] = ("9",),
    ) -> None:
        self.vocabulary = vocabulary or ByteVocabulary()
        self.n_ctx = n_ctx
        self.tokens: list[int] = []
        self.calls: list[tuple[str, int]] = []
        self.reads_states = True
        self.logprob, self.in_top2 = logprob, in_top2
        self._peeks = list(peeks)
        self._is_function = callable(script)
        self._next = script if callable(script) else _from_list(iter(script))
        self._rest: deque[int] = deque()

    @property
    def n_past(self) -> int:
        return len(self.tokens)

    @property
    def text(self) -> str:
        """The text of everything in the cache."""
        return b"".join(map(self.vocabulary.piece, self.tokens)).decode(errors="replace")

    def reseed(self, seed: int, sampling: SamplingConfig | None = None) -> None:
        self.seed, self.sampling = seed, sampling

    def prefill(self, tokens: Sequence[int]) -> int:
        self.calls.append(("prefill", self.n_past))
        self.tokens = list(tokens)
        return len(tokens)

    def read_states(self, wanted: bool) -> None:
        self.reads_states = wanted

    def propose(self, reader: StepReader, *, logprobs: bool = False) -> ModelStep:
        self.calls.append(("propose", self.n_past))
        start = self.n_past
        while reader.end is None:
            token = self._write()
            if token == EOG:
                reader.finish("eos")
                break
            self.tokens.append(token)
            if self.n_past > self.n_ctx:
                raise AssertionError("the engine let a model write past its context")
            reader.feed(self.vocabulary.piece(token))
        assert reader.end is not None
        if self._is_function:
            self._rest.clear()
        if reader.end.kind == "length" and reader.n_complete_tokens:
            del self.tokens[start + reader.n_complete_tokens :]
        return self._step(start, logprobs, reader.end.kind)

    def score(self, tokens: Sequence[int], *, logprobs: bool = False) -> ModelStep:
        self.calls.append(("score", self.n_past))
        start = self.n_past
        self.tokens += tokens
        if self.n_past > self.n_ctx:
            raise AssertionError("the engine let a model read past its context")
        return self._step(start, logprobs, None)

    def peek(self, tokens: Sequence[int]) -> FloatArray:
        self.calls.append(("peek", self.n_past))
        if self.n_past + len(tokens) > self.n_ctx:
            raise AssertionError("the engine let a model read past its context")
        (token,) = self.vocabulary.encode(self._peeks.pop(0) if len(self._peeks) > 1 else self._peeks[0])
        logits = np.zeros(max(token, EOG) + 1, dtype=np.float32)
        logits[token] = 1.0
        return logits

    def rollback(self, n_past: int) -> None:
        self.calls.append(("rollback", self.n_past))
        assert 1 <= n_past <= self.n_past, "rollback to a position that is in the cache"
        del self.tokens[n_past:]

    def _write(self) -> int:
        """The next token of the script."""
        if not self._rest:
            text = self._next(self.text)
            if not text:
                raise ValueError("the script gave no text; wanted some, or END to end generation")
            for part in text.partition(END):
                self._rest += [EOG] if part == END else self.vocabulary.encode(part)
        return self._rest.popleft()

    def _step(self, start: int, logprobs: bool, end: str | None) -> ModelStep:
        tokens = self.tokens[start:]
        step = ModelStep(tokens=tokens, end=end)
        if tokens and self.reads_states:
            states = np.asarray([_state(token) for token in self.tokens[start - 1 :]], dtype=np.float32)
            step.states = {TAP: StepStates(before=states[0], own=states[1:])}
        if logprobs:
            step.logprobs = np.full(len(tokens), self.logprob, dtype=np.float32)
            step.in_top2 = np.full(len(tokens), self.in_top2)
        return step


class ConstantProbe:
    """A probe that answers with one number, or with a list of numbers in turn and then its last."""

    tap = TAP

    def __init__(self, *probs: float) -> None:
        self._probs = list(probs)
        self.seen: list[StepStates] = []

    def semantic_prob(self, states: StepStates) -> float:
        self.seen.append(states)
        return self._probs.pop(0) if len(self._probs) > 1 else self._probs[0]


class ConstantJointProbe:
    """A joint probe that answers with one number, or with a list of numbers in turn and then its last."""

    taps: Mapping[Role, TapPoint] = {"target": TAP, "draft": TAP}

    def __init__(self, *probs: float, features: tuple[str, ...] = ()) -> None:
        self._probs = list(probs)
        self.features = features
        self.seen: list[tuple[StepStates, StepStates, FloatArray]] = []

    def semantic_prob(self, target: StepStates, draft: StepStates, features: FloatArray) -> float:
        self.seen.append((target, draft, features))
        return self._probs.pop(0) if len(self._probs) > 1 else self._probs[0]


def _from_list(script: Iterator[str]) -> Callable[[str], str]:
    return lambda _text: next(script, END)


def _state(token: int) -> list[float]:
    """A hidden state that tells which token it belongs to."""
    return [float(token), token / 256, 1.0, 0.0]
