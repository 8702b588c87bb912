"""llama.cpp's own sampler chain with an explicit seed, fed from a row of logits."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..config import SamplingConfig, check_seed
from ..protocols import FloatArray
from .native import C

_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


class Draw(NamedTuple):
    """A token, its probability, and the distribution that it was drawn from.

    `ids` int32 [n_kept] are the tokens that the filters kept, in no order; `probs` float32 [n_kept] are theirs, and sum
    to 1.
    """

    token: int
    prob: float
    ids: NDArray[np.int32]
    probs: FloatArray

    @classmethod
    def certain(cls, token: int) -> Draw:
        """A token that had to be."""
        return cls(token, 1.0, np.array([token], dtype=np.int32), np.ones(1, dtype=np.float32))

    def prob_of(self, token: int) -> float:
        """The probability of any token; 0 for one that was filtered out."""
        (found,) = (self.ids == token).nonzero()
        return float(self.probs[found[0]]) if found.size else 0.0


def accept_or_replace(drafted: Draw, target: Draw, rng: np.random.Generator) -> int:
    """The token to commit where the draft drew `drafted` and the target would draw from `target`'s distribution.

    Speculative sampling (arXiv 2211.17192, section 2.3; proof in its appendix A.1): the drafted token stays with
    probability min(1, target_prob / draft_prob); otherwise one is drawn from max(0, target_probs - draft_probs),
    normalised, where the rejected token has no share. So the result is the drafted token exactly when it was accepted.
    """
    target_prob = target.prob_of(drafted.token)
    if target_prob >= drafted.prob or rng.random() * drafted.prob < target_prob:
        return drafted.token
    # A dense row costs less than finding the ids of one in the other.
    draft_probs = np.zeros(max(int(drafted.ids.max()), int(target.ids.max())) + 1, dtype=np.float32)
    draft_probs[drafted.ids] = drafted.probs
    residual = np.maximum(target.probs - draft_probs[target.ids], 0)
    cumulative = np.cumsum(residual, dtype=np.float64)
    if not cumulative[-1] > 0:  # the two are equal, and differ only in how they were rounded
        return drafted.token
    return int(target.ids[np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right")])


class LlamaSampler:
    """Top-k, top-p, temperature, then a draw; or the likeliest token when the temperature is 0.

    A row of logits goes in rather than a context, so that a token can be drawn again from the logits of a position to
    which the cache was rolled back.
    """

    def __init__(self, config: SamplingConfig, *, seed: int, n_vocab: int, n_used: int | None = None) -> None:
        self.config = config
        self._n_used = n_used if n_used is not None else n_vocab
        self._stack = ExitStack()
        self._candidates = np.zeros(n_vocab, dtype=_CANDIDATE)
        self._ids = np.arange(n_vocab, dtype=np.int32)
        self._array = C.llama_token_data_array()
        self._pointer = ctypes.cast(self._candidates.ctypes.data, C.llama_token_data_p)
        self.reseed(seed)

    def reseed(self, seed: int, config: SamplingConfig | None = None) -> None:
        """Start the random numbers again; with another configuration where one is given."""
        check_seed(seed)
        self.config = config or self.config
        self._stack.close()
        chain: Any = C.llama_sampler_chain_init(C.llama_sampler_chain_default_params())
        self._stack.callback(C.llama_sampler_free, chain)
        for sampler in self._samplers(seed):
            C.llama_sampler_chain_add(chain, sampler)
        self._chain = chain

    def _samplers(self, seed: int) -> list[Any]:
        config = self.config
        if config.temperature == 0:
            return [C.llama_sampler_init_greedy()]
        return [
            C.llama_sampler_init_top_k(config.top_k),
            C.llama_sampler_init_top_p(config.top_p, 1),
            C.llama_sampler_init_temp(config.temperature),
            C.llama_sampler_init_dist(seed),
        ]

    def sample(self, logits: FloatArray) -> int:
        """One token id, drawn from `logits` float32 [n_vocab]."""
        n = self._n_used
        # The samplers sort in place: ids are written anew each time.
        self._candidates["id"] = self._ids
        self._candidates["logit"] = logits
        array = self._array
        array.data, array.size, array.selected, array.sorted = self._pointer, n, -1, False
        C.llama_sampler_apply(self._chain, ctypes.byref(array))
        token = int(array.data[array.selected].id)
        C.llama_sampler_accept(self._chain, token)
        return token

    def sample_last(self, context: Any) -> int:
        """One token id, drawn from the last logits of a native context: `sample` without their way through Python."""
        if self._n_used != len(self._ids):  # llama.cpp would draw from the padding too
            return self.sample(np.ctypeslib.as_array(C.llama_get_logits_ith(context, -1), (len(self._ids),)))
        return int(C.llama_sampler_sample(self._chain, context, -1))

    def draw(self, logits: FloatArray) -> Draw:
        """`sample`, with the distribution that the token was drawn from."""
        if self.config.temperature == 0:  # llama.cpp's greedy sampler computes no probabilities
            return Draw.certain(int(logits[: self._n_used].argmax()))
        token = self.sample(logits)
        array, kept = self._array, self._candidates[: self._array.size]
        return Draw(token, float(array.data[array.selected].p), kept["id"].copy(), kept["p"].copy())

    def close(self) -> None:
        self._stack.close()


_BATCH_BYTES = 2**22
"""Rows of logits are looked at together as long as they stay in the cache."""


class KnownTokens:
    """What a model thinks of tokens, gathered one by one and computed in batches; for one step after another.

    Of each token its natural-log probability under the logits before it, and whether it is one of the two likeliest.
    """

    def __init__(self, n_vocab: int) -> None:
        self._rows = np.empty((max(1, _BATCH_BYTES // (4 * n_vocab)), n_vocab), dtype=np.float32)
        self._tokens: list[int] = []
        self._logprobs: list[FloatArray] = []
        self._in_top2: list[NDArray[np.bool_]] = []

    def add(self, logits: FloatArray, token: int) -> None:
        """A token and the logits float32 [n_vocab] that it was drawn from, or read under."""
        if len(self._tokens) == len(self._rows):
            self._compute()
        self._rows[len(self._tokens)] = logits
        self._tokens.append(token)

    def add_all(self, logits: FloatArray, tokens: Sequence[int]) -> None:
        """Tokens [n] and the logits float32 [n, n_vocab] that each was read under."""
        done = 0
        while done < len(tokens):
            if len(self._tokens) == len(self._rows):
                self._compute()
            held = len(self._tokens)
            n = min(len(self._rows) - held, len(tokens) - done)
            self._rows[held : held + n] = logits[done : done + n]
            self._tokens += tokens[done : done + n]
            done += n

    def arrays(self, n: int) -> tuple[FloatArray, NDArray[np.bool_]]:
        """Of the first `n` tokens: log-probabilities float32 [n], and whether each is in the top 2, bool [n].

        All are forgotten; the next token is the first of another step.
        """
        self._compute()
        logprobs, in_top2 = self._logprobs, self._in_top2
        self._logprobs, self._in_top2 = [], []
        if len(logprobs) == 1:
            return logprobs[0][:n], in_top2[0][:n]
        empty = np.empty(0, np.float32), np.empty(0, np.bool_)
        return np.concatenate([empty[0], *logprobs])[:n], np.concatenate([empty[1], *in_top2])[:n]

    def clear(self) -> None:
        """Forget all, for a step that failed."""
        self._tokens, self._logprobs, self._in_top2 = [], [], []

    def _compute(self) -> None:
        n = len(self._tokens)
        if not n:
            return
        rows = self._rows[:n]
        own = rows[np.arange(n), self._tokens]
        peaks = rows.max(axis=1)
        self._in_top2.append(np.count_nonzero(rows > own[:, None], axis=1) <= 1)
        np.exp(np.subtract(rows, peaks[:, None], out=rows), out=rows)
        self._logprobs.append(own - peaks - np.log(rows.sum(axis=1)))
        self._tokens.clear()
