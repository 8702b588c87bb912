"""Records wait here while a stop string may have begun in their text: what was handed out is never taken back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .roles import Role
from .trace import StepRecord


class WaitingRecords:
    """The records of a run that were not handed out yet, in order."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop.encode() for stop in stops]
        self._records: list[StepRecord] = []

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: StepRecord) -> None:
        self._records.append(record)

    def settled(self, text: bytes) -> bool:
        """Can no stop string have begun at the end of the committed `text`?"""
        return not any(text.endswith(stop[:n]) for stop in self._stops for n in range(1, len(stop)))

    @property
    def first(self) -> StepRecord:
        return self._records[0]

    def pop(self) -> StepRecord:
        return self._records.pop(0)

    def cut(self, n_bytes: int, n_tokens: Mapping[Role, int]) -> int:
        """Take `n_bytes` of text, and so many tokens of each model, off the end of the committed steps.

        A step of which nothing is left is not committed any more; returns how many those are.
        """
        left = dict(n_tokens)
        n_emptied = 0
        for i in reversed(range(len(self._records))):
            record = self._records[i]
            if not record.committed or n_bytes <= 0:
                continue
            text = record.text.encode()
            kept = max(0, len(text) - n_bytes)
            n_bytes -= len(text) - kept
            n_emptied += not kept
            changes: dict[str, Any] = {
                "text": text[:kept].decode("utf-8", errors="replace"),
                "end": "stop",
                "committed": bool(kept),
            }
            for role in left:
                n_had = getattr(record, f"n_{role}_tokens")
                if n_had is not None:
                    taken = min(n_had, left[role])
                    left[role] -= taken
                    changes[f"n_{role}_tokens"] = n_had - taken
                    if role == record.origin:
                        changes["n_reused_tokens"] = min(record.n_reused_tokens, n_had - taken)
            self._records[i] = replace(record, **changes)
        return n_emptied
