"""How much memory models and their caches take, and how much there is: asked before anything is loaded."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import ConfigError
from ..roles import Role
from .ggufcheck import check_gguf
from .kept import N_KEPT
from .native import C, GgufInitParams, ggml_base

_CACHE_BYTES = 2  # keys and values are float16
_U32, _STRING, _ARRAY = 4, 8, 9  # GGUF_TYPE_UINT32 and so on
_SPARE_BYTES = 256 * 2**20
"""Python, ONNX Runtime, and llama.cpp's buffers for small models."""

_N_UBATCH = 512


def needed_bytes(path: Path, n_ctx: int, n_lanes: int, n_gpu_layers: int = 0) -> int:
    """About what one model takes of the main memory: its weights, its caches, and the buffers of a batch.

    For memories that are no plain cache it is an upper bound. Layers on a GPU take none. Raises ModelError.
    """
    check_gguf(path)
    facts = _header(path)
    n_layer, n_embd = facts["block_count"], facts["embedding_length"]
    n_head = max(1, facts["attention.head_count"])
    n_head_kv = facts["attention.head_count_kv"] or n_head
    per_head = sum(facts[f"attention.{part}_length"] or n_embd // n_head for part in ("key", "value"))
    n_ctx = min(n_ctx, facts["context_length"] or n_ctx)
    caches = n_layer * n_head_kv * per_head * n_ctx * n_lanes * _CACHE_BYTES
    n_logits = _N_UBATCH + N_KEPT * n_lanes * (n_lanes > 1)
    buffers = (n_logits * facts["vocab_size"] + _N_UBATCH * 8 * n_embd) * 4
    return math.ceil((path.stat().st_size + caches) * _share_here(n_gpu_layers, n_layer)) + buffers


def _share_here(n_gpu_layers: int, n_layer: int) -> float:
    """The share of a model's layers that stay in the main memory."""
    if n_gpu_layers == 0 or n_layer == 0 or not C.llama_supports_gpu_offload():
        return 1.0
    return max(0.0, 1 - n_gpu_layers / n_layer) if n_gpu_layers > 0 else 0.0


_KEYS = (
    *("block_count", "embedding_length", "context_length", "vocab_size"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
)


def _header(path: Path) -> dict[str, int]:
    """The numbers of a GGUF's header by their names without the architecture; 0 for one that is not there."""
    library = ggml_base()
    header = library.gguf_init_from_file(os.fsencode(path), GgufInitParams(no_alloc=True, ctx=None))
    try:
        at = library.gguf_find_key(header, b"general.architecture")
        known = at >= 0 and library.gguf_get_kv_type(header, at) == _STRING
        architecture = library.gguf_get_val_str(header, at).decode("utf-8", "replace") if known else ""
        found = {}
        for key in _KEYS:
            at = library.gguf_find_key(header, f"{architecture}.{key}".encode())
            is_number = at >= 0 and library.gguf_get_kv_type(header, at) == _U32
            found[key] = int(library.gguf_get_val_u32(header, at)) if is_number else 0
        at = library.gguf_find_key(header, b"tokenizer.ggml.tokens")
        if at >= 0 and library.gguf_get_kv_type(header, at) == _ARRAY:
            found["vocab_size"] = int(library.gguf_get_arr_n(header, at))
        return found
    finally:
        library.gguf_free(header)


def free_bytes(root: Path = Path("/")) -> int | None:
    """Memory that may be taken now, within a container's limits; None where the system does not tell (not Linux)."""
    try:
        text = (root / "proc/meminfo").read_text()
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    bounds = [int(found[1]) * 1024] if found else []
    for folder, limit, used, prefix in (
        ("sys/fs/cgroup", "memory.max", "memory.current", ""),
        ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        try:
            most, now = (int((root / folder / name).read_text()) for name in (limit, used))
        except (OSError, ValueError):  # not there, or "max": no limit
            continue
        bounds.append(max(0, most - now + _file_cache(root / folder / "memory.stat", prefix)))
    return min(bounds, default=None)


def _file_cache(path: Path, prefix: str) -> int:
    """Bytes that a container holds of files it has read, models among them; they are given back when wanted."""
    try:
        text = path.read_text()
    except OSError:
        return 0
    return sum(map(int, re.findall(rf"^{prefix}(?:in)?active_file (\d+)$", text, re.MULTILINE)))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be loaded: files, tokens of context for each lane, and layers on a GPU, by role."""

    paths: Mapping[Role, Path]
    n_ctx: int
    n_gpu_layers: Mapping[Role, int] = field(default_factory=dict)

    def needed(self, n_lanes: int) -> dict[Role, int]:
        """Bytes of main memory by role."""
        layers = self.n_gpu_layers
        return {role: needed_bytes(path, self.n_ctx, n_lanes, layers.get(role, 0)) for role, path in self.paths.items()}

    def check(self, n_lanes: int) -> None:
        """Raise ConfigError, with the numbers, when this would not fit into the memory that is free."""
        free = free_bytes()
        if free is None:
            return
        needed = self.needed(n_lanes)
        total = sum(needed.values()) + _SPARE_BYTES
        if total <= free:
            return
        lanes = f"{n_lanes} lanes of {self.n_ctx:,} tokens need" if n_lanes > 1 else f"{self.n_ctx:,} tokens need"
        parts = ", ".join(f"{role} {size / 2**30:.1f}" for role, size in needed.items())
        smaller = "fewer --lanes or a smaller -c" if n_lanes > 1 else "a smaller -c or smaller models"
        raise ConfigError(
            f"{lanes} about {total / 2**30:.1f} GiB of memory ({parts}), and {free / 2**30:.1f} are free; "
            f"end other programs, use {smaller}, or try all the same with --no-check-memory"
        )

    def lanes_that_fit(self, most: int) -> int:
        """The largest number of lanes, at most `most`, for which the memory suffices; at least 1."""
        free = free_bytes()
        if free is None:
            return most
        for n_lanes in range(most, 1, -1):
            if sum(self.needed(n_lanes).values()) + _SPARE_BYTES <= free:
                return n_lanes
        return 1
