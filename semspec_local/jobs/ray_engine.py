"""The same job on a Ray cluster: one pair of models per actor, items handed out as actors come free.

An actor or a node that dies costs the items that it was running, and they run again on another. Nothing else of the
program imports Ray.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ..config import ModelConfig, RunConfig
from ..costs.pays import go_by_costs
from ..errors import ConfigError, IncompatibleError, SemspecError
from ..provenance import fingerprint_file
from ..reasoner import Reasoner, Sources
from .items import BadLine, Item
from .records import SERVER_ERROR, ItemError, ItemRecord
from .runner import Runner, Stopped, refused
from .tasks import FREE, TASKS

logger = logging.getLogger(__name__)

MAX_TRIES = 3
"""An item that was running each of so many times when its actor died is given up; perhaps it is what kills them."""

_WAIT_S = 0.2


@dataclass(frozen=True, kw_only=True)
class RayJob:
    """What every actor needs to know. A pair by name is looked up on the actor's own machine."""

    sources: Sources
    config: RunConfig
    models: ModelConfig
    seed: int
    n_lanes: int = 1
    task: str | None = None
    system: str | None = None
    template_options: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    def with_files(self) -> RayJob:
        """The same with the sha256 of every file, which the actors' own files must have."""
        return replace(self, files=_hashes(self.sources))


def _hashes(sources: Sources) -> dict[str, str]:
    for path in sources.files():
        if not path.is_file():
            raise IncompatibleError(f"no file at {path}; check the path")
    return {path.name: fingerprint_file(path)["sha256"] for path in sources.files()}


class PairWorker:
    """Lives in an actor: a loaded pair that runs items."""

    def __init__(self, job: RayJob) -> None:
        sources = job.sources if job.sources.pair is None else Sources.from_pair(job.sources.pair)
        if (own := _hashes(sources)) != job.files:
            other = ", ".join(sorted(name for name in {*own, *job.files} if own.get(name) != job.files.get(name)))
            raise ConfigError(f"the files of this machine are not those of the one that asks: {other}")
        self._reasoner = Reasoner(sources, job.config, job.models, n_lanes=job.n_lanes)
        go_by_costs(self._reasoner)
        task = TASKS[job.task] if job.task is not None else FREE
        settings: dict[str, Any] = {"system": job.system, "template_options": job.template_options}
        self._runner = Runner(reasoner=self._reasoner, seed=job.seed, task=task, **settings)

    def run(self, items: list[Item]) -> list[ItemRecord]:
        return list(self._runner.run(items))


@dataclass
class _Flight:
    """Items on an actor, and the actor; none while it begins."""

    actor: Any
    items: list[Item]


def run_on_ray(
    entries: Iterable[Item | BadLine],
    job: RayJob,
    *,
    n_actors: int,
    address: str | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[ItemRecord]:
    """The record of every entry as it finishes, in no order.

    `address` names a running cluster (`auto`, `ray://...`); None starts one on this machine, which ends with the job.
    Raises ConfigError without Ray or where no actor can be started, Stopped when asked to stop.
    """
    try:
        import ray
    except ImportError:
        raise ConfigError("--engine ray needs Ray: pip install 'semspec-local[ray]'") from None
    ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False, include_dashboard=False)
    try:
        yield from _Fleet(ray, job.with_files(), n_actors, should_stop).run(entries)
    finally:
        ray.shutdown()


class _Fleet:
    """The actors, and who runs what."""

    def __init__(self, ray: Any, job: RayJob, n_actors: int, should_stop: Callable[[], bool]) -> None:
        self._ray, self._job, self._should_stop = ray, job, should_stop
        n_cpus = max(job.models.threads.values())
        most = max((node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]), default=0)
        if most < n_cpus:
            raise ConfigError(f"an actor wants {n_cpus} cores (-t), and no machine here has more than {most:g} of them")
        self._kind = ray.remote(num_cpus=n_cpus)(PairWorker)
        self._free: list[Any] = []
        self._flights: dict[Any, _Flight] = {}
        for _ in range(n_actors):
            self._start_one()
        self._todo: deque[Item] = deque()
        self._tries: dict[str, int] = {}

    def run(self, entries: Iterable[Item | BadLine]) -> Iterator[ItemRecord]:
        for entry in entries:
            if isinstance(entry, BadLine):
                yield refused(entry)
            else:
                self._todo.append(entry)
        while self._todo or any(flight.items for flight in self._flights.values()):
            if self._should_stop():
                raise Stopped
            while self._todo and self._free:
                self._hand_out(self._free.pop())
            landed, _ = self._ray.wait(list(self._flights), timeout=_WAIT_S)
            for reference in landed:
                yield from self._land(reference)

    def _start_one(self) -> None:
        """Start an actor. It gets items once it lives: one that waits for cores must not keep any waiting with it."""
        actor = self._kind.remote(self._job)
        self._flights[actor.run.remote([])] = _Flight(actor, [])

    def _hand_out(self, actor: Any) -> None:
        items = [self._todo.popleft() for _ in range(min(len(self._todo), max(1, self._job.n_lanes)))]
        self._flights[actor.run.remote(items)] = _Flight(actor, items)

    def _land(self, reference: Any) -> Iterator[ItemRecord]:
        flight = self._flights.pop(reference)
        try:
            records = self._ray.get(reference)
        except self._ray.exceptions.RayActorError as error:
            yield from self._lost(flight, error)
        except self._ray.exceptions.RayTaskError as error:
            raise _own_error(error) from None
        else:
            self._free.append(flight.actor)
            yield from records

    def _lost(self, flight: _Flight, error: Exception) -> Iterator[ItemRecord]:
        """An actor died: its items run again, on a new one. One that could not even load the pair ends the job."""
        if "__init__" in str(error):  # Ray has no error of its own for that
            raise ConfigError(f"no pair could be loaded on the cluster: {str(error).strip().splitlines()[-1]}")
        logger.warning("an actor was lost (%s); its items run again", type(error).__name__)
        self._start_one()
        for item in flight.items:
            self._tries[item.id] = self._tries.get(item.id, 0) + 1
            if self._tries[item.id] < MAX_TRIES:
                self._todo.appendleft(item)
                continue
            why = ItemError(type=SERVER_ERROR, message=f"the actor died {MAX_TRIES} times while this item ran")
            yield ItemRecord(id=item.id, line=item.line, status="error", error=why)


def _own_error(error: Any) -> Exception:
    """The error of this program inside one of Ray's."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, SemspecError) else SemspecError(f"an actor failed: {str(error).splitlines()[-1]}")
