"""LaneStepModel: one of many sequences in a context that several runs share."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from ..config import SamplingConfig
from ..protocols import FloatArray, TapPoint
from .context import Decoded, LlamaContext
from .hub import Hub
from .kept import N_KEPT
from .session import LlamaStepModel


class LaneStepModel(LlamaStepModel):
    """A `LlamaStepModel` whose context belongs to others too; what it wants evaluated goes through `hub`."""

    def __init__(self, context: LlamaContext, sequence: int, hub: Hub, sampling: SamplingConfig) -> None:
        self.context, self.model, self.sequence = context, context.model, sequence
        self._hub = hub
        with ExitStack() as stack:
            self._begin(sampling, 0, stack)
            self._check_rollback()
            self._stack = stack.pop_all()

    @property
    def _writes_alone(self) -> bool:
        return False

    def _evaluate(self, tokens: Sequence[int], outputs: Sequence[bool] | None) -> Decoded:
        return self._hub.evaluate(self.context, self.sequence, tokens, self.n_past, outputs, self._reads_states)

    def _kept_logits(self) -> FloatArray:
        kept: FloatArray = self._all_logits[:N_KEPT].copy()  # the buffer is everybody's
        return kept

    def _decode(self, tokens: Sequence[int], *, all_logits: bool = False) -> dict[TapPoint, FloatArray]:
        states = super()._decode(tokens, all_logits=all_logits)
        self._logits = self._logits.copy()  # the buffer is everybody's
        return states

    def _clear(self) -> None:
        self.context.trim(0, self.sequence)
