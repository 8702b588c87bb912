"""Messages to prompt tokens, through the chat template inside the model's own GGUF.

Templates are programs from a downloaded file: they run in jinja2's immutable sandbox.
"""

from __future__ import annotations

import datetime
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2 import meta
from jinja2.exceptions import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..config import THINK_CLOSE, THINK_OPEN
from ..errors import ConfigError
from .model import LlamaModel
from .vocabulary import Span

Message = Mapping[str, str]


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt: its text, its token ids, and whether it ends inside an opened thinking block."""

    text: str
    tokens: list[int]
    thinking: bool


class ChatTemplate:
    """The chat template of one model; a model without one gets its messages as plain paragraphs."""

    def __init__(self, model: LlamaModel) -> None:
        self._vocabulary = model.vocabulary
        self._source = model.chat_template
        self._bos = self._special(model, "bos")
        self._eos = self._special(model, "eos")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, undefined=jinja2.ChainableUndefined, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        environment.globals["raise_exception"] = _refuse
        self._environment = environment
        try:
            self._template = environment.from_string(self._source) if self._source else None
        except TemplateError as error:
            raise ConfigError(f"the chat template of {model.path.name} cannot be read: {error}") from error

    @staticmethod
    def _special(model: LlamaModel, kind: str) -> str:
        token = model.meta(f"tokenizer.ggml.{kind}_token_id")
        return model.vocabulary.text(int(token)) if token is not None and token.isdigit() else ""

    def render(self, messages: Sequence[Message], options: Mapping[str, Any] | None = None) -> Prompt:
        """The prompt for `messages`, ready for the assistant to go on; ConfigError when the template refuses them.

        `options` reach the template as variables (such as `enable_thinking`); one that it does not know is an error.
        """
        options = dict(options or {})
        self._check_options(options)
        # Each content is rendered under a name that no text contains, so that its place is known.
        names = [f"content{secrets.token_hex(12)}" for _ in messages]
        stand_ins = [{**message, "content": name} for message, name in zip(messages, names)]
        text = self._rendered(stand_ins, options)
        if any(text.count(name) != 1 for name in names):
            raise ConfigError(
                "the chat template leaves out or repeats a message; this combination of roles does not fit it"
            )
        text, spans = _fill(text, {name: message["content"].strip() for name, message in zip(names, messages)})
        return Prompt(
            text=text,
            tokens=self._vocabulary.encode_prompt(text, spans),
            thinking=text.rstrip().endswith(THINK_OPEN) and not text.rstrip().endswith(THINK_CLOSE),
        )

    def _rendered(self, messages: list[dict[str, str]], options: dict[str, Any]) -> str:
        if self._template is None:
            return "\n\n".join(message["content"] for message in messages) + "\n\n"
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, bos_token=self._bos, eos_token=self._eos, **options
            )
        except TemplateError as error:
            raise ConfigError(f"the chat template refuses these messages: {error}") from error
        except Exception as error:  # a template is a program of somebody else's, it may fail in any way
            raise ConfigError(f"the chat template fails on these messages: {type(error).__name__}: {error}") from error

    def _check_options(self, options: Mapping[str, Any]) -> None:
        known = meta.find_undeclared_variables(self._environment.parse(self._source or ""))
        unknown = sorted(set(options) - known)
        if unknown:
            raise ConfigError(
                f"the chat template does not use {', '.join(unknown)}; it knows: "
                f"{', '.join(sorted(known - {'messages', 'add_generation_prompt', 'bos_token', 'eos_token'})) or 'no options'}"
            )


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _fill(text: str, contents: Mapping[str, str]) -> tuple[str, list[Span]]:
    """Put contents in the place of their names; also the [start, end) spans where they stand."""
    spans: list[Span] = []
    for name in sorted(contents, key=text.index):
        start = text.index(name)
        text = text.replace(name, contents[name], 1)
        spans.append((start, start + len(contents[name])))
    return text, spans
