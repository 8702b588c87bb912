"""A GGUF's weights and facts, owned by an ExitStack; knows nothing of contexts or text."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import ModelError
from ..interrupts import HeldInterrupt
from ..modelinfo import ModelInfo
from .aborts import loading, say_aborts
from .ggufcheck import check_gguf
from .logs import first_complaint, forget_complaints, route_logs
from .native import C
from .vocabulary import LlamaVocabulary

_backend_ready = False


def _start_backend() -> None:
    global _backend_ready
    route_logs()
    say_aborts()
    if not _backend_ready:
        C.llama_backend_init()
        _backend_ready = True


class LlamaModel:
    """One loaded GGUF. Close it, or use it in a `with`; contexts made from it must be closed first."""

    def __init__(self, path: Path, *, n_gpu_layers: int = 0, weights: bool = True) -> None:
        """Without `weights` the header is read and checked against the architecture; no context can be made then."""
        check_gguf(path)
        _start_backend()
        forget_complaints()
        parameters = C.llama_model_default_params()
        parameters.n_gpu_layers = n_gpu_layers
        if not weights:  # llama.cpp wants no mapping of the file then
            parameters.no_alloc, parameters.load_mode = True, C.LLAMA_LOAD_MODE_NONE
        with loading(path, "download it again, or use fewer -ngl"), HeldInterrupt() as held:
            # llama.cpp gives up loading when this answers False.
            parameters.progress_callback = C.llama_progress_callback(lambda _share, _data: held.error is None)
            handle = C.llama_model_load_from_file(os.fsencode(path), parameters)
        if held.error is not None and handle:
            C.llama_model_free(handle)
        held.check()
        if not handle:
            reason = first_complaint() or "llama.cpp gave no reason; is there enough memory?"
            raise ModelError(f"{path} cannot be loaded: {reason}")
        self.path = path
        self.handle: Any = handle
        self._stack = ExitStack()
        self._stack.callback(C.llama_model_free, handle)
        with ExitStack() as on_error:
            on_error.callback(self.close)
            if C.llama_model_has_encoder(handle) or not C.llama_model_has_decoder(handle):
                raise ModelError(f"{path} ({self.architecture}) is not a decoder-only language model")
            self.vocabulary = LlamaVocabulary(handle, str(path))
            on_error.pop_all()

    def meta(self, key: str) -> str | None:
        """The value of a GGUF metadata key as text; None when the key is absent."""
        return self._text(lambda buffer, size: C.llama_model_meta_val_str(self.handle, key.encode(), buffer, size))

    def _text(self, read: Callable[[Any, int], int]) -> str | None:
        size = 256
        while True:
            buffer = ctypes.create_string_buffer(size)
            needed = read(buffer, size)
            if needed < 0:
                return None
            if needed < size:
                return buffer.value.decode("utf-8", errors="replace")
            size = needed + 1

    @cached_property
    def architecture(self) -> str:
        return self.meta("general.architecture") or "unknown"

    @cached_property
    def chat_template(self) -> str | None:
        template: bytes | None = C.llama_model_chat_template(self.handle, None)
        return template.decode("utf-8", errors="replace") if template else None

    @cached_property
    def n_layer(self) -> int:
        return int(C.llama_model_n_layer(self.handle))

    @cached_property
    def n_embd(self) -> int:
        return int(C.llama_model_n_embd(self.handle))

    @cached_property
    def n_ctx_train(self) -> int:
        return int(C.llama_model_n_ctx_train(self.handle))

    def most_sequences(self, n_ctx: int) -> int | None:
        """How many sequences of `n_ctx` tokens one context may hold, so that each is read as alone; None: any number.

        A model with two sets of rope factors (LongRoPE) has one for short contexts and one for long ones. llama.cpp
        chooses by the room of all sequences together.
        """
        key = f"{self.architecture}.rope.scaling"
        n_short = self.meta(f"{key}.original_context_length")
        if n_short is None or self.meta(f"{key}.type") in ("linear", "yarn") or n_ctx > int(n_short):
            return None
        return int(n_short) // n_ctx

    @cached_property
    def quantization(self) -> str:
        """The file type as llama.cpp names it, for example `Q4_K - Medium`."""
        name: bytes | None = C.llama_ftype_name(C.llama_model_ftype(self.handle))
        return name.decode() if name else "unknown"

    def info(self, fingerprint: str | None = None) -> ModelInfo:
        """The facts that probes and traces refer to; `fingerprint` is the sha256 of the file, when known."""
        return ModelInfo(
            path=str(self.path),
            name=self.meta("general.name") or self.path.stem,
            architecture=self.architecture,
            quantization=self.quantization,
            n_layer=self.n_layer,
            n_embd=self.n_embd,
            n_vocab=self.vocabulary.n_tokens,
            fingerprint=fingerprint,
        )

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> LlamaModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
