"""C functions of llama.cpp's libraries that llama_cpp does not bind: tensor access and the GGUF reader.

They are exported by ggml-base, which the bindings load only as a dependency. Structures of ggml are never
mirrored here, since their layout changes between versions.
"""

from __future__ import annotations

import ctypes
from ctypes import c_bool, c_char_p, c_int, c_int64, c_size_t, c_uint16, c_uint32, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any

import llama_cpp._ctypes_extensions as _loader
from llama_cpp import llama_cpp as C

__all__ = ["C", "GgufInitParams", "ggml_base"]


class GgufInitParams(ctypes.Structure):
    """`struct gguf_init_params`: read the header only, into no ggml context."""

    _fields_ = [("no_alloc", c_bool), ("ctx", c_void_p)]


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "ggml_get_name": (c_char_p, [c_void_p]),
    "ggml_nbytes": (c_size_t, [c_void_p]),
    "ggml_element_size": (c_size_t, [c_void_p]),
    "ggml_backend_tensor_get": (None, [c_void_p, c_void_p, c_size_t, c_size_t]),
    "gguf_init_from_file": (c_void_p, [c_char_p, GgufInitParams]),
    "gguf_free": (None, [c_void_p]),
    "gguf_get_data_offset": (c_size_t, [c_void_p]),
    "gguf_find_key": (c_int64, [c_void_p, c_char_p]),
    "gguf_get_kv_type": (c_int, [c_void_p, c_int64]),
    "gguf_get_val_u16": (c_uint16, [c_void_p, c_int64]),
    "gguf_get_arr_n": (c_size_t, [c_void_p, c_int64]),
    "gguf_get_val_u32": (c_uint32, [c_void_p, c_int64]),
    "gguf_get_val_str": (c_char_p, [c_void_p, c_int64]),
    "gguf_get_n_tensors": (c_int64, [c_void_p]),
    "gguf_get_tensor_name": (c_char_p, [c_void_p, c_int64]),
    "gguf_get_tensor_offset": (c_size_t, [c_void_p, c_int64]),
    "gguf_get_tensor_size": (c_size_t, [c_void_p, c_int64]),
    "ggml_set_abort_callback": (c_void_p, [c_void_p]),
}


@lru_cache(maxsize=1)
def ggml_base() -> Any:
    """The ggml-base library that llama.cpp itself uses, with the signatures of the functions used here."""
    # Looking a name up in libllama finds it in what libllama depends on. Opening the file anew could load a second copy
    # (wheels hold it under several names), with a log of its own that goes to stderr.
    library = ctypes.CDLL(C._lib._name, handle=C._lib._handle)
    if not hasattr(library, "gguf_free"):  # Windows looks only into the library itself
        library = _loader.load_shared_library("ggml-base", Path(C.__file__).parent / "lib")
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
