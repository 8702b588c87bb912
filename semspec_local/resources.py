"""Where files are: those that ship with the package, and the folders of the user."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_PACKAGE = Path(__file__).parent
_NAME = "semspec-local"


def shipped(kind: str) -> Path:
    """The folder of shipped `models` or `probes`: inside an installed wheel, or beside the package in a checkout."""
    installed = _PACKAGE / "_data" / kind
    return installed if installed.is_dir() else _PACKAGE.parent / kind


def cache_dir() -> Path:
    """The folder for what can be fetched or computed again; it may not exist yet.

    The first that is set: `SEMSPEC_CACHE` (this folder itself), `XDG_CACHE_HOME`; else the platform's own place.
    """
    own = _from_env("SEMSPEC_CACHE")
    if own is not None:
        return own
    return _user_folder("XDG_CACHE_HOME", linux=".cache", mac="Caches", windows="Cache")


def config_dir() -> Path:
    """The folder for what the user wrote, such as pair manifests of their own; it may not exist yet.

    The first that is set: `SEMSPEC_CONFIG` (this folder itself), `XDG_CONFIG_HOME`; else the platform's own place.
    """
    own = _from_env("SEMSPEC_CONFIG")
    if own is not None:
        return own
    return _user_folder("XDG_CONFIG_HOME", linux=".config", mac="Application Support", windows="Config")


def _from_env(name: str) -> Path | None:
    value = os.environ.get(name)
    return Path(value).expanduser() if value else None


def _user_folder(xdg: str, *, linux: str, mac: str, windows: str) -> Path:
    shared = _from_env(xdg)
    # The XDG rules: a relative path is to be ignored.
    if shared is not None and shared.is_absolute():
        return shared / _NAME
    if sys.platform == "darwin":
        return _home() / "Library" / mac / _NAME
    if sys.platform == "win32":
        return (_from_env("LOCALAPPDATA") or _home() / "AppData" / "Local") / _NAME / windows
    return _home() / linux / _NAME


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # no home folder is known, as in some containers
        return Path.cwd()
