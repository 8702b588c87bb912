"""Collect probe data: many samples of the next step at prefixes of the target's own reasoning.

For each problem the target writes one solution, alone or with the draft under a policy; some of its step boundaries
become prefixes. At each prefix both models write N samples of the next step, and each model reads the other's samples,
so that every text has both models' pooled states and log-probabilities. Stored as it goes: one safetensors file per
prefix, then one line in `index.jsonl`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np

from ..config import MAX_SEED, ModelConfig, RunConfig, SamplingConfig, default_threads
from ..errors import ConfigError
from ..llama.chat import ChatTemplate
from ..llama.lanes import Job, LlamaLanes, Trunk
from ..policy import Policy, make_policy
from ..protocols import ModelStep, Pooling, TapPoint, Window
from ..provenance import atomic_write, fingerprint_file, provenance
from ..reasoner import Reasoner, Sources
from ..roles import Role
from ..steps import StepReader
from .collection import COLLECTION_VERSION, EARLY_N_PRIME, N_PREFIXES, N_SAMPLES, POST, TARGET_ALONE, tensors_of
from .problems import Problem

logger = logging.getLogger(__name__)

_ROUNDS = 4
"""Samples of a group for each lane: more keep the lanes fuller, and lose more when a run is cut short."""

_SOLUTION_ROUNDS = 2
"""The same for solutions, which are several times as long as a step."""

_N_CTX = 1024

N_PRIME = RunConfig().n_prime
"""A run of default settings drafts from here on."""

_NO_BOUNDARY = "\0"  # a whole solution is written as one step


@dataclass(frozen=True, kw_only=True)
class CollectConfig:
    """What to collect. Layers are 0-based, read before the final norm; `post` adds the last layer after it."""

    system: str
    n_samples: int = N_SAMPLES
    n_prefixes: int = N_PREFIXES
    """Prefixes per problem, chosen at random among the step boundaries of the target's solution."""
    max_step_tokens: int = 160
    max_solution_tokens: int = 512
    target_layers: tuple[int, ...] = ()
    draft_layers: tuple[int, ...] = ()
    post: bool = False
    n_lanes: int = 32
    n_threads: int = field(default_factory=default_threads)
    seed: int = 0
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    policy: str = TARGET_ALONE
    """Who writes the solutions: the target alone, or both as at run time, so that probes are taught behind what they
    will stand behind: drafted steps, with the errors that a policy lets through."""
    threshold: float | None = None
    n_prime: int = N_PRIME
    """Steps that nobody drafts: prefixes hold at least so many, where the solution has more."""


@dataclass
class _Prefix:
    """A place to sample from: the prompt and the first `step_index` steps of the target's solution."""

    prefix_id: int
    problem: Problem
    step_index: int
    text: str
    tokens: list[int]

    def seed(self, base: int, sample: int, writer: str) -> int:
        return (base * 1_000_003 + self.prefix_id * 4099 + sample * 2 + (writer == "draft")) % 2**31


def middle_layers(n_layer: int) -> tuple[int, ...]:
    """Four layers from the middle up; the last layer is left out, for it is only computed for output tokens."""
    last = max(0, n_layer - 2)
    return tuple(sorted({min(round(n_layer * share), last) for share in (0.5, 0.7, 0.85, 1.0)}))


class Collector:
    """Fills one collection folder; run it again with the same settings to go on where it stopped."""

    def __init__(self, folder: Path, sources: Sources, config: CollectConfig, data: str) -> None:
        """`data` names the problems. Raises ConfigError for what cannot be collected, or not into this folder."""
        self.folder = folder
        self.config = config
        self._sources = sources
        if sources.draft is None:
            raise ConfigError("collecting needs a draft; use a pair that has one")
        self._stack = ExitStack()
        with ExitStack() as stack:
            self.target = stack.enter_context(self._lanes(sources.target, config.target_layers))
            self.draft = stack.enter_context(self._lanes(sources.draft, config.draft_layers))
            if self.target.model.vocabulary.fingerprint != self.draft.model.vocabulary.fingerprint:
                raise ConfigError("collecting needs a draft and a target with one vocabulary")
            self._chat = ChatTemplate(self.target.model)
            folder.mkdir(parents=True, exist_ok=True)
            self._write_header(data)
            self._stack = stack.pop_all()

    def _lanes(self, path: Path, layers: tuple[int, ...]) -> LlamaLanes:
        config = self.config
        return LlamaLanes(
            path,
            n_lanes=config.n_lanes,
            n_trunks=config.n_lanes,
            n_ctx=_N_CTX,
            n_threads=config.n_threads,
            sampling=config.sampling,
            taps=[TapPoint(layer) for layer in layers],
            post=config.post,
        )

    def _write_header(self, data: str) -> None:
        config = self.config
        models = {
            role: asdict(lanes.model.info(fingerprint_file(lanes.model.path)["sha256"]))
            | {"path": lanes.model.path.name}
            for role, lanes in (("target", self.target), ("draft", self.draft))
        }
        header = {
            "version": COLLECTION_VERSION,
            "pair": self._sources.pair,
            "models": models,
            "layers": {
                "target": [*config.target_layers, *[POST] * config.post],
                "draft": [*config.draft_layers, *[POST] * config.post],
            },
            "windows": list(get_args(Window)),
            "poolings": list(get_args(Pooling)),
            "sampling": asdict(config.sampling),
            "n_samples": config.n_samples,
            "data": data,
            "seed": config.seed,
            "prompt": {"system": config.system},
            "max_step_tokens": config.max_step_tokens,
            "n_prime": config.n_prime,
        }
        if config.policy != TARGET_ALONE:
            header["solutions"] = self._written_by()
        path = self.folder / "collection.json"
        if path.exists():
            old = json.loads(path.read_text(encoding="utf-8"))
            old.pop("provenance", None)
            old.setdefault("n_prime", EARLY_N_PRIME)
            if old != header:
                changed = sorted(key for key in {*header, *old} if old.get(key) != header.get(key))
                raise ConfigError(
                    f"{self.folder} holds another collection (different: {', '.join(changed)}); use a new folder"
                )
            return
        text = json.dumps(header | {"provenance": provenance()}, indent=2, ensure_ascii=False)
        atomic_write(path, text + "\n")

    @property
    def _policy(self) -> Policy:
        """With its own threshold unless another is given, whatever a probe was calibrated to."""
        return make_policy(self.config.policy, self.config.threshold)

    def _written_by(self) -> dict[str, Any]:
        """The policy that the solutions are written under, and what its decisions depend on."""
        policy = self._policy
        probes = {role: path for role, path in self._sources.probes.items() if f"{role}_semantic_prob" in policy.needs}
        return {
            "policy": policy.name,
            "threshold": policy.threshold,
            "probes": {role: fingerprint_file(path)["sha256"] for role, path in probes.items()},
        }

    # -- the run ------------------------------------------------------------------------------------

    @property
    def n_stored(self) -> int:
        """How many prefixes the folder holds."""
        return len(_read_lines(self.folder / "index.jsonl"))

    def run(self, problems: Sequence[Problem]) -> Iterator[int]:
        """Collect what is not stored yet; yields how many prefixes are stored, after each group and after solving.

        The first prefix of every problem comes before the second of any, so that a run cut short has many problems.
        What a lane computes depends a little on its neighbours, so a group that was cut short is sampled again whole:
        it becomes what it would have been.
        """
        done = {row["prefix_id"] for row in _read_lines(self.folder / "index.jsonl")}
        n_group = -(-_ROUNDS * self.config.n_lanes // self.config.n_samples)
        for k in range(self.config.n_prefixes):
            for start in range(0, len(problems), n_group):
                if self._solve_until(problems, start + n_group):
                    yield len(done)
                prefixes = self._prefixes(problems[start : start + n_group])
                group = [p for p in prefixes if p.prefix_id % self.config.n_prefixes == k]
                if missing := {prefix.prefix_id for prefix in group} - done:
                    self._collect_group(group, missing)
                    done |= missing
                    yield len(done)

    def _solutions(self) -> dict[str, list[int]]:
        """Token ids of the target's solutions so far; they are stored, so that a rerun has the same prefixes."""
        return {row["problem_id"]: row["tokens"] for row in _read_lines(self.folder / "solutions.jsonl")}

    def _solve_until(self, problems: Sequence[Problem], end: int) -> bool:
        """Let the target solve the problems before `end`, and some more; a part cut short is solved again whole.

        False where all were solved before.
        """
        stored, n_part, solved = self._solutions(), _SOLUTION_ROUNDS * self.config.n_lanes, False
        for start in range(0, min(end, len(problems)), n_part):
            part = problems[start : start + n_part]
            if all(problem.problem_id in stored for problem in part):
                continue
            solved = True
            solve = self._solve if self.config.policy == TARGET_ALONE else self._speculate
            for problem, tokens in solve(part):
                if problem.problem_id not in stored:
                    row = {"problem_id": problem.problem_id, "tokens": tokens}
                    _append_line(self.folder / "solutions.jsonl", row)
        return solved

    def _prefixes(self, problems: Sequence[Problem]) -> list[_Prefix]:
        """Places in the target's solutions."""
        stored = self._solutions()
        prefixes: list[_Prefix] = []
        for problem in problems:
            prompt, steps = self._prompt(problem), self._cut(stored[problem.problem_id])
            rng = np.random.default_rng([self.config.seed, problem.number])
            first = max(0, min(self.config.n_prime, len(steps) - 1))  # a short solution has no other place
            places = rng.permutation(range(first, max(1, len(steps)))).tolist()
            for k, step_index in enumerate(places[: self.config.n_prefixes]):
                before = [token for step in steps[:step_index] for token in step]
                text = self.target.model.vocabulary.decode(before)
                prefix_id = problem.number * self.config.n_prefixes + k
                prefixes.append(_Prefix(prefix_id, problem, step_index, text, prompt + before))
        return prefixes

    def _prompt(self, problem: Problem) -> list[int]:
        messages = [{"role": "user", "content": problem.question}]
        if self.config.system:
            messages.insert(0, {"role": "system", "content": self.config.system})
        return self._chat.render(messages).tokens

    def _solve(self, problems: Sequence[Problem]) -> Iterator[tuple[Problem, list[int]]]:
        def jobs() -> Iterator[Job]:
            for problem in problems:
                trunk = self.target.plant(self._prompt(problem))
                reader = StepReader(max_tokens=self.config.max_solution_tokens, boundary=_NO_BOUNDARY)
                yield Job(problem, trunk, reader, self.config.seed)

        for job, step in self.target.write(jobs()):
            self.target.release(job.trunk)
            yield job.key, step.tokens

    def _speculate(self, problems: Sequence[Problem]) -> Iterator[tuple[Problem, list[int]]]:
        """Solutions written by both models under the policy."""
        config = self.config
        settings = RunConfig(
            policy=config.policy,
            threshold=self._policy.threshold,
            n_prime=config.n_prime,
            max_tokens=config.max_solution_tokens,
            max_step_tokens=config.max_step_tokens,
            sampling=config.sampling,
        )
        with Reasoner(self._sources, settings, ModelConfig(n_ctx=_N_CTX, n_threads=config.n_threads)) as reasoner:
            for problem in problems:
                seed = (config.seed + problem.number) % (MAX_SEED + 1)
                speculation = reasoner.start(problem.question, seed=seed, system=config.system)
                for _ in speculation:
                    pass
                yield problem, speculation.target.committed

    def _cut(self, tokens: Sequence[int]) -> list[list[int]]:
        """Token ids of a solution, step by step, by the same rule as at run time."""
        steps: list[list[int]] = []
        reader: StepReader | None = None
        for token in tokens:
            if reader is None or reader.end is not None:
                reader = StepReader(max_tokens=self.config.max_step_tokens)
                steps.append([])
            steps[-1].append(token)
            reader.feed(self.target.model.vocabulary.piece(token))
        return steps

    def _collect_group(self, prefixes: Sequence[_Prefix], missing: Collection[int]) -> None:
        drafted = self._write_samples(self.draft, "draft", prefixes)
        targeted: dict[int, list[ModelStep]] = {}
        target_read: dict[int, list[ModelStep]] = {}
        draft_read: dict[int, list[ModelStep]] = {}

        def read_drafted(prefix: _Prefix, trunk: Trunk) -> None:
            target_read[prefix.prefix_id] = self.target.read(trunk, [s.tokens for s in drafted[prefix.prefix_id]])

        # The target reads the draft's samples while the prefix is in its cache, right before it writes its own.
        targeted = self._write_samples(self.target, "target", prefixes, read_drafted)
        for prefix in prefixes:
            if prefix.prefix_id not in missing:
                continue
            trunk = self.draft.plant(prefix.tokens)
            draft_read[prefix.prefix_id] = self.draft.read(trunk, [s.tokens for s in targeted[prefix.prefix_id]])
            self.draft.release(trunk)
            self._store(prefix, targeted, drafted, target_read, draft_read)

    def _write_samples(
        self, lanes: LlamaLanes, writer: str, prefixes: Sequence[_Prefix], before: Any = None
    ) -> dict[int, list[ModelStep]]:
        n = self.config.n_samples
        trunks: dict[int, Trunk] = {}
        samples: dict[int, dict[int, ModelStep]] = {prefix.prefix_id: {} for prefix in prefixes}

        def jobs() -> Iterator[Job]:
            for prefix in prefixes:
                trunk = trunks[prefix.prefix_id] = lanes.plant(prefix.tokens)
                if before:
                    before(prefix, trunk)
                for sample in range(n):
                    reader = StepReader(max_tokens=self.config.max_step_tokens)
                    seed = prefix.seed(self.config.seed, sample, writer)
                    yield Job((prefix.prefix_id, sample), trunk, reader, seed)

        for job, step in lanes.write(jobs()):
            prefix_id, sample = job.key
            samples[prefix_id][sample] = step
            if len(samples[prefix_id]) == n:
                lanes.release(trunks[prefix_id])
        return {prefix_id: [found[sample] for sample in range(n)] for prefix_id, found in samples.items()}

    # -- storing ------------------------------------------------------------------------------------

    def _store(self, prefix: _Prefix, targeted: Any, drafted: Any, target_read: Any, draft_read: Any) -> None:
        from safetensors.numpy import save_file

        key = prefix.prefix_id
        written = [("target", step) for step in targeted[key]] + [("draft", step) for step in drafted[key]]
        read: dict[Role, list[ModelStep]] = {
            "target": targeted[key] + target_read[key],
            "draft": draft_read[key] + drafted[key],
        }
        kept = [i for i, (_, step) in enumerate(written) if step.tokens]  # a sample may be an immediate end
        tensors: dict[str, Any] = {}
        for reader, steps in read.items():
            tensors |= tensors_of(reader, [steps[i] for i in kept])
        name = f"prefix-{key:06d}.safetensors"
        save_file(tensors, self.folder / name)
        vocabulary = self.target.model.vocabulary
        samples = [
            {"writer": w, "text": vocabulary.decode(s.tokens), "n_tokens": len(s.tokens), "end": s.end}
            for w, s in (written[i] for i in kept)
        ]
        _append_line(
            self.folder / "index.jsonl",
            {
                "prefix_id": key,
                "problem_id": prefix.problem.problem_id,
                "step_index": prefix.step_index,
                "question": prefix.problem.question,
                "prefix_text": prefix.text,
                "file": name,
                "samples": samples,
            },
        )

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSONL file; a torn last line is cut off, so that the next append starts clean."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return [json.loads(line) for line in whole.splitlines()]


def _append_line(path: Path, row: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8", newline="\n") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")
