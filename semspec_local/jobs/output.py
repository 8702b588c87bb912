"""The output file of a job: one line per finished item, appended and synced, and never lost.

A manifest beside it says what made it, so that a rerun goes on only with what belongs together.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError, SemspecError
from ..provenance import atomic_write
from ..trace import json_line
from .records import failed, id_of

MANIFEST_VERSION = 1


def manifest_path(output: Path) -> Path:
    return output.with_name(output.name + ".manifest.json")


class OutputFile:
    """Appends lines; knows which items are finished. Use it in a `with`.

    Raises ConfigError for an output that was made otherwise (see `check_manifest`) or holds something else.
    """

    def __init__(self, path: Path, manifest: Mapping[str, Any], *, force: bool = False, retry: bool = False) -> None:
        self.path = path
        self.finished: dict[str, bool] = {}  # by id: did it fail?
        if path.is_dir():
            raise ConfigError(f"{path} is a folder; wanted the name of a file for -o")
        try:
            exists = path.exists() and path.stat().st_size > 0
            if exists:
                check_manifest(path, manifest, force=force)
                self._read(retry)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(manifest_path(path), json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")
            self._stream = path.open("ab")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror or error}; choose another -o") from None

    def _read(self, retry: bool) -> None:
        """Take up what is finished; a torn last line is cut off, and with `retry` the failed ones leave the file."""
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        lines = whole.splitlines(keepends=True)
        kept = []
        for number, line in enumerate(lines, start=1):
            try:
                found = json.loads(line)
                item_id = id_of(found)
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ConfigError(
                    f"{self.path}, line {number}: no output of a batch; move the file away, or choose another -o"
                ) from None
            if not (retry and failed(found)):
                self.finished[item_id] = failed(found)
                kept.append(line)
        if b"".join(kept) != data:
            atomic_write(self.path, b"".join(kept))

    def append(self, line: Mapping[str, Any]) -> None:
        """Write one line; it is on the disk when this returns. Raises OutputError when it cannot be."""
        try:
            self._stream.write(json_line(line))
            self._stream.flush()
            os.fsync(self._stream.fileno())
        except OSError as error:
            raise OutputError(
                f"{self.path} cannot be written any more: {error.strerror or error}; {len(self.finished):,} finished "
                "items are safe in it, and the same command goes on when there is room"
            ) from None
        self.finished[id_of(line)] = failed(line)

    def order(self, ids: Sequence[str]) -> None:
        """Rewrite the file in this order of ids, whole or not at all."""
        places = {item_id: i for i, item_id in enumerate(ids)}
        lines = self.path.read_bytes().splitlines(keepends=True)
        lines.sort(key=lambda line: places.get(id_of(json.loads(line)), len(places)))
        self._stream.close()
        atomic_write(self.path, b"".join(lines))
        self._stream = self.path.open("ab")

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class OutputError(SemspecError):
    """The output cannot be written any more; what is in it stays."""


def check_manifest(output: Path, manifest: Mapping[str, Any], *, force: bool) -> None:
    """Raise ConfigError when the output was made by other models, settings or items; `force` lets it pass."""
    if force:
        return
    path = manifest_path(output)
    try:
        old = json.loads(path.read_text(encoding="utf-8"))
        changed = list(_differences(old["job"], json.loads(json.dumps(manifest["job"]))))
    except OSError:
        raise ConfigError(
            f"{output} exists, and {path.name} beside it does not: it cannot be told what made it; choose another -o, "
            "or add --force to go on in it"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path} is no manifest of a batch; choose another -o, or add --force") from None
    if changed:
        raise ConfigError(
            f"{output} was made with other settings ({', '.join(changed)}); choose another -o, or add --force to mix"
        )


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name in sorted({*old, *new}):
        mine, theirs = old.get(name), new.get(name)
        if isinstance(mine, dict) and isinstance(theirs, dict):
            yield from _differences(mine, theirs, f"{prefix}{name}.")
        elif mine != theirs:
            yield f"{prefix}{name}"
