"""Run arms on problems of the made world, in turns, and keep what each did with each problem.

The arms take turns on every problem, another one first each time, so that a machine that changes its speed hits all
alike. Knows nothing of tables.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import MAX_SEED
from ..errors import ConfigError, SemspecError
from ..interrupts import HeldInterrupt
from ..lab.world import Problem
from ..llama.native_time import NativeTime, native_time
from ..metrics import Counters
from ..probes import native_calls
from ..provenance import atomic_write
from ..trace import json_line
from .arms import Arm, ArmRun
from .costs import CostSums, cost_sums
from .world_task import Verdicts, is_right, verdicts_on

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class ItemResult:
    """What one arm did with one problem. `native_s` and `elapsed_s` are None when native calls were not timed.

    `elapsed_s` is a little more than `wall_s`: the prompt's text is made in it, and the answer read.
    """

    item: int
    right: bool
    answer: str
    stop_reason: str
    wall_s: float
    prefill_s: float
    n_tokens: int
    counters: Counters | None = None
    costs: CostSums | None = None
    verdicts: Verdicts | None = None
    n_proposed: int | None = None
    n_accepted: int | None = None
    native_s: float | None = None
    elapsed_s: float | None = None

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ItemResult:
        """The result as `json_line` wrote it."""
        known = dict(values)
        for name, kind in (("counters", Counters), ("costs", CostSums), ("verdicts", Verdicts)):
            if known[name] is not None:
                known[name] = kind(**known[name])
        if known["counters"] is not None:
            lengths = known["counters"].accepted_run_lengths
            known["counters"].accepted_run_lengths = {int(length): n for length, n in lengths.items()}
        return cls(**known)


@dataclass
class Results:
    """All there is to know of a benchmark. Every arm has the same items, in the same order.

    `facts` are provenance and settings. An item on which an arm failed is in `failed` and in no arm's results.
    `calls_back` names the arms where `native_s` holds Python that llama.cpp called.
    """

    facts: dict[str, Any]
    arms: dict[str, list[ItemResult]]
    failed: list[dict[str, Any]] = field(default_factory=list)
    calls_back: list[str] = field(default_factory=list)

    def save(self, path: Path, **rest: Any) -> None:
        """Write everything as one JSON object, whole or not at all; `rest` goes beside it."""
        atomic_write(path, json_line({**vars(self), **rest}))

    @classmethod
    def read(cls, path: Path) -> Results:
        """What `save` wrote; ConfigError for anything else."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            arms = {name: [ItemResult.from_json(item) for item in items] for name, items in values["arms"].items()}
            return cls(values["facts"], arms, values["failed"], values["calls_back"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} holds no results of this benchmark: {error!r}") from error


def run_items(
    arms: Sequence[Arm],
    items: Sequence[tuple[int, Problem]],
    results: Results,
    *,
    seed: int,
    timed: bool = False,
    each: Callable[[int], None] = lambda n_done: None,
) -> None:
    """Put every problem to every arm and add to `results`, item by item, so that Ctrl-C loses the unfinished one only.

    All arms have the same seed on an item, and another on the next. `timed` measures llama.cpp's own time; that slows
    all arms a little. `each` is called after each item.
    """
    results.calls_back = [arm.name for arm in arms if arm.calls_back]
    for n_done, (number, problem) in enumerate(items, 1):
        first = n_done % len(arms)
        found: dict[str, ItemResult] = {}
        try:
            for arm in (*arms[first:], *arms[:first]):
                found[arm.name] = run_item(arm, number, problem, seed=item_seed(seed, number), timed=timed)
        except SemspecError as error:
            results.failed.append({"item": number, "arm": arm.name, "error": str(error)})
        else:
            with HeldInterrupt() as held:
                for name, result in found.items():
                    results.arms[name].append(result)
            held.check()
        each(n_done)


def item_seed(seed: int, number: int) -> int:
    """The seed of all arms on an item."""
    return (seed + number) % (MAX_SEED + 1)


def run_item(arm: Arm, number: int, problem: Problem, *, seed: int, timed: bool = False) -> ItemResult:
    """One problem, put to one arm, graded and judged."""
    spent: NativeTime | None = None
    if timed:
        with native_time(native_calls()) as spent:
            run = arm.run(problem.question, seed)
    else:
        run = arm.run(problem.question, seed)
    return _result(number, problem, run, spent)


def _result(number: int, problem: Problem, run: ArmRun, spent: NativeTime | None) -> ItemResult:
    return ItemResult(
        item=number,
        right=is_right(problem, run),
        answer=run.answer,
        stop_reason=run.stop_reason,
        wall_s=run.wall_s,
        prefill_s=run.prefill_s,
        n_tokens=run.n_tokens,
        counters=run.counters,
        costs=None if run.records is None else cost_sums(run.records),
        verdicts=None if run.records is None else verdicts_on(problem, run.records),
        n_proposed=run.n_proposed,
        n_accepted=run.n_accepted,
        native_s=spent.native_s if spent else None,
        elapsed_s=spent.elapsed_s if spent else None,
    )


class Progress:
    """Says how far a run is, and saves it: use it as `each` of `run_items`."""

    def __init__(
        self,
        n_items: int,
        *,
        say: Say,
        save: Callable[[], None],
        say_every: int = 10,
        save_every: int = 25,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._n_items, self._say, self._save, self._clock = n_items, say, save, clock
        self._say_every, self._save_every = say_every, save_every
        self._start = clock()

    def __call__(self, n_done: int) -> None:
        if n_done % self._say_every == 0:
            left_s = (self._clock() - self._start) / n_done * (self._n_items - n_done)
            self._say(f"{n_done} of {self._n_items} items, about {_minutes(left_s)} left")
        if n_done % self._save_every == 0:
            self._save()


def _minutes(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
