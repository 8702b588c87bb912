"""What is examined, and what is asked of child processes for it: each question once, and only when a check wants it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..config import ModelConfig
from ..errors import SemspecError
from ..probes import shipped_probe
from ..provenance import known_sha256
from ..reasoner import Sources
from ..roles import ROLES, ProbeRole, Role
from .child import Answer, Task, ask

SMOKE_LIMIT_S = 900.0


@dataclass
class Examination:
    """A machine, and the files that `run` would use with the same options; `target` None takes a pair."""

    pair: str | None = None
    target: Path | None = None
    draft: Path | None = None
    probes: Mapping[ProbeRole, Path] = field(default_factory=dict)
    models: ModelConfig = field(default_factory=ModelConfig)
    smoke: bool = False

    @cached_property
    def found(self) -> Sources | SemspecError:
        """The files, or why there are none."""
        if self.target is not None:
            return Sources(target=self.target, draft=self.draft, probes=self.probes)
        try:
            sources = Sources.from_pair(self.pair)
        except SemspecError as error:
            return error
        return replace(sources, probes={**sources.probes, **self.probes})

    @property
    def sources(self) -> Sources | None:
        return None if isinstance(self.found, SemspecError) else self.found

    def path(self, role: Role) -> Path | None:
        return self.sources.path(role) if self.sources is not None else None

    @cached_property
    def answers(self) -> dict[str, Answer]:
        """What llama.cpp and ONNX Runtime are, and what the models' headers say."""
        tasks = [Task("llama", "llama")]
        tasks += [Task(name, name, needs=("llama",)) for name in ("build", "symbols", "defaults")]
        paths: dict[str, Any] = {role: str(path.absolute()) for role in ROLES if (path := self.path(role)) is not None}
        tasks += [Task(role, "model", {"path": path}, needs=("llama",)) for role, path in paths.items()]
        if len(paths) == 2:
            tasks.append(Task("vocabularies", "vocabularies", paths, needs=("llama", *paths)))
        if paths:
            arguments = {"paths": paths, "n_ctx": self.models.n_ctx}
            tasks.append(Task("memory", "memory", arguments, needs=("llama", *paths)))
        tasks.append(Task("onnx", "onnx", {"path": str(shipped_probe("tiny", "target").absolute())}))
        return ask(tasks)

    def answer(self, name: str) -> Answer | None:
        """None where the question was not asked, or pointless."""
        return self.answers.get(name)

    def facts(self, role: Role) -> dict[str, Any] | None:
        """What the model's header says, None where that is not known."""
        answer = self.answer(role)
        return answer.value if answer is not None and answer.ok else None

    @cached_property
    def probe_answers(self) -> dict[str, Answer]:
        """What the probes are, and whether they fit the models."""
        if self.sources is None:
            return {}
        infos = {role: self._info(role, facts) for role in ROLES if (facts := self.facts(role)) is not None}
        needed: dict[ProbeRole, tuple[Role, ...]] = {"target": ("target",), "draft": ("draft",), "joint": ROLES}
        tasks = []
        for role, path in self.sources.probes.items():
            known = {one: infos[one] for one in needed[role] if one in infos}
            arguments = {
                "path": str(path.absolute()),
                "role": role,
                "infos": known if len(known) == len(needed[role]) else {},
            }
            tasks.append(Task(role, "probe", arguments))
        return ask(tasks)

    def _info(self, role: Role, facts: dict[str, Any]) -> dict[str, Any]:
        """The facts that a probe is compared with, and the file's sha256 where that costs nothing."""
        assert self.sources is not None, "facts come from files"
        record, path = self.sources.state.get(role, {}), self.sources.path(role)
        info: dict[str, Any] = dict(facts["info"])
        if record.get("requantized"):  # it need not equal the file made elsewhere, bit for bit
            return info
        if record.get("sha256"):
            return {**info, "fingerprint": record["sha256"]}
        return {**info, "fingerprint": known_sha256(path)} if path is not None else info

    @cached_property
    def smoke_answer(self) -> Answer:
        """What came of loading the pair and answering a question with it."""
        assert self.sources is not None, "asked for only where there are files"
        paths = {role: str(path.absolute()) for role in ROLES if (path := self.path(role)) is not None}
        probes = {role: str(path.absolute()) for role, path in self.sources.probes.items()}
        arguments = {"files": paths, "probes": probes, "models": asdict(self.models)}
        return ask([Task("smoke", "smoke", arguments)], time_limit_s=SMOKE_LIMIT_S)["smoke"]

    @property
    def opened(self) -> list[str]:
        """Uses of the network by the children so far."""
        answers = [*self.answers.values(), *self.probe_answers.values()]
        if "smoke_answer" in self.__dict__:
            answers.append(self.smoke_answer)
        return sorted({use for answer in answers for use in answer.opened})
