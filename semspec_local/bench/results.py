"""What a benchmark found: per arm and trial, kept line by line in a file that a rerun goes on with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..costs.model import CostSums
from ..errors import NOT_AS_WRITTEN, ConfigError
from ..linefile import LineFile, manifest_path
from ..metrics import Counters
from .world_task import Verdicts

RESULTS_VERSION = 1

_SEEN = ("memory_bytes", "calls_back")
"""Facts that are seen when the arms are loaded; a rerun that has nothing left to do takes them from the file."""


@dataclass(frozen=True, kw_only=True)
class ItemResult:
    """What one arm did with one item under one seed.

    A failed one has an `error`, counts as wrong, and its time counts. `exact`: the answer is right letter by letter.
    `n_proposed` and `n_accepted` are tokens of speculation by tokens. `native_s` and `elapsed_s` are None when native
    calls were not timed, or not made in this process; `elapsed_s` is a little more than `wall_s`: the prompt's text is
    made in it, and the answer read. `energy_j` is None where the machine does not tell.
    """

    item: str
    seed: int
    right: bool
    answer: str
    stop_reason: str
    wall_s: float
    prefill_s: float
    n_tokens: int
    exact: bool | None = None
    ttft_s: float | None = None
    counters: Counters | None = None
    costs: CostSums | None = None
    verdicts: Verdicts | None = None
    n_proposed: int | None = None
    n_accepted: int | None = None
    native_s: float | None = None
    elapsed_s: float | None = None
    energy_j: float | None = None
    error: str | None = None

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ItemResult:
        """The result as `to_json` wrote it."""
        known = dict(values)
        for name, kind in (("counters", Counters), ("costs", CostSums), ("verdicts", Verdicts)):
            if known.get(name) is not None:
                known[name] = kind(**known[name])
        if known.get("counters") is not None:
            lengths = known["counters"].accepted_run_lengths
            known["counters"].accepted_run_lengths = {int(length): n for length, n in lengths.items()}
        return cls(**known)

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        if values["counters"] is not None:
            values["counters"] = {name: value for name, value in values["counters"].items() if name[0] != "_"}
        return values


@dataclass
class Results:
    """All there is to know of a benchmark. Every arm has the same trials (item and seed), in the same order.

    `facts` are provenance and settings, and what was seen when the arms were loaded.
    """

    facts: dict[str, Any]
    arms: dict[str, list[ItemResult]]

    @property
    def calls_back(self) -> list[str]:
        """The arms where `native_s` holds Python that llama.cpp called."""
        return list(self.facts.get("calls_back", []))

    @property
    def memory_bytes(self) -> dict[str, int | None]:
        """An arm's peak when loaded alone, None where the system does not tell."""
        return dict(self.facts.get("memory_bytes", {}))

    @property
    def n_trials(self) -> int:
        return len(next(iter(self.arms.values()), []))

    @property
    def trials(self) -> set[tuple[str, int]]:
        """The items and seeds that are done."""
        return {(result.item, result.seed) for result in next(iter(self.arms.values()), [])}

    def add(self, found: Mapping[str, ItemResult]) -> None:
        """One trial, with the result of every arm."""
        for name in self.arms:
            self.arms[name].append(found[name])


class ResultsFile(LineFile):
    """A results file: a line per trial. Use it in a `with`; what is there already is in `results` afterwards."""

    def __init__(self, path: Path, results: Results, *, force: bool = False) -> None:
        self.results = results
        if path.exists():
            results.facts |= {name: value for name, value in _facts_of(path).items() if name in _SEEN}
        super().__init__(path, self._manifest(), take_up=self._done_before, kind="benchmark", force=force)

    def _manifest(self) -> dict[str, Any]:
        facts = self.results.facts
        job = {"arms": list(self.results.arms), **facts["settings"], "files": facts["files"]}
        return {"version": RESULTS_VERSION, "job": job, "facts": facts}

    def keep_facts(self) -> None:
        """Write down what was seen of the arms when they were loaded."""
        self.write_manifest(self._manifest())

    def _done_before(self, line: Mapping[str, Any]) -> bool:
        found = _trial(line)
        if set(found) != set(self.results.arms):
            raise ValueError("other arms")
        self.results.add(found)
        return True

    def append_trial(self, found: Mapping[str, ItemResult]) -> None:
        self.append({"arms": {name: result.to_json() for name, result in found.items()}})


@contextmanager
def kept_in(path: Path | None, results: Results, *, force: bool = False) -> Iterator[ResultsFile | None]:
    """The file that results go to, None for no file; it is closed at the end of the `with`."""
    if path is None:
        yield None
        return
    with ResultsFile(path, results, force=force) as file:
        yield file


def read_results(path: Path) -> Results:
    """What a results file holds, without its torn end; ConfigError for anything else."""
    try:
        manifest = json.loads(manifest_path(path).read_text(encoding="utf-8"))
        data = path.read_bytes()
        results = Results(manifest["facts"], {name: [] for name in manifest["job"]["arms"]})
        for line in data[: data.rfind(b"\n") + 1].splitlines():
            results.add(_trial(json.loads(line)))
    except (OSError, *NOT_AS_WRITTEN) as error:
        raise ConfigError(
            f"{path} holds no results of this benchmark, or none of its manifest is beside it: {error!r}"
        ) from None
    return results


def _facts_of(path: Path) -> dict[str, Any]:
    """The facts in the manifest of a results file; none where it cannot be read."""
    try:
        facts = json.loads(manifest_path(path).read_text(encoding="utf-8"))["facts"]
    except (OSError, *NOT_AS_WRITTEN):
        return {}
    return facts if isinstance(facts, dict) else {}


def _trial(line: Mapping[str, Any]) -> dict[str, ItemResult]:
    return {name: ItemResult.from_json(values) for name, values in line["arms"].items()}
