"""Clusters of steps: numbers, rules of meaning, and the models behind them; real ones where they are at hand."""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from semspec_local.errors import ConfigError
from semspec_local.lab.meaning.cluster import MIN_COSINE, ExactRule, RuleClusterer, adjusted_rand, greedy_clusters
from semspec_local.lab.meaning.judge import QUESTION, JudgeRule
from semspec_local.lab.meaning.numbers import numbers_in
from semspec_local.lab.meaning.textmodels import EmbeddingRule, NliRule


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
    exact = RuleClusterer(ExactRule(), same_numbers=False)
    assert exact.cluster(["So 5.", "so  5.\n", "So 6.", "", "so 5."]) == [0, 0, 1, 2, 0]
    assert exact.cluster([]) == []


class FirstLetter:
    name = "first letter"

    def same(self, first: str, other: str, context: str) -> bool:
        return first[:1] == other[:1]


def test_with_same_numbers_a_rule_is_only_asked_where_they_are():
    texts = ["a 1", "a 2", "a 1 1", "b 1", "b 1"]
    assert RuleClusterer(FirstLetter(), same_numbers=False).cluster(texts) == [0, 0, 0, 1, 1]
    both = RuleClusterer(FirstLetter(), same_numbers=True)
    assert both.cluster(texts) == [0, 1, 0, 2, 2]
    assert both.name == "first letter and equal sets of numbers"


def test_the_rand_index_knows_equal_clusters_chance_and_what_sklearn_says():
    assert adjusted_rand([0, 0, 1, 1], [5, 5, 2, 2]) == 1
    assert adjusted_rand([0, 0, 1, 1], [0, 1, 0, 1]) == pytest.approx(-0.5)
    assert adjusted_rand([0, 0, 1, 2], [0, 0, 1, 1]) == pytest.approx(4 / 7)  # the example in scikit-learn's manual
    assert adjusted_rand([], []) == adjusted_rand([0], [0]) == adjusted_rand([0, 1], [0, 1]) == 1
    rng = np.random.default_rng(0)
    by_chance = [
        adjusted_rand(rng.integers(4, size=200).tolist(), rng.integers(4, size=200).tolist()) for _ in range(99)
    ]
    assert abs(np.mean(by_chance)) < 0.01
    with pytest.raises(ConfigError, match="of 1 and 2 items"):
        adjusted_rand([0], [0, 1])


# -- text models ----------------------------------------------------------------------------------------

WORDS = ["[UNK]", "one", "two", "three", "four"]


def text_model(folder: Path, *, pairs: bool, inputs: tuple[str, ...] = ("input_ids", "token_type_ids")) -> Path:
    """A folder with a tokenizer of five words, and an ONNX model on their ids.

    A cross-encoder's classes are other and entailment: a premise entails a hypothesis whose ids add up to no more. An
    encoder's token vectors are (1, id).
    """
    onnx = pytest.importorskip("onnx", reason="the extra packages of the lab are not installed")
    tokenizers = pytest.importorskip("tokenizers", reason="the extra packages of the lab are not installed")
    helper, numpy_helper = onnx.helper, onnx.numpy_helper
    folder.mkdir()
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    constants = {"one": 1.0, "half": 0.5, "two": 2.0}
    if pairs:
        nodes = [
            helper.make_node("Cast", ["input_ids"], ["ids"], to=1),
            helper.make_node("Cast", ["token_type_ids"], ["kind"], to=1),
            helper.make_node("Mul", ["kind", "two"], ["kind2"]),
            helper.make_node("Sub", ["one", "kind2"], ["sign"]),
            helper.make_node("Mul", ["ids", "sign"], ["signed"]),
            helper.make_node("ReduceSum", ["signed", "axis"], ["sum"], keepdims=1),
            helper.make_node("Add", ["sum", "half"], ["entailed"]),
            helper.make_node("Neg", ["entailed"], ["not"]),
            helper.make_node("Concat", ["not", "entailed"], ["logits"], axis=1),
        ]
        output = helper.make_tensor_value_info("logits", 1, ["n", 2])
    else:
        nodes = [
            helper.make_node("Cast", ["input_ids"], ["ids"], to=1),
            helper.make_node("Unsqueeze", ["ids", "last"], ["column"]),
            helper.make_node("Mul", ["column", "zero"], ["zeros"]),
            helper.make_node("Add", ["zeros", "one"], ["ones"]),
            helper.make_node("Concat", ["ones", "column"], ["last_hidden_state"], axis=2),
        ]
        output = helper.make_tensor_value_info("last_hidden_state", 1, ["n", "length", 2])
        constants |= {"zero": 0.0}
    stored = [numpy_helper.from_array(np.array(value, np.float32), name) for name, value in constants.items()]
    stored += [numpy_helper.from_array(np.array([number]), name) for name, number in (("axis", 1), ("last", 2))]
    graph = helper.make_graph(
        nodes, "made", [helper.make_tensor_value_info(name, 7, ["n", "length"]) for name in inputs], [output], stored
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(made, str(folder / "model.onnx"))
    return folder


def test_texts_mean_the_same_when_each_entails_the_other(tmp_path):
    folder = text_model(tmp_path / "made", pairs=True)
    (folder / "config.json").write_text('{"id2label": {"0": "not_entailment", "1": "ENTAILMENT"}}')
    rule = NliRule(folder)
    assert rule.entails("three", "one two") and rule.entails("four", "three") and not rule.entails("three", "four")
    assert RuleClusterer(rule, same_numbers=False).cluster(["three", "one two", "four", "two two"]) == [0, 0, 1, 1]
    assert not NliRule(folder, classes=["entailment", "other"]).entails("three", "one two")
    assert rule.name == "made: each entails the other"


@pytest.mark.parametrize(
    ("config", "classes", "message"),
    [
        (None, None, "does not say which class is which"),
        ('{"id2label": [1]}', None, "does not say which class is which"),
        ('{"id2label": {"0": "LABEL_0", "1": "LABEL_1"}}', None, "the classes are label_0, label_1; wanted one called"),
        (None, ["no", "neutral", "entailment"], r"returns \[2\] numbers; wanted 3 for no, neutral, entailment"),
    ],
)
def test_a_cross_encoder_whose_classes_are_not_known_is_refused(tmp_path, config, classes, message):
    folder = text_model(tmp_path / "made", pairs=True)
    if config is not None:
        (folder / "config.json").write_text(config)
    with pytest.raises(ConfigError, match=message):
        NliRule(folder, classes=classes).same("one", "two", "")


def test_an_encoder_of_ones_own_takes_the_place_of_minilm(tmp_path):
    rule = EmbeddingRule(text_model(tmp_path / "mine", pairs=False, inputs=("input_ids",)), min_cosine=0.999)
    np.testing.assert_allclose(rule.embed("one three"), np.array([1, 2]) / 5**0.5, rtol=1e-6)  # the mean of (1, id)
    assert rule.same("one three", "two", "") and not rule.same("one", "four", "")
    assert rule.name == "mine cosine >= 0.999"


def test_a_model_that_wants_more_than_text_is_refused(tmp_path):
    folder = text_model(tmp_path / "made", pairs=False, inputs=("input_ids", "pixel_values"))
    with pytest.raises(ConfigError, match="wants the inputs pixel_values; wanted a model that reads text alone"):
        EmbeddingRule(folder, min_cosine=0.5)


def test_a_missing_or_broken_text_model_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"has no model.onnx; wanted a folder with model.onnx and tokenizer.json"):
        EmbeddingRule(tmp_path, min_cosine=0.5)
    for name in ("model.onnx", "tokenizer.json"):
        (tmp_path / name).write_text("nothing")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        EmbeddingRule(tmp_path, min_cosine=0.5)


@pytest.fixture(scope="module")
def minilm():
    try:
        return EmbeddingRule(os.environ.get("SEMSPEC_EMBEDDING_MODEL"), min_cosine=MIN_COSINE)
    except ConfigError as error:
        pytest.skip(f"all-MiniLM-L6-v2 is not at hand: {error}")


def test_steps_mean_the_same_when_words_and_numbers_do(minilm):
    texts = [
        "She has 5 + 3 = 8 apples.",
        "So she has 5 + 3 = 8 apples in total.",
        "She has 5 - 2 = 3 apples.",
        "It rained for 5 days, then 3, then 8.",
    ]
    assert RuleClusterer(minilm, same_numbers=True).cluster(texts) == [0, 0, 1, 2]
    # The words alone put 8 apples and 3 apples together.
    assert RuleClusterer(minilm, same_numbers=False).cluster(texts[:3]) == [0, 0, 0]


def test_a_vector_does_not_depend_on_other_texts(minilm):
    alone = minilm.embed("She has 8 apples.").copy()
    minilm.embed("A much longer text. " * 100)
    minilm._known.clear()
    np.testing.assert_array_equal(minilm.embed("She has 8 apples."), alone)
    assert np.linalg.norm(alone) == pytest.approx(1)
    assert np.isfinite(minilm.embed("")).all()


# -- the judge ------------------------------------------------------------------------------------------


def test_a_judge_is_asked_both_ways_and_reads_what_questions_share_once(tiny, monkeypatch):
    with JudgeRule(tiny("llama"), n_threads=1, n_ctx=2048) as judge:
        asked = []
        monkeypatch.setattr(judge, "says_all", lambda first, second, context: not asked.append((first, second)))
        assert judge.same("a", "b", "?") and asked == [("a", "b"), ("b", "a")]
        monkeypatch.undo()
        prompts = [
            judge._prompt(QUESTION.format(context="?", first="It is 5.", second=text)) for text in ("5.", "Or 6?")
        ]
        fresh = []
        for prompt in prompts:
            judge._read = []
            fresh.append(judge._logits(prompt))
        reused = [judge._logits(prompt) for prompt in [*prompts, *reversed(prompts), prompts[0]]]
        for found, wanted in zip(reused, [*fresh, *reversed(fresh), fresh[0]]):
            np.testing.assert_allclose(found, wanted, atol=0.1)  # batches of other lengths round differently
        assert np.abs(fresh[0] - fresh[1]).max() > 0.5
        assert judge.says_all("a", "b", "?") in (True, False)
        with pytest.raises(ConfigError, match=r"a question to the judge has .* wanted at most 2048"):
            judge.says_all("a", "b" * 20_000, "?")


def test_a_judge_answers_by_the_likelier_of_yes_and_no(tiny, monkeypatch):
    with JudgeRule(tiny("llama"), n_threads=1) as judge:
        for winner, other, answer in ((0, 1, True), (1, 0, False)):
            logits = np.zeros(judge._context.n_vocab)
            logits[list(judge._answers[winner])], logits[list(judge._answers[other])] = 3.0, 1.0
            monkeypatch.setattr(judge, "_logits", lambda tokens, made=logits: made)
            assert judge.says_all("a", f"b{winner}", "?") is answer
