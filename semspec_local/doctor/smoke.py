"""The whole machinery, once and small: the pair is loaded, hidden states are read, a question is answered three ways.

`smoke` is the check, `try_pair` what the child process does for it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import ModelConfig, RunConfig, SamplingConfig
from ..errors import ModelError
from ..policy import POLICIES
from ..protocols import TapPoint
from ..reasoner import Reasoner, Sources
from ..result import RunResult
from ..roles import PROBE_ROLES, ROLES, ProbeRole
from .check import Verdict, fail, ok, warn
from .examination import Examination

if TYPE_CHECKING:
    from ..llama.model import LlamaModel

QUESTION = "Anna has 9 shells. Anna finds 6 more shells. How many shells does Anna have?"
"""One that every pair can answer, the embedded one too."""

_N_TOKENS, _N_STEP_TOKENS, _N_TIMED = 24, 8, 8
_GREEDY = SamplingConfig(temperature=0.0)


def smoke(examination: Examination) -> Verdict | None:
    """The pair answers a question with its draft, and rejected steps leave no trace in the text."""
    if not examination.smoke:
        return None
    asked = {name: examination.answer(name) for name in ("llama", *ROLES, "memory")}
    if examination.sources is None or any(answer is not None and not answer.ok for answer in asked.values()):
        return fail("not tried, since the models cannot be loaded", "first mend what is above")
    memory = asked["memory"]
    room: dict[str, Any] = memory.value if memory is not None else {"free": None}
    if room["free"] is not None and sum(room["needed"].values()) > room["free"]:
        return fail("not tried, since the models do not fit into the memory", "see memory")
    answer = examination.smoke_answer
    if not answer.ok:
        return fail(
            f"loading the pair and answering a question: {answer.error}", "see the checks above; run it with -v -v"
        )
    return _judged(answer.value)


def _judged(found: dict[str, Any]) -> Verdict:
    said = "; ".join(_described(role, trial) for role, trial in found["trials"].items())
    if found["texts_differ_at"] is not None:
        return fail(
            f"{said}; with every drafted step rejected the text is another than the target's own, from character "
            f"{found['texts_differ_at']} on: rollback does not work for this model",
            "use --policy never with it, and report this",
        )
    if found["n_drafted"] is None:
        return ok(f"{said}; the target alone wrote {found['n_tokens']} tokens")
    if not found["n_drafted"]:
        return fail(f"{said}; the draft was loaded, and no step of it was verified", "use another draft")
    by = f"policy {found['policy']}: {found['n_accepted']} of {found['n_drafted']} drafted steps accepted"
    said = f"{said}; {by}; rejected steps leave the target's text as it is"
    if not found["n_accepted"]:
        return warn(f"{said}; with none accepted the draft costs time only", "use another draft, or another policy")
    return ok(said)


def _described(role: str, trial: dict[str, Any]) -> str:
    tapped = f", {trial['tapped_ms']:.1f} with states read at {trial['tap']}" if trial["tapped_ms"] is not None else ""
    return f"{role}: {trial['plain_ms']:.1f} ms per token{tapped}, {trial['rollback']}"


def try_pair(files: dict[str, str], probes: dict[ProbeRole, str], models: dict[str, Any]) -> dict[str, Any]:
    """Load everything and try it. Raises what loading and running raise; the parent has a time limit."""
    from ..llama.model import LlamaModel

    config = ModelConfig(**models)
    layers = {"target": config.n_gpu_layers, "draft": config.n_gpu_layers_draft}
    trials = {}
    for role in ROLES:
        if role in files:
            with LlamaModel(Path(files[role]), n_gpu_layers=layers[role]) as model:
                trials[role] = _try_model(model, config.threads[role])
    return {"trials": trials, **_try_runs(files, probes, config)}


def _try_model(model: LlamaModel, n_threads: int) -> dict[str, Any]:
    """Decode with and without hidden states; each context tries its tap and its rollback when it is made."""
    from ..llama.context import LlamaContext

    settings: dict[str, Any] = {"n_ctx": 64, "n_threads": n_threads}
    tap = TapPoint(max(0, model.n_layer - 2), "pre")
    with LlamaContext(model, **settings) as context:
        facts: dict[str, Any] = {
            "plain_ms": _ms_per_token(context),
            "rollback": "rolls back by cutting" if context.can_trim else "rolls back by checkpoints",
        }
    try:
        with LlamaContext(model, taps=[tap], **settings) as context:
            assert context.taps is not None, "it was asked for one"
            return {**facts, "tap": context.taps.names[tap], "tapped_ms": _ms_per_token(context)}
    except ModelError:  # an architecture without hidden states runs all the same
        return {**facts, "tap": None, "tapped_ms": None}


def _ms_per_token(context: Any) -> float:
    """The quickest of a few: other programs only ever make it longer."""
    seconds = []
    for position in range(_N_TIMED):
        start = time.perf_counter()
        context.decode([0], [position])
        seconds.append(time.perf_counter() - start)
    return 1000 * min(seconds)


def _try_runs(files: dict[str, str], probes: dict[ProbeRole, str], models: ModelConfig) -> dict[str, Any]:
    """The question three ways on one loaded pair: as usual, with every drafted step rejected, by the target alone."""
    sources = Sources(
        target=Path(files["target"]),
        draft=Path(files["draft"]) if "draft" in files else None,
        probes={role: Path(path) for role, path in probes.items()},
    )
    policy = _policy(sources)
    with Reasoner(sources, _config(policy), models) as reasoner:
        alone = _text(reasoner, _config("never"))
        if sources.draft is None:
            return {
                "policy": policy,
                "n_tokens": alone.usage["completion_tokens"],
                "n_drafted": None,
                "texts_differ_at": None,
            }
        usual = _text(reasoner, _config(policy))
        rejected = _text(reasoner, _config("random", threshold=0.0))
    drafted = min(result.stats["n_proposed_steps"] for result in (usual, rejected))
    return {
        "policy": policy,
        "n_drafted": usual.stats["n_proposed_steps"] if drafted else 0,
        "n_accepted": usual.stats["n_accepted_steps"],
        "texts_differ_at": _first_difference(alone.text, rejected.text),
    }


def _policy(sources: Sources) -> str:
    """The default policy where its probes are there, else one that needs none."""
    if sources.draft is None:
        return "never"
    default = RunConfig().policy
    needed = [role for role in PROBE_ROLES if f"{role}_semantic_prob" in POLICIES[default].needs]
    return default if set(needed) <= set(sources.probes) else "always"


def _config(policy: str, **more: Any) -> RunConfig:
    return RunConfig(
        policy=policy, n_prime=0, max_tokens=_N_TOKENS, max_step_tokens=_N_STEP_TOKENS, sampling=_GREEDY, **more
    )


def _text(reasoner: Reasoner, config: RunConfig) -> RunResult:
    return reasoner.answer(QUESTION, seed=1, config=config)


def _first_difference(one: str, other: str) -> int | None:
    if one == other:
        return None
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
