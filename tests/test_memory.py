"""How many lanes fit, and how many are worth it."""

from __future__ import annotations

from pathlib import Path

import pytest

from semspec_local.config import ModelConfig, RunConfig
from semspec_local.errors import ConfigError, ModelError
from semspec_local.llama import memory
from semspec_local.llama.kept import N_KEPT
from semspec_local.llama.lane_choice import batch_costs, best_lanes
from semspec_local.llama.model import LlamaModel
from semspec_local.pairs import resolve
from semspec_local.reasoner import Reasoner, Sources


def test_the_caches_grow_with_context_and_lanes_and_layers():
    target, draft = resolve("tiny").target, resolve("tiny").draft
    base = memory.needed_bytes(target, 512, 1)
    assert base > target.stat().st_size
    per_token = 4 * (256 + 256) * 2  # layers, keys and values, float16
    kept = N_KEPT * 9 * n_vocab(target) * 4  # each of several lanes keeps logits of its own
    assert memory.needed_bytes(target, 512, 9) - base == 8 * 512 * per_token + kept
    assert memory.needed_bytes(target, 256, 1) == base - 256 * per_token
    added = memory.needed_bytes(draft, 512, 9) - memory.needed_bytes(draft, 512, 1)
    assert added == 8 * 512 * 2 * 256 * 2 + N_KEPT * 9 * n_vocab(draft) * 4


def n_vocab(path: Path) -> int:
    with LlamaModel(path) as model:
        return model.vocabulary.n_tokens


@pytest.mark.case(34)
def test_no_more_context_is_counted_than_the_model_was_trained_for(tiny):
    assert memory.needed_bytes(tiny("llama"), 10**6, 1) == memory.needed_bytes(tiny("llama"), 10**7, 1)


def test_a_broken_file_is_said_to_be_broken(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="broken or truncated"):
        memory.needed_bytes(path, 512, 1)


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, None),
        ({"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    1024 kB\n"}, 2**20),
        (
            {
                "proc/meminfo": "MemAvailable: 4096 kB\n",
                "sys/fs/cgroup/memory.max": "3000000\n",
                "sys/fs/cgroup/memory.current": "1000000\n",
            },
            2_000_000,
        ),
        (
            {
                "proc/meminfo": "MemAvailable: 4096 kB\n",
                "sys/fs/cgroup/memory.max": "3000000\n",
                "sys/fs/cgroup/memory.current": "2900000\n",
                "sys/fs/cgroup/memory.stat": "anon 100\ninactive_file 1500000\nactive_file 300000\nfile 9\n",
            },
            1_900_000,
        ),
        ({"proc/meminfo": "MemAvailable: 4 kB\n", "sys/fs/cgroup/memory.max": "max\n"}, 4096),
        (
            {
                "proc/meminfo": "MemAvailable: 4096 kB\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "10",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "20",
            },
            0,
        ),
    ],
)
def test_what_is_free_is_the_least_of_machine_and_container(tmp_path, files, free):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert memory.free_bytes(tmp_path) == free


@pytest.mark.case(34)
@pytest.mark.case(36)
@pytest.mark.parametrize(
    ("n_lanes", "said"),
    [
        (1, r"512 tokens need about .* GiB of memory \(target .*use a smaller -c .*--no-check-memory"),
        (0, r"512 tokens need about"),
        (64, r"64 lanes of 512 tokens need about .* GiB of memory \(target .*use fewer --lanes"),
    ],
)
def test_what_cannot_fit_is_refused_before_anything_is_loaded(monkeypatch, n_lanes, said):
    monkeypatch.setattr(memory, "free_bytes", lambda: 100 * 2**20)
    monkeypatch.setattr(LlamaModel, "__init__", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(ConfigError, match=said):
        Reasoner(Sources.from_pair("tiny"), RunConfig(policy="loglik-ratio"), ModelConfig(n_ctx=512), n_lanes=n_lanes)


def test_who_knows_better_may_load_it_all_the_same(monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda: 0)
    models = ModelConfig(n_ctx=512, n_threads=1, check_memory=False)
    with Reasoner(Sources.from_pair("tiny"), RunConfig(policy="never", max_tokens=2), models) as reasoner:
        assert reasoner.answer("hi", seed=0).usage["completion_tokens"] <= 2


def test_layers_on_a_gpu_take_no_main_memory(monkeypatch):
    path = resolve("tiny").target
    whole = memory.needed_bytes(path, 512, 1)
    assert memory.needed_bytes(path, 512, 1, -1) == whole, "this build has no GPU: the layers stay here"
    monkeypatch.setattr(memory.C, "llama_supports_gpu_offload", lambda: True)
    half, none = (memory.needed_bytes(path, 512, 1, n) for n in (2, -1))
    assert none == memory.needed_bytes(path, 512, 1, 99) < half < whole
    assert abs((whole + none) / 2 - half) <= 1


def test_as_many_lanes_as_fit(monkeypatch):
    files = resolve("tiny")
    plan = memory.Plan(paths={"target": files.target, "draft": files.draft}, n_ctx=1024)

    def fitting(n_lanes: int) -> int:
        free = sum(plan.needed(n_lanes).values()) + memory._SPARE_BYTES
        monkeypatch.setattr(memory, "free_bytes", lambda: free)
        return plan.lanes_that_fit(32)

    assert [fitting(n) for n in (1, 5, 32, 40)] == [1, 5, 32, 32]
    monkeypatch.setattr(memory, "free_bytes", lambda: 0)
    assert plan.lanes_that_fit(32) == 1
    monkeypatch.setattr(memory, "free_bytes", lambda: None)
    assert plan.lanes_that_fit(32) == 32


@pytest.mark.parametrize(
    ("costs", "best"),
    [
        ({1: 10.0}, 1),
        ({1: 10.0, 2: 9.5, 4: 2.0}, 1),
        ({1: 10.0, 2: 6.0, 4: 4.0, 8: 3.9}, 4),
        ({1: 10.0, 2: 6.0, 4: 4.0, 8: 3.0}, 8),
        ({1: 300e-6, 2: 200e-6, 4: 120e-6}, 1),  # a tiny model: Python would take more than that saves
        ({1: 900e-6, 2: 500e-6, 4: 300e-6}, 4),
    ],
)
def test_lanes_are_doubled_while_that_pays(costs, best):
    assert best_lanes(costs) == best


def test_costs_are_measured_for_every_number_of_lanes():
    with LlamaModel(Path(resolve("tiny").target)) as model:
        costs = batch_costs(model, n_threads=1, most=9)
    assert list(costs) == [1, 2, 4, 8] and all(seconds > 0 for seconds in costs.values())


def test_zero_lanes_means_as_many_as_are_worth_it():
    models = ModelConfig(n_ctx=256, n_threads=1)
    with Reasoner(Sources.from_pair("tiny"), RunConfig(policy="never"), models, n_lanes=0, max_lanes=3) as reasoner:
        assert reasoner.n_lanes in (1, 2)
        assert (
            reasoner.answer("Hm?", seed=1, config=RunConfig(policy="never", max_tokens=5)).usage["completion_tokens"]
            <= 5
        )
