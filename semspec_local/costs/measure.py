"""Measure what a token costs on a loaded pair, the way a run spends it.

Every model writes and reads behind the same prefix, a worked problem. All points take turns, so that a machine that
changes its speed hits all alike. Knows nothing of what the numbers say.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import datetime, timezone
from functools import partial
from itertools import cycle, islice
from statistics import median

import numpy as np

from ..features import needs_of
from ..lab.world import problems, solve
from ..llama.session import LlamaStepModel
from ..machine import n_cores
from ..protocols import StepModel
from ..reasoner import Reasoner
from ..steps import StepReader
from .model import TOKENS_PER_STEP
from .pair import Loaded, PairCosts

N_READ = (1, 4, 8, 16, 32, 64, 128)
"""How many tokens the passes that read have."""

N_TRIALS = 5
POINT_S = 2.0
"""A point that has taken so many seconds is not repeated any more."""

_N_PREFIX = 256
_MOST_WRITTEN = 64
_MOST_ENDS = 8
"""So often a model that ends its text is given another token of the prefix's text to go on from."""

_NO_BOUNDARY = "\U0010ffff"  # no character, so no model writes it: a step ends at its length
_SEED = 1
_WRITE = 0
"""In the key of a point, where the others have how many tokens they read."""

_Point = tuple[str, int]


def measure_costs(
    reasoner: Reasoner,
    *,
    tokens_per_step: int = TOKENS_PER_STEP,
    load: float | None = None,
    n_trials: int = N_TRIALS,
    point_s: float = POINT_S,
    clock: Callable[[], float] = time.perf_counter,
) -> PairCosts:
    """The median seconds per token of writing `tokens_per_step` (at most 64), and of reading 1 to 128 in one pass.

    `load` is the machine's before the models were loaded. What belongs to a model that was not loaded is unknown, and
    lengths for which the context has no room are left out.
    """
    loaded = loaded_facts(reasoner)
    sides: dict[str, _Side] = {}
    with ExitStack() as stack:
        for role, model in reasoner.step_models.items():
            asked = role in loaded.logprobs
            flags = {"logprobs_written": asked and role == "draft", "logprobs_read": asked and role == "target"}
            sides[role] = _Side(model, tokens_per_step, clock, **flags)
        if loaded.taps["target"]:
            alone = stack.enter_context(_target_alone(reasoner))
            sides["alone"] = _Side(alone, tokens_per_step, clock)
        taken = _in_turns(_points(sides), n_trials, point_s, clock)
    costs = {point: median(seconds) for point, seconds in taken.items() if seconds}
    curves = {name: {n: s for (side, n), s in costs.items() if side == name and n != _WRITE} for name in sides}
    c_t = costs.get(("target", _WRITE))
    return PairCosts(
        c_d=costs.get(("draft", _WRITE)),
        c_t=c_t,
        c_t_alone=costs.get(("alone", _WRITE)) if "alone" in sides else c_t,
        p_d=curves.get("draft", {}),
        p_t=curves["target"],
        loaded=loaded,
        n_prefix=sides["target"].n_prefix,
        spread=_spread(taken),
        load=load,
        n_cores=n_cores(),
        n_threads=max(reasoner.models.threads[role] for role in reasoner.step_models),
        measured_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def loaded_facts(reasoner: Reasoner) -> Loaded:
    """What of the loaded pair decides its costs, beside the files and the threads."""
    joint = reasoner.joint_probe
    needs = reasoner.policy.needs | needs_of(joint.features if joint is not None else ())
    wanted = {"target": {"target_logprobs", "target_in_top2"}, "draft": {"draft_logprobs"}}
    contexts = {role: model.context for role, model in reasoner.step_models.items()}
    logprobs = [role for role in contexts if needs & wanted[role]]
    return Loaded(
        taps={
            role: [f"{tap.layer} {tap.norm}" for tap in context.taps.taps] if context.taps is not None else []
            for role, context in contexts.items()
        },
        logprobs=logprobs,
        all_logits=[
            role
            for role, context in contexts.items()
            # The draft is asked for log-probabilities of what it writes, not of what it reads.
            if (role == "target" and role in logprobs) or (context.taps is not None and context.taps.needs_all_outputs)
        ],
    )


def _target_alone(reasoner: Reasoner) -> LlamaStepModel:
    """The target as `--policy never` has it, beside the one of which states are read."""
    model = reasoner.step_models["target"]
    return LlamaStepModel(
        model.model,
        n_ctx=min(model.n_ctx, 2 * _N_PREFIX),
        n_threads=reasoner.models.threads["target"],
        sampling=reasoner.config.sampling,
    )


class _Side:
    """A model that holds the prefix, before and after everything it is asked to do."""

    def __init__(
        self,
        model: StepModel,
        tokens_per_step: int,
        clock: Callable[[], float],
        *,
        logprobs_written: bool = False,
        logprobs_read: bool = False,
    ) -> None:
        self._model, self._clock = model, clock
        self._logprobs_written, self._logprobs_read = logprobs_written, logprobs_read
        self.n_prefix = min(_N_PREFIX, model.n_ctx // 2)
        room = model.n_ctx - self.n_prefix
        self._n_written = min(tokens_per_step, _MOST_WRITTEN, room)
        self.lengths = [n for n in N_READ if n <= room]
        text = model.vocabulary.encode(_worked_problems())
        tokens = list(islice(cycle(text), self.n_prefix + max(N_READ)))
        self._next = tokens[self.n_prefix :]
        model.reseed(_SEED)
        model.prefill(tokens[: self.n_prefix])

    def read(self, n: int) -> float:
        """Seconds per token of reading `n` tokens in one pass."""
        start = self._clock()
        self._model.score(self._next[:n], logprobs=self._logprobs_read)
        seconds = self._clock() - start
        self._model.rollback(self.n_prefix)
        return seconds / n

    def write(self) -> float | None:
        """Seconds per token of writing a step; None for a model that only ends its text."""
        left, seconds = self._n_written, 0.0
        self._model.score(self._next[:1])  # a rejected step in memory would be written for nothing
        self._model.rollback(self.n_prefix)
        for token in self._next[:_MOST_ENDS]:
            reader = StepReader(max_tokens=left, boundary=_NO_BOUNDARY)
            start = self._clock()
            step = self._model.propose(reader, logprobs=self._logprobs_written)
            seconds += self._clock() - start
            left -= len(step.tokens)
            if step.end != "eos" or self._model.n_past + 1 + left > self._model.n_ctx:
                break
            self._model.score([token])
        self._model.rollback(self.n_prefix)
        n = self._n_written - left
        return seconds / n if n else None


def _points(sides: Mapping[str, _Side]) -> dict[_Point, Callable[[], float | None]]:
    """Everything there is to measure. Of the target alone only writing counts."""
    points: dict[_Point, Callable[[], float | None]] = {(name, _WRITE): side.write for name, side in sides.items()}
    for name, side in sides.items():
        if name != "alone":
            points |= {(name, n): partial(side.read, n) for n in side.lengths}
    return points


def _in_turns(
    points: Mapping[_Point, Callable[[], float | None]], n_trials: int, point_s: float, clock: Callable[[], float]
) -> dict[_Point, list[float]]:
    """What every point gave, in turns, after one round of the quick ones to warm up."""
    for (_, n), measure in points.items():
        if n <= N_READ[1]:
            measure()
    taken: dict[_Point, list[float]] = {point: [] for point in points}
    spent = dict.fromkeys(points, 0.0)
    for _ in range(n_trials):
        for point, measure in points.items():
            if spent[point] >= point_s:
                continue
            start = clock()
            seconds = measure()
            spent[point] += clock() - start
            if seconds is not None:
                taken[point].append(seconds)
    return taken


def _spread(taken: Mapping[_Point, list[float]]) -> float | None:
    """How far repetitions of one point lie apart, by their median: the median over the points."""
    spreads = [(max(one) - min(one)) / median(one) for one in taken.values() if len(one) > 1]
    return median(spreads) if spreads else None


def _worked_problems() -> str:
    """Arithmetic word problems, each with its steps: about what a run has before it."""
    rng = np.random.default_rng(_SEED)
    texts = [p.question + "\n\n" + "".join(s.text for s in solve(p, rng, hand="target")) for p in problems(_SEED, 8)]
    return "\n\n".join(texts)
