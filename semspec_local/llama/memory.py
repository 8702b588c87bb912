"""How much memory models and their caches take, and how much there is: asked before anything is loaded."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from ..errors import ConfigError
from ..roles import Role
from .ggufcheck import check_gguf
from .native import GgufInitParams, ggml_base

_CACHE_BYTES = 2  # keys and values are float16
_U32, _STRING, _ARRAY = 4, 8, 9  # GGUF_TYPE_UINT32 and so on
_SPARE_BYTES = 256 * 2**20
"""Python, ONNX Runtime, and llama.cpp's buffers for small models."""

_N_UBATCH = 512


def needed_bytes(path: Path, n_ctx: int, n_lanes: int) -> int:
    """About what one model takes: its weights, its caches, and the buffers of a batch. Raises ModelError.

    For memories that are no plain cache it is an upper bound.
    """
    check_gguf(path)
    facts = _header(path)
    n_layer, n_embd = facts["block_count"], facts["embedding_length"]
    n_head = max(1, facts["attention.head_count"])
    n_head_kv = facts["attention.head_count_kv"] or n_head
    per_head = sum(facts[f"attention.{part}_length"] or n_embd // n_head for part in ("key", "value"))
    n_ctx = min(n_ctx, facts["context_length"] or n_ctx)
    caches = n_layer * n_head_kv * per_head * n_ctx * n_lanes * _CACHE_BYTES
    buffers = _N_UBATCH * (facts["vocab_size"] + 8 * n_embd) * 4
    return path.stat().st_size + caches + buffers


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
    for limit, used in (
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            bounds.append(max(0, int((root / limit).read_text()) - int((root / used).read_text())))
        except (OSError, ValueError):  # not there, or "max": no limit
            continue
    return min(bounds, default=None)


def check_fits(paths: Mapping[Role, Path], n_ctx: int, n_lanes: int) -> None:
    """Raise ConfigError, with the numbers, when models and lanes would not fit into the memory that is free."""
    free = free_bytes()
    if free is None:
        return
    needed = {role: needed_bytes(path, n_ctx, n_lanes) for role, path in paths.items()}
    total = sum(needed.values()) + _SPARE_BYTES
    if total > free:
        parts = ", ".join(f"{role} {size / 2**30:.1f}" for role, size in needed.items())
        raise ConfigError(
            f"{n_lanes} lanes of {n_ctx:,} tokens need about {total / 2**30:.1f} GiB of memory ({parts}), and "
            f"{free / 2**30:.1f} are free; use fewer --lanes or a smaller -c"
        )


def lanes_that_fit(paths: Mapping[Role, Path], n_ctx: int, most: int) -> int:
    """The largest number of lanes, at most `most`, for which the memory suffices; at least 1."""
    free = free_bytes()
    if free is None:
        return most
    for n_lanes in range(most, 1, -1):
        if sum(needed_bytes(path, n_ctx, n_lanes) for path in paths.values()) + _SPARE_BYTES <= free:
            return n_lanes
    return 1
