"""Where pairs live on this machine, and whether the network may be used."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import ConfigError
from ..resources import cache_dir


def pair_folder(name: str, cache: Path | None = None) -> Path:
    """The folder that holds the files of the pair `name`."""
    return (cache if cache is not None else cache_dir()) / "models" / name


def is_offline() -> bool:
    """True when `SEMSPEC_OFFLINE` or `HF_HUB_OFFLINE` forbids the network (1, on, yes or true)."""
    return any(
        os.environ.get(name, "").strip().lower() in ("1", "on", "yes", "true")
        for name in ("SEMSPEC_OFFLINE", "HF_HUB_OFFLINE")
    )


def from_home(text: str) -> Path:
    """A path whose `~` is the home folder; ConfigError when there is none."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{text}: {error}") from None
