"""Which llama-server is asked: one that was named, one built here, or one on PATH."""

from __future__ import annotations

import os
import shutil
import sys
from importlib import metadata
from pathlib import Path

from ..errors import ConfigError
from ..resources import cache_dir

_ENV = "SEMSPEC_LLAMA_SERVER"
_SUFFIX = ".exe" if sys.platform == "win32" else ""


def built_server() -> Path:
    """Where `scripts/build_llama_server` puts the server of the installed llama-cpp-python; it may not be there."""
    return cache_dir() / "llama.cpp" / metadata.version("llama-cpp-python") / f"llama-server{_SUFFIX}"


def find_llama_server(given: Path | None = None) -> Path:
    """The binary: `given`, else what SEMSPEC_LLAMA_SERVER names, else what was built here, else one on PATH."""
    if given is not None:
        return _checked(given, "--llama-server")
    if named := os.environ.get(_ENV):
        return _checked(Path(named), _ENV)
    if built_server().is_file():
        return built_server()
    if found := shutil.which("llama-server"):
        return Path(found)
    raise ConfigError(
        "there is no llama-server on this machine; build one with scripts/build_llama_server, "
        f"or name one with --llama-server PATH or {_ENV}"
    )


def _checked(path: Path, origin: str) -> Path:
    if not path.is_file():
        raise ConfigError(f"{origin} is {path}; no such file, wanted the llama-server binary")
    if not os.access(path, os.X_OK):
        raise ConfigError(f"{origin} is {path}; it cannot be executed, wanted the llama-server binary")
    return path
