"""All checks, in order, each on its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from . import costs, folders, library, machine, models, probes, smoke
from .check import Check, Verdict, fail
from .examination import Examination

CHECKS: tuple[tuple[str, Callable[[Examination], Verdict | None]], ...] = (
    ("python", machine.python),
    ("llama-cpp", library.llama_cpp),
    ("build", library.build),
    ("symbols", library.symbols),
    ("structures", library.structures),
    ("onnxruntime", library.onnxruntime),
    ("pair", models.pair),
    ("target", models.target),
    ("draft", models.draft),
    ("vocabularies", models.vocabularies),
    ("target-probe", probes.target_probe),
    ("draft-probe", probes.draft_probe),
    ("joint-probe", probes.joint_probe),
    ("memory", models.memory),
    ("threads", machine.threads),
    ("load", machine.load),
    ("costs", costs.costs),
    ("cache", folders.cache),
    ("terminal", machine.terminal),
    ("smoke", smoke.smoke),
    ("offline", folders.offline),  # after all that could have used the network
)
"""A check answers None where there is nothing to check, such as a draft where none is given."""


def examine(examination: Examination) -> Iterator[Check]:
    """One check after the other; one that breaks is a failed check, and the others go on."""
    for name, check in CHECKS:
        try:
            verdict = check(examination)
        except Exception as error:  # whatever is wrong here is what a doctor is for
            verdict = fail(f"this check broke: {type(error).__name__}: {error}", "report this, with what stands above")
        if verdict is not None:
            yield Check(name=name, status=verdict.status, detail=verdict.detail, fix=verdict.fix)
