"""Lossless speculation by tokens (arXiv 2211.17192): the arms that speculation by steps is compared with.

A draft writes some tokens ("token-sd"), or they are looked up in the text so far ("lookup"); the target reads them in
one pass, and each stays or is replaced so that the text is distributed exactly as if the target had written it alone.
Knows nothing of steps, probes or policies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..config import MAX_SEED, SamplingConfig, check_seed
from ..engine import Prompts
from ..errors import ConfigError, DecodeError, ModelError
from ..llama.sampling import Draw, LlamaSampler
from ..llama.session import LlamaStepModel
from ..protocols import FloatArray
from ..trace import StopReason
from .lookup import Lookup


@dataclass(frozen=True, kw_only=True)
class TokenSdResult:
    """What one run wrote, and how.

    `stop_reason` is "eos", "budget" or "context_full"; an end-of-generation token is in neither `tokens` nor `text`,
    but counts as proposed and accepted like every other. A round is a pass of the target over drafted tokens; passes
    that only write (the last token of a budget, or where nothing is found to copy) are in `n_target_passes` alone. The
    prompt's pass is in neither.
    `wall_s` includes `prefill_s` and ends with the last token.
    """

    tokens: list[int]
    text: str
    stop_reason: StopReason
    n_proposed: int
    n_accepted: int
    n_rounds: int
    n_target_passes: int
    prefill_s: float
    wall_s: float


class Proposer(Protocol):
    """Who drafts tokens."""

    def propose(self, tokens: Sequence[int], n: int) -> list[Draw]:
        """Up to `n` tokens, of at least one, that may follow the prompt and the committed `tokens`.

        Each with the distribution that it was drawn from; an end-of-generation token is the last.
        """
        ...


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


@dataclass
class _Side:
    """One model of the run.

    Between rounds its cache, and the model's `tokens` with it, are a beginning of the prompt and the committed tokens,
    without the last of these: that one is drawn, but not read yet.
    """

    model: LlamaStepModel
    prompt: list[int]
    sampler: LlamaSampler

    def unread(self, tokens: Sequence[int]) -> Sequence[int]:
        """Those of the committed `tokens` that are not in the cache."""
        return tokens[self.model.n_past - len(self.prompt) :]

    def read(self, tokens: Sequence[int], *, all_logits: bool = False) -> FloatArray:
        """Read tokens in one pass; the logits after each, or after the last: float32 [n_tokens or 1, n_vocab].

        They are llama.cpp's own until the next call.
        """
        n_past, n = self.model.n_past, len(tokens)
        outputs = [True] * n if all_logits else None
        logits = self.model.context.decode(tokens, range(n_past, n_past + n), outputs=outputs).logits
        self.model.tokens += tokens
        return logits

    def trim(self, n_tokens: int) -> None:
        """Forget what lies behind the first `n_tokens` committed ones, and the last of these."""
        n_past = len(self.prompt) + n_tokens - 1
        if self.model.n_past > n_past:
            if not self.model.context.trim(n_past):
                raise DecodeError(f"{self.model.model.path.name}: llama.cpp did not trim the cache to {n_past} tokens")
            del self.model.tokens[n_past:]

    def settle(self, tokens: Sequence[int]) -> None:
        """Hand the model back, holding exactly the prompt and `tokens`."""
        missing = self.unread(tokens)[:-1]
        if missing:
            self.read(missing)
        # The model does not know of our reading. A rollback to where it has not been reads the last token again, so it
        # holds the logits that belong there; one to the prompt, whose checkpoint it has, evaluates nothing.
        kept = [*self.prompt, *tokens]
        self.model.tokens = [*kept, kept[-1]]
        self.model.rollback(len(kept))


@dataclass
class _Drafter:
    """A `Proposer` with a model."""

    side: _Side
    eog: Container[int]

    def propose(self, tokens: Sequence[int], n: int) -> list[Draw]:
        """It does not read the last token that it drafts."""
        side = self.side
        drafts = [side.sampler.draw(side.read(side.unread(tokens))[-1])]
        while len(drafts) < n and drafts[-1].token not in self.eog:
            drafts.append(side.sampler.draw(side.read([drafts[-1].token])[-1]))
        return drafts


class TokenSpeculation:
    """One run of token-level speculation; `run` it once. Without a draft, tokens are looked up in the text.

    Afterwards the models hold the prompt and the written tokens, or the prompt alone when the run failed.
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
        for name, value in (("n_draft", n_draft), ("max_tokens", max_tokens)):
            if value < 1:
                raise ConfigError(f"{name} is {value}; wanted 1 or more")
        if draft is not None and target.vocabulary.fingerprint != draft.vocabulary.fingerprint:
            raise ConfigError(
                f"{draft.model.path.name} and {target.model.path.name} have different vocabularies; "
                "speculation by tokens needs a draft that has the target's"
            )
        self._models: tuple[LlamaStepModel, ...] = (target,) if draft is None else (target, draft)
        for model in self._models:
            if not model.context.can_trim:
                raise ModelError(
                    f"{model.model.path.name} ({model.model.architecture}) has a memory that cannot be trimmed; "
                    "speculation by tokens needs a plain cache"
                )
        self.prompts, self.n_draft, self.sampling, self.max_tokens = prompts, n_draft, sampling, max_tokens
        self._clock = clock
        *self._seeds, rng_seed = np.random.SeedSequence(check_seed(seed)).generate_state(3).tolist()
        self._rng = np.random.default_rng(rng_seed)
        self._eog = target.vocabulary.eog_tokens
        self._has_run = False
        self.tokens: list[int] = []
        self._stop_reason: StopReason | None = None
        self._n_proposed = self._n_accepted = self._n_rounds = self._n_target_passes = 0

    def run(self) -> TokenSdResult:
        if self._has_run:
            raise RuntimeError("a run can be run once; make another one for another run")
        self._has_run = True
        with ExitStack() as stack:
            sides = [
                _Side(model, list(prompt), self._sampler(model, seed, stack))
                for model, prompt, seed in zip(self._models, (self.prompts.target, self.prompts.draft), self._seeds)
            ]
            start = self._clock()
            for side in sides:
                side.model.prefill(side.prompt)
                side.model.checkpoint()
            prefill_s = self._clock() - start
            kept: list[int] = []
            try:
                self._write(sides)
                wall_s = self._clock() - start
                kept = self.tokens
            finally:
                with ExitStack() as each:
                    for side in sides:
                        each.callback(side.settle, kept)
        assert self._stop_reason is not None
        return TokenSdResult(
            tokens=list(self.tokens),
            text=self._models[0].vocabulary.decode(self.tokens),
            stop_reason=self._stop_reason,
            n_proposed=self._n_proposed,
            n_accepted=self._n_accepted,
            n_rounds=self._n_rounds,
            n_target_passes=self._n_target_passes,
            prefill_s=prefill_s,
            wall_s=wall_s,
        )

    def _sampler(self, model: LlamaStepModel, seed: int, stack: ExitStack) -> LlamaSampler:
        n_vocab, n_used = model.vocabulary.n_tokens, model.vocabulary.n_used
        sampler = LlamaSampler(self.sampling, seed=seed % (MAX_SEED + 1), n_vocab=n_vocab, n_used=n_used)
        return stack.enter_context(closing(sampler))

    def _write(self, sides: Sequence[_Side]) -> None:
        """The whole run after the prompt."""
        target, *others = sides
        proposer: Proposer = _Drafter(others[0], self._eog) if others else Lookup(target.prompt, self._eog)
        limit = min(self.max_tokens, *(side.model.n_ctx - len(side.prompt) for side in sides))
        self._commit([target.sampler.draw(target.model.checkpoint().logits).token], limit)
        while self._stop_reason is None:
            # The target adds one token to those that stay, so the last one of a budget is its own.
            n = min(self.n_draft, limit - len(self.tokens) - 1)
            drafts = proposer.propose(self.tokens, n) if n else []
            self._n_rounds += bool(drafts)
            self._n_proposed += len(drafts)
            self._commit(self._verify(target, drafts), limit)
            for side in sides:
                side.trim(len(self.tokens))

    def _verify(self, target: _Side, drafts: list[Draw]) -> list[int]:
        """What follows the committed tokens: the drafts that stay, then one token of the target's own."""
        (pending,) = target.unread(self.tokens)
        rows = target.read([pending, *(drafted.token for drafted in drafts)], all_logits=True)
        self._n_target_passes += 1
        written: list[int] = []
        for drafted, row in zip(drafts, rows):
            token = accept_or_replace(drafted, target.sampler.draw(row), self._rng)
            written.append(token)
            if token != drafted.token:
                return written
            self._n_accepted += 1
        if not written or written[-1] not in self._eog:
            written.append(target.sampler.draw(rows[-1]).token)
        return written

    def _commit(self, written: list[int], limit: int) -> None:
        """Add tokens to the run, and see whether it is over; only the last of them can end generation."""
        self.tokens += written
        if self.tokens[-1] in self._eog:
            self.tokens.pop()
            self._stop_reason = "eos"
        elif len(self.tokens) >= limit:
            self._stop_reason = "budget" if len(self.tokens) >= self.max_tokens else "context_full"
