"""Read the items of a job: JSONL lines of three kinds, CSV rows. A line that is none becomes an error with its number.

Knows nothing of models. Whatever a line holds, reading goes on with the next.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from ..config import is_text
from ..errors import ConfigError
from ..questions import QUESTION_KEYS

MAX_LINE_BYTES = 4 * 2**20
"""A longer line is no question; it is skipped without being held in memory."""

SAMPLING = ("temperature", "top_k", "top_p")

OVERRIDES = (
    *("policy", "threshold", "seed", "max_tokens", "max_step_tokens", "think_budget", "overflow", "draft", "stop"),
    *SAMPLING,
    "template_kwargs",
)
"""What the `semspec` object of a line may set for that item; `"draft": false` is the target alone."""

_OF_BATCHES = ("seed", "stop", *SAMPLING)
"""Settings that the body of an OpenAI batch line calls as we do."""

_CHANGES_NOTHING: dict[str, Any] = {
    "n": 1,
    "best_of": 1,
    "stream": False,
    "echo": False,
    "logprobs": False,
    "logit_bias": {},
    "tools": [],
    "frequency_penalty": 0,
    "presence_penalty": 0,
}
"""Values of a body's fields that ask for nothing; others of them cannot be granted."""

_ABOUT_OTHER_THINGS = {"model", "user", "metadata", "store", "service_tier", "safety_identifier", "stream_options"}
_READ = {"messages", "prompt", "max_tokens", "max_completion_tokens", "chat_template_kwargs", *_OF_BATCHES}

Message = Mapping[str, str]


@dataclass(frozen=True)
class Item:
    """One question; `line` counts from 1 within `file`."""

    id: str
    line: int
    messages: tuple[Message, ...]
    overrides: Mapping[str, Any] = field(default_factory=dict)
    file: str = ""


@dataclass(frozen=True)
class BadLine:
    """A line that holds no item, and why: got, wanted."""

    id: str
    line: int
    message: str
    file: str = ""


@dataclass(frozen=True)
class Job:
    """Everything that was read, in input order; `sha256` is of all the bytes."""

    entries: tuple[Item | BadLine, ...]
    sha256: str


class _Refused(Exception):
    """Why a line holds no item."""


def read_job(source: str | Path, *, column: str | None = None) -> Job:
    """Read a `.jsonl` or `.csv` file, all `.jsonl` files of a folder, or standard input (`-`).

    Raises ConfigError for what cannot be read, for a job without items, and for ids that occur twice.
    """
    digest = hashlib.sha256()
    entries: list[Item | BadLine] = []
    paths = _files(source)
    for path in paths:
        entries += _entries(path, digest, column, path.name if path is not None and len(paths) > 1 else "")
    if not entries:
        raise ConfigError(f"{source} holds no items; wanted JSON lines with a prompt or messages")
    _refuse_twins(entries)
    return Job(tuple(entries), digest.hexdigest())


def digest_of(source: str | Path) -> str | None:
    """The sha256 that `read_job` would find now; None for what cannot be read a second time."""
    digest = hashlib.sha256()
    try:
        for path in _files(source):
            if path is None:
                return None
            digest.update(path.read_bytes())
    except (OSError, ConfigError):
        return None
    return digest.hexdigest()


def _files(source: str | Path) -> list[Path | None]:
    if str(source) == "-":
        return [None]
    path = Path(source)
    if path.is_dir():
        found = sorted(path.glob("*.jsonl"))
        if not found:
            raise ConfigError(f"{path} has no .jsonl files; wanted a file, a folder of them, or - for standard input")
        return list(found)
    if not path.exists():
        raise ConfigError(f"no input at {path}; wanted a .jsonl or .csv file, a folder, or - for standard input")
    return [path]


def _entries(path: Path | None, digest: Any, column: str | None, name: str) -> Iterator[Item | BadLine]:
    try:
        with sys.stdin.buffer if path is None else path.open("rb") as stream:
            if path is not None and path.suffix.lower() == ".csv":
                data = stream.read()
                digest.update(data)
                yield from _csv_items(path, data, column)
            else:
                if column is not None:
                    raise ConfigError("--column is for CSV files; a JSON line names its own fields")
                for number, line in _lines(stream, digest):
                    yield entry_of(line, number, name)
    except OSError as error:
        raise ConfigError(f"{path or 'standard input'} cannot be read: {error.strerror or error}") from None


def _lines(stream: BinaryIO, digest: Any) -> Iterator[tuple[int, bytes | None]]:
    """Lines with their numbers, without their ends; None for one that is too long."""
    number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        digest.update(line)
        too_long = len(line) > MAX_LINE_BYTES
        while too_long and not line.endswith(b"\n") and (line := stream.readline(MAX_LINE_BYTES)):
            digest.update(line)
        yield number, None if too_long else line.removeprefix(b"\xef\xbb\xbf" if number == 1 else b"").rstrip(b"\r\n")


def entry_of(line: bytes | None, number: int, file: str = "") -> Item | BadLine:
    """What a line holds."""
    given: Any = None
    try:
        if line is None:
            raise _Refused(f"got a line of more than {MAX_LINE_BYTES:,} bytes; wanted a shorter one")
        if not line.strip():
            raise _Refused("the line is blank; wanted one JSON object a line")
        given = _parsed(line)
        found_id, messages, overrides = _read_object(given)
        return Item(found_id or _default_id(number, file), number, messages, overrides, file)
    except _Refused as refused:
        found = given.get("custom_id", given.get("id")) if isinstance(given, dict) else None
        is_id = isinstance(found, (str, int)) and not isinstance(found, bool) and is_text(str(found))
        return BadLine(str(found) if is_id else _default_id(number, file), number, str(refused), file)


def _default_id(number: int, file: str) -> str:
    return f"{file}:{number}" if file else f"line-{number}"


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _Refused(f"byte {error.start + 1} is no UTF-8; wanted UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise _Refused(f"this is no JSON ({_brief(error)}); wanted one JSON object a line") from None


def _read_object(given: Any) -> tuple[str | None, tuple[Message, ...], dict[str, Any]]:
    if not isinstance(given, dict):
        raise _Refused(f"got {_kind(given)}; wanted a JSON object with prompt or messages")
    body: dict[str, Any] = given
    overrides: dict[str, Any] = {}
    if "body" in given or "custom_id" in given:
        body, overrides = _batch_body(given)
    elif misplaced := sorted(set(given) & set(OVERRIDES)):
        raise _Refused(f'{misplaced[0]} has no effect there; wanted it inside "semspec": {{...}}')
    overrides |= _overrides(given)
    messages = _messages(body)
    return _id(given), messages, overrides


def _batch_body(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The body of an OpenAI batch line, and what of it overrides the job's settings."""
    body, url = given.get("body"), given.get("url", "/v1/chat/completions")
    if not isinstance(body, dict):
        raise _Refused(f"body is {_kind(body)}; wanted an object")
    if given.get("method", "POST") != "POST":
        raise _Refused(f"method is {given['method']!r}; wanted POST")
    if url not in ("/v1/chat/completions", "/v1/completions"):
        raise _Refused(f"url is {url!r}; wanted /v1/chat/completions or /v1/completions")
    for name, value in body.items():
        if name in _READ or name in _ABOUT_OTHER_THINGS or value is None:
            continue
        if name not in _CHANGES_NOTHING or value != _CHANGES_NOTHING[name]:
            raise _Refused(f"the body asks for {name}, which cannot be done here; leave it out")
    limits = (body.get("max_completion_tokens"), body.get("max_tokens"))
    found = {"max_tokens": next((limit for limit in limits if limit is not None), None)}
    found |= {"template_kwargs": body.get("chat_template_kwargs")}
    found |= {name: body.get(name) for name in _OF_BATCHES}
    return body, _checked({name: value for name, value in found.items() if value is not None})


def _overrides(given: dict[str, Any]) -> dict[str, Any]:
    found = given.get("semspec", {})
    if not isinstance(found, dict):
        raise _Refused(f"semspec is {_kind(found)}; wanted an object")
    if unknown := sorted(set(found) - set(OVERRIDES)):
        raise _Refused(f"semspec has no setting {', '.join(unknown)}; it knows {', '.join(OVERRIDES)}")
    return _checked(found)


_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("seed", "max_tokens", "max_step_tokens", "think_budget", "top_k"), (int,)),
    **dict.fromkeys(("threshold", "temperature", "top_p"), (int, float)),
    "policy": (str,),
    "overflow": (str,),
    "draft": (bool,),
    "template_kwargs": (dict,),
    "stop": (str, list),
}


def _checked(found: dict[str, Any]) -> dict[str, Any]:
    """Settings of the right types; a single stop text becomes a tuple of one. Their values are the run's to check."""
    for name, value in found.items():
        wanted = _TYPES[name]
        if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
            names = " or ".join(kind.__name__ for kind in wanted)
            raise _Refused(f"{name} is {_kind(value)}; wanted {names}")
    if "stop" in found:
        stops = [found["stop"]] if isinstance(found["stop"], str) else found["stop"]
        if not all(isinstance(text, str) and text and is_text(text) for text in stops):
            raise _Refused("stop holds something else than texts; wanted a text, or a list of texts")
        found = {**found, "stop": tuple(stops)}
    return found


def _messages(body: dict[str, Any]) -> tuple[Message, ...]:
    if "messages" not in body:
        return ({"role": "user", "content": _text(body.get("prompt"), "prompt")},)
    if "prompt" in body:
        raise _Refused("got both prompt and messages; wanted one of them")
    given = body["messages"]
    if not isinstance(given, list) or not given:
        raise _Refused(f"messages is {_kind(given)}; wanted a list of messages")
    messages = []
    for message in given:
        if not isinstance(message, dict) or message.get("role") not in ("system", "user", "assistant"):
            raise _Refused("a message has no role of system, user or assistant")
        messages.append({"role": message["role"], "content": _text(message.get("content"), "content")})
    if messages[-1]["role"] != "user":
        raise _Refused(f"the last message is of the {messages[-1]['role']}; wanted one of the user")
    return tuple(messages)


def _text(given: Any, name: str) -> str:
    """A text, or the text parts of a list of parts."""
    if isinstance(given, list) and given and all(isinstance(part, dict) for part in given):
        if not all(part.get("type") == "text" and isinstance(part.get("text"), str) for part in given):
            raise _Refused(f"{name} has parts that are no text; this program reads text alone")
        given = "".join(part["text"] for part in given)
    if not isinstance(given, str):
        raise _Refused(f"{name} is {_kind(given)}; wanted a text")
    if not given.strip():
        raise _Refused(f"{name} is empty; wanted some text")
    if not is_text(given):
        raise _Refused(f"{name} holds half of a surrogate pair, which is no character; wanted text")
    return given


def _id(given: dict[str, Any]) -> str | None:
    found = given.get("custom_id", given.get("id"))
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, (str, int)) or not str(found) or not is_text(str(found)):
        raise _Refused(f"the id is {_kind(found)}; wanted a text or a whole number")
    return str(found)


def _csv_items(path: Path, data: bytes, column: str | None) -> Iterator[Item | BadLine]:
    try:
        rows = csv.DictReader(io.StringIO(data.decode("utf-8-sig"), newline=""), strict=True)
        names = rows.fieldnames or []
        known = sorted(QUESTION_KEYS, key=lambda name: name != "prompt")  # a batch's own word comes first
        column = column or next((name for name in known if name in names), None)
        if column is None or column not in names:
            raise ConfigError(f"{path} has the columns {', '.join(names) or '-'}; name the one to ask with --column")
        for row in rows:
            line = rows.line_num
            try:
                text = _text(row[column], column)
                yield Item(row.get("id") or f"line-{line}", line, ({"role": "user", "content": text},))
            except _Refused as refused:
                yield BadLine(row.get("id") or f"line-{line}", line, str(refused))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start + 1} is no UTF-8; wanted a CSV file in UTF-8") from None
    except csv.Error as error:
        raise ConfigError(f"{path} is no CSV file: {error}") from None


def _refuse_twins(entries: Sequence[Item | BadLine]) -> None:
    seen: dict[str, Item | BadLine] = {}
    for entry in entries:
        if (first := seen.setdefault(entry.id, entry)) is not entry:
            lines = " and ".join(f"{e.file + ' ' if e.file else ''}line {e.line}" for e in (first, entry))
            raise ConfigError(f"the id {entry.id!r} is on {lines}; wanted ids that differ, so that results can be told")


def _kind(value: Any) -> str:
    """A value in words, short."""
    if value is None:
        return "missing"
    names = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "a text",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), type(value).__name__)


def _brief(error: Exception) -> str:
    return str(error).split(":", maxsplit=1)[0][:80] if isinstance(error, ValueError) else "nested too deeply"
