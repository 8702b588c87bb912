"""Requantizing through llama.cpp, on a model of a few kilobytes."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from semspec_local.errors import ConfigError, ModelError
from semspec_local.llama.quantize import check_file_type, file_types, requantize

N_EMBD, N_FF, N_VOCAB = 64, 128, 32


def write_model(path: Path) -> Path:
    """A llama of one layer with random weights in float32 and no vocabulary: all that the quantizer reads."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(32)
    writer.add_embedding_length(N_EMBD)
    writer.add_block_count(1)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(N_VOCAB)
    shapes = {"token_embd": (N_VOCAB, N_EMBD), "output_norm": (N_EMBD,), "blk.0.attn_norm": (N_EMBD,)}
    shapes |= {f"blk.0.attn_{name}": (N_EMBD, N_EMBD) for name in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_norm": (N_EMBD,), "blk.0.ffn_gate": (N_FF, N_EMBD), "blk.0.ffn_up": (N_FF, N_EMBD)}
    shapes |= {"blk.0.ffn_down": (N_EMBD, N_FF)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_model_becomes_another_type_and_again_another(tmp_path: Path) -> None:
    source = write_model(tmp_path / "f32.gguf")
    requantize(source, tmp_path / "q8.part", "q8_0", 1)
    requantize(tmp_path / "q8.part", tmp_path / "q4.part", "Q4_0", 1)
    sizes = [(tmp_path / name).stat().st_size for name in ("f32.gguf", "q8.part", "q4.part")]
    assert sizes[0] > sizes[1] > sizes[2] > 0
    tensors = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "q4.part").tensors}
    assert tensors["blk.0.ffn_up.weight"] == "Q4_0"


def test_file_types_go_by_llama_cpps_names() -> None:
    assert {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "Q4_K_M": 15}.items() <= file_types().items()
    assert check_file_type("q4_k_m") == "Q4_K_M"
    with pytest.raises(ConfigError, match=r"unknown file type 'Q9'; known: BF16, F16, F32, .*Q8_0"):
        check_file_type("Q9")


def test_what_llama_cpp_cannot_do_is_a_model_error_and_leaves_nothing(tmp_path: Path) -> None:
    source = write_model(tmp_path / "f32.gguf")
    with pytest.raises(ModelError, match=r"could not turn .*f32\.gguf into F16"):
        requantize(source, tmp_path / "absent" / "x.part", "F16", 1)
    (tmp_path / "page.gguf").write_bytes(b"<!doctype html>")
    with pytest.raises(ModelError, match="web page"):
        requantize(tmp_path / "page.gguf", tmp_path / "x.part", "F16", 1)
    assert not (tmp_path / "x.part").exists()
