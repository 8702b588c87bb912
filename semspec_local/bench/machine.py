"""The machine that something was measured on: its processor, its cores, and how busy it is."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

from ..provenance import UNKNOWN


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
