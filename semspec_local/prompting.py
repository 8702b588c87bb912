"""Questions to prompts: the system message, the options of chat templates, and what does not fit into the context."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .config import RunConfig
from .engine import Prompts
from .errors import ConfigError
from .policy import POLICIES
from .roles import ROLES, Role

if TYPE_CHECKING:
    from .llama.chat import ChatTemplate, Prompt
    from .llama.session import LlamaStepModel

Question = str | Sequence[Mapping[str, str]]
"""A question, or the messages of a conversation, each with `role` and `content`; the last one asks."""

ANSWER_PART = 4
"""One part of the context in so many is left for the answer where a question loses its beginning."""

_Messages = list[dict[str, str]]


class Prompting:
    """Renders questions for the loaded models, each through its own chat template."""

    def __init__(
        self, chats: Mapping[Role, ChatTemplate], models: Mapping[Role, LlamaStepModel], system: str | None
    ) -> None:
        self._chats, self._models, self._system = chats, models, system

    def prompts(
        self, question: Question, *, system: str | None, options: Mapping[str, Any], config: RunConfig
    ) -> Prompts:
        """The question as each model reads it. Raises ConfigError for one that is empty, or too long for a context."""
        messages = self._messages(question, system)
        known = self._known(options)
        # A draft that writes no steps limits a run in nothing; one that guesses reads what fits.
        drafts = POLICIES[config.policy].drafts
        guesser: dict[Role, dict[str, Any]] = {} if drafts or not config.guess else {"draft": known["draft"]}
        known = {role: given for role, given in known.items() if role in (ROLES if drafts else ROLES[:1])}
        rendered = self._render(messages, known)
        n_cut = 0
        if config.overflow == "truncate-left" and not self._fits(rendered, 1):

            def fits(shorter: _Messages) -> bool:
                return self._fits(self._render(shorter, known), config.max_tokens)

            shorter = without_beginning(messages, fits)
            n_cut = _n_chars(messages) - _n_chars(shorter)
            messages, rendered = shorter, self._render(shorter, known)
        for role, prompt in rendered.items():
            self._models[role].check_prompt(prompt.tokens)
        if self._fits(guessing := self._render(messages, guesser), 1):
            rendered |= guessing
        return Prompts(
            target=rendered["target"].tokens,
            draft=rendered["draft"].tokens if "draft" in rendered else (),
            thinking=rendered["target"].thinking,
            text=rendered["target"].text,
            n_chars_cut=n_cut,
        )

    def _messages(self, question: Question, system: str | None) -> _Messages:
        messages = [{"role": "user", "content": question}] if isinstance(question, str) else [*map(dict, question)]
        if not messages or not messages[-1]["content"].strip():
            raise ConfigError("the question is empty; wanted some text")
        system = self._system if system is None else system
        if system and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        return messages

    def _known(self, options: Mapping[str, Any]) -> dict[Role, dict[str, Any]]:
        """Of the options those that each model's template knows."""
        known = {role: chat.options for role, chat in self._chats.items()}
        if unknown := sorted(set(options) - set().union(*known.values())):
            names = ", ".join(sorted(set().union(*known.values()))) or "none"
            raise ConfigError(f"no chat template here has the option {', '.join(unknown)}; known: {names}")
        return {role: {name: options[name] for name in names if name in options} for role, names in known.items()}

    def _render(self, messages: _Messages, options: Mapping[Role, Mapping[str, Any]]) -> dict[Role, Prompt]:
        return {role: self._chats[role].render(messages, given) for role, given in options.items()}

    def _fits(self, rendered: Mapping[Role, Prompt], n_answer: int) -> bool:
        """Does every model have room for so many tokens after the prompt, or for its part of the context?"""
        return all(
            len(prompt.tokens) + min(n_answer, max(1, self._models[role].n_ctx // ANSWER_PART))
            <= self._models[role].n_ctx
            for role, prompt in rendered.items()
        )


def without_beginning(messages: _Messages, fits: Callable[[_Messages], bool]) -> _Messages:
    """`messages` without as much of their beginning as it takes to fit; the system message stays.

    Whole messages go first, so that a message of the user is the first one left; then the last one loses text. What
    does not fit even so comes back as it was.
    """
    n_system = int(messages[0]["role"] == "system")
    head, rest = messages[:n_system], messages[n_system:]
    starts = [at for at, message in enumerate(rest) if message["role"] == "user"]
    at = bisect_left(starts, True, key=lambda start: fits([*head, *rest[start:]]))
    if at < len(starts):
        return [*head, *rest[starts[at] :]]
    last = rest[-1]
    text = _longest_end(last["content"].strip(), lambda end: fits([*head, {**last, "content": end}]))
    return [*head, {**last, "content": text}] if text else messages


def _longest_end(text: str, fits: Callable[[str], bool]) -> str:
    """The longest end of a text that fits, "" for none; short ones are tried first, for the text may be huge."""
    low, high = 0, 256
    while high < len(text) and fits(text[-high:]):
        low, high = high, 2 * high
    high = min(high, len(text))
    n = bisect_left(range(low + 1, high + 1), True, key=lambda n: not fits(text[-n:]))
    return text[len(text) - low - n :]


def _n_chars(messages: _Messages) -> int:
    return sum(len(message["content"].strip()) for message in messages)
