"""The Llama of the embedded pair in torch, and how a small one grows into one of twice its size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ...protocols import FloatArray
from .gguf import N_CTX_TRAIN, RMS_EPS, ROPE_BASE, Shape

HAS_BFLOAT16 = bool(torch.cpu._is_avx512_bf16_supported())
"""Does this CPU multiply in bfloat16? Where it does, layers and optimizer do: four to five times as fast as float32."""


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
        # torch's own attention for CPUs takes two and a half times as long as these products in bfloat16.
        scores = (_rotate(q, turn) * q.shape[-1] ** -0.5) @ _rotate(k, turn).transpose(-1, -2)
        later = torch.full((n, n), -torch.inf).triu(1)
        mixed = (scores + later).softmax(-1) @ v
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
        with torch.autocast("cpu", torch.bfloat16, enabled=HAS_BFLOAT16):
            states = self(ids[:, :-1])[learnt]
        logits = states @ self.token_embd.weight.T
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


def begun(model: Llama, shape: Shape, seed: int) -> Llama:
    """A model of `shape` that computes what `model` does: a copy, or grown to twice the size."""
    if replace(shape, file_type=model.shape.file_type) != model.shape:
        return grown(model, shape, seed)
    copy = Llama(shape, model.n_vocab)
    copy.load_state_dict(model.state_dict())
    return copy


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
