"""Step-level semantic speculation for reasoning models on llama.cpp.

    from semspec_local import Reasoner, Sources

    with Reasoner(Sources.from_pair()) as reasoner:
        print(reasoner.answer("How many ...?").answer)

The names in `__all__` are the public ones. Each is loaded when it is first asked for, so this import costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import ModelConfig, RunConfig, SamplingConfig
    from .engine import Speculation
    from .errors import (
        ConfigError,
        DecodeError,
        DownloadError,
        IncompatibleError,
        ModelError,
        PairNotPulledError,
        ProbeError,
        SemspecError,
    )
    from .policy import POLICIES, make_policy
    from .reasoner import Reasoner, Sources
    from .result import RunResult
    from .trace import RunTrace, StepRecord, read_trace

    __version__: str

_HOMES = {
    "config": ("ModelConfig", "RunConfig", "SamplingConfig"),
    "engine": ("Speculation",),
    "errors": (
        "ConfigError",
        "DecodeError",
        "DownloadError",
        "IncompatibleError",
        "ModelError",
        "PairNotPulledError",
        "ProbeError",
        "SemspecError",
    ),
    "policy": ("POLICIES", "make_policy"),
    "reasoner": ("Reasoner", "Sources"),
    "result": ("RunResult",),
    "trace": ("RunTrace", "StepRecord", "read_trace"),
}
"""Which module each public name comes from; the imports above say the same to type checkers."""

__all__ = [
    "POLICIES",
    "ConfigError",
    "DecodeError",
    "DownloadError",
    "IncompatibleError",
    "ModelConfig",
    "ModelError",
    "PairNotPulledError",
    "ProbeError",
    "Reasoner",
    "RunConfig",
    "RunResult",
    "RunTrace",
    "SamplingConfig",
    "SemspecError",
    "Sources",
    "Speculation",
    "StepRecord",
    "__version__",
    "make_policy",
    "read_trace",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = _version()
    else:
        home = next((module for module, names in _HOMES.items() if name in names), None)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("semspec-local")
    except metadata.PackageNotFoundError:  # a checkout that was never installed
        return "unknown"
