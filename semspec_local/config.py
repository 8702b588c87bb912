"""Every default, once.

Frozen dataclasses; the help text of a field is the help text of its command-line option. This module
knows nothing of models, files or the command line.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Literal

from .errors import ConfigError
from .roles import Role

AnswerBy = Literal["target", "draft"]
Overflow = Literal["error", "truncate-left"]

DEFAULT_BOUNDARY = "\n\n"
"""The text that ends a reasoning step: a blank line."""

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
"""The tags around the thinking of a reasoning model."""

MAX_SEED = 2**32 - 2
"""llama.cpp reads 2**32 - 1 as "choose one"; every other 32-bit value is a seed, 0 included."""


MAX_GUESS = 16
"""Most tokens that a draft guesses at a time."""


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


def default_threads() -> int:
    """The number of cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS and Windows
        return os.cpu_count() or 1


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How a model picks a token; the same for draft and target."""

    temperature: float = _option(0.6, "Sampling temperature; 0 always takes the likeliest token.")
    top_k: int = _option(50, "Keep the K likeliest tokens; 0 keeps all.")
    top_p: float = _option(0.95, "Keep the smallest set of tokens that holds this much probability.")

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 10:
            raise ConfigError(f"--temp is {self.temperature}; wanted a number from 0 to 10")
        if self.top_k < 0:
            raise ConfigError(f"--top-k is {self.top_k}; wanted 0 (keep all) or more")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"--top-p is {self.top_p}; wanted a number over 0, at most 1")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What one run of the speculation loop needs to know."""

    policy: str = _option("semantic-joint", "The rule that accepts or rejects a drafted step.")
    threshold: float | None = _option(
        None, "The policy's threshold. Default: what the probe was calibrated to, or the policy's own (see policies)."
    )
    n_prime: int = _option(1, "Steps that the target writes first, before the draft may propose.")
    guess: int | None = _option(
        None,
        "Let the draft guess so many tokens at a time of what the target writes; wrong ones are replaced, so that the "
        "text is distributed as without. 0: none. Default: as many as pay by what `costs` measured, where steps are "
        "drafted, and none where it has not.",
    )
    max_step_tokens: int = _option(200, "A step ends here when no blank line came before.")
    max_tokens: int = _option(2048, "Stop after this many committed tokens.")
    answer_by: AnswerBy = _option("target", "Who writes the answer after a model has finished thinking.")
    think_budget: int | None = _option(None, "Close the thinking of a reasoning model after this many tokens.")
    give_up: bool = _option(
        True, "Do not draft, or stop it, where it loses time: by what `costs` measured, and what is accepted."
    )
    overflow: Overflow = _option(
        "error", "What becomes of a question that is too long: it is refused, or its beginning is left out."
    )
    stop: tuple[str, ...] = _option((), "Stop when this text appears; may be given more than once.")
    sampling: SamplingConfig = field(default_factory=SamplingConfig)

    def __post_init__(self) -> None:
        for name, low in (("n_prime", 0), ("max_step_tokens", 1), ("max_tokens", 1)):
            if getattr(self, name) < low:
                flag = "-n" if name == "max_tokens" else "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} is {getattr(self, name)}; wanted {low} or more")
        if self.guess is not None and not 0 <= self.guess <= MAX_GUESS:
            raise ConfigError(f"--guess is {self.guess}; wanted 0 (none) to {MAX_GUESS} tokens")
        if self.answer_by not in ("target", "draft"):
            raise ConfigError(f"--answer-by is {self.answer_by!r}; wanted target or draft")
        if self.overflow not in ("error", "truncate-left"):
            raise ConfigError(f"--overflow is {self.overflow!r}; wanted error or truncate-left")
        if self.think_budget is not None and self.think_budget < 0:
            raise ConfigError(f"--think-budget is {self.think_budget}; wanted 0 or more")
        if any(not text for text in self.stop):
            raise ConfigError("--stop is empty; wanted some text to stop at")
        if any(not is_text(text) for text in self.stop):
            raise ConfigError("--stop holds bytes that are no UTF-8; wanted text")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """How the two models are loaded into llama.cpp."""

    n_ctx: int = _option(4096, "Context size in tokens, for each model.")
    n_threads: int = _option(0, "CPU threads; 0 takes every core. One less is far faster on a machine that is busy.")
    n_threads_draft: int = _option(
        0, "CPU threads of the draft; 0 takes as many as -t. A tiny draft is fastest with 1."
    )
    n_gpu_layers: int = _option(0, "Layers of the target to put on a GPU; -1 puts all.")
    n_gpu_layers_draft: int = _option(0, "Layers of the draft to put on a GPU; -1 puts all.")
    check_memory: bool = _option(True, "Refuse to load what does not fit into the memory that is free.")

    def __post_init__(self) -> None:
        if self.n_ctx < 8:
            raise ConfigError(f"-c is {self.n_ctx}; wanted a context of at least 8 tokens")
        most = max(os.cpu_count() or 1, 4)
        for flag, n, zero in (("-t", self.n_threads, "all cores"), ("-td", self.n_threads_draft, "as many as -t")):
            if not 0 <= n <= most:
                raise ConfigError(f"{flag} is {n}; wanted 0 ({zero}) to {most}")
        for flag, value in (("-ngl", self.n_gpu_layers), ("-ngld", self.n_gpu_layers_draft)):
            if value < -1:
                raise ConfigError(f"{flag} is {value}; wanted -1 (all layers) or more")

    @property
    def gpu_layers(self) -> dict[Role, int]:
        """Layers of each model on a GPU."""
        return {"target": self.n_gpu_layers, "draft": self.n_gpu_layers_draft}

    @property
    def threads(self) -> dict[Role, int]:
        """CPU threads of each model."""
        target = self.n_threads or default_threads()
        return {"target": target, "draft": self.n_threads_draft or target}


def is_text(text: str) -> bool:
    """Can this be written as UTF-8?"""
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair: bytes of the command line that are no UTF-8
        return False
    return True


def check_seed(seed: int) -> int:
    """Return `seed`, or raise ConfigError when llama.cpp could not use it as it is."""
    if not 0 <= seed <= MAX_SEED:
        raise ConfigError(f"--seed is {seed}; wanted a whole number from 0 to {MAX_SEED}")
    return seed
