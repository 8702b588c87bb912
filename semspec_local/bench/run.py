"""Run arms on items, in turns, and keep what each did with each.

The arms take turns on every item, another one first each time, so that a machine that changes its speed hits all
alike. Knows nothing of tables.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..config import MAX_SEED
from ..costs.model import cost_sums
from ..errors import SemspecError
from ..interrupts import HeldInterrupt
from ..llama.native_time import NativeTime, native_time
from ..machine import EnergyMeter
from ..metrics import total
from ..probes import native_calls
from ..trace import StepRecord
from .arms import Arm, ArmRun, MatchedArm
from .grading import grade
from .results import ItemResult, Results, ResultsFile
from .tasks import BenchItem, BenchTask
from .world_task import Verdicts

Judge = Callable[[BenchItem, Sequence[StepRecord]], Verdicts | None]
"""Says which decisions of a run were wrong, where that is known."""


@dataclass(frozen=True)
class Trial:
    """An item under a seed; `seed` counts the repetitions, `run_seed` is what all arms get."""

    number: int
    item: BenchItem
    seed: int

    @property
    def run_seed(self) -> int:
        return item_seed(self.seed, self.number)


def trials_of(items: Sequence[BenchItem], n_seeds: int, *, offset: int = 0, seed: int = 0) -> list[Trial]:
    """Every item under every seed; the first seed of all comes before the second of any."""
    numbered = list(enumerate(items, offset))
    return [Trial(number, item, seed + k) for k in range(n_seeds) for number, item in numbered]


def item_seed(seed: int, number: int) -> int:
    """The seed of all arms on an item: another one for each item, and for each repetition."""
    return (seed * 1_000_003 + number) % (MAX_SEED + 1)


@dataclass(frozen=True)
class Bench:
    """What is run: the task says how an item is asked and graded, `judge` what was decided wrongly."""

    task: BenchTask
    judge: Judge = lambda item, records: None
    timed: bool = False
    """Also time native calls; that slows all arms a little."""
    energy: EnergyMeter = EnergyMeter(())

    def run(self, arm: Arm, trial: Trial) -> ItemResult:
        """One item, put to one arm, graded and judged. A failure is a result too."""
        prompt, seed = self.task.prompt(trial.item), trial.run_seed
        begun, energy = time.perf_counter(), self.energy.read()
        spent: NativeTime | None = None
        try:
            if self.timed and arm.calls_back is not None:
                with native_time(native_calls()) as spent:
                    run = arm.run(prompt, seed)
            else:
                run = arm.run(prompt, seed)
        except SemspecError as error:
            return _failed(trial, time.perf_counter() - begun, error)
        return self._result(trial, run, spent, self.energy.since(energy))

    def _result(self, trial: Trial, run: ArmRun, spent: NativeTime | None, energy_j: float | None) -> ItemResult:
        graded = grade(run.final, trial.item.expected, self.task.kind)
        records = run.records
        return ItemResult(
            item=trial.item.id,
            seed=trial.seed,
            right=graded.correct,
            exact=graded.exact,
            answer=graded.extracted or "",
            stop_reason=run.stop_reason,
            wall_s=run.wall_s,
            prefill_s=run.prefill_s,
            ttft_s=run.ttft_s,
            n_tokens=run.n_tokens,
            counters=run.counters,
            costs=None if records is None else cost_sums(records),
            verdicts=None if records is None else self.judge(trial.item, records),
            n_proposed=run.n_proposed,
            n_accepted=run.n_accepted,
            native_s=spent.native_s if spent else None,
            elapsed_s=spent.elapsed_s if spent else None,
            energy_j=energy_j,
        )


def _failed(trial: Trial, seconds: float, error: SemspecError) -> ItemResult:
    return ItemResult(
        item=trial.item.id,
        seed=trial.seed,
        right=False,
        answer="",
        stop_reason="error",
        wall_s=seconds,
        prefill_s=0.0,
        n_tokens=0,
        error=str(error),
    )


def run_trials(
    bench: Bench, arms: Sequence[Arm], trials: Sequence[Trial], results: Results, file: ResultsFile | None = None
) -> Iterator[int]:
    """Put every trial that is not done yet to every arm, and add it to `results` and `file`, whole or not at all.

    Yields how many are done after each, so that Ctrl-C loses the unfinished one only.
    """
    done = results.trials
    for position, trial in enumerate(trials, 1):
        if (trial.item.id, trial.seed) in done:
            continue
        found: dict[str, ItemResult] = {}
        for arm in in_turn(arms, position):
            if isinstance(arm, MatchedArm):
                arm.rate = acceptance_so_far(results, found, arm.follows)
            found[arm.name] = bench.run(arm, trial)
        with HeldInterrupt() as held:
            if file is not None:
                file.append_trial(found)
            results.add(found)
        held.check()
        yield results.n_trials


def in_turn(arms: Sequence[Arm], position: int) -> list[Arm]:
    """The arms, another one first at each position; one that follows another's rate comes after all others."""
    first = position % len(arms)
    turned = [*arms[first:], *arms[:first]]
    return sorted(turned, key=lambda arm: isinstance(arm, MatchedArm))


def acceptance_so_far(results: Results, found: dict[str, ItemResult], name: str) -> float:
    """The share of proposed steps that an arm has accepted in all trials until now; a half before the first."""
    counters = [result.counters for result in (*results.arms[name], found[name]) if result.counters is not None]
    rate = total(counters).step_acceptance_rate
    return 0.5 if rate is None else rate
