"""A rule of meaning that asks a language model, such as the target itself, through its logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ...config import THINK_CLOSE, default_threads
from ...errors import ConfigError
from ...llama.chat import ChatTemplate
from ...llama.context import LlamaContext
from ...llama.model import LlamaModel

QUESTION = """\
{context}

Two people went on from here with one step each.

The first wrote:
{first}

The second wrote:
{second}

Does the first step say everything that the second one says, with the same numbers and the same result? \
Answer with yes or no."""

_ANSWERS = tuple((word, word.capitalize(), f" {word}", f" {word.capitalize()}") for word in ("yes", "no"))


class JudgeRule:
    """Texts mean the same when the model, asked in both directions, finds `yes` likelier than `no`; close it after use.

    Nothing is generated: an answer is one reading, and what two questions have in common is read once.
    """

    def __init__(self, path: Path, *, n_threads: int | None = None, n_ctx: int = 4096) -> None:
        self._model = LlamaModel(path)
        self._context: LlamaContext | None = None
        try:
            self._chat = ChatTemplate(self._model)
            self._answers = self._answer_tokens()
            self._context = LlamaContext(self._model, n_ctx=n_ctx, n_threads=n_threads or default_threads())
        except BaseException:
            self.close()
            raise
        self._read: list[int] = []
        self._known: dict[tuple[str, str, str], bool] = {}
        self.name = f"{path.name}, asked whether each says all that the other says"

    def same(self, first: str, other: str, context: str) -> bool:
        return self.says_all(first, other, context) and self.says_all(other, first, context)

    def says_all(self, first: str, second: str, context: str) -> bool:
        """Does `first` say everything that `second` says? ConfigError when the question is longer than the context."""
        key = first, second, context
        if key not in self._known:
            question = QUESTION.format(context=context.strip(), first=first.strip(), second=second.strip())
            logits = self._logits(self._prompt(question))
            yes, no = (np.logaddexp.reduce(logits[list(tokens)]) for tokens in self._answers)
            self._known[key] = bool(yes > no)
        return self._known[key]

    def _prompt(self, question: str) -> list[int]:
        options = {"enable_thinking": False} if "enable_thinking" in self._chat.options else {}
        prompt = self._chat.render([{"role": "user", "content": question}], options)
        closing = self._model.vocabulary.encode(f"{THINK_CLOSE}\n\n", control=True) if prompt.thinking else []
        return [*prompt.tokens, *closing]

    def _logits(self, tokens: list[int]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        context = self._context
        assert context is not None
        if len(tokens) > context.n_ctx:
            raise ConfigError(f"a question to the judge has {len(tokens)} tokens; wanted at most {context.n_ctx}")
        n_known = 0
        if context.can_trim:
            limit = min(len(tokens) - 1, len(self._read))  # the last token is read again, for its logits
            n_known = next((i for i in range(limit) if tokens[i] != self._read[i]), limit)
        if not context.trim(n_known):
            context.clear()
            n_known = 0
        self._read = []  # what is in the memory is not known until the reading went well
        new = tokens[n_known:]
        decoded = context.decode(new, range(n_known, len(tokens)))
        self._read = tokens
        return np.asarray(decoded.logits[-1], dtype=np.float64)

    def _answer_tokens(self) -> tuple[frozenset[int], frozenset[int]]:
        """The ids that only spellings of yes begin with, and those of no."""
        encode = self._model.vocabulary.encode
        yes, no = (frozenset(encode(word)[0] for word in words) for words in _ANSWERS)
        yes, no = yes - no, no - yes
        if not yes or not no:
            raise ConfigError(f"{self._model.path.name} cannot be a judge: in its vocabulary yes and no begin alike")
        return yes, no

    def close(self) -> None:
        if self._context is not None:
            self._context.close()
        self._model.close()

    def __enter__(self) -> JudgeRule:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
