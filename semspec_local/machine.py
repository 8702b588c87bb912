"""The machine that something is measured on: its processor, its cores, how busy it is, what it uses."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path

from .provenance import UNKNOWN


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """What the processor calls itself, where the system tells; never raises."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(errors="replace"), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine() or UNKNOWN


def n_cores() -> int:
    """The machine's cores, also those that this process may not use."""
    return os.cpu_count() or 1


def load_average() -> float | None:
    """How many processes wanted a core over the last minute; None where the system does not tell (Windows)."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


class EnergyMeter:
    """Reads what the processors have used, from the counters that Linux shows of them (RAPL)."""

    def __init__(self, counters: Sequence[Path]) -> None:
        self._counters = tuple(counters)

    @classmethod
    def find(cls, root: Path = Path("/sys/class/powercap")) -> EnergyMeter:
        """The meters of whole packages that may be read; often none, for reading them takes rights."""
        return cls(
            [path for path in sorted(root.glob("*/energy_uj")) if path.parent.name.count(":") == 1 and _read(path)]
        )

    def read(self) -> tuple[int | None, ...]:
        """The counters now, in microjoules."""
        return tuple(_read(path) for path in self._counters)

    def since(self, before: tuple[int | None, ...]) -> float | None:
        """Joules since then; None where nothing tells. A counter that began again at 0 tells nothing."""
        pairs = list(zip(before, self.read()))
        if not pairs or any(a is None or b is None or b < a for a, b in pairs):
            return None
        return sum((b or 0) - (a or 0) for a, b in pairs) / 1e6


def _read(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


class PeakMemory:
    """The most memory that this process has held since a moment, beyond what it held then; Linux tells."""

    def __init__(self, proc: Path = Path("/proc/self")) -> None:
        self._proc = proc
        self._before: int | None = None
        try:
            (proc / "clear_refs").write_text("5")  # the peak begins anew
            self._before = self._status("VmRSS")
        except OSError:
            pass

    def bytes(self) -> int | None:
        """None where the system does not tell."""
        peak = self._status("VmHWM")
        return None if peak is None or self._before is None else max(0, peak - self._before)

    def _status(self, name: str) -> int | None:
        try:
            found = re.search(rf"^{name}:\s+(\d+) kB", (self._proc / "status").read_text(), re.MULTILINE)
        except OSError:
            return None
        return int(found[1]) * 1024 if found else None
