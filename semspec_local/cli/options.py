"""Command-line options made from the fields of the configuration: defaults and help texts stand there, once."""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import click

from ..config import ModelConfig, RunConfig, SamplingConfig

F = TypeVar("F", bound=Callable[..., Any])

# Where llama.cpp has a flag for the thing, its spelling comes first.
_FLAGS: dict[str, list[str]] = {
    "max_tokens": ["-n", "--predict", "--n-predict", "--max-tokens"],
    "temperature": ["--temp", "--temperature"],
    "n_ctx": ["-c", "--ctx-size"],
    "n_threads": ["-t", "--threads"],
    "n_threads_draft": ["-td", "--threads-draft"],
    "n_gpu_layers": ["-ngl", "--gpu-layers"],
    "n_gpu_layers_draft": ["-ngld", "--gpu-layers-draft"],
}


def config_options(*kinds: type, only: Collection[str] | None = None) -> Callable[[F], F]:
    """An option for every field of these dataclasses that has a help text; `only` names those that are wanted."""

    def add(command: F) -> F:
        for kind in reversed(kinds):
            hints = get_type_hints(kind)
            for item in reversed(fields(kind)):
                if "help" in item.metadata and (only is None or item.name in only):
                    command = _option(item, hints[item.name])(command)
        return command

    return add


def _option(item: Field[Any], hint: Any) -> Callable[[F], F]:
    flag = item.name.replace("_", "-")
    names = [f"--{flag}/--no-{flag}"] if hint is bool else _FLAGS.get(item.name, [f"--{flag}"])
    default = item.default if item.default is not MISSING else None
    multiple = get_origin(hint) is tuple
    return click.option(
        *names,
        item.name,
        type=_click_type(hint),
        default=default,
        multiple=multiple,
        allow_from_autoenv=not multiple,  # a variable would be cut at its blanks
        show_default=default is not None and not multiple,
        help=item.metadata["help"],
    )


def _click_type(hint: Any) -> Any:
    if get_origin(hint) is Literal:
        return click.Choice(get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        return _click_type(next(kind for kind in get_args(hint) if kind is not type(None)))
    if get_origin(hint) is tuple:
        return get_args(hint)[0]
    return hint


def take(kind: type, values: Mapping[str, Any], **more: Any) -> Any:
    """A configuration from parsed options; other options are left alone."""
    names = {item.name for item in fields(kind) if "help" in item.metadata}
    return kind(**{name: values[name] for name in names if name in values}, **more)


def configs(values: Mapping[str, Any]) -> tuple[RunConfig, ModelConfig]:
    """Both configurations from the options of a command."""
    return take(RunConfig, values, sampling=take(SamplingConfig, values)), take(ModelConfig, values)


def json_object(_ctx: click.Context, param: click.Parameter, value: str | None) -> dict[str, Any] | None:
    """A callback for an option whose value is a JSON object."""
    if value is None:
        return None
    example = '{"enable_thinking": false}'
    try:
        found = json.loads(value)
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is not JSON ({error}); wanted an object such as {example}") from error
    if not isinstance(found, dict):
        raise click.BadParameter(f"{value!r} is not a JSON object; wanted one such as {example}")
    return found
