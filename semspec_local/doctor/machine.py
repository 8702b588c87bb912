"""Python, cores, load and terminal of this machine. `root` is where /proc and /sys are, for tests."""

from __future__ import annotations

import locale
import math
import os
import platform
import re
import struct
import subprocess
import sys
from contextlib import suppress
from importlib import import_module, metadata
from pathlib import Path
from typing import TextIO

from ..config import default_threads
from ..machine import load_average, n_cores
from .check import Verdict, fail, ok, warn
from .examination import Examination

_ROOT = Path("/")
_COMPARE = {">=": lambda got, bound: got >= bound, "<": lambda got, bound: got < bound}


def python(_: Examination) -> Verdict:
    """A Python of a version that is supported, of 64 bits, not emulated."""
    bits = struct.calcsize("P") * 8
    said = f"{platform.python_version()}, {bits} bits, {platform.system()} {platform.machine()}"
    wanted = _wanted_python()
    if not all(_COMPARE[sign](sys.version_info[:2], bound) for sign, bound in wanted):
        asked = ",".join(f"{sign}{major}.{minor}" for sign, (major, minor) in wanted)
        return fail(
            f"{said}; wanted {asked}", f"make an environment with Python {asked} and install semspec-local there"
        )
    if bits != 64:
        return fail(f"{said}; models need more memory than 32 bits reach", "install a Python of 64 bits")
    if _is_translated():
        return warn(f"{said}, under Rosetta: far slower than this processor is", "install a Python for arm64")
    return ok(said)


def _wanted_python() -> list[tuple[str, tuple[int, int]]]:
    """The bounds of this package's own metadata; none where it was never installed."""
    try:
        asked = metadata.distribution("semspec-local").metadata.get_all("Requires-Python") or []
    except metadata.PackageNotFoundError:
        return []
    return [
        (sign, (int(major), int(minor))) for sign, major, minor in re.findall(r"(>=|<)(\d+)\.(\d+)", "".join(asked))
    ]


def _is_translated() -> bool:
    """Is this an Intel Python that macOS translates?"""
    if platform.system() != "Darwin":
        return False
    command = ["sysctl", "-n", "sysctl.proc_translated"]  # not there on a Mac with an Intel processor
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, timeout=10, check=False).stdout.strip() == b"1"
    return False


def threads(examination: Examination, root: Path = _ROOT) -> Verdict:
    """No more threads than cores that this process may use."""
    usable, quota, physical = default_threads(), _quota(root), _physical_cores(root)
    chosen = examination.models.threads
    said = f"{_cores(usable)} for this process"
    said += f", {physical} physical in the machine" if physical else ""
    said += f", {quota:g} by the container's quota" if quota else ""
    said += f"; threads: target {chosen['target']}, draft {chosen['draft']}, by turns; probes 1"
    limit = min(usable, math.ceil(quota)) if quota else usable
    if max(chosen.values()) > limit:
        return warn(f"{said}; more threads than cores wait for each other", f"use -t {max(1, limit)}")
    return ok(said)


def _quota(root: Path) -> float | None:
    """Cores' worth of time that a container may use; None where there is no limit, or no cgroup."""
    with suppress(OSError, ValueError):
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
        return int(quota) / int(period) if quota != "max" else None
    with suppress(OSError, ValueError):
        parts = [int((root / f"sys/fs/cgroup/cpu/cpu.cfs_{name}_us").read_text()) for name in ("quota", "period")]
        return parts[0] / parts[1] if parts[0] > 0 else None
    return None


def _physical_cores(root: Path) -> int | None:
    cores = set()
    for path in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/topology/thread_siblings_list"):
        with suppress(OSError):
            cores.add(path.read_text().strip())
    return len(cores) or None


def load(_: Examination) -> Verdict:
    """Other programs leave cores free: one busy core slows down all threads that wait for it."""
    now, cores = load_average(), n_cores()
    if now is None:
        return ok("this system tells no load average")
    said = f"load average {now:.2f} on {_cores(cores)}"
    if now <= cores / 2:
        return ok(said)
    free = min(default_threads(), max(1, cores - math.ceil(now)))
    return warn(
        f"{said}: other programs are at work, so runs are slow and times mean little", f"end them, or use -t {free}"
    )


def _cores(n: int) -> str:
    return f"{n} core{'s' if n > 1 else ''}"


def terminal(_: Examination) -> Verdict:
    """The terminal can show what models write."""
    stream = sys.stdout
    if not stream.isatty():
        return ok("standard output is no terminal; it is written as UTF-8, without colours")
    encoding = terminal_encoding(stream)
    colours = "no colours (NO_COLOR)" if os.environ.get("NO_COLOR") else "colours"
    if os.environ.get("TERM") == "dumb":
        colours = "no colours (TERM=dumb)"
    said = f"{encoding}, {colours}"
    if not _is_utf8(encoding):
        fix = "chcp 65001" if sys.platform == "win32" else "choose a UTF-8 locale, such as LANG=C.UTF-8"
        return warn(f"{said}; what models write beyond that is shown wrongly", fix)
    if sys.platform == "win32" and not _long_paths():
        return warn(
            f"{said}; paths over 260 characters do not work", "switch on LongPathsEnabled, or use short folders"
        )
    return ok(said)


def terminal_encoding(stream: TextIO) -> str:
    """The encoding of the terminal behind a stream, which need not be the one that Python writes there."""
    with suppress(OSError, ValueError, AttributeError):
        if encoding := os.device_encoding(stream.fileno()):
            return encoding
    return locale.getpreferredencoding(False)


def _is_utf8(encoding: str) -> bool:
    return encoding.lower().replace("-", "").replace("_", "") in ("utf8", "cp65001")


def _long_paths() -> bool:
    """Has Windows been told that paths may be long?"""
    registry = import_module("winreg")
    place = r"SYSTEM\CurrentControlSet\Control\FileSystem"
    try:
        with registry.OpenKey(registry.HKEY_LOCAL_MACHINE, place) as key:
            return bool(registry.QueryValueEx(key, "LongPathsEnabled")[0])
    except OSError:
        return False
