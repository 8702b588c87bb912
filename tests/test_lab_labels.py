"""Labels: what clusterers say of a collection, side by side, in the terminal and as a page."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from contextlib import ExitStack
from html.parser import HTMLParser

import pytest
from lab_support import EXACT, make_collection

from semspec_local.cli.probe_label import clusterer_of
from semspec_local.lab.collection import read_collection
from semspec_local.lab.label_report import agreement, labels_page, meanings, picked, semantic_entropy, summary
from semspec_local.lab.labels import make_labels
from semspec_local.lab.meaning import textmodels


class OneMeaning:
    name = "all alike"

    def cluster(self, texts, context=""):
        return [0] * len(texts)


class NoMeaning:
    name = "none alike"

    def cluster(self, texts, context=""):
        return list(range(len(texts)))


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return read_collection(make_collection(tmp_path_factory.mktemp("labels") / "c", n_problems=6))


def test_a_clusterer_is_told_what_came_before(rows):
    told = set()

    class Listening(OneMeaning):
        def cluster(self, texts, context=""):
            told.add(context)
            return super().cluster(texts)

    make_labels(rows, Listening())
    assert told == {"?\n\n"}


def test_entropy_is_none_for_one_meaning_and_the_logarithm_for_all_apart(rows):
    assert semantic_entropy([3, 3, 3]) == 0
    assert semantic_entropy([0, 1, 2, 3]) == pytest.approx(math.log(4))
    assert summary(rows, make_labels(rows, OneMeaning()))["target"]["semantic_entropy_mean"] == 0
    assert summary(rows, make_labels(rows, NoMeaning()))["draft"]["semantic_entropy_mean"] == pytest.approx(math.log(8))


def test_agreement_is_full_with_itself_and_none_between_all_and_nothing(rows):
    exact, all_alike, none_alike = (make_labels(rows, rule) for rule in (EXACT, OneMeaning(), NoMeaning()))
    same = agreement(exact, exact)
    assert (same["adjusted_rand"], same["same_clusters"], same["disagree"]) == (1, 1, 0)
    apart = agreement(all_alike, none_alike)
    assert (apart["adjusted_rand"], apart["same_clusters"], apart["disagree"]) == (0, 0, 1)
    assert (apart["together_first"], apart["together_other"]) == (1, 0)
    assert 0 < agreement(exact, all_alike)["disagree"] < 1


def test_meanings_come_with_the_biggest_first_and_count_every_sample(rows):
    labels = make_labels(rows, EXACT)
    for prefix, clusters in zip(rows.prefixes, labels.prefixes):
        found = meanings(prefix, clusters)
        sizes = [sum(meaning.n_by_writer.values()) for meaning in found]
        assert sizes == sorted(sizes, reverse=True) and sum(sizes) == len(prefix.samples)


@pytest.mark.parametrize(("n", "numbers"), [(0, []), (1, [0]), (3, [0, 5, 11]), (99, list(range(12)))])
def test_examples_are_spread_over_the_collection(rows, n, numbers):
    assert picked(rows, n) == numbers


class Texts(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.texts = set(), []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        assert not {"src", "href"} & {name for name, _ in attrs}

    def handle_data(self, data):
        self.texts.append(data)


def test_the_page_shows_texts_and_runs_nothing_of_them(tmp_path):
    folder = make_collection(tmp_path / "c", n_problems=1)
    index = folder / "index.jsonl"
    hostile = "<script>alert(1)</script>"
    lines = [json.loads(line) for line in index.read_text().splitlines()]
    for line in lines:
        line["question"] = line["problem_id"] = line["samples"][0]["text"] = hostile
    index.write_text("".join(json.dumps(line) + "\n" for line in lines))
    collection = read_collection(folder)
    reader = Texts()
    reader.feed(labels_page(collection, make_labels(collection, EXACT), 100))
    assert "script" not in reader.tags and "".join(reader.texts).count(hostile) >= 3 * len(lines)


def command(folder, *words):
    arguments = [sys.executable, "-m", "semspec_local", "probe", "label", str(folder), *words]
    return subprocess.run(arguments, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("same_numbers", "min_cosine", "name"),
    [
        (None, None, "cosine >= 0.6 and equal sets of numbers"),
        (True, None, "cosine >= 0.6 and equal sets of numbers"),
        (False, None, "cosine >= 0.8"),
        (None, 0.7, "cosine >= 0.7 and equal sets of numbers"),
        (False, 0.7, "cosine >= 0.7"),
    ],
)
def test_how_close_two_sentences_must_be_depends_on_their_numbers(monkeypatch, same_numbers, min_cosine, name):
    class Rule:
        def __init__(self, folder, *, min_cosine):
            self.name = f"cosine >= {min_cosine:g}"

    monkeypatch.setattr(textmodels, "EmbeddingRule", Rule)
    options = {"clusterer": "embedding", "encoder": None, "same_numbers": same_numbers, "min_cosine": min_cosine}
    assert clusterer_of(options, None, ExitStack()).name == name


def test_the_command_labels_shows_and_compares(tmp_path):
    folder = make_collection(tmp_path / "c", n_problems=4)
    early = command(folder, "--compare", "exact", "world")
    assert (early.returncode, "was not labelled by exact; do: probe label --clusterer exact" in early.stderr) == (
        2,
        True,
    )
    done = command(folder, "--clusterer", "exact", "--show", "2", "--html", str(tmp_path / "page.html"))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "clusterer: equal text (case and white space aside)"
    assert sum(line.startswith("prefix ") for line in lines) == 2
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert command(folder, "--clusterer", "world", "--show", "0").returncode == 0
    assert json.loads((folder / "labels.json").read_text())["clusterer"].startswith("world")
    compared = command(folder, "--compare", "exact", "world")
    assert compared.stdout.startswith("adjusted Rand index: 1.000 "), compared.stderr
    needs = command(folder, "--clusterer", "nli")
    assert (needs.returncode, "needs --nli-model FOLDER" in needs.stderr) == (2, True)
    assert json.loads((folder / "labels.json").read_text())["clusterer"].startswith("world")
