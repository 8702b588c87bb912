"""Speculation by tokens alone (arXiv 2211.17192): the arms that speculation by steps is compared with.

A draft guesses tokens ("token-sd"), or they are looked up in the text so far ("lookup"); the whole run is one step of
`llama.guessing`, to its end. Knows nothing of probes or policies.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..config import MAX_SEED, SamplingConfig, check_seed
from ..engine import Prompts
from ..errors import ConfigError
from ..llama.guessing import TokenGuesser
from ..llama.session import LlamaStepModel
from ..steps import StepEnd, StepReader
from ..trace import StopReason
from .lookup import Lookup


@dataclass(frozen=True, kw_only=True)
class TokenSdResult:
    """What one run wrote, and how.

    `stop_reason` is "eos", "budget" or "context_full"; an end-of-generation token is in neither `tokens` nor `text`,
    but counts as proposed and accepted like every other. `wall_s` includes `prefill_s`, and ends when the caches hold
    the text.
    """

    tokens: list[int]
    text: str
    stop_reason: StopReason
    n_proposed: int
    n_accepted: int
    prefill_s: float
    wall_s: float


class _EveryToken(StepReader):
    """Ends after so many tokens and nowhere else, be it inside a character."""

    def feed(self, piece: bytes) -> StepEnd | None:
        self.n_tokens += 1
        return None if self.n_tokens_left else self.finish("length")


class TokenSpeculation:
    """One run of token-level speculation; `run` it once. Without a draft, tokens are looked up in the text.

    Afterwards the target holds the prompt and the written tokens, or the prompt alone when the run failed; so does the
    draft, but that the last tokens may be missing.
    """

    def __init__(
        self,
        prompts: Prompts,
        *,
        target: LlamaStepModel,
        draft: LlamaStepModel | None,
        n_draft: int,
        sampling: SamplingConfig,
        max_tokens: int,
        seed: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if max_tokens < 1:
            raise ConfigError(f"max_tokens is {max_tokens}; wanted 1 or more")
        self.prompts, self.sampling, self.max_tokens = prompts, sampling, max_tokens
        self._sides = [(target, prompts.target)]
        if draft is None:
            proposer = Lookup(prompts.target, target.vocabulary.eog_tokens)
            self._guesser = TokenGuesser(target, proposer, n_draft)
        else:
            self._sides.append((draft, prompts.draft))
            self._guesser = TokenGuesser.with_draft(target, draft, n_draft)
        self._clock = clock
        *self._seeds, rng_seed = np.random.SeedSequence(check_seed(seed)).generate_state(3).tolist()
        self._rng = np.random.default_rng(rng_seed)
        self._has_run = False

    def run(self) -> TokenSdResult:
        if self._has_run:
            raise RuntimeError("a run can be run once; make another one for another run")
        self._has_run = True
        start = self._clock()
        for (model, prompt), seed in zip(self._sides, self._seeds):
            model.reseed(seed % (MAX_SEED + 1), self.sampling)
            model.prefill(prompt)
        prefill_s = self._clock() - start
        room = min(model.n_ctx - len(prompt) for model, prompt in self._sides)
        step = self._guesser.write(_EveryToken(max_tokens=min(self.max_tokens, room)), self._rng)
        full: StopReason = "budget" if len(step.tokens) >= self.max_tokens else "context_full"
        return TokenSdResult(
            tokens=step.tokens,
            text=self._sides[0][0].vocabulary.decode(step.tokens),
            stop_reason="eos" if step.end == "eos" else full,
            n_proposed=step.n_guesses,
            n_accepted=step.n_guesses_kept,
            prefill_s=prefill_s,
            wall_s=self._clock() - start,
        )
