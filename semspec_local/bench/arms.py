"""The arms of a benchmark behind one protocol: a question goes in, and what was written and how comes out.

An arm is named by a text: `target` and `draft` are that model alone, a policy's name is speculation by steps
(`loglik-ratio@0.9` with a threshold of its own), `random@rate-of:ARM` accepts as often as that arm. `+guess@4` behind
such a policy lets the draft guess four tokens at a time of what the target writes. `token-sd@4` is speculation by
tokens alone, four guessed at a time, `lookup@4` the same with tokens that are found in the text;
`llama-server` and `llama-server+draft@3` are llama.cpp's own server.
Knows nothing of what is asked, nor of right answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..config import MAX_GUESS, ModelConfig, RunConfig
from ..errors import ConfigError
from ..metrics import Counters
from ..policy import POLICIES, make_policy
from ..prefix import Prefix
from ..reasoner import Reasoner, Sources
from ..trace import StepRecord
from .llama_server import DEFAULT_N_MAX
from .server_binary import find_llama_server
from .token_sd import TokenSpeculation

if TYPE_CHECKING:
    from .external import ServerArm

TARGET, DRAFT, TOKEN_SD, LOOKUP = "target", "draft", "token-sd", "lookup"
_MATCHED, _GUESS = "random@rate-of:", "+guess@"

LLAMA_SERVER, LLAMA_SERVER_DRAFT = "llama-server", "llama-server+draft"

DEFAULT_N_DRAFT = 4
"""Tokens that `token-sd` and `lookup` draft at a time when their name says no number."""


@dataclass(frozen=True, kw_only=True)
class ArmRun:
    """One question, answered.

    `final` is the text in which the answer stands: all of it, or what follows the thinking. `wall_s` is from the
    prompt's first token read to the last one written, `prefill_s` the part of it that reads the prompt, `ttft_s` the
    part until the first text is there. `counters` and `records` are those of speculation by steps (None elsewhere).
    `n_proposed` and `n_accepted` are guessed tokens (None where none are guessed).
    """

    text: str
    final: str
    stop_reason: str
    wall_s: float
    prefill_s: float
    n_tokens: int
    ttft_s: float | None = None
    counters: Counters | None = None
    records: tuple[StepRecord, ...] | None = None
    n_proposed: int | None = None
    n_accepted: int | None = None


class Arm(Protocol):
    """One side of a benchmark, loaded. It answers one question after another."""

    name: str

    @property
    def calls_back(self) -> bool | None:
        """Does Python run inside llama.cpp's calls, where `native_time` does not see it?

        None when llama.cpp runs in another process.
        """
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
        return self._run(question, seed, self._reasoner.config)

    def _run(self, question: str, seed: int, config: RunConfig) -> ArmRun:
        _forget_prompts(self._reasoner)
        speculation = self._reasoner.start(question, seed=seed, config=config)
        records = list(speculation)
        counters = speculation.counters
        return ArmRun(
            text=speculation.text,
            final=speculation.prefix.split()[1],
            stop_reason=speculation.stop_reason or "interrupted",
            wall_s=counters.wall_s,
            prefill_s=counters.prefill_s,
            ttft_s=counters.ttft_s,
            n_tokens=counters.n_committed_tokens,
            counters=counters,
            records=tuple(records),
            n_proposed=counters.n_guesses if config.guess else None,
            n_accepted=counters.n_guesses_kept if config.guess else None,
        )


class MatchedArm(StepArm):
    """Accepts at random, as often as the arm `follows` does: set `rate` before each run."""

    def __init__(self, name: str, reasoner: Reasoner, follows: str) -> None:
        super().__init__(name, reasoner)
        self.follows, self.rate = follows, 0.5

    def run(self, question: str, seed: int) -> ArmRun:
        return self._run(question, seed, replace(self._reasoner.config, threshold=self.rate))


def cannot_close_thinking(arm: str) -> str:
    """What to say to `--think-budget` where an arm that has none would do more work than the others."""
    return f"the arm {arm} cannot close a model's thinking; leave out --think-budget, or the arm"


def _forget_prompts(reasoner: Reasoner) -> None:
    """Let a run read its prompt whole, as it would alone and as an external arm is told to."""
    for model in reasoner.step_models.values():
        model.forget()


class TokenArm:
    """Lossless speculation by tokens, on the prompts that speculation by steps reads; without a draft, by lookup."""

    calls_back = False  # its models are loaded without taps

    def __init__(self, name: str, reasoner: Reasoner, n_draft: int) -> None:
        self.name, self._reasoner, self.n_draft = name, reasoner, n_draft

    def run(self, question: str, seed: int) -> ArmRun:
        _forget_prompts(self._reasoner)
        models, config = self._reasoner.step_models, self._reasoner.config
        prompts = self._reasoner.prompts(question)
        result = TokenSpeculation(
            prompts,
            target=models["target"],
            draft=models.get("draft"),
            n_draft=self.n_draft,
            sampling=config.sampling,
            max_tokens=config.max_tokens,
            seed=seed,
        ).run()
        return ArmRun(
            text=result.text,
            final=Prefix(opened=prompts.thinking, data=result.text.encode()).split()[1],
            stop_reason=result.stop_reason,
            wall_s=result.wall_s,
            prefill_s=result.prefill_s,
            ttft_s=result.prefill_s,  # the first token is drawn from the prompt's own logits
            n_tokens=len(result.tokens),
            n_proposed=result.n_proposed,
            n_accepted=result.n_accepted,
        )


@dataclass(frozen=True)
class ArmSpec:
    """A parsed name: the kind is `target`, `draft`, `token-sd`, `lookup`, `matched`, `llama-server` or `policy`."""

    name: str
    kind: str
    policy: str = "never"
    threshold: float | None = None
    guess: int = 0
    n_draft: int = DEFAULT_N_DRAFT
    follows: str = ""


def parse_arm(name: str) -> ArmSpec:
    """What the name of an arm says; ConfigError for one that says nothing."""
    if _GUESS in name and not name.startswith(_MATCHED):
        return _parse_guess(name)
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
    if name.startswith(_MATCHED):
        return ArmSpec(name, "matched", policy="random", threshold=0.5, follows=name.removeprefix(_MATCHED))
    if word not in POLICIES:
        by_tokens = (f"{TOKEN_SD}@N", f"{LOOKUP}@N")
        known = ", ".join((TARGET, DRAFT, *by_tokens, *POLICIES, LLAMA_SERVER, f"{LLAMA_SERVER_DRAFT}@N"))
        raise ConfigError(f"the arm is {name!r}; known are {known} (a policy may have @threshold, then {_GUESS}N)")
    try:
        threshold = float(number) if at else None
    except ValueError:
        raise ConfigError(f"the arm is {name!r}; wanted a number after the @, the policy's threshold") from None
    make_policy(word, threshold)
    return ArmSpec(name, "policy", policy=word, threshold=threshold)


def _parse_guess(name: str) -> ArmSpec:
    """A policy, and how many tokens are guessed of what its target writes."""
    policy, _, number = name.partition(_GUESS)
    spec = parse_arm(policy)
    if spec.kind != "policy":
        raise ConfigError(f"the arm is {name!r}; wanted a policy before {_GUESS}N ({TOKEN_SD}@N is the target with it)")
    if not (number.isascii() and number.isdecimal() and 0 < int(number) <= MAX_GUESS):
        raise ConfigError(f"the arm is {name!r}; wanted 1 to {MAX_GUESS} tokens behind {_GUESS}")
    return replace(spec, name=name, guess=int(number))


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


def check_arms(names: Sequence[str]) -> list[ArmSpec]:
    """What the names say together; ConfigError for one that says nothing, is there twice, or follows nothing."""
    specs = [parse_arm(name) for name in names]
    if repeated := sorted({name for name in names if list(names).count(name) > 1}):
        raise ConfigError(f"the arm {repeated[0]!r} is there twice; wanted each arm once")
    for spec in specs:
        if spec.follows and spec.follows not in names:
            raise ConfigError(f"the arm {spec.name} follows {spec.follows}, which is no arm here; add it too")
        if spec.follows and parse_arm(spec.follows).kind != "policy":
            raise ConfigError(f"the arm {spec.name} follows {spec.follows}, which accepts no steps; name a policy")
    return specs


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
    specs = check_arms(names)
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
    config = replace(config, policy=spec.policy, threshold=spec.threshold, guess=spec.guess)
    if spec.kind in (TOKEN_SD, LOOKUP) and config.think_budget is not None:
        raise ConfigError(cannot_close_thinking(spec.name))
    if spec.kind == DRAFT:
        state = {"target": sources.state["draft"]} if "draft" in sources.state else {}
        sources = replace(sources, target=_draft_of(spec, sources), draft=None, probes={}, state=state)
        models = replace(models, n_gpu_layers=models.n_gpu_layers_draft, n_threads=models.threads["draft"])
    elif not POLICIES[spec.policy].drafts and not spec.guess:
        sources = replace(sources, draft=None, probes={})
    else:
        _draft_of(spec, sources)
        needs = POLICIES[spec.policy].needs
        probes = {role: path for role, path in sources.probes.items() if f"{role}_semantic_prob" in needs}
        sources = replace(sources, probes=probes)
    reasoner = stack.enter_context(Reasoner(sources, config, models))
    if spec.kind == "matched":
        return MatchedArm(spec.name, reasoner, spec.follows)
    if spec.kind in (TOKEN_SD, LOOKUP):
        return TokenArm(spec.name, reasoner, spec.n_draft)
    return StepArm(spec.name, reasoner)


def _draft_of(spec: ArmSpec, sources: Sources) -> Path:
    if sources.draft is None:
        raise ConfigError(f"the arm {spec.name} needs a draft, and there is none; give one with -md")
    return sources.draft
