"""What a collection holds: sampled steps, and the states of both models on each of them.

A collection is a folder: `collection.json` (header), `index.jsonl` (one prefix a line), and one safetensors file per
prefix. This file knows the layout and nothing of what is done with it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from ..errors import NOT_AS_WRITTEN, ConfigError
from ..modelinfo import ModelInfo
from ..protocols import FloatArray, ModelStep, Norm, Pooling, Window
from ..roles import ROLES, Role

COLLECTION_VERSION = 1

N_SAMPLES, N_PREFIXES = 16, 2
"""How many samples of each model at each prefix, and how many prefixes of each problem, unless told otherwise."""

TARGET_ALONE = "never"
"""The policy under which the target writes its solutions alone."""

EARLY_N_PRIME = 1
"""What collections were made with that do not say it: it could not be chosen then."""

POST = "post"
"""What a header's list of layers calls the last layer after the final norm."""


@dataclass(frozen=True)
class StateKind:
    """Which states are meant: a layer, a pooling window, a pooling, before or after the final norm."""

    layer: int
    window: Window
    pooling: Pooling
    norm: Norm = "pre"

    def tensor(self, reader: Role) -> str:
        """The tensor's name in a prefix's safetensors file."""
        place = POST if self.norm == "post" else str(self.layer)
        return f"{reader}.{place}.{self.window}.{self.pooling}"


@dataclass(frozen=True)
class Sample:
    """One sampled step: who wrote it, its text, its length in the writer's tokens, why it ended."""

    writer: Role
    text: str
    n_tokens: int
    end: str


@dataclass(frozen=True)
class Prefix:
    """One prefix and the steps that both models wrote from it; `file` holds the states, one row per sample.

    `text` is what the target had written before, after the `question`.
    """

    prefix_id: int
    problem_id: str
    step_index: int
    question: str
    text: str
    file: str
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class Collection:
    """A collection on disk. Rows are all samples of all prefixes, in the order of the index.

    `n_left_out` counts the prefixes from which one of the models wrote nothing at all: they have no shares to learn.
    """

    folder: Path
    header: Mapping[str, Any]
    prefixes: tuple[Prefix, ...]
    index_sha256: str
    models: Mapping[Role, ModelInfo] = field(repr=False)
    n_left_out: int = 0

    @property
    def origin(self) -> dict[str, Any]:
        """What its prefixes are: the problems, the steps that were never drafted, and who wrote the solutions.

        `solutions` is None for the target alone, and otherwise the policy, its threshold and its probes.
        """
        return {key: self.header.get(key) for key in ("data", "n_prime", "solutions")}

    @property
    def pair(self) -> str:
        return str(self.header["pair"])

    @cached_property
    def problem_ids(self) -> NDArray[np.str_]:
        """The problem of each row, str [n_rows]."""
        return np.array([prefix.problem_id for prefix in self.prefixes for _ in prefix.samples])

    @cached_property
    def prefix_ids(self) -> NDArray[np.int64]:
        """The prefix of each row, int64 [n_rows]."""
        return np.array([prefix.prefix_id for prefix in self.prefixes for _ in prefix.samples])

    @cached_property
    def writers(self) -> NDArray[np.str_]:
        """Who wrote each row's step, str [n_rows]."""
        return np.array([sample.writer for prefix in self.prefixes for sample in prefix.samples])

    @cached_property
    def n_tokens(self) -> NDArray[np.int64]:
        """The length of each row's step, int64 [n_rows]; an empty step has no states worth reading."""
        return np.array([sample.n_tokens for prefix in self.prefixes for sample in prefix.samples])

    def kinds(self, reader: Role) -> list[StateKind]:
        """Every kind of state that was collected for a reader."""
        header, last = self.header, self.models[reader].n_layer - 1
        return [
            StateKind(last if layer == POST else layer, window, pooling, "post" if layer == POST else "pre")
            for layer in header["layers"][reader]
            for window in header["windows"]
            for pooling in header["poolings"]
        ]

    def states(self, reader: Role, kind: StateKind) -> FloatArray:
        """States of one reader on every row, float32 [n_rows, n_embd]; ConfigError where they are broken."""
        n_embd = self.models[reader].n_embd
        return self._tensors(kind.tensor(reader), (n_embd,))

    def feature(self, reader: Role, name: str) -> FloatArray:
        """A number per row, float32 [n_rows]: `logprob_mean`, `logprob_min` (natural log) or `top2_share`."""
        return self._tensors(f"{reader}.{name}", ())

    def _tensors(self, name: str, row_shape: tuple[int, ...]) -> FloatArray:
        parts = []
        for prefix in self.prefixes:
            rows = _read_tensor(self.folder / prefix.file, name).astype(np.float32)
            wanted = (len(prefix.samples), *row_shape)
            if rows.shape != wanted:
                raise ConfigError(f"{prefix.file}: {name} is {list(rows.shape)}; wanted {list(wanted)}")
            used = np.array([sample.n_tokens > 0 for sample in prefix.samples])
            if not np.isfinite(rows[used]).all():
                raise ConfigError(f"{prefix.file}: {name} holds NaN or infinity (float16 ends at 65504)")
            parts.append(rows)
        return np.concatenate(parts)


def tensors_of(reader: Role, steps: Sequence[ModelStep]) -> dict[str, Any]:
    """Arrays over samples of one reader: pooled states float32 [n, n_embd], log-probability features float32 [n]."""
    tensors: dict[str, Any] = {}
    for tap in steps[0].states if steps else ():
        for window in get_args(Window):
            for pooling in get_args(Pooling):
                rows = [step.states[tap].pool(window, pooling) for step in steps]
                tensors[StateKind(tap.layer, window, pooling, tap.norm).tensor(reader)] = np.stack(rows)
    logprobs = [step.logprobs for step in steps if step.logprobs is not None]
    tensors[f"{reader}.logprob_mean"] = np.asarray([row.mean() for row in logprobs], dtype=np.float32)
    tensors[f"{reader}.logprob_min"] = np.asarray([row.min() for row in logprobs], dtype=np.float32)
    shares = [step.in_top2.mean() for step in steps if step.in_top2 is not None]
    tensors[f"{reader}.top2_share"] = np.asarray(shares, dtype=np.float32)
    return tensors


def read_collection(folder: Path | str) -> Collection:
    """Read header and index; ConfigError names the file and line that cannot be used.

    A last line without its newline is left out: it is being written, or its writer was stopped.
    """
    folder = Path(folder)
    header = _read_header(folder / "collection.json")
    models = {role: ModelInfo.from_dict(header["models"][role]) for role in ROLES}
    index = folder / "index.jsonl"
    try:
        data = index.read_bytes()
    except OSError as error:
        raise ConfigError(f"{index} cannot be read: {error.strerror or error}") from None
    data = data[: data.rfind(b"\n") + 1]
    found = list(_read_index(index, data))
    prefixes = tuple(prefix for prefix in found if {sample.writer for sample in prefix.samples} == set(ROLES))
    if not prefixes:
        raise ConfigError(f"{index} has {len(found)} prefixes, none with steps of both models")
    if len({prefix.prefix_id for prefix in prefixes}) != len(prefixes):
        raise ConfigError(f"{index} has a prefix_id twice")
    return Collection(folder, header, prefixes, hashlib.sha256(data).hexdigest(), models, len(found) - len(prefixes))


def _read_header(path: Path) -> dict[str, Any]:
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
        if header["version"] != COLLECTION_VERSION:
            raise ConfigError(f"{path}: version is {header['version']!r}; wanted {COLLECTION_VERSION}")
        missing = [name for name in ("pair", "windows", "poolings") if name not in header]
        missing += [f"{name}.{role}" for name in ("models", "layers") for role in ROLES if role not in header[name]]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    except NOT_AS_WRITTEN as error:
        raise ConfigError(f"{path} is not the header of a collection ({type(error).__name__}: {error})") from None
    if missing:
        raise ConfigError(f"{path} has no {missing[0]}")
    return {"n_prime": EARLY_N_PRIME, **header}


def _read_index(path: Path, data: bytes) -> Iterator[Prefix]:
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            item = json.loads(line)
            samples = tuple(
                Sample(sample["writer"], str(sample["text"]), int(sample["n_tokens"]), str(sample["end"]))
                for sample in item["samples"]
            )
            file = str(item["file"])
            prefix = Prefix(
                prefix_id=int(item["prefix_id"]),
                problem_id=str(item["problem_id"]),
                step_index=int(item["step_index"]),
                question=str(item["question"]),
                text=str(item["prefix_text"]),
                file=file,
                samples=samples,
            )
        except NOT_AS_WRITTEN as error:
            raise ConfigError(f"{path}, line {number}: no prefix ({type(error).__name__}: {error})") from None
        if Path(file).name != file or file in ("", ".", ".."):
            raise ConfigError(f"{path}, line {number}: file is {file!r}; wanted a plain name in that folder")
        if any(sample.writer not in ROLES for sample in samples):
            raise ConfigError(f"{path}, line {number}: a writer is neither target nor draft")
        yield prefix


def _read_tensor(path: Path, name: str) -> NDArray[Any]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ConfigError("reading states needs safetensors: pip install 'semspec-local[train]'") from None
    try:
        with safe_open(str(path), framework="numpy") as file:
            return np.asarray(file.get_tensor(name))
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: {name} cannot be read ({error})") from None
