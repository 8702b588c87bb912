"""The arms of a benchmark behind one protocol: a question goes in, and what was written and how comes out.

An arm is named by a text: `target` and `draft` are that model alone, a policy's name is speculation by steps
(`loglik-ratio@0.9` with a threshold of its own), `token-sd@4` is speculation by tokens, four drafted at a time,
`lookup@4` the same with tokens that are found in the text; `llama-server` and `llama-server+draft@3` are llama.cpp's
own server.
Knows nothing of what is asked, nor of right answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..answer import final_answer
from ..config import ModelConfig, RunConfig
from ..errors import ConfigError
from ..metrics import Counters
from ..policy import POLICIES, make_policy
from ..reasoner import Reasoner, Sources
from ..result import result_of
from ..trace import StepRecord
from .llama_server import DEFAULT_N_MAX
from .server_binary import find_llama_server
from .token_sd import TokenSpeculation

if TYPE_CHECKING:
    from .external import ServerArm

TARGET, DRAFT, TOKEN_SD, LOOKUP = "target", "draft", "token-sd", "lookup"
LLAMA_SERVER, LLAMA_SERVER_DRAFT = "llama-server", "llama-server+draft"

DEFAULT_N_DRAFT = 4
"""Tokens that `token-sd` and `lookup` draft at a time when their name says no number."""


@dataclass(frozen=True, kw_only=True)
class ArmRun:
    """One question, answered.

    `wall_s` is from the prompt's first token read to the last one written, `prefill_s` the part of it that reads the
    prompt. `counters` and `records` are those of speculation by steps (None elsewhere). `n_proposed` and
    `n_accepted` are tokens of speculation by tokens (None elsewhere).
    """

    answer: str
    text: str
    stop_reason: str
    wall_s: float
    prefill_s: float
    n_tokens: int
    counters: Counters | None = None
    records: tuple[StepRecord, ...] | None = None
    n_proposed: int | None = None
    n_accepted: int | None = None


class Arm(Protocol):
    """One side of a benchmark, loaded. It answers one question after another."""

    name: str

    @property
    def calls_back(self) -> bool:
        """Does Python run inside llama.cpp's calls, where `native_time` does not see it?"""
        ...

    def run(self, question: str, seed: int) -> ArmRun: ...


class StepArm:
    """The loop of the engine; with the policy `never`, a model alone."""

    def __init__(self, name: str, reasoner: Reasoner) -> None:
        self.name, self._reasoner = name, reasoner

    @property
    def calls_back(self) -> bool:
        return any(model.context.calls_back for model in self._reasoner.step_models.values())

    def run(self, question: str, seed: int) -> ArmRun:
        speculation = self._reasoner.start(question, seed=seed)
        records = list(speculation)
        result, counters = result_of(speculation, records), speculation.counters
        return ArmRun(
            answer=result.answer,
            text=result.text,
            stop_reason=result.stop_reason,
            wall_s=counters.wall_s,
            prefill_s=counters.prefill_s,
            n_tokens=counters.n_committed_tokens,
            counters=counters,
            records=tuple(records),
        )


class TokenArm:
    """Lossless speculation by tokens, on the prompts that speculation by steps reads; without a draft, by lookup."""

    calls_back = False  # its models are loaded without taps

    def __init__(self, name: str, reasoner: Reasoner, n_draft: int) -> None:
        self.name, self._reasoner, self.n_draft = name, reasoner, n_draft

    def run(self, question: str, seed: int) -> ArmRun:
        models, config = self._reasoner.step_models, self._reasoner.config
        result = TokenSpeculation(
            self._reasoner.prompts(question),
            target=models["target"],
            draft=models.get("draft"),
            n_draft=self.n_draft,
            sampling=config.sampling,
            max_tokens=config.max_tokens,
            seed=seed,
        ).run()
        return ArmRun(
            answer=final_answer(result.text),
            text=result.text,
            stop_reason=result.stop_reason,
            wall_s=result.wall_s,
            prefill_s=result.prefill_s,
            n_tokens=len(result.tokens),
            n_proposed=result.n_proposed,
            n_accepted=result.n_accepted,
        )


@dataclass(frozen=True)
class ArmSpec:
    """A parsed name: the kind is `target`, `draft`, `token-sd`, `lookup`, `llama-server` or `policy`."""

    name: str
    kind: str
    policy: str = "never"
    threshold: float | None = None
    n_draft: int = DEFAULT_N_DRAFT


def parse_arm(name: str) -> ArmSpec:
    """What the name of an arm says; ConfigError for one that says nothing."""
    word, at, number = name.partition("@")
    if word in (TARGET, DRAFT):
        if at:
            raise ConfigError(f"the arm is {name!r}; {word} stands alone, so leave out @{number}")
        return ArmSpec(name, word)
    if word in (TOKEN_SD, LOOKUP):
        if at and not (number.isascii() and number.isdecimal() and int(number) > 0):
            raise ConfigError(f"the arm is {name!r}; wanted {word}@N for N drafted tokens, 1 or more")
        policy = "always" if word == TOKEN_SD else "never"  # decides which models are loaded, and nothing else
        return ArmSpec(name, word, policy=policy, n_draft=int(number) if at else DEFAULT_N_DRAFT)
    if word in (LLAMA_SERVER, LLAMA_SERVER_DRAFT):
        return _parse_server(name)
    if word not in POLICIES:
        by_tokens = (f"{TOKEN_SD}@N", f"{LOOKUP}@N")
        known = ", ".join((TARGET, DRAFT, *by_tokens, *POLICIES, LLAMA_SERVER, f"{LLAMA_SERVER_DRAFT}@N"))
        raise ConfigError(f"the arm is {name!r}; known are {known} (a policy may have @threshold)")
    try:
        threshold = float(number) if at else None
    except ValueError:
        raise ConfigError(f"the arm is {name!r}; wanted a number after the @, the policy's threshold") from None
    make_policy(word, threshold)
    return ArmSpec(name, "policy", policy=word, threshold=threshold)


def _parse_server(name: str) -> ArmSpec:
    """llama.cpp's own server; `n_draft` is 0 for the target alone."""
    word, at, number = name.partition("@")
    if word == LLAMA_SERVER:
        if at:
            raise ConfigError(f"the arm is {name!r}; {word} stands alone, so leave out @{number}")
        return ArmSpec(name, LLAMA_SERVER, n_draft=0)
    if at and not (number.isascii() and number.isdecimal() and int(number) > 0):
        raise ConfigError(f"the arm is {name!r}; wanted {word}@N for N drafted tokens, 1 or more")
    return ArmSpec(name, LLAMA_SERVER, n_draft=int(number) if at else DEFAULT_N_MAX)


@contextmanager
def make_arms(
    names: Sequence[str],
    sources: Sources,
    config: RunConfig | None = None,
    models: ModelConfig | None = None,
    *,
    llama_server: Path | None = None,
) -> Iterator[list[Arm]]:
    """The arms of these names, each with the models to itself, closed at the end of the `with`.

    All run as `config` says but for its policy and threshold. Every name is read before the first file is.
    `llama_server` is the binary of those arms that are one; None looks for it (`find_llama_server`).
    """
    specs = [parse_arm(name) for name in names]
    if repeated := sorted({name for name in names if list(names).count(name) > 1}):
        raise ConfigError(f"the arm {repeated[0]!r} is there twice; wanted each arm once")
    config, models = config or RunConfig(), models or ModelConfig()
    binary = find_llama_server(llama_server) if any(spec.kind == LLAMA_SERVER for spec in specs) else None
    with ExitStack() as stack:
        yield [
            _load(spec, sources, config, models, stack)
            if spec.kind != LLAMA_SERVER
            else stack.enter_context(_server_arm(spec, sources, config, models, binary))
            for spec in specs
        ]


def _server_arm(
    spec: ArmSpec, sources: Sources, config: RunConfig, models: ModelConfig, binary: Path | None
) -> ServerArm:
    from .external import ServerArm  # it stands on this module

    assert binary is not None, "looked for before the first arm is loaded"
    return ServerArm(spec.name, binary, sources, config, models, n_max=spec.n_draft)


def _load(spec: ArmSpec, sources: Sources, config: RunConfig, models: ModelConfig, stack: ExitStack) -> Arm:
    config = replace(config, policy=spec.policy, threshold=spec.threshold)
    if spec.kind == DRAFT:
        state = {"target": sources.state["draft"]} if "draft" in sources.state else {}
        sources = replace(sources, target=_draft_of(spec, sources), draft=None, probes={}, state=state)
        models = replace(models, n_gpu_layers=models.n_gpu_layers_draft, n_threads=models.threads["draft"])
    elif not POLICIES[spec.policy].drafts:
        sources = replace(sources, draft=None, probes={})
    else:
        _draft_of(spec, sources)
        needs = POLICIES[spec.policy].needs
        probes = {role: path for role, path in sources.probes.items() if f"{role}_semantic_prob" in needs}
        sources = replace(sources, probes=probes)
    reasoner = stack.enter_context(Reasoner(sources, config, models))
    if spec.kind in (TOKEN_SD, LOOKUP):
        return TokenArm(spec.name, reasoner, spec.n_draft)
    return StepArm(spec.name, reasoner)


def _draft_of(spec: ArmSpec, sources: Sources) -> Path:
    if sources.draft is None:
        raise ConfigError(f"the arm {spec.name} needs a draft, and there is none; give one with -md")
    return sources.draft
