"""Items to records, one after the other on a loaded pair. One item's failure is that item's record.

Knows nothing of files but the traces.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..config import MAX_SEED, RunConfig
from ..engine import Speculation
from ..errors import ConfigError, SemspecError
from ..reasoner import Reasoner
from ..trace import RunSummary, RunTrace, StepRecord, write_trace
from .items import SAMPLING, BadLine, Item, Message
from .records import INVALID_REQUEST, SERVER_ERROR, ItemError, ItemRecord, status_of
from .tasks import FREE, Task

logger = logging.getLogger(__name__)

_LONGEST_NAME = 120


class Stopped(Exception):
    """Somebody asked the job to stop; what was running is not finished."""


@dataclass(frozen=True, kw_only=True)
class Runner:
    """Runs items on `reasoner`. Each item has a seed of its own, made of `seed` and its id, whatever ran before it.

    `c_t_alone` are the target's measured seconds per token alone, for items that run one after the other.
    `should_stop` is asked after every step: True ends the job, and leaves out the item that was running.
    """

    reasoner: Reasoner
    seed: int
    task: Task = FREE
    system: str | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    traces: Path | None = None
    c_t_alone: float | None = None
    should_stop: Callable[[], bool] = lambda: False

    def run(self, entries: Iterable[Item | BadLine]) -> Iterator[ItemRecord]:
        """The record of every entry, as it finishes. Raises Stopped, and what traces that cannot be written raise."""
        reasoner = self.reasoner
        yield from reasoner.hub.run(self._record, iter(entries), reasoner.n_lanes)

    def _record(self, lane: int, entry: Item | BadLine) -> ItemRecord:
        if self.should_stop():
            raise Stopped
        return refused(entry) if isinstance(entry, BadLine) else self.record_of(entry, lane)

    def record_of(self, item: Item, lane: int = 0) -> ItemRecord:
        """Run one item to its end."""
        start = time.perf_counter()
        seed = item_seed(self.seed, item)
        try:
            speculation = self.reasoner.start(
                self._messages(item),
                seed=seed,
                system=self.system,
                template_options={**self.template_options, **item.overrides.get("template_kwargs", {})},
                config=config_of(item, self.reasoner.config),
                lane=lane,
            )
            records = list(self._steps(speculation))
            result = self.reasoner.result(speculation, records, c_t_alone=self.c_t_alone)
        except Stopped:
            raise
        except Exception as error:  # whatever an item does, the others go on
            return _failure(item, seed, error, time.perf_counter() - start)
        if self.traces is not None:
            self._write_trace(item, speculation, records)
        rest = result.text if result.reasoning is None else speculation.prefix.split()[1]
        return ItemRecord(
            id=item.id,
            line=item.line,
            status=status_of(result.stop_reason),
            answer=self.task.answer(rest),
            text=result.text,
            reasoning=result.reasoning,
            stop_reason=result.stop_reason,
            seed=seed,
            usage=result.usage,
            stats=result.stats,
            seconds=time.perf_counter() - start,
        )

    def _steps(self, speculation: Speculation) -> Iterator[StepRecord]:
        for record in speculation:
            yield record
            if speculation.stop_reason is None and self.should_stop():  # what has just ended is kept
                raise Stopped

    def _messages(self, item: Item) -> Sequence[Message]:
        """The item's messages, the task's sentence after the last one."""
        if not self.task.suffix:
            return item.messages
        *before, last = item.messages
        return (*before, {**last, "content": f"{last['content']}\n\n{self.task.suffix}"})

    def _write_trace(self, item: Item, speculation: Speculation, records: list[StepRecord]) -> None:
        assert self.traces is not None
        header = self.reasoner.header(str(item.messages[-1]["content"]), speculation) | {"item": item.id}
        summary = RunSummary(stop_reason=speculation.stop_reason or "eos", counters=speculation.counters)
        write_trace(self.traces / f"{file_name(item.id)}.jsonl", RunTrace(header, records, summary))


def refused(entry: BadLine) -> ItemRecord:
    """The record of a line that holds no item."""
    message = f"{entry.file + ', ' if entry.file else ''}line {entry.line}: {entry.message}"
    return ItemRecord(
        id=entry.id, line=entry.line, status="error", error=ItemError(type=INVALID_REQUEST, message=message)
    )


def _failure(item: Item, seed: int, error: Exception, seconds: float) -> ItemRecord:
    if not isinstance(error, SemspecError):
        logger.warning("item %s failed", item.id, exc_info=error)
    message = str(error) if isinstance(error, SemspecError) else f"{type(error).__name__}: {error}"
    kind = INVALID_REQUEST if isinstance(error, ConfigError) else SERVER_ERROR
    found = ItemError(type=kind, message=message)
    return ItemRecord(id=item.id, line=item.line, status="error", seed=seed, seconds=seconds, error=found)


def item_seed(seed: int, item: Item) -> int:
    """The seed that the item names, or one that depends on the job's seed and the item's id alone."""
    given = item.overrides.get("seed")
    if given is not None:
        return int(given)
    digest = hashlib.sha256(f"{seed}:{item.id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % (MAX_SEED + 1)


def config_of(item: Item, base: RunConfig) -> RunConfig:
    """The job's configuration with what the item sets; ConfigError for values that cannot be used."""
    elsewhere = {"seed", "draft", "template_kwargs", *SAMPLING}
    changes: dict[str, Any] = {name: value for name, value in item.overrides.items() if name not in elsewhere}
    changes["sampling"] = replace(base.sampling, **{n: v for n, v in item.overrides.items() if n in SAMPLING})
    if item.overrides.get("draft") is False:
        changes |= {"policy": "never", "guess": 0}
    if changes.get("policy", base.policy) != base.policy:
        changes.setdefault("threshold", None)  # a threshold belongs to its policy
    return replace(base, **changes)


def file_name(item_id: str) -> str:
    """A name for a file of an item: safe on every system, and different for different ids."""
    name = quote(item_id, safe=" ")
    if name.strip(". ") != name:  # such as "..", or what Windows would cut
        name = name.replace(".", "%2E").replace(" ", "%20")
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:_LONGEST_NAME]}-{hashlib.sha256(item_id.encode()).hexdigest()[:16]}"
