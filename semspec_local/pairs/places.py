"""Where pairs live on this machine, and whether the network may be used."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ..errors import ConfigError

_APP = "semspec-local"


def cache_folder() -> Path:
    """The cache: `SEMSPEC_CACHE`, else the platform's usual place."""
    if chosen := os.environ.get("SEMSPEC_CACHE"):
        return from_home(chosen).absolute()
    if sys.platform == "win32":
        return _folder("LOCALAPPDATA", "~/AppData/Local")
    if sys.platform == "darwin":
        return _folder("XDG_CACHE_HOME", "~/Library/Caches")
    return _folder("XDG_CACHE_HOME", "~/.cache")


def config_folder() -> Path:
    """The user's configuration folder, in the platform's usual place."""
    if sys.platform == "win32":
        return _folder("APPDATA", "~/AppData/Roaming")
    if sys.platform == "darwin":
        return _folder("XDG_CONFIG_HOME", "~/Library/Application Support")
    return _folder("XDG_CONFIG_HOME", "~/.config")


def pair_folder(name: str, cache: Path | None = None) -> Path:
    """The folder that holds the files of the pair `name`."""
    return (cache if cache is not None else cache_folder()) / "models" / name


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


def _folder(variable: str, otherwise: str) -> Path:
    value = os.environ.get(variable)
    # The XDG rules say that a relative value is to be ignored.
    base = Path(value) if value and Path(value).is_absolute() else from_home(otherwise)
    return base / _APP
