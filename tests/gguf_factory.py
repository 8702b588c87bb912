"""Tiny GGUFs with random weights, the same for the same arguments: models that say nothing, in milliseconds.

Control tokens, padding, special vocabularies and memories of every kind are here because the models that people have
differ in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] != ['user', 'assistant'][loop.index0 % 2] %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = (int(kind) for kind in gguf.TokenType)


@dataclass(frozen=True)
class Vocab:
    """A vocabulary as a GGUF spells it; `kind` is `gpt2` (byte-level BPE) or `llama` (SentencePiece)."""

    kind: str
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()
    bos: str | None = None
    eos: str | None = None
    eot: str | None = None
    add_bos: bool = False

    def id(self, token: str) -> int:
        return self.tokens.index(token)

    def padded(self, n: int) -> Vocab:
        """The same with `n` more tokens at the end that mean nothing."""
        more = tuple(f"[PAD{len(self.tokens) + i}]" for i in range(n))
        scores = self.scores + (-1e6,) * n if self.scores else ()
        return replace(self, tokens=self.tokens + more, types=self.types + (UNUSED,) * n, scores=scores)


def byte_letters() -> dict[int, str]:
    """The letter that stands for each byte in a byte-level vocabulary."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {**{byte: chr(byte) for byte in shown}, **{byte: chr(256 + i) for i, byte in enumerate(hidden)}}


def spelled(text: str) -> str:
    """Text in the letters of a byte-level vocabulary."""
    return "".join(byte_letters()[byte] for byte in text.encode())


_MERGES = [
    ("\n", "\n"),
    *((mark, "\n\n") for mark in ".,;:!?)"),
    *(("t", "h"), ("th", "e"), (" ", "the"), (" ", "a"), ("i", "n")),
]
_CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def bpe_vocab(
    *,
    words: Sequence[str] = (),
    controls: Sequence[str] = _CONTROLS,
    n_pad: int = 6,
    bos: str | None = None,
    eos: str = "<|im_end|>",
    add_bos: bool = False,
    control_think: bool = False,
) -> Vocab:
    """Bytes, some merges, control tokens, thinking tags and padding; `words` are grown letter by letter."""
    merges = list(_MERGES)
    for word in words:
        merges += [(word[:i], word[i]) for i in range(1, len(word)) if (word[:i], word[i]) not in merges]
    pieces = list(dict.fromkeys(a + b for a, b in merges))
    tokens = [*byte_letters().values(), *map(spelled, pieces)]
    types = [NORMAL] * len(tokens)
    tokens += [*controls, "<think>", "</think>"]
    types += [CONTROL] * len(controls) + [CONTROL if control_think else USER_DEFINED] * 2
    vocab = Vocab(
        kind="gpt2",
        tokens=tuple(tokens),
        types=tuple(types),
        merges=tuple(f"{spelled(a)} {spelled(b)}" for a, b in merges),
        bos=bos,
        eos=eos,
        add_bos=add_bos,
    )
    return vocab.padded(n_pad)


def spm_vocab(*, add_bos: bool = True, controls: Sequence[str] = (), n_pad: int = 0) -> Vocab:
    """A SentencePiece vocabulary with bytes as the last resort, and a token for a blank line."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]
    pieces = ["\n\n", "th", "the", "▁the", "▁a", "in", "▁", *map(chr, range(33, 127)), "\n"]
    scores = [0.0] * len(tokens) + [-float(i) for i in range(len(pieces))] + [0.0] * len(controls)
    vocab = Vocab(
        kind="llama",
        tokens=(*tokens, *pieces, *controls),
        types=(*types, *[NORMAL] * len(pieces), *[CONTROL] * len(controls)),
        scores=tuple(scores),
        bos="<s>",
        eos="</s>",
        add_bos=add_bos,
    )
    return vocab.padded(n_pad)


def write_model(
    path: Path,
    *,
    architecture: str = "llama",
    vocab: Vocab | None = None,
    chat_template: str | None = CHATML,
    seed: int = 0,
    n_layer: int = 3,
    n_embd: int = 64,
    quantization: str = "F32",
    window: int = 16,
    name: str | None = None,
    n_ctx_train: int = 4096,
    **changes: Any,
) -> Path:
    """Write a model; `architecture` is llama, qwen2, gemma2 (every other layer sees `window` tokens), mamba or lfm2.

    `changes` are metadata keys (their dots as double underscores) that replace what would have been written.
    """
    vocab = vocab or bpe_vocab()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(name or f"tiny {architecture}")
    writer.add_block_count(n_layer)
    writer.add_context_length(n_ctx_train)
    writer.add_embedding_length(n_embd)
    writer.add_feed_forward_length(0 if architecture == "mamba" else 2 * n_embd)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(vocab.tokens))
    _add_vocab(writer, vocab)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    unlikely = [i for i, kind in enumerate(vocab.types) if kind in (CONTROL, UNKNOWN)]
    build = _Builder(writer, np.random.default_rng(seed), quantization, n_embd, unlikely)
    _ARCHITECTURES[architecture](build, n_layer, len(vocab.tokens), window)
    for key, value in changes.items():
        writer.add_key_value(key.replace("__", "."), *_typed(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _typed(value: Any) -> tuple[Any, gguf.GGUFValueType]:
    kinds = {
        bool: gguf.GGUFValueType.BOOL,
        int: gguf.GGUFValueType.UINT32,
        np.uint16: gguf.GGUFValueType.UINT16,
        str: gguf.GGUFValueType.STRING,
    }
    return value, kinds[type(value)]


def _add_vocab(writer: gguf.GGUFWriter, vocab: Vocab) -> None:
    writer.add_tokenizer_model(vocab.kind)
    writer.add_tokenizer_pre("qwen2" if vocab.kind == "gpt2" else "default")
    writer.add_token_list(vocab.tokens)
    writer.add_token_types(vocab.types)
    if vocab.merges:
        writer.add_token_merges(vocab.merges)
    if vocab.scores:
        writer.add_token_scores(vocab.scores)
    for token, add in ((vocab.bos, writer.add_bos_token_id), (vocab.eos, writer.add_eos_token_id)):
        if token is not None:
            add(vocab.id(token))
    if vocab.eot is not None:
        writer.add_eot_token_id(vocab.id(vocab.eot))
    writer.add_add_bos_token(vocab.add_bos)


@dataclass
class _Builder:
    writer: gguf.GGUFWriter
    rng: np.random.Generator
    quantization: str
    n_embd: int
    unlikely: list[int]
    """Tokens that are seldom drawn, so that a text does not end at once."""

    def matrix(self, name: str, n_out: int, n_in: int, scale: float = 1.0, zero: Sequence[int] = ()) -> None:
        weights = self.rng.normal(0, scale / np.sqrt(n_in), (n_out, n_in)).astype(np.float32)
        weights[list(zero)] = 0
        kind = gguf.GGMLQuantizationType[self.quantization]
        if kind == gguf.GGMLQuantizationType.F32 or n_in % 32:
            self.writer.add_tensor(name, weights)
        else:
            self.writer.add_tensor(name, gguf.quants.quantize(weights, kind), raw_dtype=kind)

    def vector(self, name: str, values: Any, n: int | None = None) -> None:
        self.writer.add_tensor(name, np.full(n or self.n_embd, values, dtype=np.float32))

    def embeddings(self, n_vocab: int, *, output: bool = True, norm: str = "output_norm.weight") -> None:
        # Where the output shares them, large embeddings would make every token repeat itself.
        if not output:
            self.matrix("token_embd.weight", n_vocab, self.n_embd, zero=self.unlikely)
        self.vector(norm, 1.0)
        if output:
            self.matrix("token_embd.weight", n_vocab, self.n_embd, scale=3.0)
            self.matrix("output.weight", n_vocab, self.n_embd, scale=3.0, zero=self.unlikely)

    def attention(self, layer: str, *, n_head: int = 4, n_head_kv: int = 2) -> None:
        width = self.n_embd // n_head
        self.matrix(f"{layer}.attn_q.weight", n_head * width, self.n_embd)
        self.matrix(f"{layer}.attn_k.weight", n_head_kv * width, self.n_embd)
        self.matrix(f"{layer}.attn_v.weight", n_head_kv * width, self.n_embd)
        self.matrix(f"{layer}.attn_output.weight", self.n_embd, n_head * width)

    def feed_forward(self, layer: str) -> None:
        self.vector(f"{layer}.ffn_norm.weight", 1.0)
        self.matrix(f"{layer}.ffn_gate.weight", 2 * self.n_embd, self.n_embd)
        self.matrix(f"{layer}.ffn_up.weight", 2 * self.n_embd, self.n_embd)
        self.matrix(f"{layer}.ffn_down.weight", self.n_embd, 2 * self.n_embd)


def _llama(build: _Builder, n_layer: int, n_vocab: int, _window: int, *, biases: bool = False) -> None:
    build.writer.add_head_count(4)
    build.writer.add_head_count_kv(2)
    build.embeddings(n_vocab)
    for layer in (f"blk.{i}" for i in range(n_layer)):
        build.vector(f"{layer}.attn_norm.weight", 1.0)
        build.attention(layer)
        if biases:
            for part, n in (("q", build.n_embd), ("k", build.n_embd // 2), ("v", build.n_embd // 2)):
                build.vector(f"{layer}.attn_{part}.bias", 0.1, n)
        build.feed_forward(layer)


def _qwen2(build: _Builder, n_layer: int, n_vocab: int, window: int) -> None:
    _llama(build, n_layer, n_vocab, window, biases=True)


def _gemma2(build: _Builder, n_layer: int, n_vocab: int, window: int) -> None:
    build.writer.add_head_count(4)
    build.writer.add_head_count_kv(2)
    build.writer.add_key_length(build.n_embd // 4)
    build.writer.add_value_length(build.n_embd // 4)
    build.writer.add_sliding_window(window)
    build.writer.add_attn_logit_softcapping(50.0)
    build.writer.add_final_logit_softcapping(30.0)
    build.embeddings(n_vocab, output=False)
    for layer in (f"blk.{i}" for i in range(n_layer)):
        build.vector(f"{layer}.attn_norm.weight", 1.0)
        build.attention(layer)
        build.vector(f"{layer}.post_attention_norm.weight", 2.0)
        build.feed_forward(layer)
        build.vector(f"{layer}.post_ffw_norm.weight", 2.0)


def _mamba(build: _Builder, n_layer: int, n_vocab: int, _window: int) -> None:
    n_embd, n_inner, n_state, n_rank, n_conv = build.n_embd, 2 * build.n_embd, 16, 4, 4
    build.writer.add_head_count(0)
    build.writer.add_ssm_conv_kernel(n_conv)
    build.writer.add_ssm_inner_size(n_inner)
    build.writer.add_ssm_state_size(n_state)
    build.writer.add_ssm_time_step_rank(n_rank)
    build.embeddings(n_vocab)
    for layer in (f"blk.{i}" for i in range(n_layer)):
        build.vector(f"{layer}.attn_norm.weight", 1.0)
        build.matrix(f"{layer}.ssm_in.weight", 2 * n_inner, n_embd)
        build.matrix(f"{layer}.ssm_conv1d.weight", n_inner, n_conv)
        build.vector(f"{layer}.ssm_conv1d.bias", 0.1, n_inner)
        build.matrix(f"{layer}.ssm_x.weight", n_rank + 2 * n_state, n_inner)
        build.matrix(f"{layer}.ssm_dt.weight", n_inner, n_rank)
        build.vector(f"{layer}.ssm_dt.bias", 0.1, n_inner)
        decay = -np.tile(np.arange(1, n_state + 1, dtype=np.float32), (n_inner, 1))
        build.writer.add_tensor(f"{layer}.ssm_a", decay)
        build.vector(f"{layer}.ssm_d", 1.0, n_inner)
        build.matrix(f"{layer}.ssm_out.weight", n_embd, n_inner)


def _lfm2(build: _Builder, n_layer: int, n_vocab: int, _window: int) -> None:
    n_embd = build.n_embd
    build.writer.add_head_count(4)
    build.writer.add_head_count_kv([2 if i % 2 else 0 for i in range(n_layer)])
    build.writer.add_shortconv_l_cache(3)
    build.embeddings(n_vocab, output=False, norm="token_embd_norm.weight")
    for i in range(n_layer):
        layer = f"blk.{i}"
        build.vector(f"{layer}.attn_norm.weight", 1.0)
        if i % 2:
            build.attention(layer)
            build.vector(f"{layer}.attn_q_norm.weight", 1.0, n_embd // 4)
            build.vector(f"{layer}.attn_k_norm.weight", 1.0, n_embd // 4)
        else:
            build.matrix(f"{layer}.shortconv.in_proj.weight", 3 * n_embd, n_embd)
            build.matrix(f"{layer}.shortconv.conv.weight", n_embd, 3)
            build.matrix(f"{layer}.shortconv.out_proj.weight", n_embd, n_embd)
        build.feed_forward(layer)


_ARCHITECTURES = {"llama": _llama, "qwen2": _qwen2, "gemma2": _gemma2, "mamba": _mamba, "lfm2": _lfm2}
