"""The record of a run, and its JSONL form: a `run` line, a `step` line per candidate or written step, a `summary` line.

Floats keep full precision; a number that is unknown, infinite or NaN is null. Rates are not stored: `metrics`
derives them. This module knows nothing of models, policies' rules or the command line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from .errors import ConfigError, SemspecError
from .metrics import Counters
from .policy import Reason

TRACE_VERSION = 1

Origin = Literal["draft", "target", "forced"]
StopReason = Literal["eos", "budget", "context_full", "stop", "interrupted", "error"]


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step of a run: a candidate (accepted or not) or a written step.

    `index` is its position in the trace, `step_index` that among the committed steps (a rejected candidate has that
    of the step that replaces it). `origin` wrote it. Token counts are None for a model that did not hold the step.
    `accepted` is None when no policy was asked. `end` is a `steps.StepEnd.kind`, or "forced". Times are in seconds,
    0.0 for what did not happen: `score_s` is the target's pass over the candidate, `probe_s` all else that scores it,
    the probes or the rating. `n_reused_tokens` of a written step were evaluated with the candidate that it replaces.
    `n_guesses` tokens were guessed for it by the draft, and the target kept `n_guesses_kept`; an end of text counts.
    """

    index: int
    step_index: int
    origin: Origin
    committed: bool
    text: str
    n_target_tokens: int | None = None
    n_draft_tokens: int | None = None
    n_reused_tokens: int = 0
    n_guesses: int = 0
    n_guesses_kept: int = 0
    draft_semantic_prob: float | None = None
    target_semantic_prob: float | None = None
    joint_semantic_prob: float | None = None
    acceptance_ratio: float | None = None
    score: float | None = None
    threshold: float | None = None
    accepted: bool | None = None
    reason: Reason
    end: str
    propose_s: float = 0.0
    score_s: float = 0.0
    probe_s: float = 0.0
    write_s: float = 0.0
    read_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """How a run ended, and its counters and times."""

    stop_reason: StopReason
    counters: Counters


@dataclass(frozen=True)
class RunTrace:
    """A whole run. `header` holds provenance, config and seed; `summary` is None if the run was interrupted."""

    header: dict[str, Any]
    steps: list[StepRecord] = field(default_factory=list)
    summary: RunSummary | None = None


class TraceWriter:
    """Writes a trace line by line; each is on its way to the disk before the call returns.

    Replaces a file of that name. Raises ConfigError if it cannot be opened, SemspecError if a line cannot be written.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self._path = Path(path)
        try:
            self._file = self._path.open("wb")
        except (OSError, ValueError) as error:
            raise ConfigError(f"the trace {self._path} cannot be written: {error}") from error

    def header(self, header: Mapping[str, Any]) -> None:
        """Write the `run` line: provenance, config, seed, and what else a reader should know."""
        kind = {"type": "run", "version": TRACE_VERSION}
        self._line({**kind, **header, **kind})

    def step(self, record: StepRecord) -> None:
        self._line({"type": "step", **_to_json(record)})

    def summary(self, summary: RunSummary) -> None:
        self._line({"type": "summary", **_to_json(summary)})

    def close(self) -> None:
        with suppress(OSError):  # each line was flushed; what could not be was raised then
            self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _line(self, values: dict[str, Any]) -> None:
        try:
            self._file.write(json_line(values))
            self._file.flush()
        except OSError as error:
            raise SemspecError(f"the trace {self._path} cannot be written: {error}") from error


def write_trace(path: str | PathLike[str], trace: RunTrace) -> None:
    """Write a whole trace at once."""
    with TraceWriter(path) as writer:
        writer.header(trace.header)
        for record in trace.steps:
            writer.step(record)
        if trace.summary is not None:
            writer.summary(trace.summary)


def read_trace(path: str | PathLike[str]) -> RunTrace:
    """Read a trace; one that was interrupted has no summary, and may have a torn last line, which is left out.

    Raises ConfigError, with the line's number, for anything else that is no trace of this version. Fields that are not
    known are ignored.
    """
    try:
        *lines, torn = Path(path).read_bytes().split(b"\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"the trace {path} cannot be read: {error}") from error
    if torn and _parse(torn) is not None:
        lines.append(torn)  # complete, but for its newline
    if not lines:
        raise ConfigError(f"{path}, line 1: got no complete line; wanted a line of type 'run'")
    header: dict[str, Any] | None = None
    steps: list[StepRecord] = []
    summary: RunSummary | None = None
    for number, line in enumerate(lines, 1):
        try:
            values = _object(line)
            if header is None:
                header = _read_header(values)
            elif summary is not None:
                _refuse("a line after the summary", "the end of the file")
            elif values.get("type") == "summary":
                summary = _from_json(RunSummary, values)
            else:
                steps.append(_read_step(values, len(steps)))
        except (_Malformed, RecursionError) as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error
    assert header is not None, "there was at least one line"
    return RunTrace(header, steps, summary)


def json_line(values: Mapping[str, Any]) -> bytes:
    """One line of JSON as UTF-8, with its newline; floats in full precision, infinite and NaN ones as null."""
    plain = _to_json(values)
    try:
        return (json.dumps(plain, ensure_ascii=False, allow_nan=False) + "\n").encode()
    except UnicodeEncodeError:  # half of a surrogate pair, as in an argument that is not UTF-8
        return (json.dumps(plain, allow_nan=False) + "\n").encode()


class _Malformed(Exception):
    """A line is not what the format says; the message gives got and wanted."""


_T = TypeVar("_T")


def _to_json(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        return {item.name: _to_json(getattr(value, item.name)) for item in fields(value) if item.init}
    return value


def _parse(line: bytes) -> Any:
    """The JSON value of a line, or None if it has none."""
    try:
        return json.loads(line.decode(), parse_constant=_refuse_number, parse_float=_finite)
    except (ValueError, RecursionError, _Malformed):
        return None


def _finite(digits: str) -> float:
    number = float(digits)
    return number if math.isfinite(number) else _refuse_number(digits)


def _refuse_number(digits: str) -> NoReturn:
    _refuse(digits, "a finite number")


def _refuse(got: object, wanted: str) -> NoReturn:
    raise _Malformed(f"got {_short(got)}; wanted {wanted}")


def _short(got: object) -> str:
    shown = got if isinstance(got, str) else ascii(got)
    return shown if len(shown) <= 80 else shown[:77] + "..."


def _object(line: bytes) -> dict[str, Any]:
    values = _parse(line)
    if not isinstance(values, dict):
        _refuse(line, "a JSON object")
    return values


def _read_header(values: dict[str, Any]) -> dict[str, Any]:
    if values.get("type") != "run":
        _refuse(f"type {values.get('type')!r}", "'run' on the first line")
    version = values.get("version")
    if type(version) is not int or version != TRACE_VERSION:
        _refuse(f"trace version {version!r}", f"{TRACE_VERSION}")
    return {key: value for key, value in values.items() if key not in ("type", "version")}


def _read_step(values: dict[str, Any], index: int) -> StepRecord:
    if values.get("type") != "step":
        _refuse(f"type {values.get('type')!r}", "'step' or 'summary'")
    record = _from_json(StepRecord, values)
    if record.index != index:
        _refuse(f"index {record.index}", f"{index}")
    return record


_LATER = frozenset({"n_reused_tokens", "n_tokens_reused", "n_guesses", "n_guesses_kept"})
"""Fields that earlier traces of the same version do not have; their defaults are what was true then."""


def _from_json(kind: type[_T], values: dict[str, Any]) -> _T:
    """A dataclass from a JSON object, each value checked against the field's type."""
    hints = get_type_hints(kind)
    known: dict[str, Any] = {}
    for item in fields(kind):  # type: ignore[arg-type]
        if item.init:
            if item.name in values:
                known[item.name] = _value(item.name, values[item.name], hints[item.name])
            elif item.name not in _LATER:
                _refuse(f"no {item.name}", "all fields")
    return kind(**known)


def _value(name: str, value: Any, hint: Any) -> Any:
    if hint is Counters:
        return _from_json(Counters, value) if isinstance(value, dict) else _refuse(f"{name} {value!r}", "an object")
    if get_origin(hint) is dict:
        return _histogram(name, value)
    if get_origin(hint) is Literal:
        if value not in get_args(hint) or not isinstance(value, str):
            _refuse(f"{name} {value!r}", "one of " + ", ".join(get_args(hint)))
        return value
    kinds = get_args(hint) or (hint,)
    if float in kinds and type(value) is int and abs(value) < 2**1000:
        return float(value)
    # bool is an int to isinstance; a position or count is never negative
    if type(value) not in kinds or (type(value) is int and value < 0):
        _refuse(f"{name} {value!r}", " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds))
    return value


def _histogram(name: str, value: Any) -> dict[int, int]:
    if not isinstance(value, dict):
        _refuse(f"{name} {value!r}", "an object")
    counts: dict[int, int] = {}
    for key, count in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10) or type(count) is not int or count < 1:
            _refuse(f"{name} {key!r}: {count!r}", "whole numbers")
        counts[int(key)] = count
    return counts
