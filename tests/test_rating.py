"""What the target is asked to rate a step, and how the answer is read."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from gguf_factory import LLAMA2, spm_vocab, write_model

from semspec_local.config import ModelConfig, RunConfig, SamplingConfig
from semspec_local.errors import ConfigError, ModelError
from semspec_local.llama.model import LlamaModel
from semspec_local.policy import StepScores, make_policy
from semspec_local.rating import RATING_PROMPT, Rater
from semspec_local.reasoner import Reasoner, Sources
from semspec_local.testing import ByteVocabulary


class Answers:
    """A model that gives these logits to the ten digits, and higher ones to all that is none."""

    def __init__(self, *digits: float) -> None:
        self.logits = np.full(300, 50.0, dtype=np.float32)
        self.logits[list(b"0123456789")] = digits
        self.asked: list[list[int]] = []

    def peek(self, tokens):
        self.asked.append(list(tokens))
        return self.logits


def rating(*digits: float) -> float:
    return Rater(ByteVocabulary()).rate(Answers(*digits))  # type: ignore[arg-type]


def test_the_rating_is_the_likeliest_digit_whatever_else_is_likely():
    for digit in range(10):
        assert rating(*(float(i == digit) for i in range(10))) == digit
    assert rating(*[-math.inf] * 4, -3.0, *[-math.inf] * 5) == 4


def test_of_equally_likely_digits_the_lowest_counts():
    assert rating(*[1.0] * 10) == 0
    assert rating(0, 0, 0, 2, 1, 2, 0, 0, 2, 0) == 3


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_none_are_no_rating(bad):
    found = rating(*[1.0] * 9, bad)
    assert math.isnan(found)
    with pytest.raises(ModelError, match="target_rating is nan"):
        make_policy("specreason", 0).decide(StepScores(1, target_rating=found), np.random.default_rng(0))


def test_the_question_is_asked_once_and_whole():
    model = Answers(*range(10))
    Rater(ByteVocabulary()).rate(model)  # type: ignore[arg-type]
    assert model.asked == [list(RATING_PROMPT.encode())]


@pytest.mark.parametrize("kind", ["llama", "other-vocab", "add-bos", "control-think", "spm"])
def test_the_question_is_text_and_a_digit_is_one_token_after_it(tiny, kind):
    with LlamaModel(tiny(kind)) as model:
        vocabulary = model.vocabulary
        rater = Rater(vocabulary)
        assert vocabulary.decode(rater.prompt) == RATING_PROMPT
        assert all(vocabulary.piece(token) for token in rater.prompt)  # control tokens are no text
        assert [vocabulary.decode([token]) for token in rater._digits] == list("0123456789")


class Merged(ByteVocabulary):
    """What is no letter is one token, whichever it is."""

    def encode(self, text, *, control=False):
        return [byte if chr(byte).isalpha() else 1 for byte in text.encode()]


def test_digits_that_look_alike_cannot_be_read():
    with pytest.raises(ConfigError, match="the same token for two digits; wanted one token for each"):
        Rater(Merged())


def reasoner(target, draft) -> Reasoner:
    config = RunConfig(policy="specreason", max_tokens=40, max_step_tokens=8, sampling=SamplingConfig(temperature=0))
    return Reasoner(Sources(target=target, draft=draft), config, ModelConfig(n_ctx=512, n_threads=1))


def test_a_vocabulary_whose_digits_grow_together_with_the_question_is_refused_at_load(tiny, tmp_path):
    vocab = spm_vocab()
    vocab = replace(vocab, tokens=tuple("\n9" if token == "\n\n" else token for token in vocab.tokens))
    path = write_model(tmp_path / "merged.gguf", vocab=vocab, chat_template=LLAMA2)
    with pytest.raises(ConfigError, match=r"no token that is 9 alone.*a policy that asks for no rating"):
        reasoner(path, tiny("spm"))


def test_a_pair_answers_with_ratings(tiny):
    with reasoner(tiny("llama"), tiny("llama-q8")) as pair:
        speculation = pair.start("How many hens are there?", seed=1)
        records = [record for record in speculation if record.accepted is not None]
    assert records
    for record in records:
        assert record.score in range(10) and record.threshold == 7 and record.probe_s > 0
        assert record.accepted == (record.score >= 7)
