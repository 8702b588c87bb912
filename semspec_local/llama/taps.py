"""Hidden states of chosen layers, read through llama.cpp's eval callback while it computes.

llama.cpp calls back once per graph node to ask whether it is wanted, and once more when a wanted node has been
computed. An exception must never leave the callback (ctypes would answer False, which cuts the graph short and
spoils the cache), so it is stored and raised after the decode. The tensors' memory is reused as soon as the
callback returns: values are copied at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..errors import ModelError
from ..protocols import FloatArray, TapPoint
from .native import C, ggml_base

# Names of the node that carries a layer's output, where it is not `l_out`.
_LAYER_OUTPUT = {"plamo2": "ffn_residual"}

# Architectures whose layer outputs are not one [n_tokens, n_embd] array per layer.
_UNSUPPORTED = {
    "deepseek4": "it keeps several residual streams per layer",
    "qwen4exp": "it keeps several residual streams per layer",
    "gemma3n": "its layer outputs have an extra dimension",
    "hrm-text": "its layer outputs are numbered by pass, not by layer",
    "gemma4-assistant": "it publishes no layer outputs",
    "eagle3": "it publishes no layer outputs",
}

_FINAL_NORM = "result_norm"
_LAYERED_NAME = re.compile(r"^(.+)-(\d+)$")


def node_name(tap: TapPoint, *, architecture: str, n_layer: int) -> str:
    """The graph node that carries `tap`; ModelError when this architecture has none."""
    if architecture in _UNSUPPORTED:
        raise ModelError(f"no hidden states from architecture {architecture!r}: {_UNSUPPORTED[architecture]}")
    if not 0 <= tap.layer < n_layer:
        raise ModelError(f"layer {tap.layer} does not exist; this model has layers 0 to {n_layer - 1}")
    if tap.norm == "post":
        if tap.layer != n_layer - 1:
            raise ModelError(f"the final norm follows layer {n_layer - 1} alone; got layer {tap.layer} after the norm")
        return _FINAL_NORM
    return f"{_LAYER_OUTPUT.get(architecture, 'l_out')}-{tap.layer}"


class LayerTaps:
    """Collects the rows of the tapped nodes over one decode; `callback` goes into the context's parameters."""

    def __init__(self, taps: Iterable[TapPoint], *, architecture: str, n_layer: int, n_embd: int) -> None:
        self.taps = tuple(sorted(set(taps)))
        self.names = {tap: node_name(tap, architecture=architecture, n_layer=n_layer) for tap in self.taps}
        # The last layer is computed for output tokens only, so every token has to be one.
        self.needs_all_outputs = any(tap.layer == n_layer - 1 for tap in self.taps)
        self._architecture = architecture
        self._n_embd = n_embd
        self._wanted = {name.encode(): tap for tap, name in self.names.items()}
        self._rows: dict[TapPoint, list[FloatArray]] = {}
        self._seen: set[bytes] | None = None
        self.muted = False
        """Is nothing wanted for now?"""
        self._error: BaseException | None = None
        self._library = ggml_base()
        self._get_name = self._library.ggml_get_name
        # llama.cpp keeps the pointer: the object must live as long as the context.
        self.callback = C.ggml_backend_sched_eval_callback(self._on_node)

    def _on_node(self, tensor: int, ask: bool, _user_data: Any) -> bool:
        if self.muted:
            return not ask
        try:
            name = self._get_name(tensor)
            if ask:
                if self._seen is not None:
                    self._seen.add(name)
                return name in self._wanted
            self._copy(self._wanted[name], tensor)
        except BaseException as error:  # raised after the decode
            self._error = self._error or error
            return not ask
        return True

    def _copy(self, tap: TapPoint, tensor: int) -> None:
        if self._library.ggml_element_size(tensor) != 4:
            raise ModelError(f"layer {tap.layer} of {self._architecture!r} is not float32")
        n_bytes = self._library.ggml_nbytes(tensor)
        n_rows, rest = divmod(n_bytes, 4 * self._n_embd)
        if rest:
            raise ModelError(f"layer {tap.layer} of {self._architecture!r} is not a multiple of {self._n_embd} wide")
        rows = np.empty((n_rows, self._n_embd), dtype=np.float32)
        if n_rows:
            self._library.ggml_backend_tensor_get(tensor, rows.ctypes.data, 0, n_bytes)
        self._rows.setdefault(tap, []).append(rows)

    def start(self, *, list_names: bool = False) -> None:
        """Forget earlier rows; call before each decode."""
        self._rows = {}
        self._error = None
        self._seen = set() if list_names else None

    def raise_stored(self) -> None:
        """Raise what went wrong inside the callback, if anything did; call after each decode."""
        if self._error is not None:
            raise self._error

    def rows(self, n_tokens: int) -> dict[TapPoint, FloatArray]:
        """The states of the last decode, float32 [n_tokens, n_embd] per tap; several ubatches are joined in order."""
        result: dict[TapPoint, FloatArray] = {}
        for tap in self.taps:
            parts = self._rows.get(tap, [])
            states = parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else None
            if states is None or len(states) != n_tokens:
                got = 0 if states is None else len(states)
                raise ModelError(
                    f"no hidden states at {self.names[tap]!r} of architecture {self._architecture!r}: got {got} rows "
                    f"for {n_tokens} tokens.{self._names_seen()}"
                )
            result[tap] = states
        return result

    def _names_seen(self) -> str:
        if not self._seen:
            return ""
        matches = [_LAYERED_NAME.match(name.decode(errors="replace")) for name in self._seen]
        return " Its graph has: " + ", ".join(sorted({match.group(1) for match in matches if match}))
