"""A whole benchmark: which items, which arms, loaded and warmed up, run trial by trial.

What the command line and Python call; knows nothing of tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..config import ModelConfig, RunConfig
from ..machine import EnergyMeter, PeakMemory, cpu_name, load_average, n_cores
from ..provenance import fingerprint_file, provenance
from ..reasoner import Sources
from ..trace import StepRecord
from .arms import LLAMA_SERVER, make_arms, parse_arm
from .results import Results, kept_in
from .run import Bench, Trial, run_trials, trials_of
from .tasks import BenchItem, BenchTask, find_task, load_task, task_provenance, world_task_items
from .world_task import Verdicts, verdicts_on

N_WARM_UP = 64
"""Tokens that an arm writes before it counts, the first ones drafted."""


@dataclass(frozen=True, kw_only=True)
class Suite:
    """What to run. `config` holds for every arm but for its policy and threshold; `n_seeds` repeat every item."""

    task: str
    arms: Sequence[str]
    sources: Sources
    data: Path | None = None
    limit: int
    offset: int = 0
    every: int = 1
    n_seeds: int = 1
    seed: int = 0
    config: RunConfig = field(default_factory=RunConfig)
    models: ModelConfig = field(default_factory=ModelConfig)
    timed: bool = False
    llama_server: Path | None = None

    def facts(self, argv: Sequence[str]) -> dict[str, Any]:
        """Provenance and settings; "settings" and "files" must be the same when a run goes on."""
        shared = asdict(self.config)
        del shared["policy"], shared["threshold"], shared["guess"]  # each arm has its own
        settings = {name: getattr(self, name) for name in ("limit", "offset", "every", "n_seeds", "seed", "timed")}
        return {
            "provenance": provenance(argv),
            "machine": {"cpu": cpu_name(), "n_cores": n_cores(), "load": load_average()},
            "pair": self.sources.pair,
            "models": {
                role: path.name for role in ("target", "draft") if (path := self.sources.path(role)) is not None
            },
            "files": [dict(fingerprint_file(path)) for path in self.sources.files()],
            "settings": {
                **task_provenance(self.task, self.data),
                **settings,
                "config": shared,
                "models_config": asdict(self.models),
            },
        }

    def items(self) -> list[BenchItem]:
        return load_task(self.task, self.data, self.limit, self.offset, self.every)

    def judge(self, task: BenchTask) -> Any:
        """Says which decisions were wrong, for problems of the made world."""
        if task.seed is None:
            return lambda item, records: None
        known = {item.id: problem for item, problem in world_task_items(task, self.limit, self.offset, self.every)}

        def judge(item: BenchItem, records: Sequence[StepRecord]) -> Verdicts | None:
            return verdicts_on(known[item.id], records) if item.id in known else None

        return judge


@contextmanager
def running(
    suite: Suite, results: Results, out: Path | None = None, *, force: bool = False
) -> Iterator[tuple[int, Iterator[int]]]:
    """How many trials there are in all, and an iterator that runs those not done yet, counting up.

    What is in the file `out` already is taken up. Each arm is loaded alone first, to see what memory it needs, and
    writes some tokens that count for nothing; then all are loaded.
    """
    task, items = find_task(suite.task), suite.items()
    bench = Bench(task, suite.judge(task), timed=suite.timed, energy=EnergyMeter.find())
    trials = trials_of(items, suite.n_seeds, offset=suite.offset, seed=suite.seed)
    with kept_in(out, results, force=force) as file:
        if all((trial.item.id, trial.seed) in results.trials for trial in trials):
            yield len(trials), iter(())
            return
        memory = {name: _warmed(suite, name, bench, trials[0]) for name in _loadable(suite.arms)}
        with _arms(suite, suite.arms) as arms:
            results.facts |= {"memory_bytes": memory, "calls_back": [arm.name for arm in arms if arm.calls_back]}
            if file is not None:
                file.keep_facts()
            yield len(trials), run_trials(bench, arms, trials, results, file)


def _loadable(names: Sequence[str]) -> list[str]:
    """Those that can be loaded without another one."""
    return [name for name in names if "@rate-of:" not in name]


def _arms(suite: Suite, names: Sequence[str]) -> Any:
    return make_arms(names, suite.sources, suite.config, suite.models, llama_server=suite.llama_server)


def _warmed(suite: Suite, name: str, bench: Bench, trial: Trial) -> int | None:
    """The memory that an arm needs beyond what this process holds anyway, in bytes; None for another process's."""
    peak = PeakMemory()
    few = min(suite.config.max_tokens, N_WARM_UP)
    brief = replace(suite, config=replace(suite.config, max_tokens=few, n_prime=0))
    with _arms(brief, [name]) as arms:
        for arm in arms:
            bench.run(arm, trial)
        return None if parse_arm(name).kind == LLAMA_SERVER else peak.bytes()


def new_results(suite: Suite, argv: Sequence[str]) -> Results:
    """Empty results of a suite."""
    return Results(suite.facts(argv), {name: [] for name in suite.arms})


def document(results: Results, arms: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The last line of standard output, and what is kept of a benchmark: facts and the numbers of every arm."""
    failed = [
        {"arm": name, "item": result.item, "seed": result.seed, "error": result.error}
        for name, found in results.arms.items()
        for result in found
        if result.error is not None
    ]
    return {**results.facts, "failed": failed, "arms": list(arms)}
