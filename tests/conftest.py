"""What all tests share: a home of their own, tiny models, and the real pair where it was pulled."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from gguf_factory import LLAMA2, bpe_vocab, spm_vocab, write_model
from hypothesis import settings

from semspec_local.errors import ConfigError
from semspec_local.pairs import PairFiles, resolve
from semspec_local.resources import cache_dir

settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
settings.load_profile("untimed")

REAL_CACHE = cache_dir()
"""The user's own cache, read before any test changes the environment."""

_FOLDERS = ("LOCALAPPDATA", "APPDATA", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "HF_HOME")


@pytest.fixture(autouse=True)
def own_home(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: Any) -> None:
    """No test reads or writes the user's folders; tests marked `real` see the user's cache, and only that."""
    home = tmp_path_factory.mktemp("home")
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(home))
    for name in _FOLDERS:
        monkeypatch.setenv(name, str(home / name.lower()))
    monkeypatch.setenv("SEMSPEC_CONFIG", str(home / "config"))
    is_real = request.node.get_closest_marker("real") is not None
    monkeypatch.setenv("SEMSPEC_CACHE", str(REAL_CACHE if is_real else home / "cache"))


@pytest.fixture
def real_pair() -> PairFiles:
    """The pair `qwen2.5-coder`, for tests marked `real`; skips where it was not pulled."""
    try:
        return resolve("qwen2.5-coder", cache=REAL_CACHE)
    except ConfigError as error:
        pytest.skip(str(error))


_MODELS: dict[str, Callable[[], dict[str, Any]]] = {
    "llama": dict,
    "llama-other-seed": lambda: {"seed": 1},
    "llama-unpadded": lambda: {"vocab": bpe_vocab(n_pad=0)},
    "llama-q8": lambda: {"quantization": "Q8_0"},
    "qwen2": lambda: {"architecture": "qwen2"},
    "gemma2": lambda: {"architecture": "gemma2"},
    "mamba": lambda: {"architecture": "mamba"},
    "lfm2": lambda: {"architecture": "lfm2"},
    "spm": lambda: {"vocab": spm_vocab(), "chat_template": LLAMA2},
    "other-vocab": lambda: {"vocab": bpe_vocab(words=["hello", "world", " is", "step"]), "seed": 2},
    "more-padding": lambda: {"vocab": bpe_vocab(n_pad=70), "seed": 3},
    "add-bos": lambda: {"vocab": bpe_vocab(bos="<|endoftext|>", add_bos=True)},
    "control-think": lambda: {"vocab": bpe_vocab(control_think=True)},
    "no-template": lambda: {"chat_template": None},
}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The path of a tiny model with random weights, by its name in `_MODELS`; written when first asked for."""
    folder = tmp_path_factory.mktemp("models")

    @cache
    def path(name: str) -> Path:
        return write_model(folder / f"{name}.gguf", **_MODELS[name]())

    return path
