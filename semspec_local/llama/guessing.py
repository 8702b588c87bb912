"""Where the target writes, tokens are guessed, some at a time: lossless speculation by tokens (arXiv 2211.17192).

A draft guesses, or what stands in the text already is looked up. The target reads the guesses in one pass; each stays
or is replaced so that the text is distributed exactly as if the target had written it token by token. Knows nothing of
policies and probes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..errors import ConfigError, ModelError
from ..protocols import ModelStep
from ..steps import StepReader
from .sampling import Draw, accept_or_replace
from .session import LlamaStepModel


class Proposer(Protocol):
    """Who guesses tokens, within one step after another: `begin`, `propose` as often as needed, then `settle`.

    Of the `tokens` of a step the first `n_right` are settled for good with every call; what follows is the last one,
    which nobody has read yet.
    """

    def begin(self) -> None: ...

    def propose(self, tokens: Sequence[int], n_right: int, n: int) -> list[Draw]:
        """Up to `n` tokens, of at least one, that may follow the step's `tokens`; maybe none.

        Each with the distribution that it was drawn from; an end-of-generation token is the last.
        """
        ...

    def settle(self, n_right: int) -> None:
        """The step is over: forget what was wrong."""
        ...

    def undo(self) -> None:
        """The step failed: go back to where it began."""
        ...


class DraftGuesses:
    """A `Proposer` with a model whose cache holds the same text. It does not read the last of its guesses."""

    def __init__(self, draft: LlamaStepModel) -> None:
        self._draft = draft

    def begin(self) -> None:
        self._draft.begin_step()
        self._start = self._draft.n_past

    def propose(self, tokens: Sequence[int], n_right: int, n: int) -> list[Draw]:
        draft = self._draft
        n_known = min(draft.n_past - self._start, n_right)
        room = draft.n_ctx - self._start - len(tokens)  # behind what it has yet to read
        if room < 0:
            return []
        n = min(n, room + 1)
        draft.read_at(self._start + n_known, tokens[n_known:])
        guesses = [draft.draw()]
        while len(guesses) < n and guesses[-1].token not in draft.vocabulary.eog_tokens:
            draft.read_at(draft.n_past, [guesses[-1].token])
            guesses.append(draft.draw())
        return guesses

    def settle(self, n_right: int) -> None:
        self._draft.rollback(min(self._draft.n_past, self._start + n_right))

    def undo(self) -> None:
        self._draft.return_to_start()


class TokenGuesser:
    """Implements `protocols.Guesser`: up to `n` tokens are guessed at a time."""

    def __init__(self, target: LlamaStepModel, proposer: Proposer, n: int) -> None:
        check_can_guess([target])
        if n < 1:
            raise ConfigError(f"{n} tokens are to be guessed at a time; wanted 1 or more")
        self._target, self._proposer, self.n = target, proposer, n

    @classmethod
    def with_draft(cls, target: LlamaStepModel, draft: LlamaStepModel, n: int) -> TokenGuesser:
        """Raises ConfigError or ModelError where the draft cannot guess the target's tokens."""
        check_can_guess([target, draft])
        return cls(target, DraftGuesses(draft), n)

    def write(self, reader: StepReader, rng: np.random.Generator) -> ModelStep:
        target, proposer = self._target, self._proposer
        with ExitStack() as stack:
            target.begin_step()
            stack.callback(target.return_to_start)
            proposer.begin()
            stack.callback(proposer.undo)
            step = _Writing(target, proposer, reader, rng).run(self.n)
            stack.pop_all()
        return step


def check_can_guess(models: Sequence[LlamaStepModel]) -> None:
    """Raise ConfigError or ModelError for models of which one cannot guess the other's tokens."""
    if len({model.vocabulary.fingerprint for model in models}) > 1:
        names = " and ".join(model.model.path.name for model in models)
        raise ConfigError(
            f"{names} have different vocabularies, so neither can guess the other's tokens; wanted a draft with the "
            "target's vocabulary, or no guesses"
        )
    for model in models:
        if not model.context.can_trim:
            raise ModelError(
                f"{model.model.path.name} ({model.model.architecture}) has a memory that cannot be trimmed, so wrong "
                "guesses could not be undone; wanted a model with a plain cache, or no guesses"
            )


@dataclass
class _Writing:
    """One step on its way. Its last token was drawn and is read by nobody yet, unless it was guessed.

    `n_right` of its tokens are in the target's cache; what lies behind them comes from wrong guesses.
    """

    target: LlamaStepModel
    proposer: Proposer
    reader: StepReader
    rng: np.random.Generator

    def run(self, n: int) -> ModelStep:
        target, reader = self.target, self.reader
        self.step = step = ModelStep(tokens=[])
        start = target.checkpoint()
        self.start = start.n_past
        first = target.reuse_rejected(reader, step.tokens, None)
        self.n_right = step.n_reused = len(step.tokens)
        if first is not None:
            self._add(first)
        while reader.end is None:
            n_guesses = min(n, reader.n_tokens_left - 1)  # the target adds a token of its own
            self._round(self.proposer.propose(step.tokens, self.n_right, n_guesses) if n_guesses else [])
        if unread := step.tokens[self.n_right :]:
            target.read_at(self.start + self.n_right, unread)
        step.end = reader.end.kind
        if step.end == "length":
            target.cut_to_whole_character(step, reader, start)
        self.proposer.settle(min(self.n_right, len(step.tokens)))
        return step

    def _round(self, guesses: list[Draw]) -> None:
        """The target reads the last token and the guesses; those that stay are added, then one token of its own."""
        target, step = self.target, self.step
        unread = [*step.tokens[self.n_right :], *(guess.token for guess in guesses)]
        read = target.read_at(self.start + self.n_right, unread, all_logits=True)
        self.n_right = len(step.tokens)
        step.n_guesses += len(guesses)
        for guess, logits in zip(guesses, read.logits):
            token = accept_or_replace(guess, target.draw(logits), self.rng)
            self._add(token)
            if token == guess.token:
                step.n_guesses_kept += 1
                self.n_right = len(step.tokens)
            if token != guess.token or self.reader.end is not None:
                break
        else:
            self._add(target.draw(read.logits[len(guesses)]).token)
        if self.reader.end is not None and self.n_right == len(step.tokens):
            target.keep(read, self.start + self.n_right)

    def _add(self, token: int) -> None:
        """Add the step's next token, unless it ends the text."""
        if token in self.target.vocabulary.eog_tokens:
            self.reader.finish("eos")
        else:
            self.step.tokens.append(token)
            self.reader.feed(self.target.vocabulary.piece(token))
