"""Messages to prompt tokens, through the chat template inside the model's own GGUF.

Templates are programs from a downloaded file: they run in jinja2's immutable sandbox.
"""

from __future__ import annotations

import datetime
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..config import THINK_OPEN
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
        environment = _Sandbox(
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=jinja2.ChainableUndefined,
            extensions=[loopcontrols, _GenerationTag],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        environment.globals["raise_exception"] = _refuse
        self._environment = environment
        try:
            self._template = environment.from_string(self._source) if self._source else None
        except Exception as error:  # Python's compiler too may refuse what a template becomes
            raise ConfigError(f"the chat template of {model.path.name} cannot be read: {_line(error)}") from error

    @staticmethod
    def _special(model: LlamaModel, kind: str) -> str:
        token = model.meta(f"tokenizer.ggml.{kind}_token_id")
        is_known = token is not None and token.isdecimal() and int(token) < model.vocabulary.n_tokens
        return model.vocabulary.text(int(token)) if token is not None and is_known else ""

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
        end_of_template = text[max((end for _, end in spans), default=0) :]
        return Prompt(
            text=text,
            tokens=self._vocabulary.encode_prompt(text, spans),
            thinking=end_of_template.rstrip().endswith(THINK_OPEN),
        )

    def _rendered(self, messages: list[dict[str, str]], options: dict[str, Any]) -> str:
        if self._template is None:
            return "\n\n".join(message["content"] for message in messages) + "\n\n"
        variables = {"bos_token": self._bos, "eos_token": self._eos, "add_generation_prompt": True}
        try:
            return self._template.render(tools=None, documents=None, **variables, messages=messages, **options)
        except TemplateError as error:
            raise ConfigError(f"the chat template refuses these messages: {_line(error)}") from error
        except Exception as error:  # a template is a program of somebody else's, it may fail in any way
            raise ConfigError(
                f"the chat template fails on these messages: {type(error).__name__}: {_line(error)}"
            ) from error

    @cached_property
    def options(self) -> frozenset[str]:
        """The variables that this template reads, besides what every template gets."""
        used = meta.find_undeclared_variables(self._environment.parse(self._source or ""))
        return frozenset(used - _GIVEN - set(self._environment.globals))

    def _check_options(self, options: Mapping[str, Any]) -> None:
        if unknown := sorted(set(options) - self.options):
            known = ", ".join(sorted(self.options)) or "none"
            raise ConfigError(f"the chat template has no option {', '.join(unknown)}; it knows: {known}")


_GIVEN = {"messages", "add_generation_prompt", "bos_token", "eos_token", "tools", "documents"}
"""What every template gets, so it is not for `options`. Templates expect `tools` and `documents`, None when unused."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """Refuses an unsafe attribute at once, where jinja2 would go on with an undefined value."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        raise SecurityError(f"it reaches for {attribute!r} of a {type(obj).__name__}")


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's part for training; here it means nothing."""

    tags = {"generation"}  # noqa: RUF012 - so declared by jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


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
