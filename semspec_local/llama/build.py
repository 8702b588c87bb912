"""What the installed llama.cpp and its bindings are; for `doctor`, which asks in a process that may die of it."""

from __future__ import annotations

from typing import Any

import llama_cpp

from .native import C, ggml_base

_FUNCTIONS = (
    *("llama_memory_seq_rm", "llama_memory_seq_pos_min"),  # rollback
    *("llama_state_seq_get_data_ext", "llama_state_seq_set_data_ext"),  # checkpoints
    *("llama_set_abort_callback", "llama_log_set"),
)

_DEFAULTS = {"n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1}
"""What `llama_context_default_params` answers; other numbers mean that bindings and library differ."""


def identity() -> dict[str, Any]:
    """The version of the bindings that were imported, and where they are."""
    return {"version": str(llama_cpp.__version__), "file": str(llama_cpp.__file__)}


def build_facts() -> dict[str, Any]:
    """What the library was built for: `features` as it prints them (`AVX2`), and what it can do."""
    said = C.llama_print_system_info().decode("utf-8", "replace")
    entries = [entry.rpartition(":")[2].partition("=") for entry in said.split("|")]
    return {
        "features": sorted(name.strip() for name, _, value in entries if value.strip() == "1"),
        "gpu": bool(C.llama_supports_gpu_offload()),
        "mmap": bool(C.llama_supports_mmap()),
        "mlock": bool(C.llama_supports_mlock()),
    }


def missing_symbols() -> list[str]:
    """What this program calls and the library does not have; empty when all is there."""
    missing = [name for name in _FUNCTIONS if not hasattr(C, name)]
    if "cb_eval" not in {field[0] for field in C.llama_context_params._fields_}:
        missing.append("cb_eval")
    try:
        ggml_base()
    except (AttributeError, OSError) as error:  # it names the first one that is not there
        missing.append(str(error))
    return missing


def odd_defaults() -> list[str]:
    """Parameters whose defaults are not what they should be, each with got and wanted."""
    parameters = C.llama_context_default_params()
    got = {name: int(getattr(parameters, name)) for name in _DEFAULTS}
    return [f"{name} is {got[name]:,}, wanted {wanted:,}" for name, wanted in _DEFAULTS.items() if got[name] != wanted]
