"""What data files call a question, and the sentence that asks for an answer in a box. Knows nothing of answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

QUESTION_KEYS = ("question", "problem", "prompt")
"""What a line may call its question; GSM8K, MATH and batches of jobs differ."""

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
"""The sentence that Qwen's and DeepSeek's authors ask mathematics with."""


def question_of(row: Any) -> str | None:
    """The question in a line of data: the first text under `QUESTION_KEYS`; None for a line that has none."""
    if not isinstance(row, Mapping):
        return None
    return next((row[key] for key in QUESTION_KEYS if isinstance(row.get(key), str)), None)
