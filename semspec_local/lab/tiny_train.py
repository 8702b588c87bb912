"""Teaching one model of the embedded pair, in torch: the Llama itself, its optimizer, and the loop.

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
from torch.nn import functional as F

from ..errors import ConfigError
from ..protocols import FloatArray
from .tiny_data import Lesson
from .tiny_gguf import N_CTX_TRAIN, RMS_EPS, ROPE_BASE, Shape

N_WARM_UP = 60
FALLING_SHARE = 0.4
"""Over this last share of the steps the learning rate falls to nothing."""

_N_BUCKET = 2048  # lessons among which those of one length come together, so that little is padding
_REPORT_EVERY, _SAVE_EVERY = 50, 100


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How one model is taught.

    `grows_from` names the model that this one begins as, grown to twice its size; None begins from nothing. The first
    `n_short` of the lessons are short ones, and come first. `batch_tokens` counts padding too.
    """

    shape: Shape
    grows_from: str | None = None
    n_lessons: int
    n_short: int
    batch_tokens: int
    learning_rate: float


# -- the model ------------------------------------------------------------------------------------------


class Layer(nn.Module):  # type: ignore[misc]
    """One Llama layer without biases."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        d = shape.n_embd
        self.n_head = shape.n_head
        self.attn_norm, self.ffn_norm = (nn.RMSNorm(d, eps=RMS_EPS) for _ in range(2))
        self.attn_q, self.attn_k, self.attn_v, self.attn_output = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.ffn_gate, self.ffn_up = (nn.Linear(d, shape.n_ff, bias=False) for _ in range(2))
        self.ffn_down = nn.Linear(shape.n_ff, d, bias=False)

    def forward(self, x: Any, turn: Any) -> Any:
        b, n, d = x.shape
        h = self.attn_norm(x)
        parts = (part(h).view(b, n, self.n_head, -1) for part in (self.attn_q, self.attn_k, self.attn_v))
        q, k, v = (part.transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(_rotate(q, turn), _rotate(k, turn), v, is_causal=True)
        x = x + self.attn_output(mixed.transpose(1, 2).reshape(b, n, d))
        h = self.ffn_norm(x)
        return x + self.ffn_down(F.silu(self.ffn_gate(h)) * self.ffn_up(h))


class Llama(nn.Module):  # type: ignore[misc]
    """A Llama with tied embeddings, whose parameters are named as llama.cpp names its tensors."""

    def __init__(self, shape: Shape, n_vocab: int) -> None:
        super().__init__()
        self.shape, self.n_vocab = shape, n_vocab
        self.token_embd = nn.Embedding(n_vocab, shape.n_embd)
        self.blk = nn.ModuleList(Layer(shape) for _ in range(shape.n_layer))
        self.output_norm = nn.RMSNorm(shape.n_embd, eps=RMS_EPS)
        angles = torch.outer(torch.arange(N_CTX_TRAIN), ROPE_BASE ** (-torch.arange(0, shape.n_rot, 2) / shape.n_rot))
        self.register_buffer("turn", torch.stack([angles.cos(), angles.sin()]), persistent=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.02)
            if name.endswith(("attn_output.weight", "ffn_down.weight")):
                nn.init.zeros_(weight)

    def forward(self, ids: Any) -> Any:
        """Final states [n, length, n_embd] of ids [n, length]; their products with the embeddings are the logits."""
        x = self.token_embd(ids)
        for layer in self.blk:
            x = layer(x, self.turn[:, : ids.shape[1]])
        return self.output_norm(x)

    def loss(self, ids: Any, weights: Any) -> Any:
        """Sum of the cross-entropy of the learnt tokens, in nats, each times its weight."""
        learnt = weights[:, 1:] > 0
        logits = self(ids[:, :-1])[learnt] @ self.token_embd.weight.T
        return F.cross_entropy(logits, ids[:, 1:][learnt], reduction="none") @ weights[:, 1:][learnt]

    def arrays(self) -> dict[str, FloatArray]:
        """The weights by llama.cpp's names."""
        return {name: weight.detach().numpy() for name, weight in self.named_parameters()}


def _rotate(x: Any, turn: Any) -> Any:
    a, b = x[..., 0::2], x[..., 1::2]
    cos, sin = turn
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


_NOISE = 0.02
"""How much the two copies of a widened weight differ, as a share of it; equal ones would stay equal for ever."""


def grown(model: Llama, shape: Shape, seed: int) -> Llama:
    """A model of `shape`, twice as wide and twice as deep, that computes what `model` does (after arXiv 1511.05641).

    Every hidden unit is there twice, and what reads it halves its weight; every layer is followed by a copy of itself
    that adds nothing yet.
    """
    small, big = model.shape, Llama(shape, model.n_vocab)
    doubled = (2 * small.n_embd, 2 * small.n_ff, 2 * small.n_head, 2 * small.n_layer)
    assert (shape.n_embd, shape.n_ff, shape.n_head, shape.n_layer) == doubled, "a model grows to twice its size"
    generator = torch.Generator().manual_seed(seed)

    def wide(weight: Any, *, halve: bool) -> Any:
        """Both copies of what is read and of what is written; norms and embeddings have no input to halve."""
        if weight.ndim == 1:
            return weight.repeat(2)
        if not halve:
            return weight.repeat(1, 2)
        apart = weight * _NOISE * torch.randn(weight.shape, generator=generator)
        row = torch.cat([weight / 2 + apart, weight / 2 - apart], 1)
        return row.repeat(2, 1)

    with torch.no_grad():
        big.token_embd.weight.copy_(wide(model.token_embd.weight, halve=False))
        big.output_norm.weight.copy_(wide(model.output_norm.weight, halve=False) / 2)
        for i, layer in enumerate(big.blk):
            for name, weight in layer.named_parameters():
                weight.copy_(wide(model.blk[i // 2].get_parameter(name), halve=True))
                if i % 2 and name in ("attn_output.weight", "ffn_down.weight"):
                    weight.zero_()
    return big


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
    """Momentum whose update of each matrix is made orthogonal (arXiv 2502.16982), in float32.

    torch's own works in bfloat16, which is slow on most CPUs. The team shares the matrices out.
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
    for _ in range(n_rounds):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.T


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


def schedule(plan: Plan, lessons: Sequence[Lesson], seed: int) -> list[list[int]]:
    """The batches of a training, in order: those of the short lessons first."""
    rng = np.random.default_rng([seed, 1])
    first, rest = range(plan.n_short), range(plan.n_short, len(lessons))
    return [group for part in (first, rest) for group in batches(lessons, part, plan.batch_tokens, rng)]


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


def teach(
    plan: Plan,
    lessons: list[Lesson],
    held_out: list[Lesson],
    n_vocab: int,
    *,
    seed: int,
    checkpoint: Path,
    n_processes: int,
    say: Callable[[str], None],
    small: Llama | None = None,
) -> tuple[Llama, list[tuple[int, float, float]], float]:
    """Train one model, from its checkpoint where there is one, else from `small`, grown, else from nothing.

    Raises ConfigError for a checkpoint of another training.

    Returns it, its losses as (step, mean over the steps since the last, held out), in nats per unit of weight, and the
    seconds that its steps took.
    """
    _begin(plan, n_vocab, seed, checkpoint, Team(), small)  # what is wrong with the checkpoint is said here
    with tempfile.TemporaryDirectory() as folder:
        arguments = (n_processes, folder, plan, lessons, held_out, n_vocab, seed, checkpoint, say, small)
        torch.multiprocessing.start_processes(_work, arguments, nprocs=n_processes, start_method="fork")
    run = _begin(plan, n_vocab, seed, checkpoint, Team(), small)
    if run.step < len(schedule(plan, lessons, seed)):
        raise KeyboardInterrupt  # a process that Ctrl-C ends says nothing
    return run.model, run.losses, run.seconds


def _begin(plan: Plan, n_vocab: int, seed: int, checkpoint: Path, team: Team, small: Llama | None) -> _Run:
    torch.manual_seed(seed)
    model = Llama(plan.shape, n_vocab) if small is None else grown(small, plan.shape, seed)
    run = _Run(model, optimizers(model, plan.learning_rate, team), 0, [], _key(plan, n_vocab, seed, small))
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        if saved.get("key") != run.key:
            raise ConfigError(f"{checkpoint} is of another training; remove it, or use another --work")
        run.step, run.losses, run.seconds = saved["step"], saved["losses"], saved["seconds"]
        model.load_state_dict(saved["model"])
        for tool, state in zip(run.tools, saved["tools"]):
            tool.load_state_dict(state)
    return run


def _key(plan: Plan, n_vocab: int, seed: int, small: Llama | None) -> str:
    """What a checkpoint belongs to: one with another key must not be gone on from."""
    digest = hashlib.sha256(repr((plan, n_vocab, seed)).encode())
    for weight in small.arrays().values() if small is not None else ():
        digest.update(weight.tobytes())
    return digest.hexdigest()


def _work(
    rank: int,
    n: int,
    folder: str,
    plan: Plan,
    lessons: list[Lesson],
    held_out: list[Lesson],
    n_vocab: int,
    seed: int,
    checkpoint: Path,
    say: Callable[[str], None],
    small: Llama | None,
) -> None:
    """What each process of the team does."""
    torch.set_num_threads(1)
    team = Team(rank, n)
    if n > 1:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/team", rank=rank, world_size=n)
    todo = schedule(plan, lessons, seed)
    run = _begin(plan, n_vocab, seed, checkpoint, team, small)
    recent, n_tokens, since = [], 0, time.monotonic()
    while run.step < len(todo):
        rate = plan.learning_rate * rate_share(run.step, len(todo))
        recent.append(_take_step(run, lessons, todo[run.step], rate, team))
        n_tokens += sum(len(lessons[i][0]) for i in todo[run.step])
        run.step += 1
        over = run.step == len(todo)
        if run.step % _REPORT_EVERY == 0 or over:
            found = _mean_loss(run.model, held_out, plan.batch_tokens)
            run.losses.append((run.step, float(np.mean(recent)), found))
            if rank == 0:
                speed = n_tokens / (time.monotonic() - since)
                say(
                    f"step {run.step} of {len(todo)}: loss {run.losses[-1][1]:.4f}, "
                    f"held out {found:.4f}, {speed:.0f} tokens/s"
                )
            run.seconds += time.monotonic() - since
            recent, n_tokens, since = [], 0, time.monotonic()
        if rank == 0 and (run.step % _SAVE_EVERY == 0 or over):
            run.save(checkpoint)
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
