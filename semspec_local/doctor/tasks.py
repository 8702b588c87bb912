"""What the child process is asked. Arguments and answers are JSON; what is wrong is raised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..modelinfo import ModelInfo
from ..roles import ProbeRole, Role

_CONTEXTS = (8192, 4096, 2048, 1024, 512, 256)


def llama() -> dict[str, Any]:
    from ..llama.build import identity

    return identity()


def build() -> dict[str, Any]:
    from ..llama.build import build_facts

    return build_facts()


def symbols() -> list[str]:
    from ..llama.build import missing_symbols

    return missing_symbols()


def defaults() -> list[str]:
    from ..llama.build import odd_defaults

    return odd_defaults()


def model(path: str) -> dict[str, Any]:
    from ..llama.facts import model_facts

    return model_facts(Path(path))


def vocabularies(target: str, draft: str) -> str | None:
    from ..llama.facts import vocabulary_difference

    return vocabulary_difference(Path(target), Path(draft))


def memory(paths: dict[str, str], n_ctx: int) -> dict[str, Any]:
    """What both models need and what is free, in bytes; `fits` is the largest usual context that fits, if any."""
    from ..llama.memory import free_bytes, needed_bytes

    def needed(n: int) -> dict[str, int]:
        return {role: needed_bytes(Path(path), n, 1) for role, path in paths.items()}

    free = free_bytes()
    smaller = [n for n in _CONTEXTS if n < n_ctx and free is not None and sum(needed(n).values()) <= free]
    return {"needed": needed(n_ctx), "free": free, "fits": max(smaller, default=None)}


def onnx(path: str) -> dict[str, Any]:
    from ..probes.trial import runtime_facts

    return runtime_facts(Path(path))


def probe(path: str, role: ProbeRole, infos: dict[Role, dict[str, Any]]) -> dict[str, Any]:
    from ..probes.trial import probe_facts

    return probe_facts(Path(path), role, {one: ModelInfo.from_dict(facts) for one, facts in infos.items()})


def smoke(files: dict[str, str], probes: dict[ProbeRole, str], models: dict[str, Any]) -> dict[str, Any]:
    from .smoke import try_pair

    return try_pair(files, probes, models)
