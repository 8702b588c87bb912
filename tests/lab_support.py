"""A small made-up collection with a planted signal, for the tests of the lab."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from semspec_local.lab.meaning.cluster import ExactRule, RuleClusterer
from semspec_local.modelinfo import ModelInfo

N_EMBD = {"target": 8, "draft": 6}
LAYERS = {"target": [1, 2], "draft": [0, 1]}
SIGNAL_LAYER = {"target": 2, "draft": 1}
N_SAMPLES = 8
EXACT = RuleClusterer(ExactRule(), same_numbers=False)


def info(role: str) -> ModelInfo:
    return ModelInfo(
        architecture="llama",
        n_layer=3,
        n_embd=N_EMBD[role],
        n_vocab=50,
        name=f"Made-up {role}",
        quantization="F16",
        path=f"{role}.gguf",
        fingerprint=("a" if role == "target" else "b") * 64,
    )


def make_collection(folder: Path, *, n_problems: int = 40, seed: int = 0) -> Path:
    """Each model has its own odds of four meanings at a prefix; one layer's states hold the reader's odds."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    header = {
        "version": 1,
        "pair": "made-up",
        "models": {role: info(role).to_dict() for role in N_EMBD},
        "layers": LAYERS,
        "windows": ["token"],
        "poolings": ["mean", "last"],
        "sampling": {"temperature": 0.6},
        "n_samples": N_SAMPLES,
        "data": "made up",
        "seed": seed,
        "prompt": {"system": ""},
    }
    (folder / "collection.json").write_text(json.dumps(header))
    with (folder / "index.jsonl").open("w") as index:
        for prefix_id in range(2 * n_problems):
            shared = rng.dirichlet([0.5] * 4)
            odds = {role: 0.7 * shared + 0.3 * rng.dirichlet([0.5] * 4) for role in N_EMBD}
            written = [(role, int(rng.choice(4, p=odds[role]))) for role in N_EMBD for _ in range(N_SAMPLES)]
            name = f"prefix-{prefix_id:06d}.safetensors"
            save_file(tensors(rng, odds, [meaning for _, meaning in written]), folder / name)
            samples = [
                {"writer": role, "text": f"Meaning  {meaning}", "n_tokens": 3, "end": "boundary"}
                for role, meaning in written
            ]
            line = {"prefix_id": prefix_id, "problem_id": f"p{prefix_id // 2}", "step_index": prefix_id % 2}
            line |= {"question": "?", "prefix_text": "", "file": name, "samples": samples}
            index.write(json.dumps(line) + "\n")
    return folder


def tensors(rng, odds, meanings):
    made = {}
    for role, n_embd in N_EMBD.items():
        known = odds[role][meanings]
        for layer in LAYERS[role]:
            for pooling in ("mean", "last"):
                states = rng.normal(size=(len(meanings), n_embd))
                if layer == SIGNAL_LAYER[role] and pooling == "mean":
                    states[:, 2] = 10 * known + rng.normal(scale=0.5, size=len(meanings))
                made[f"{role}.{layer}.token.{pooling}"] = states.astype(np.float16)
        logprob = np.log(known + 0.05) + rng.normal(scale=0.3, size=len(meanings))
        made[f"{role}.logprob_mean"] = logprob.astype(np.float32)
        made[f"{role}.logprob_min"] = (logprob - 1).astype(np.float32)
        made[f"{role}.top2_share"] = rng.uniform(size=len(meanings)).astype(np.float32)
    return made
