"""Where measured costs are kept: a file in the user's cache folder per pair, machine, threads and GPU layers.

A file holds one measurement per way of loading the models (taps, log-probabilities), the last one at the end.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..config import ModelConfig
from ..errors import NOT_AS_WRITTEN
from ..machine import cpu_name, n_cores
from ..provenance import atomic_write, fingerprint_file, known_sha256
from ..reasoner import Sources
from ..resources import cache_dir
from ..roles import ROLES, Role
from ..trace import json_line
from .pair import Loaded, PairCosts

logger = logging.getLogger(__name__)

_FOLDER = "costs"
_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class CostKey:
    """What costs belong to. `fingerprints` are the sha256 of the models' files, by role."""

    fingerprints: dict[Role, str]
    cpu: str
    n_cores: int
    threads: dict[Role, int]
    gpu_layers: dict[Role, int]

    @property
    def path(self) -> Path:
        """The file for it; it may not exist."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        return cache_dir() / _FOLDER / f"{digest[:24]}.json"


def cost_key(sources: Sources, models: ModelConfig) -> CostKey:
    """The key of a pair on this machine; hashes files that were never hashed. Raises OSError."""
    paths = _paths(sources)
    return _key({role: fingerprint_file(path)["sha256"] for role, path in paths.items()}, models)


def store_costs(key: CostKey, costs: PairCosts) -> None:
    """Keep a measurement, in place of the last one of models that were loaded alike. Raises OSError."""
    others = [one for one in _read(key) if one.loaded != costs.loaded]
    key.path.parent.mkdir(parents=True, exist_ok=True)
    measured = [one.to_json() for one in (*others, costs)]
    atomic_write(key.path, json_line({"version": _VERSION, "key": asdict(key), "measured": measured}))


def stored_costs(sources: Sources, models: ModelConfig, loaded: Loaded | None = None) -> PairCosts | None:
    """The last measurement of a pair on this machine, or None; with `loaded`, of models that were loaded just so.

    Reads no big file: one that was never hashed was never measured. A broken file is ignored, with a warning.
    """
    if not (cache_dir() / _FOLDER).is_dir():
        return None
    try:
        found = {role: known_sha256(path) for role, path in _paths(sources).items()}
    except OSError:
        return None
    fingerprints = {role: sha256 for role, sha256 in found.items() if sha256 is not None}
    measured = _read(_key(fingerprints, models)) if len(fingerprints) == len(found) else []
    fitting = [one for one in measured if loaded is None or one.loaded == loaded]
    return fitting[-1] if fitting else None


def _paths(sources: Sources) -> dict[Role, Path]:
    return {role: path for role in ROLES if (path := sources.path(role)) is not None}


def _key(fingerprints: dict[Role, str], models: ModelConfig) -> CostKey:
    layers: dict[Role, int] = {"target": models.n_gpu_layers, "draft": models.n_gpu_layers_draft}
    return CostKey(
        fingerprints=fingerprints,
        cpu=cpu_name(),
        n_cores=n_cores(),
        threads={role: models.threads[role] for role in fingerprints},
        gpu_layers={role: layers[role] for role in fingerprints},
    )


def _read(key: CostKey) -> list[PairCosts]:
    """The measurements in the file of `key`, the oldest first."""
    try:
        found: Any = json.loads(key.path.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or found.get("version") != _VERSION or found.get("key") != asdict(key):
            raise ValueError(f"wanted an object of version {_VERSION} with the key of its name")
        return [PairCosts.from_json(one) for one in found["measured"]]
    except FileNotFoundError:
        return []
    except (OSError, *NOT_AS_WRITTEN) as error:
        logger.warning("%s is broken and was ignored (%s); semspec-local costs writes it anew", key.path, error)
        return []
