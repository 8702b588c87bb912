"""What made a result: versions, files and arguments; and writing files so that a half-written one is never seen.

Versions come from installed metadata: nothing heavy is imported to ask for its version.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import secrets
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from os import PathLike
from pathlib import Path
from typing import Any, TypedDict

from .resources import cache_dir

UNKNOWN = "unknown"

_PACKAGES = ("semspec-local", "llama-cpp-python", "onnxruntime", "numpy")
_CACHE_NAME = "fingerprints.json"
_CHUNK_BYTES = 1 << 20

_MIN_CACHED_BYTES = 1 << 20
"""Smaller files are hashed anew: asking takes as long, and they are the ones that change within a clock tick."""


class Fingerprint(TypedDict):
    """What identifies a file: its contents' sha256 in hex, its size, and its name without the folder."""

    sha256: str
    size_bytes: int
    name: str


def provenance(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Versions of this package and of what it stands on, the platform, and `argv` (default: of this process).

    Never raises; what is not known is "unknown".
    """
    versions: dict[str, Any] = {name.replace("-", "_"): _version(name) for name in _PACKAGES}
    return {
        **versions,
        "python": platform.python_version() or UNKNOWN,
        "platform": _platform(),
        "argv": [str(item) for item in (sys.argv if argv is None else argv)],
    }


def command_line(program: str) -> list[str]:
    """This process's command as it may be read elsewhere: without the folders of this machine."""
    return [program, *(Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:])]


def atomic_write(path: str | PathLike[str], data: bytes | str) -> None:
    """Write a whole file or nothing: a temporary name in the same folder, synced, then renamed.

    Text is written as UTF-8 with its newlines as they are. A link keeps pointing to its file, and the file keeps its
    mode. What is no regular file (a terminal, a pipe, `/dev/null`) is written to as it is. Raises OSError.
    """
    raw = data.encode() if isinstance(data, str) else data
    goal = Path(path).resolve()
    if goal.exists() and not goal.is_file():
        goal.write_bytes(raw)
        return
    temporary = goal.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        if goal.exists():
            shutil.copymode(goal, temporary)
        temporary.replace(goal)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sha256_file(path: str | PathLike[str]) -> str:
    """The sha256 of a file in hex, read in pieces. Raises OSError."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def fingerprint_file(path: str | PathLike[str]) -> Fingerprint:
    """The fingerprint of a file, hashed once as long as its path, size and modification time stay. Raises OSError.

    What was hashed is kept in the user's cache folder; a cache that cannot be read or written only costs time.
    """
    file = Path(path).resolve()
    before = file.stat()
    sha256 = _cached_sha256(file, before)
    if sha256 is not None:
        return {"sha256": sha256, "size_bytes": before.st_size, "name": Path(path).name}
    sha256 = sha256_file(file)
    after = file.stat()
    unchanged = (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    if before.st_size >= _MIN_CACHED_BYTES and unchanged:
        _remember(str(file), [before.st_size, before.st_mtime_ns, sha256])
    return {"sha256": sha256, "size_bytes": after.st_size, "name": Path(path).name}


def known_sha256(path: str | PathLike[str]) -> str | None:
    """The sha256 of a file that is small or was hashed before; None where a big one would have to be read.

    Raises OSError.
    """
    file = Path(path).resolve()
    stat = file.stat()
    return sha256_file(file) if stat.st_size < _MIN_CACHED_BYTES else _cached_sha256(file, stat)


def _cached_sha256(file: Path, stat: os.stat_result) -> str | None:
    entry = _cached().get(str(file)) if stat.st_size >= _MIN_CACHED_BYTES else None
    if entry is None or entry[:2] != [stat.st_size, stat.st_mtime_ns]:
        return None
    return str(entry[2])


def _version(package: str) -> str:
    try:
        return metadata.version(package) or UNKNOWN
    except Exception:  # not installed, or its metadata is broken
        return UNKNOWN


def _platform() -> str:
    try:
        return platform.platform() or UNKNOWN
    except Exception:  # it asks the system in several ways
        return UNKNOWN


def _cached() -> dict[str, list[Any]]:
    """Path -> [size in bytes, modification time in ns, sha256]; only entries of that form."""
    try:
        found = json.loads((cache_dir() / _CACHE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return {path: entry for path, entry in found.items() if _is_entry(entry)} if isinstance(found, dict) else {}


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, list)
        and [type(item) for item in entry] == [int, int, str]
        and len(entry[2]) == 64
        and set(entry[2]) <= set("0123456789abcdef")
    )


def _remember(path: str, entry: list[Any]) -> None:
    with suppress(OSError, ValueError):
        cache_dir().mkdir(parents=True, exist_ok=True)
        atomic_write(cache_dir() / _CACHE_NAME, json.dumps({**_cached(), path: entry}, indent=0))
