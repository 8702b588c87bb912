"""What a GGUF says about itself, as far as probes and reports need it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from .errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """The facts that decide whether a probe fits a model.

    `architecture` and `name` are the GGUF's own (`qwen2`, `Qwen2.5 Coder 1.5B Instruct`); `quantization` is its file
    type (`Q4_K_M`). `fingerprint` is the sha256 of the file in hex, None where nobody has computed it.
    """

    architecture: str
    n_layer: int
    n_embd: int
    n_vocab: int
    name: str
    quantization: str
    path: str
    fingerprint: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelInfo:
        """Raise ConfigError for a missing or unknown field, or one of the wrong type."""
        known = {item.name: item for item in fields(cls)}
        if unknown := sorted(set(values) - set(known)):
            raise ConfigError(f"model facts have an unknown field {unknown[0]!r}; wanted {', '.join(known)}")
        for name in known:
            value = values.get(name)
            wanted = int if name.startswith("n_") else str
            if name == "fingerprint" and value is None:
                continue
            if not isinstance(value, wanted) or isinstance(value, bool):
                kind = "a whole number" if wanted is int else "text"
                raise ConfigError(f"model facts: {name} is {value!r}; wanted {kind}")
        return cls(**{name: values[name] for name in known if name in values})
