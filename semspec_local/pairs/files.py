"""Files on disk: hashing, finishing under a final name, free space, one writer at a time."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from ..errors import DownloadError

CHUNK_BYTES = 1 << 20

Advance = Callable[[int], None]
"""Told how many more bytes are done."""


def sha256_file(path: Path, advance: Advance | None = None) -> str:
    """The sha256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            if advance is not None:
                advance(len(chunk))
    return digest.hexdigest()


def check_file(path: Path, label: str, size: int | None, sha256: str | None) -> str:
    """Return the sha256 of `path`; DownloadError gives got and wanted when size or sha256 differ."""
    got_size = path.stat().st_size
    if size is not None and got_size != size:
        raise DownloadError(f"{label} is the wrong file: got {got_size} bytes, wanted {size}")
    got = sha256_file(path)
    if sha256 is not None and got != sha256:
        raise DownloadError(f"{label} is the wrong file: got sha256 {got}, wanted {sha256}")
    return got


def finish(temporary: Path, final: Path) -> None:
    """Give a complete file its final name, so that it survives a power cut."""
    with temporary.open("rb+") as file:
        os.fsync(file.fileno())
    temporary.replace(final)
    with suppress(OSError):  # a folder cannot be opened on Windows
        descriptor = os.open(final.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_json(path: Path, value: object) -> None:
    """Write a small JSON file so that a reader sees the old one or the new one, never half of it."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    finish(temporary, path)


def file_bytes(path: Path) -> int:
    """The size of a file in bytes, 0 when there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def check_free_space(folder: Path, needed: int) -> None:
    """Raise DownloadError with both numbers when the disk of `folder` has fewer than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DownloadError(
            f"not enough disk space in {folder}: {format_size(needed)} needed, {format_size(free)} free; "
            "make room, or set SEMSPEC_CACHE to a folder on another disk"
        )


def format_size(n_bytes: int) -> str:
    """A size for people, in powers of ten: 1.1 GB, 98.0 MB, 512 bytes."""
    if n_bytes >= 100_000_000:
        return f"{n_bytes / 1e9:.1f} GB"
    if n_bytes >= 100_000:
        return f"{n_bytes / 1e6:.1f} MB"
    return f"{n_bytes} bytes"


@contextmanager
def one_writer(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder`; DownloadError when another process holds it. A dead process holds nothing."""
    with (folder / "lock").open("ab") as file:
        try:
            _lock(file)
        except OSError:
            raise DownloadError(f"another `models pull` is at work in {folder}; wait for it to end") from None
        yield


def _lock(file: BinaryIO) -> None:
    if sys.platform == "win32":
        import msvcrt

        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
