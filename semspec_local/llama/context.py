"""One native llama.cpp context: decode, logits and memory, for one or many sequences.

Owns the batch and the callbacks. Knows nothing of steps, text or sampling.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ConfigError, DecodeError, ModelError
from ..interrupts import HeldInterrupt
from ..protocols import FloatArray, TapPoint
from .aborts import loading
from .logs import first_complaint, forget_complaints
from .model import LlamaModel
from .native import C
from .taps import LayerTaps

N_UBATCH = 512
_ABORTABLE = 64  # shorter batches finish before anybody could want them interrupted

# LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: the part of the state that cannot be cut (recurrent states)
_PARTIAL_ONLY = 1


# Architectures whose contexts hand out that state and logits at once, as the tests see; lfm2 is one that does not.
_HANDS_OUT_STATE = ("gemma2", "llama", "mamba", "qwen2")


def _is_output_state(taps: Sequence[TapPoint], model: LlamaModel) -> bool:
    """Is the state after the final norm all that is wanted? llama.cpp can hand that out without a callback."""
    return model.architecture in _HANDS_OUT_STATE and set(taps) == {TapPoint(model.n_layer - 1, "post")}


@dataclass(frozen=True)
class Decoded:
    """What one decode left behind: the logits of the output tokens, and the states of all tokens per tap.

    `logits` float32 [n_outputs, n_vocab] is a copy when `decode` ran in chunks, otherwise llama.cpp's own buffer, valid
    until the next decode. `states` float32 [n_tokens, n_embd] per tap.
    """

    logits: FloatArray
    states: dict[TapPoint, FloatArray]


class _Floats:
    """What NumPy asks for to see memory as an array; made in a microsecond, where ctypes' way takes thirty."""

    def __init__(self, address: int, shape: tuple[int, ...]) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": shape, "typestr": _FLOAT, "version": 3}


_FLOAT = np.dtype(np.float32).str


def float_view(pointer: Any, shape: tuple[int, ...]) -> FloatArray:
    """The floats that a ctypes pointer points at, float32 of this shape; not a copy."""
    return np.asarray(_Floats(ctypes.addressof(pointer.contents), shape))


class LlamaContext:
    """A context of `model`, for `n_seq_max` sequences of `n_ctx` tokens each; close it before the model.

    With `one_cache` a token passes over the cells of all sequences. With a cache each it does not, but llama.cpp then
    evaluates only sequences with neighbouring numbers together.
    """

    def __init__(
        self,
        model: LlamaModel,
        *,
        n_ctx: int,
        n_threads: int,
        taps: Sequence[TapPoint] = (),
        n_seq_max: int = 1,
        one_cache: bool = True,
        n_batch: int = 2048,
        n_ubatch: int = N_UBATCH,
    ) -> None:
        most = model.most_sequences(n_ctx) if one_cache else None
        if most is not None and n_seq_max > most:
            raise ConfigError(
                f"{model.path.name} ({model.architecture}) reads short contexts otherwise than long ones, and "
                f"{n_seq_max} of {n_ctx:,} tokens would be taken for a long one; at most {most} go together: use fewer "
                "lanes, or a smaller -c"
            )
        self.model = model
        self.n_ctx = n_ctx
        self.n_vocab = model.vocabulary.n_tokens
        self.n_batch = min(n_batch, max(n_ctx, 64))
        self.taps = (
            LayerTaps(taps, architecture=model.architecture, n_layer=model.n_layer, n_embd=model.n_embd)
            if taps
            else None
        )
        self._outputs_state = _is_output_state(taps, model)
        self._calls_back = bool(taps) and not self._outputs_state
        self._reads_states = bool(taps)
        self._stack = ExitStack()
        self._held: HeldInterrupt | None = None
        self._abort_callback = C.ggml_abort_callback(self._should_abort)
        parameters = C.llama_context_default_params()
        parameters.n_ctx, parameters.n_seq_max = n_ctx * n_seq_max, n_seq_max
        parameters.n_batch, parameters.n_ubatch = self.n_batch, min(n_ubatch, self.n_batch)
        parameters.n_threads = parameters.n_threads_batch = n_threads
        parameters.swa_full = True  # a sliding window kept whole can be cut anywhere
        parameters.kv_unified = one_cache
        if self._outputs_state:
            parameters.embeddings, parameters.pooling_type = True, C.LLAMA_POOLING_TYPE_NONE
        elif self.taps:
            parameters.cb_eval = self.taps.callback
        forget_complaints()
        with loading(model.path, "try a smaller -c or fewer -ngl"), HeldInterrupt() as held:
            self.handle: Any = C.llama_init_from_model(model.handle, parameters)
        if not self.handle:
            raise ModelError(
                f"llama.cpp cannot make a context of {n_ctx:,} tokens for {model.path.name}: "
                f"{first_complaint() or 'not enough memory'}; try a smaller -c"
            )
        self._stack.callback(C.llama_free, self.handle)
        self._batch = C.llama_batch_init(self.n_batch, 0, 1)
        self._stack.callback(C.llama_batch_free, self._batch)
        self._memory = C.llama_get_memory(self.handle)
        with ExitStack() as on_error:
            on_error.callback(self.close)
            held.check()
            self._arrays = self._batch_arrays()
            self._one = self._batch_of_one()
            self._check_taps()
            self.can_trim = self._probe_trim()
            on_error.pop_all()

    def _batch_arrays(self) -> tuple[Any, ...]:
        """NumPy views of the batch's token, position and output columns; every token is of sequence 0 until changed."""
        batch, shape = self._batch, (self.n_batch,)
        for i in range(self.n_batch):
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
        self._n_other_sequences = 0  # leading tokens of the batch whose sequence may not be 0
        as_array = np.ctypeslib.as_array
        return (as_array(batch.token, shape), as_array(batch.pos, shape), as_array(batch.logits, shape))

    def _batch_of_one(self) -> Any:
        """A batch that always has one token of sequence 0, with output."""
        batch = C.llama_batch_init(1, 0, 1)
        self._stack.callback(C.llama_batch_free, batch)
        batch.n_tokens, batch.n_seq_id[0], batch.seq_id[0][0], batch.logits[0] = 1, 1, 0, 1
        self._one_token, self._one_position = batch.token, batch.pos
        return batch

    # -- decoding -----------------------------------------------------------------------------------

    def read_states(self, wanted: bool) -> None:
        """Whether the next decodes give the states of the taps; without, they cost a little less."""
        if self.taps is None or wanted == self._reads_states:
            return
        self.taps.muted = not wanted
        if self._outputs_state:
            C.llama_set_embeddings(self.handle, wanted)
        self._reads_states = wanted  # last: what a Ctrl-C broke off is done again

    def decode(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[int] | None = None,
        outputs: Sequence[bool] | None = None,
    ) -> Decoded:
        """Evaluate tokens; `outputs` marks those whose logits are wanted (default: the last one).

        Raises DecodeError; the caller then has to drop what was added to the memory.
        """
        n = len(tokens)
        if outputs is None:
            outputs = [False] * (n - 1) + [True]
        all_flagged = self._reads_states and self.taps is not None and self.taps.needs_all_outputs
        flags = [True] * n if all_flagged else list(outputs)
        logits: list[FloatArray] = []
        states: list[dict[TapPoint, FloatArray]] = []
        for start in range(0, n, self.n_batch):
            part = slice(start, min(start + self.n_batch, n))
            rows = self._decode_part(tokens[part], positions[part], sequences and sequences[part], flags[part])
            kept = [wanted for wanted, flag in zip(outputs[part], flags[part]) if flag]
            rows = rows if all(kept) else rows[np.asarray(kept, dtype=bool)]
            logits.append(rows if n <= self.n_batch else rows.copy())
            states.append(self._states(part.stop - part.start))
        if len(logits) == 1:
            return Decoded(logits[0], states[0])
        joined = {tap: np.concatenate([part[tap] for part in states]) for tap in states[0]}
        return Decoded(np.concatenate(logits), joined)

    def _decode_part(
        self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int] | None, flags: Sequence[bool]
    ) -> FloatArray:
        n = len(tokens)
        token_column, position_column, output_column = self._arrays
        token_column[:n], position_column[:n], output_column[:n] = tokens, positions, flags
        self._set_sequences(n, sequences)
        self._batch.n_tokens = n
        if self.taps and self._calls_back:
            self.taps.start(list_names=self._checking)
        self._run()
        n_outputs = sum(flags)
        if not n_outputs:
            return np.empty((0, self.n_vocab), dtype=np.float32)
        return float_view(C.llama_get_logits(self.handle), (n_outputs, self.n_vocab))

    def _set_sequences(self, n: int, sequences: Sequence[int] | None) -> None:
        if sequences is None and not self._n_other_sequences:
            return
        n_written = n if sequences is not None else self._n_other_sequences
        for i, sequence in enumerate(sequences if sequences is not None else (0,) * n_written):
            self._batch.seq_id[i][0] = sequence
        self._n_other_sequences = max(n, self._n_other_sequences) if sequences is not None else 0

    def _states(self, n: int) -> dict[TapPoint, FloatArray]:
        """The states of the last decode's tokens, per tap."""
        if self.taps is None or not self._reads_states:
            return {}
        if self._calls_back:
            return self.taps.rows(n)
        states = float_view(C.llama_get_embeddings(self.handle), (n, self.model.n_embd))
        return {self.taps.taps[0]: states.copy()}

    # -- one token at a time ------------------------------------------------------------------------

    def decode_one(self, token: int, position: int) -> None:
        """Evaluate one token of sequence 0, with output: the short way, a few microseconds beside llama.cpp's own time.

        Read what follows it with `last_logits`, `last_state` and `LlamaSampler.sample_last`. Not for contexts whose
        states come through a callback (`calls_back`).
        """
        self._one_token[0] = token
        self._one_position[0] = position
        status = C.llama_decode(self.handle, self._one)
        if status:
            self._raise_status(status)

    @property
    def calls_back(self) -> bool:
        """Do states come through a callback, once per node of the graph?"""
        return self._calls_back

    def last_logits(self) -> FloatArray:
        """Logits float32 [n_vocab] of a token that was decoded alone: llama.cpp's own buffer.

        The next `decode_one` writes the next token's there; anything else may move it.
        """
        return float_view(C.llama_get_logits(self.handle), (self.n_vocab,))

    def last_state(self) -> FloatArray:
        """State float32 [n_embd] after the final norm of a token that was decoded alone; a buffer like the logits'."""
        return float_view(C.llama_get_embeddings(self.handle), (self.model.n_embd,))

    def _run(self) -> None:
        """llama_decode on the filled batch; Ctrl-C aborts a long one."""
        abortable = self._batch.n_tokens >= _ABORTABLE
        if not abortable and not self._calls_back:  # no Python runs meanwhile that Ctrl-C could break
            self._raise_status(C.llama_decode(self.handle, self._batch))
            return
        with HeldInterrupt() as self._held:
            if abortable:
                C.llama_set_abort_callback(self.handle, self._abort_callback, None)
            status = C.llama_decode(self.handle, self._batch)
            if abortable:
                C.llama_set_abort_callback(self.handle, C.ggml_abort_callback(), None)
        self._held.check()
        if self.taps:
            self.taps.raise_stored()
        self._raise_status(status)

    def _raise_status(self, status: int) -> None:
        if status == 1:
            raise DecodeError(f"the context of {self.n_ctx:,} tokens is full; use a larger -c or a shorter question")
        if status != 0:
            raise DecodeError(f"llama.cpp could not evaluate {self._batch.n_tokens} tokens (status {status})")

    def _should_abort(self, _data: Any) -> bool:
        # Python runs signal handlers between two of its own instructions: being called is what lets Ctrl-C arrive.
        return self._held is not None and self._held.error is not None

    # -- memory -------------------------------------------------------------------------------------

    def clear(self) -> None:
        C.llama_memory_clear(self._memory, True)

    def trim(self, n_past: int, sequence: int = 0) -> bool:
        """Drop the cells of a sequence from position `n_past` on; False when this memory cannot do it."""
        if not C.llama_memory_seq_rm(self._memory, sequence, n_past, -1):
            return False
        # A sliding window answers True even when the cells that the kept tokens look back to are gone; with no cell
        # left at all, its first is -1.
        first = int(C.llama_memory_seq_pos_min(self._memory, sequence))
        window = int(C.llama_model_n_swa(self.model.handle))
        return n_past == 0 or window == 0 or first == 0 or 0 < first < n_past - window

    def copy(self, source: int, destination: int) -> None:
        """Let another sequence share all cells of `source`."""
        C.llama_memory_seq_cp(self._memory, source, destination, -1, -1)

    def save_state(self, sequence: int = 0) -> bytes:
        """The part of a sequence's state that cannot be cut, for memories where `can_trim` is False."""
        size = C.llama_state_seq_get_size_ext(self.handle, sequence, _PARTIAL_ONLY)
        buffer = (ctypes.c_uint8 * size)()
        written = C.llama_state_seq_get_data_ext(self.handle, buffer, size, sequence, _PARTIAL_ONLY)
        return ctypes.string_at(buffer, written)

    def load_state(self, state: bytes, sequence: int = 0) -> bool:
        """Put back what `save_state` returned; False when llama.cpp refuses it."""
        buffer = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        return bool(C.llama_state_seq_set_data_ext(self.handle, buffer, len(state), sequence, _PARTIAL_ONLY))

    # -- checks at load -----------------------------------------------------------------------------

    _checking = False

    def _check_taps(self) -> None:
        """Three tokens are decoded so that a wrong layer name fails here, with the names that exist."""
        self._checking = True
        try:
            self.decode([0, 0, 0], [0, 1, 2])
        finally:
            self._checking = False
            self.clear()

    def _probe_trim(self) -> bool:
        """Can the tail of a sequence be dropped? Tried, not guessed from the architecture."""
        self.decode([0, 0], [0, 1])
        answer = bool(C.llama_memory_seq_rm(self._memory, 0, 1, -1))
        self.clear()
        return answer

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> LlamaContext:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
