"""A JSONL file that grows by one line at a time, each on the disk before the next, and a manifest beside it.

The manifest says what made the file, so that a rerun goes on only with what belongs together. Knows nothing of what
the lines say.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import NOT_AS_WRITTEN, ConfigError, SemspecError
from .provenance import atomic_write
from .trace import json_line

if TYPE_CHECKING:
    from typing_extensions import Self

Line = Mapping[str, Any]


class LineFileError(SemspecError):
    """The file cannot be written any more; what is in it stays."""


def manifest_path(path: Path) -> Path:
    return path.with_name(path.name + ".manifest.json")


class LineFile:
    """Appends lines; takes up those that are there. Use it in a `with`.

    `manifest` holds under "job" what must be the same when a run goes on. Raises ConfigError for a file that was made
    otherwise or holds something else.
    """

    def __init__(
        self,
        path: Path,
        manifest: Mapping[str, Any],
        *,
        take_up: Callable[[Line], bool],
        kind: str,
        force: bool = False,
    ) -> None:
        """`take_up` is told every line that is there, and says whether it stays; it raises for what is no such line."""
        self.path, self._take_up, self._kind = path, take_up, kind
        if path.is_dir():
            raise ConfigError(f"{path} is a folder; wanted the name of a file for -o")
        try:
            if path.exists() and path.stat().st_size > 0:
                check_manifest(path, manifest, kind=kind, force=force)
                self._read()
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
            self.write_manifest(manifest)
            self._stream = path.open("ab")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror or error}; choose another -o") from None

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Say beside the file what makes it."""
        atomic_write(manifest_path(self.path), json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")

    def _read(self) -> None:
        """Take up what is there; a torn last line is cut off."""
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        kept = []
        for number, line in enumerate(whole.splitlines(keepends=True), start=1):
            try:
                stays = self._take_up(json.loads(line))
            except NOT_AS_WRITTEN:
                raise ConfigError(
                    f"{self.path}, line {number}: no output of a {self._kind}; move the file away, or choose another -o"
                ) from None
            if stays:
                kept.append(line)
        if b"".join(kept) != data:
            atomic_write(self.path, b"".join(kept))

    def append(self, line: Line) -> None:
        """Write one line; it is on the disk when this returns. Raises LineFileError when it cannot be."""
        try:
            self._stream.write(json_line(line))
            self._stream.flush()
            os.fsync(self._stream.fileno())
        except OSError as error:
            raise LineFileError(f"{self.path} cannot be written any more: {error.strerror or error}") from None

    def rewrite(self, key: Callable[[Line], Any]) -> None:
        """Sort the lines by this key, whole or not at all."""
        lines = self.path.read_bytes().splitlines(keepends=True)
        lines.sort(key=lambda line: key(json.loads(line)))
        self._stream.close()
        atomic_write(self.path, b"".join(lines))
        self._stream = self.path.open("ab")

    def close(self) -> None:
        with suppress(OSError):  # each line was flushed; what could not be was raised then
            self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_manifest(path: Path, manifest: Mapping[str, Any], *, kind: str, force: bool) -> None:
    """Raise ConfigError when the file was made by other models, settings or items; `force` lets it pass."""
    if force:
        return
    beside = manifest_path(path)
    try:
        old = json.loads(beside.read_text(encoding="utf-8"))
        changed = list(_differences(old["job"], json.loads(json.dumps(manifest["job"]))))
    except OSError:
        raise ConfigError(
            f"{path} exists, and {beside.name} beside it does not: it cannot be told what made it; choose another -o, "
            "or add --force to go on in it"
        ) from None
    except NOT_AS_WRITTEN:
        raise ConfigError(f"{beside} is no manifest of a {kind}; choose another -o, or add --force") from None
    if changed:
        raise ConfigError(
            f"{path} was made with other settings ({', '.join(changed)}); choose another -o, or add --force to mix"
        )


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name in sorted({*old, *new}):
        mine, theirs = old.get(name), new.get(name)
        if isinstance(mine, dict) and isinstance(theirs, dict):
            yield from _differences(mine, theirs, f"{prefix}{name}.")
        elif mine != theirs:
            yield f"{prefix}{name}"
