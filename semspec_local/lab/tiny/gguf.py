"""The embedded pair as files: its shape, its vocabulary, and weights to GGUF. Knows nothing of training.

The architecture is Llama's, so that every feature of llama.cpp applies; the vocabulary is a byte-level BPE with digits
as single tokens, cut as Qwen2's is, because llama.cpp has that cut.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...protocols import FloatArray

USER, ASSISTANT, END = "<|user|>", "<|assistant|>", "<|end|>"
CONTROLS = (USER, ASSISTANT, END)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<|user|>' + message['content'] + '<|end|>' }}"
    "{% elif message['role'] == 'assistant' %}{{ '<|assistant|>' + message['content'] + '<|end|>' }}"
    "{% else %}{{ raise_exception('this model knows no ' + message['role'] + ' message') }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

RMS_EPS = 1e-5
ROPE_BASE = 10_000.0
N_CTX_TRAIN = 1024

# How the text is cut before merges: Qwen2's rule, under the name that llama.cpp knows it by.
_PRE_TOKENIZER = "qwen2"
_CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The size of one model: `n_ff` is the width inside the gated MLP, `file_type` what llama.cpp stores it as."""

    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    file_type: str

    @property
    def n_rot(self) -> int:
        return self.n_embd // self.n_head

    def n_weights(self, n_vocab: int) -> int:
        per_layer = 4 * self.n_embd**2 + 3 * self.n_embd * self.n_ff + 2 * self.n_embd
        return self.n_layer * per_layer + n_vocab * self.n_embd + self.n_embd


def train_vocabulary(texts: Iterable[str], n_vocab: int) -> Any:
    """A `tokenizers.Tokenizer` of `n_vocab` ids, control tokens included, taught on `texts`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_CUT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=n_vocab,
        special_tokens=list(CONTROLS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_gguf(
    path: Path, weights: Mapping[str, FloatArray], shape: Shape, tokenizer: Any, *, name: str, description: str
) -> None:
    """Write float32 `weights`, by llama.cpp's tensor names, as an F32 GGUF; there is no output matrix: it is tied.

    Rotary positions turn neighbouring numbers of a head together, as llama.cpp does for this architecture.
    """
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(name)
    writer.add_description(description)
    writer.add_license("MIT")
    writer.add_block_count(shape.n_layer)
    writer.add_context_length(N_CTX_TRAIN)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head)
    writer.add_layer_norm_rms_eps(RMS_EPS)
    writer.add_rope_dimension_count(shape.n_rot)
    writer.add_rope_freq_base(ROPE_BASE)
    _add_vocabulary(writer, tokenizer)
    writer.add_chat_template(CHAT_TEMPLATE)
    for key, array in weights.items():
        writer.add_tensor(key, np.ascontiguousarray(array, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_vocabulary(writer: Any, tokenizer: Any) -> None:
    import gguf

    model = json.loads(tokenizer.to_str())["model"]
    ids: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(ids, key=ids.__getitem__)
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_PRE_TOKENIZER)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in CONTROLS else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(ids[END])
    writer.add_add_bos_token(False)


def random_weights(shape: Shape, n_vocab: int, seed: int = 0) -> dict[str, FloatArray]:
    """Weights of the right shapes that mean nothing, for measuring what a shape costs."""
    rng = np.random.default_rng(seed)

    def matrix(n_out: int, n_in: int) -> FloatArray:
        return (rng.standard_normal((n_out, n_in)) * 0.02).astype(np.float32)

    weights = {"token_embd.weight": matrix(n_vocab, shape.n_embd)}
    ones = np.ones(shape.n_embd, dtype=np.float32)
    for i in range(shape.n_layer):
        weights |= {f"blk.{i}.{part}_norm.weight": ones for part in ("attn", "ffn")}
        weights |= {
            f"blk.{i}.attn_{part}.weight": matrix(shape.n_embd, shape.n_embd) for part in ("q", "k", "v", "output")
        }
        weights |= {f"blk.{i}.ffn_{part}.weight": matrix(shape.n_ff, shape.n_embd) for part in ("gate", "up")}
        weights[f"blk.{i}.ffn_down.weight"] = matrix(shape.n_embd, shape.n_ff)
    return weights | {"output_norm.weight": ones}
