"""From a pair of files to answers: loads models and probes, renders the question, runs the loop.

Two layers: `Reasoner.start` gives step records, `Reasoner.answer` the finished result. What is wrong with the files
is said before the first token.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import MAX_SEED, ModelConfig, RunConfig, check_seed
from .engine import Pays, Prompts, Speculation
from .errors import ConfigError, ModelError, ProbeError
from .modelinfo import ModelInfo
from .policy import POLICIES, Policy, make_policy
from .prompting import Prompting, Question
from .protocols import TapPoint
from .provenance import fingerprint_file, provenance
from .rating import Rater
from .remarks import remarks_of
from .result import RunResult, result_of
from .roles import PROBE_ROLES, ROLES, ProbeRole, Role
from .trace import StepRecord

if TYPE_CHECKING:
    from .llama.guessing import TokenGuesser
    from .llama.model import LlamaModel
    from .llama.session import LlamaStepModel
    from .probes import OnnxJointProbe, OnnxProbe

logger = logging.getLogger(__name__)

MAX_LANES = 32

_SEMANTIC_PROBS = frozenset(f"{role}_semantic_prob" for role in PROBE_ROLES)


@dataclass(frozen=True, kw_only=True)
class Sources:
    """The files of one pair, and what is known of them. `draft` is None for the target alone."""

    target: Path
    draft: Path | None = None
    probes: Mapping[ProbeRole, Path] = field(default_factory=dict)
    pair: str | None = None
    system: str | None = None
    state: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """For a pulled pair, per role: where its file came from, and whether it was requantized here."""

    @classmethod
    def from_pair(cls, name: str | None = None) -> Sources:
        """A pair on this machine by name, with the probes that ship for it.

        Default: the default pair, or, with a warning, the embedded one where that was not pulled.
        """
        from .pairs import resolve, usual_pair
        from .probes import find_probe

        files = resolve(name or usual_pair())
        found = {role: find_probe(files.name, role) for role in PROBE_ROLES}
        return cls(
            target=files.target,
            draft=files.draft,
            probes={role: path for role, path in found.items() if path is not None},
            pair=files.name,
            system=files.manifest.system,
            state=files.state,
        )

    def path(self, role: Role) -> Path | None:
        return self.target if role == "target" else self.draft

    def files(self) -> list[Path]:
        """Every file that a run reads."""
        return [path for role in ROLES if (path := self.path(role)) is not None] + list(self.probes.values())


class Reasoner:
    """A loaded pair. Use it in a `with`, for one question after another."""

    def __init__(
        self,
        sources: Sources,
        config: RunConfig | None = None,
        models: ModelConfig | None = None,
        *,
        n_lanes: int = 1,
        max_lanes: int = MAX_LANES,
    ) -> None:
        """`n_lanes` runs may go on at once; 0 takes as many as lower the cost, fit, and are at most `max_lanes`."""
        self.sources = sources
        self.n_lanes, self.max_lanes = n_lanes, max_lanes
        self.config = config or RunConfig()
        self.models = models or ModelConfig()
        self.policy = make_policy(self.config.policy, self.config.threshold)
        self._check_sources()
        self._check_memory()
        self.warnings: list[str] = []
        self.probe_warnings: list[str] = []
        self.pays_for: Callable[[Policy], Pays] | None = None
        """Set by who knows what drafting costs here (see `costs.pays`); None always drafts."""
        self.n_guess = 0
        """Set by the same: tokens to guess at a time in runs whose configuration leaves that open."""
        self.guesses_pay: Pays | None = None
        """Set by the same: do such guesses still pay? None goes on guessing."""
        with ExitStack() as stack:
            self._load(stack)
            self._stack = stack.pop_all()

    def _check_sources(self) -> None:
        unused = sorted(set(self.sources.probes) - set(self._probe_roles()))
        if unused and self.sources.pair is None:
            logger.warning(
                "policy %s does not use the %s", self.policy.name, " and the ".join(map(_probe_name, unused))
            )
        self._check_unused()
        if self.config.guess and self.sources.draft is None:
            raise ConfigError("--guess needs a draft; give one with -md, or leave out --guess")
        if not self.policy.drafts:
            return
        if self.sources.draft is None:
            raise ConfigError(f"policy {self.policy.name} needs a draft; give one with -md, or use --policy never")
        missing = [role for role in self._probe_roles() if role not in self.sources.probes]
        if missing:
            given = {f"{role}_semantic_prob" for role in self.sources.probes}
            fitting = [name for name, one in POLICIES.items() if given and given == one.needs & _SEMANTIC_PROBS]
            other = "a policy without probes, such as loglik-ratio"
            if fitting:
                other = f"--policy {fitting[0]}, for the probes given"
            raise ConfigError(
                f"policy {self.policy.name} needs the {' and the '.join(map(_probe_name, missing))}; "
                f"give {' and '.join(f'--{role}-probe' for role in missing)}, or use {other}"
            )

    def _check_unused(self) -> None:
        """A file that this policy does not need is not opened; a mistyped name is said all the same."""
        draft = self.sources.draft
        if "draft" not in self._used_roles() and draft is not None and not draft.exists():
            raise ModelError(f"no model file at {draft}; check the path, or leave out -md")
        for role in set(self.sources.probes) - set(self._probe_roles()):
            if not self.sources.probes[role].exists():
                raise ProbeError(
                    f"no probe at {self.sources.probes[role]}; check the path, or leave out --{role}-probe"
                )

    def _probe_roles(self) -> list[ProbeRole]:
        return [role for role in PROBE_ROLES if f"{role}_semantic_prob" in self.policy.needs]

    def _load(self, stack: ExitStack) -> None:
        from .llama.chat import ChatTemplate
        from .llama.context import LlamaContext
        from .llama.hub import Hub
        from .llama.lane_model import LaneStepModel
        from .llama.model import LlamaModel
        from .llama.session import LlamaStepModel

        self.infos: dict[Role, ModelInfo] = {}
        self.probes: dict[Role, OnnxProbe] = {}
        self.joint_probe: OnnxJointProbe | None = None
        self.hub = Hub()
        chats: dict[Role, ChatTemplate] = {}
        models = {}
        for role in self._used_roles():
            path = self.sources.path(role)
            assert path is not None
            models[role] = stack.enter_context(LlamaModel(path, n_gpu_layers=self.models.gpu_layers[role]))
            self.infos[role] = models[role].info()
        if "target_rating" in self.policy.needs:
            Rater(models["target"].vocabulary)  # raises before the first question where it cannot
        if len({model.vocabulary.fingerprint for model in models.values()}) > 1:
            self._warn("draft and target have different vocabularies, so steps are carried between them as text")
        self._load_probes()
        self.policy = self._make_policy(self.config)
        self.n_lanes = self.n_lanes or self._best_lanes(models)
        self._lanes: list[dict[Role, LlamaStepModel]] = [{} for _ in range(self.n_lanes)]
        self._models = self._lanes[0]
        for role, model in models.items():
            n_ctx = min(self.models.n_ctx, model.n_ctx_train)
            if n_ctx < self.models.n_ctx != ModelConfig().n_ctx:  # nobody asked for the default
                self._warn(f"the {role} was trained for {n_ctx:,} tokens of context; that is what it gets")
            n_threads = self.models.threads[role]
            logger.info("%s: %s, a context of %s tokens, %d threads", role, model.path.name, f"{n_ctx:,}", n_threads)
            settings: dict[str, Any] = {"n_ctx": n_ctx, "n_threads": n_threads, "taps": self._taps(role)}
            if self.n_lanes == 1:
                alone = LlamaStepModel(model, sampling=self.config.sampling, **settings)
                self._models[role] = stack.enter_context(alone)
            else:
                # Where nobody drafts, all lanes write at once; else some draft while others write or read.
                settings["one_cache"] = "draft" in self._used_roles()
                context = stack.enter_context(LlamaContext(model, n_seq_max=self.n_lanes, **settings))
                for number, lane in enumerate(self._lanes):
                    lane[role] = stack.enter_context(LaneStepModel(context, number, self.hub, self.config.sampling))
            chats[role] = ChatTemplate(model)
        if self.config.guess:
            self._guesser(0, self.config.guess)  # raises before the first question where it cannot
        self._prompting = Prompting(chats, self._models, self.sources.system)

    def _check_memory(self) -> None:
        """Said before anything is loaded: llama.cpp ends the process, or the machine crawls, where memory runs out."""
        from .llama.memory import Plan

        plan = Plan(
            paths={role: path for role in self._used_roles() if (path := self.sources.path(role)) is not None},
            n_ctx=self.models.n_ctx,
            n_gpu_layers=self.models.gpu_layers,
        )
        if self.models.check_memory:
            plan.check(max(1, self.n_lanes))
        self._most_lanes = min(self.max_lanes, plan.lanes_that_fit(self.max_lanes)) if self.n_lanes == 0 else 1

    def _best_lanes(self, models: Mapping[Role, LlamaModel]) -> int:
        """As many lanes as lower the cost of a token, and as fit."""
        from .llama.lane_choice import batch_costs, best_lanes

        most, one_cache = self._most_lanes, "draft" in self._used_roles()
        if one_cache:
            limits = [model.most_sequences(min(self.models.n_ctx, model.n_ctx_train)) for model in models.values()]
            most = min([most, *(limit for limit in limits if limit is not None)])
        if most == 1:
            return 1
        n_threads = self.models.threads["target"]
        return best_lanes(batch_costs(models["target"], n_threads=n_threads, most=most, one_cache=one_cache))

    def _used_roles(self) -> tuple[Role, ...]:
        return ROLES if self.policy.drafts or self.config.guess else ROLES[:1]

    def _load_probes(self) -> None:
        from .probes import load_joint_probe, load_probe

        known = {role: self._fingerprinted(role) for role in self.infos} if self._probe_roles() else {}
        for role in ROLES:
            if role in self._probe_roles():
                self.probes[role] = load_probe(self.sources.probes[role], role, known[role])
        if "joint" in self._probe_roles():
            self.joint_probe = load_joint_probe(self.sources.probes["joint"], known)
        loaded = [*self.probes.values(), *([self.joint_probe] if self.joint_probe is not None else [])]
        self.probe_warnings += [warning for probe in loaded for warning in probe.warnings]
        for warning in self.probe_warnings:
            self._warn(warning)

    def _taps(self, role: Role) -> list[TapPoint]:
        """Where the probes read this model, each place once."""
        taps = [self.probes[role].tap] if role in self.probes else []
        taps += [self.joint_probe.taps[role]] if self.joint_probe is not None else []
        return list(dict.fromkeys(taps))

    def _fingerprinted(self, role: Role) -> ModelInfo:
        # A file requantized on this machine need not equal the one made elsewhere, bit for bit.
        if self.sources.state.get(role, {}).get("requantized"):
            return self.infos[role]
        path = self.sources.path(role)
        assert path is not None
        return replace(self.infos[role], fingerprint=fingerprint_file(path)["sha256"])

    def _warn(self, warning: str) -> None:
        self.warnings.append(warning)
        logger.warning("%s", warning)

    # -- runs ---------------------------------------------------------------------------------------

    def start(
        self,
        question: Question,
        *,
        seed: int,
        system: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        config: RunConfig | None = None,
        lane: int = 0,
    ) -> Speculation:
        """A run over one question, or over messages with role and content, ready to be iterated.

        `system` None takes the pair's own message, "" none at all. Another `config` must not need models or probes that
        were not loaded. Runs on different lanes may go on at once, each as work of `hub`.
        """
        config = config or self.config
        policy = self._policy_for(config)
        n_guess = (self.n_guess if policy.drafts else 0) if config.guess is None else config.guess
        guesser = self._guesser(lane, n_guess) if n_guess else None
        prompts = self.prompts(question, system=system, template_options=template_options, config=config)
        return Speculation(
            prompts,
            target=self._lanes[lane]["target"],
            draft=self._lanes[lane].get("draft"),
            policy=policy,
            config=config,
            probes=self.probes,
            joint_probe=self.joint_probe if "joint_semantic_prob" in policy.needs else None,
            pays=self.pays_for(policy) if config.give_up and self.pays_for is not None else None,
            guesser=guesser if prompts.draft else None,
            guesses_pay=self.guesses_pay if config.guess is None else None,
            seed=check_seed(seed),
        )

    def _guesser(self, lane: int, n: int) -> TokenGuesser:
        from .llama.guessing import TokenGuesser

        models = self._lanes[lane]
        if "draft" not in models:
            raise ConfigError("--guess needs a draft, and none was loaded")
        return TokenGuesser.with_draft(models["target"], models["draft"], n)

    def prompts(
        self,
        question: Question,
        *,
        system: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        config: RunConfig | None = None,
    ) -> Prompts:
        """The question as a run reads it, for who runs something else on the loaded models."""
        return self._prompting.prompts(
            question, system=system, options=template_options or {}, config=config or self.config
        )

    @property
    def step_models(self) -> Mapping[Role, LlamaStepModel]:
        """The loaded models by role; they belong to this pair, and to one run at a time."""
        return self._models

    @property
    def can_guess(self) -> bool:
        """Can the loaded draft guess the target's tokens?"""
        from .llama.guessing import check_can_guess

        try:
            check_can_guess([*self._models.values()])
        except (ConfigError, ModelError):
            return False
        return "draft" in self._models

    def _make_policy(self, config: RunConfig) -> Policy:
        """The policy of a configuration; without a threshold, what the probe was calibrated to, or the policy's own."""
        policy = make_policy(config.policy, config.threshold)
        if config.threshold is None and self.joint_probe is not None and "joint_semantic_prob" in policy.needs:
            return make_policy(config.policy, self.joint_probe.spec.calibrated_threshold(policy.name))
        return policy

    def _policy_for(self, config: RunConfig) -> Policy:
        policy = self._make_policy(config)
        if policy.drafts and not self.policy.drafts:
            raise ConfigError(f"policy {policy.name} needs a draft, and none was loaded for {self.policy.name}")
        loaded = {*self.probes, *(["joint"] if self.joint_probe is not None else [])}
        if any(f"{role}_semantic_prob" in policy.needs for role in PROBE_ROLES if role not in loaded):
            raise ConfigError(f"policy {policy.name} needs probes, and none were loaded for {self.policy.name}")
        return policy

    def answer(self, question: Question, *, seed: int | None = None, **options: Any) -> RunResult:
        """Run one question to its end; `seed` None chooses one, which the result names."""
        seed = new_seed() if seed is None else seed
        speculation = self.start(question, seed=seed, **options)
        return self.result(speculation, list(speculation))

    def result(
        self, speculation: Speculation, records: list[StepRecord], *, c_t_alone: float | None = None
    ) -> RunResult:
        """The result of a run of this pair, with what should be said about it (see `remarks`)."""
        remarks = remarks_of(speculation, records, probe_warnings=self.probe_warnings, c_t_alone=c_t_alone)
        return result_of(speculation, records, remarks)

    def header(self, question: str, speculation: Speculation, *, argv: list[str] | None = None) -> dict[str, Any]:
        """What a trace says of a run before its first step; `prompt` is the whole text that the target reads."""
        return {
            "provenance": provenance(argv),
            "seed": speculation.seed,
            "question": question,
            "prompt": speculation.prompts.text,
            "policy": speculation.policy.name,
            "threshold": speculation.policy.threshold,
            "n_guess": speculation.n_guess,
            "config": asdict(speculation.config),
            "models_config": asdict(self.models),
            "pair": self.sources.pair,
            "models": {role: self._facts(role) for role in self._models},
            "probes": {role: fingerprint_file(self.sources.probes[role]) for role in self._probe_roles()},
            "warnings": self.warnings,
        }

    def _facts(self, role: Role) -> dict[str, Any]:
        path = self.sources.path(role)
        assert path is not None
        facts = asdict(self.infos[role]) | {"path": path.name, "fingerprint": fingerprint_file(path)["sha256"]}
        state = self.sources.state.get(role, {})
        return facts | {"requantized": state.get("requantized"), "source_sha256": state.get("source_sha256")}

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Reasoner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _probe_name(role: ProbeRole) -> str:
    return "joint probe" if role == "joint" else f"{role}'s probe"


def new_seed() -> int:
    """A seed nobody chose."""
    return secrets.randbelow(MAX_SEED + 1)
