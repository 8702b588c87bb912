"""What the engine asks of a model and of a probe, and the values that pass between them.

The engine sees models and probes through these protocols only; `llama/` and `probes/` implement them on
llama.cpp and onnxruntime, `testing` on scripts. Nothing heavy is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from .config import SamplingConfig
from .roles import Role as Role
from .steps import StepReader

Window = Literal["predictor", "token"]
Pooling = Literal["mean", "last"]

Norm = Literal["pre", "post"]

FloatArray = NDArray[np.float32]

Feature = Literal[
    "target_logprob_mean",
    "target_logprob_min",
    "draft_logprob_mean",
    "target_top2_share",
    "n_tokens",
    "step_index",
]
"""Log-probabilities are natural, per token; the share is that of tokens among the target's two likeliest; `n_tokens`
counts the target's tokens, `step_index` the steps before this one."""

FEATURES: tuple[Feature, ...] = get_args(Feature)


@dataclass(frozen=True, order=True)
class TapPoint:
    """Where a hidden state is read: after layer `layer` (0-based), before (`pre`) or after (`post`) the final norm.

    Layer N before the norm is llama.cpp's `l_out-N`, Hugging Face's `hidden_states[N + 1]`; only the last layer
    has a `post`.
    """

    layer: int
    norm: Norm = "pre"


@dataclass(frozen=True)
class StepStates:
    """Hidden states of one layer around one step.

    `before` is the state of the last token before the step, float32 [n_embd]; `own` are the states of the
    step's own tokens, float32 [n_tokens, n_embd].
    """

    before: FloatArray
    own: FloatArray

    def window(self, window: Window) -> FloatArray:
        """The states that a window covers, float32 [n_tokens, n_embd].

        `predictor` covers the states that predict the step's tokens: from the last token before the step to
        the second-last token of the step (as the code of arXiv 2602.03708 does). `token` covers the step's own tokens.
        """
        if window == "token":
            return self.own
        return np.concatenate([self.before[None, :], self.own[:-1]])

    def pool(self, window: Window, pooling: Pooling) -> FloatArray:
        """One vector for the step, float32 [n_embd]."""
        states = self.window(window)
        if pooling == "mean":
            return np.asarray(states.mean(axis=0, dtype=np.float64), dtype=np.float32)
        return np.ascontiguousarray(states[-1], dtype=np.float32)


@dataclass
class ModelStep:
    """One step as one model has it: its tokens, which are in that model's cache, and what was read on the way.

    `states` maps a tap point to its states; it is empty when nothing is tapped. `logprobs` float32 [n_tokens] are
    the model's own log-probabilities (natural log, temperature 1, whole vocabulary) of the tokens; `in_top2`
    bool [n_tokens] says whether each token was one of the model's two likeliest. None when not asked for.
    `end` says why a written step ended (`steps.StepEnd.kind`); None for a step that was only read. So many tokens as
    `n_reused` says, at the beginning of a written step, were in the cache already, for a rejected step began like it.
    `n_guesses` tokens were guessed for a step that was written with a `Guesser`; the target kept `n_guesses_kept`.
    """

    tokens: list[int]
    states: dict[TapPoint, StepStates] = field(default_factory=dict)
    logprobs: FloatArray | None = None
    in_top2: NDArray[np.bool_] | None = None
    end: str | None = None
    n_reused: int = 0
    n_guesses: int = 0
    n_guesses_kept: int = 0


class Vocabulary(Protocol):
    """Text to token ids and back, for one model."""

    @property
    def fingerprint(self) -> str: ...

    def encode(self, text: str, *, control: bool = False) -> list[int]:
        """Ids of text that continues earlier text; with `control`, for text of ours, it may name control tokens."""
        ...

    def piece(self, token: int) -> bytes:
        """The bytes a token adds to the text; empty for control tokens."""
        ...


class StepModel(Protocol):
    """A language model with one sequence in its cache.

    `n_past` counts the tokens in the cache. Every method leaves the model able to write or read the next
    token at `n_past`. A method that raises leaves `n_past` at a value that `rollback` accepts.
    """

    @property
    def vocabulary(self) -> Vocabulary: ...

    @property
    def n_ctx(self) -> int: ...

    @property
    def n_past(self) -> int: ...

    def prefill(self, tokens: Sequence[int]) -> int:
        """Start over with these tokens, at least one, as the whole cache; how many of them had to be read."""
        ...

    def reseed(self, seed: int, sampling: SamplingConfig | None = None) -> None:
        """Restart the sampler's random numbers; `sampling` says how to draw from now on, None: as before."""
        ...

    def read_states(self, wanted: bool) -> None:
        """Whether steps have states from now on; at first they do. What nobody reads need not cost time.

        They may be turned off at any time, and on again before `prefill`.
        """
        ...

    def propose(self, reader: StepReader, *, logprobs: bool = False) -> ModelStep:
        """Write tokens until `reader` says that the step has ended, or an end-of-generation token is drawn.

        An end-of-generation token ends the step and is in neither the tokens nor the cache. The step may be empty.
        One of kind "length" is cut back to `reader.n_complete_tokens`, if there are any.
        """
        ...

    def score(self, tokens: Sequence[int], *, logprobs: bool = False) -> ModelStep:
        """Read tokens, at least one, in one pass."""
        ...

    def peek(self, tokens: Sequence[int]) -> FloatArray:
        """Logits float32 [n_vocab] of what would follow these tokens, at least one, which are then forgotten.

        Afterwards the model is as before, and nothing in its cache was evaluated again.
        """
        ...

    def rollback(self, n_past: int) -> None:
        """Forget every token from position `n_past` (at least 1) on."""
        ...


class Guesser(Protocol):
    """Writes steps of a target with tokens that its draft guesses, distributed as if the target wrote alone."""

    @property
    def n(self) -> int:
        """How many tokens are guessed at a time."""
        ...

    def write(self, reader: StepReader, rng: np.random.Generator) -> ModelStep:
        """What `propose` of the target does, but that the step has no states and no log-probabilities.

        Both models hold the same text before it. Afterwards the draft's cache holds some of the step's tokens too, the
        first ones, as many as it has room for. When it raises, both are at a position that `rollback` accepts.
        """
        ...


class JointProbe(Protocol):
    """Reads pooled states of both models and features of a drafted step; see `features.step_features`."""

    @property
    def taps(self) -> Mapping[Role, TapPoint]: ...

    @property
    def features(self) -> tuple[str, ...]:
        """Names from `features.FEATURES`."""
        ...

    def semantic_prob(self, target: StepStates, draft: StepStates, features: FloatArray) -> float:
        """The share of the target's steps that mean the same, in [0, 1]; `features` float32 [k]."""
        ...


class StepProbe(Protocol):
    """Reads a pooled hidden state of its own model and estimates the semantic probability of the step."""

    @property
    def tap(self) -> TapPoint: ...

    def semantic_prob(self, states: StepStates) -> float:
        """A number in [0, 1]."""
        ...
