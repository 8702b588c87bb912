"""Teaching one model of the embedded pair, in torch: its optimizer and the loop.

Several processes of one thread each share every batch: unlike the threads of one process they do not wait for each
other at every product, so a busy machine costs its share and no more.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed
import torch.multiprocessing
from numpy.typing import NDArray
from torch import nn

from ...errors import ConfigError
from .data import Lesson
from .gguf import Shape
from .llama import HAS_BFLOAT16, Llama, begun

N_WARM_UP = 60
FALLING_SHARE = 0.4
"""Over this last share of the steps the learning rate falls to nothing."""

_N_BUCKET = 2048  # lessons among which those of one length come together, so that little is padding
_REPORT_EVERY, _SAVE_EVERY = 50, 100


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How one model is taught.

    `hand` is the one it writes, `slip_rate` the share of slips among the other's steps that it reads. `begins_as` names
    the model that this one begins as, grown where its shape is twice that one's; None begins from nothing. The first
    `n_short` of the lessons are short ones, and come first. `batch_tokens` counts padding too.
    """

    shape: Shape
    hand: str
    slip_rate: float
    begins_as: str | None = None
    n_lessons: int
    n_short: int
    batch_tokens: int
    learning_rate: float


# -- the optimizer --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Team:
    """The processes that share the work; this one is `rank` of `n`."""

    rank: int = 0
    n: int = 1

    def add_up(self, tensors: Sequence[Any]) -> None:
        """Replace each tensor by its sum over the team."""
        if self.n == 1:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        torch.distributed.all_reduce(flat)
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
            tensor.copy_(part.view_as(tensor))


class Muon(torch.optim.Optimizer):  # type: ignore[misc]
    """Momentum whose update of each matrix is made orthogonal (arXiv 2502.16982).

    torch's own always works in bfloat16, which is slow on most CPUs. The team shares the matrices out.
    """

    def __init__(self, parameters: list[Any], rate: float, team: Team, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": rate, "momentum": momentum, "decay": 0.01})
        self._team = team

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self) -> None:
        (group,) = self.param_groups
        updates = []
        for i, weight in enumerate(group["params"]):
            velocity = self.state[weight].setdefault("velocity", torch.zeros_like(weight))
            velocity.lerp_(weight.grad, 1 - group["momentum"])
            mine = i % self._team.n == self._team.rank
            update = weight.grad.lerp(velocity, group["momentum"])
            updates.append(_orthogonal(update) if mine else torch.zeros_like(weight))
        self._team.add_up(updates)
        for weight, update in zip(group["params"], updates):
            # As large as an update by Adam would be, so that one learning rate does for both.
            scale = 0.2 * max(weight.shape) ** 0.5
            weight.mul_(1 - group["lr"] * group["decay"]).add_(update, alpha=-group["lr"] * scale)


def _orthogonal(matrix: Any, n_rounds: int = 5) -> Any:
    """About the nearest orthogonal matrix, by Newton-Schulz rounds with the coefficients of arXiv 2502.16982."""
    a, b, c = 3.4445, -4.775, 2.0315
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.T
    x = x / (x.norm() + 1e-7)
    x = x.bfloat16() if HAS_BFLOAT16 else x
    for _ in range(n_rounds):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x if wide else x.T).float()


def optimizers(model: Llama, rate: float, team: Team) -> list[Any]:
    """Muon for the matrices inside, Adam for embeddings and norms."""
    inner = {name for name, weight in model.named_parameters() if weight.ndim == 2 and name.startswith("blk.")}
    matrices = [weight for name, weight in model.named_parameters() if name in inner]
    others = [weight for name, weight in model.named_parameters() if name not in inner]
    return [Muon(matrices, rate, team), torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)]


def rate_share(step: int, n_steps: int) -> float:
    """The share of the learning rate at a step: warm up, stay, and fall to nothing at the end."""
    return min(1.0, (step + 1) / N_WARM_UP) * min(1.0, (n_steps - step) / (FALLING_SHARE * n_steps))


# -- the loop -------------------------------------------------------------------------------------------


def batches(
    lessons: Sequence[Lesson], part: Sequence[int], batch_tokens: int, rng: np.random.Generator
) -> list[list[int]]:
    """Indices of a part of the lessons, grouped into batches of about `batch_tokens` tokens; every one is in one."""
    order = rng.permutation(np.array(part, dtype=np.int64))
    groups: list[list[int]] = []
    for start in range(0, len(order), _N_BUCKET):
        group: list[int] = []
        for i in sorted(order[start : start + _N_BUCKET].tolist(), key=lambda i: len(lessons[i][0])):
            if group and (len(group) + 1) * len(lessons[i][0]) > batch_tokens:
                groups.append(group)
                group = []
            group.append(i)
        groups.append(group)
    return [groups[i] for i in rng.permutation(len(groups))]


def collate(lessons: Sequence[Lesson], group: Sequence[int]) -> tuple[Any, Any]:
    """Padded ids int64 [n, longest], and their weights float32."""
    longest = max((len(lessons[i][0]) for i in group), default=1)
    ids: NDArray[np.int64] = np.zeros((len(group), longest), np.int64)
    weights: NDArray[np.float32] = np.zeros((len(group), longest), np.float32)
    for row, i in enumerate(group):
        ids[row, : len(lessons[i][0])], weights[row, : len(lessons[i][1])] = lessons[i]
    return torch.from_numpy(ids), torch.from_numpy(weights)


@dataclass
class _Run:
    """A model on its way, as it is saved."""

    model: Llama
    tools: list[Any]
    step: int
    losses: list[tuple[int, float, float]]
    key: str
    seconds: float = 0.0

    def save(self, path: Path) -> None:
        temporary = path.with_suffix(".part")
        facts = {"key": self.key, "step": self.step, "losses": self.losses, "seconds": self.seconds}
        states = [tool.state_dict() for tool in self.tools]
        torch.save({**facts, "model": self.model.state_dict(), "tools": states}, temporary)
        temporary.replace(path)


@dataclass(frozen=True, kw_only=True)
class Training:
    """Everything that one training is made of. `small` is the model that `plan.begins_as` names, taught before."""

    plan: Plan
    lessons: list[Lesson]
    held_out: list[Lesson]
    n_vocab: int
    seed: int
    checkpoint: Path
    say: Callable[[str], None]
    small: Llama | None = None

    @property
    def schedule(self) -> list[list[int]]:
        """The batches in order, those of the short lessons first."""
        rng = np.random.default_rng([self.seed, 1])
        first, rest = range(self.plan.n_short), range(self.plan.n_short, len(self.lessons))
        return [g for part in (first, rest) for g in batches(self.lessons, part, self.plan.batch_tokens, rng)]

    @property
    def key(self) -> str:
        """What a checkpoint belongs to: one with another key must not be gone on from."""
        digest = hashlib.sha256(repr((self.plan, self.n_vocab, self.seed)).encode())
        for weight in self.small.arrays().values() if self.small is not None else ():
            digest.update(weight.tobytes())
        return digest.hexdigest()

    def begin(self, team: Team) -> _Run:
        """The model as its checkpoint has it, else as it begins."""
        torch.manual_seed(self.seed)
        fresh = Llama(self.plan.shape, self.n_vocab)
        model = fresh if self.small is None else begun(self.small, self.plan.shape, self.seed)
        run = _Run(model, optimizers(model, self.plan.learning_rate, team), 0, [], self.key)
        if self.checkpoint.exists():
            saved = torch.load(self.checkpoint, weights_only=True)
            if saved.get("key") != run.key:
                raise ConfigError(f"{self.checkpoint} is of another training; remove it, or use another --work")
            run.step, run.losses, run.seconds = saved["step"], saved["losses"], saved["seconds"]
            model.load_state_dict(saved["model"])
            for tool, state in zip(run.tools, saved["tools"]):
                tool.load_state_dict(state)
        return run


def teach(training: Training, *, n_processes: int) -> tuple[Llama, list[tuple[int, float, float]], float]:
    """Train one model, from its checkpoint where there is one, else from `small`, else from nothing.

    Raises ConfigError for a checkpoint of another training.

    Returns it, its losses as (step, mean over the steps since the last, held out), in nats per unit of weight, and the
    seconds that its steps took.
    """
    training.begin(Team())  # what is wrong with the checkpoint is said here
    with tempfile.TemporaryDirectory() as folder:
        arguments = (n_processes, folder, training)
        torch.multiprocessing.start_processes(_work, arguments, nprocs=n_processes, start_method="fork")
    run = training.begin(Team())
    if run.step < len(training.schedule):
        raise KeyboardInterrupt  # a process that Ctrl-C ends says nothing
    return run.model, run.losses, run.seconds


def _work(rank: int, n: int, folder: str, training: Training) -> None:
    """What each process of the team does."""
    torch.set_num_threads(1)
    team = Team(rank, n)
    if n > 1:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/team", rank=rank, world_size=n)
    lessons, todo = training.lessons, training.schedule
    run = training.begin(team)
    recent, n_tokens, since = [], 0, time.monotonic()
    while run.step < len(todo):
        rate = training.plan.learning_rate * rate_share(run.step, len(todo))
        recent.append(_take_step(run, lessons, todo[run.step], rate, team))
        n_tokens += sum(len(lessons[i][0]) for i in todo[run.step])
        run.step += 1
        over = run.step == len(todo)
        if run.step % _REPORT_EVERY == 0 or over:
            found = _mean_loss(run.model, training.held_out, training.plan.batch_tokens)
            run.losses.append((run.step, float(np.mean(recent)), found))
            if rank == 0:
                speed = n_tokens / (time.monotonic() - since)
                training.say(
                    f"step {run.step} of {len(todo)}: loss {run.losses[-1][1]:.4f}, "
                    f"held out {found:.4f}, {speed:.0f} tokens/s"
                )
            run.seconds += time.monotonic() - since
            recent, n_tokens, since = [], 0, time.monotonic()
        if rank == 0 and (run.step % _SAVE_EVERY == 0 or over):
            run.save(training.checkpoint)
    if n > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def _take_step(run: _Run, lessons: Sequence[Lesson], group: Sequence[int], rate: float, team: Team) -> float:
    """One step of the whole team; the mean loss of its batch."""
    weight_sum = sum(float(lessons[i][1][1:].sum()) for i in group)
    for tool in run.tools:
        for part in tool.param_groups:
            part["lr"] = rate
    weights = list(run.model.parameters())
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    total = torch.zeros(1)
    if mine := group[team.rank :: team.n]:  # the last batch of a bucket may have fewer lessons than there are processes
        loss = run.model.loss(*collate(lessons, mine)) / weight_sum
        loss.backward()
        total += loss.detach()
    team.add_up([total, *(weight.grad for weight in weights)])
    nn.utils.clip_grad_norm_(weights, 1.0)
    for tool in run.tools:
        tool.step()
    return float(total)


def _mean_loss(model: Llama, lessons: Sequence[Lesson], batch_tokens: int) -> float:
    total = weight_sum = 0.0
    with torch.no_grad():
        for group in batches(lessons, range(len(lessons)), batch_tokens, np.random.default_rng(0)):
            ids, weights = collate(lessons, group)
            total += float(model.loss(ids, weights))
            weight_sum += float(weights[:, 1:].sum())
    return total / weight_sum
