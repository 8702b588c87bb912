"""Numbers in steps, greedy clusters, and the embedding clusterer where its model is at hand."""

from __future__ import annotations

import os
from fractions import Fraction

import numpy as np
import pytest

from semspec_local.errors import ConfigError
from semspec_local.lab.cluster import EmbeddingClusterer, ExactClusterer, greedy_clusters, numbers_in


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("no numbers", []),
        ("5.0 apples, $5 each, 5.", ["5"]),
        ("1,000 and 12,345,678.5", ["1000", "12345678.5"]),
        ("1{,}000", ["1000"]),
        ("1, 2, 3", ["1", "2", "3"]),
        ("1000,2000", ["1000", "2000"]),
        ("costs $5.50", ["5.5"]),
        ("40%", ["2/5"]),
        (r"40\% of it", ["2/5"]),
        ("40 percent", ["2/5"]),
        ("0.4", ["2/5"]),
        (".4", ["2/5"]),
        ("2/5", ["2/5"]),
        (r"\frac{2}{5} and \dfrac{1}{2}", ["2/5", "1/2"]),
        ("24/3 = 8", ["24", "3", "8"]),
        ("24 / 3 = 8", ["24", "3", "8"]),
        ("1/0", ["1", "0"]),
        ("0/4", ["0", "4"]),
        ("x = -5", ["-5"]),
        ("10-5", ["10", "5"]),
        ("- 5 apples", ["5"]),
        ("Step 2: add 3\n4. then 5\n**6.** 7", ["3", "5", "7"]),
        ("3.14", ["3.14"]),
        ("x^2", ["2"]),
        ("٣ apples", []),
    ],
)
def test_numbers_are_found_by_value(text, numbers):
    assert numbers_in(text) == {Fraction(number) for number in numbers}


def test_absurdly_long_numbers_are_survived():
    assert numbers_in("1" * 100_000)
    assert numbers_in("1/" * 10_000)


def test_every_item_is_assigned_to_the_first_cluster_that_takes_it():
    rng = np.random.default_rng(0)
    for _ in range(50):
        values = rng.integers(10, size=rng.integers(0, 30)).tolist()
        ids = greedy_clusters(len(values), lambda first, other, v=values: abs(v[first] - v[other]) <= 1)
        firsts = [values[ids.index(cluster_id)] for cluster_id in range(len(set(ids)))]
        assert len(ids) == len(values)
        for value, cluster_id in zip(values, ids):
            assert cluster_id == next(i for i, first in enumerate(firsts) if abs(first - value) <= 1)


def test_exact_clusters_ignore_case_and_white_space():
    assert ExactClusterer().cluster(["So 5.", "so  5.\n", "So 6.", "", "so 5."]) == [0, 0, 1, 2, 0]
    assert ExactClusterer().cluster([]) == []


def test_a_missing_or_broken_embedding_model_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"has no model.onnx; wanted a folder with model.onnx and tokenizer.json"):
        EmbeddingClusterer(tmp_path)
    for name in ("model.onnx", "tokenizer.json"):
        (tmp_path / name).write_text("nothing")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        EmbeddingClusterer(tmp_path)


@pytest.fixture(scope="module")
def embedding():
    try:
        return EmbeddingClusterer(os.environ.get("SEMSPEC_EMBEDDING_MODEL"))
    except ConfigError as error:
        pytest.skip(f"all-MiniLM-L6-v2 is not at hand: {error}")


def test_steps_mean_the_same_when_words_and_numbers_do(embedding):
    texts = [
        "She has 5 + 3 = 8 apples.",
        "So she has 5 + 3 = 8 apples in total.",
        "She has 5 - 2 = 3 apples.",
        "It rained for 5 days, then 3, then 8.",
    ]
    assert embedding.cluster(texts) == [0, 0, 1, 2]


def test_a_vector_does_not_depend_on_other_texts(embedding):
    alone = embedding.embed("She has 8 apples.").copy()
    embedding.embed("A much longer text. " * 100)
    embedding._known.clear()
    np.testing.assert_array_equal(embedding.embed("She has 8 apples."), alone)
    assert np.linalg.norm(alone) == pytest.approx(1)
    assert np.isfinite(embedding.embed("")).all()
