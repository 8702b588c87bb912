"""Batches of questions: read, run, write, and go on where a job was broken off."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..config import ModelConfig, RunConfig
from ..costs.pays import go_by_costs
from ..reasoner import Reasoner, Sources
from .items import BadLine, Item, Job, entry_of, read_job
from .records import ItemError, ItemRecord
from .runner import Runner
from .tasks import TASKS, Task

__all__ = [
    "TASKS",
    "BadLine",
    "Item",
    "ItemError",
    "ItemRecord",
    "Job",
    "Runner",
    "Task",
    "entry_of",
    "read_job",
    "run",
]


def run(
    items: Iterable[str | Mapping[str, Any]],
    pair: str | None = None,
    *,
    sources: Sources | None = None,
    config: RunConfig | None = None,
    models: ModelConfig | None = None,
    seed: int = 0,
    task: str | None = None,
    n_lanes: int = 1,
) -> Iterator[ItemRecord]:
    """Answer questions; yields each one's record as it finishes.

    An item is a question, or a mapping as in a line of a batch: `prompt` or `messages`, and perhaps `id` and `semspec`.
    One that cannot be used gives a record with an error, as one that fails does. `sources` names files instead of a
    `pair`; `n_lanes` run at once, 0 takes as many as pay. Raises what loading them raises, before the first item.
    """
    from .tasks import FREE

    entries = (
        entry_of(json.dumps({"prompt": item} if isinstance(item, str) else dict(item)).encode(), number)
        for number, item in enumerate(items, start=1)
    )
    with Reasoner(sources or Sources.from_pair(pair), config, models, n_lanes=n_lanes) as reasoner:
        go_by_costs(reasoner)
        runner = Runner(reasoner=reasoner, seed=seed, task=TASKS[task] if task is not None else FREE)
        yield from runner.run(entries)
