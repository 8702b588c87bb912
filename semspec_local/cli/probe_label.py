"""`semspec-local probe label`: what counts as one meaning, and what comes of it."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..config import default_threads
from ..errors import ConfigError
from ..lab.meaning.cluster import MIN_COSINE, MIN_COSINE_SAME_NUMBERS
from .probe_lab import collection_argument, say

if TYPE_CHECKING:
    from ..lab.collection import Collection
    from ..lab.meaning.cluster import Clusterer

CLUSTERERS = {
    "embedding": "sentence embeddings are close (--encoder, --min-cosine)",
    "nli": "a cross-encoder finds that each entails the other (--nli-model)",
    "judge": "a language model, asked twice, says so (--judge)",
    "world": "exact, for problems of the made world",
    "exact": "equal text",
}

_A_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
_A_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def clusterer_of(options: dict[str, Any], collection: Collection, stack: ExitStack) -> Clusterer:
    """The clusterer that the options name; what it holds is closed with `stack`."""
    from ..lab.meaning import cluster, judge, textmodels
    from ..lab.world import WorldClusterer

    kind, same_numbers = options["clusterer"], options["same_numbers"]
    same_numbers = kind != "exact" if same_numbers is None else same_numbers
    if kind == "world":
        return WorldClusterer()
    rule: cluster.Rule
    if kind == "exact":
        rule = cluster.ExactRule()
    elif kind == "embedding":
        given = options["min_cosine"]
        min_cosine = cluster.min_cosine_for(same_numbers) if given is None else given
        rule = textmodels.EmbeddingRule(options["encoder"], min_cosine=min_cosine)
    elif kind == "nli":
        if options["nli_model"] is None:
            raise click.UsageError("--clusterer nli needs --nli-model FOLDER: model.onnx, tokenizer.json, config.json")
        classes = options["nli_classes"] and options["nli_classes"].split(",")
        rule = textmodels.NliRule(options["nli_model"], classes=classes)
    else:
        path = options["judge"] or _target_of(collection)
        rule = stack.enter_context(judge.JudgeRule(path, n_threads=options["threads"]))
    return cluster.RuleClusterer(rule, same_numbers=same_numbers)


def _target_of(collection: Collection) -> Path:
    from ..pairs import resolve
    from ..provenance import fingerprint_file

    path = resolve(collection.pair).target
    wanted = collection.models["target"].fingerprint
    if fingerprint_file(path)["sha256"] != wanted:
        raise ConfigError(f"{path.name} is not the target that this collection was made with; name one with --judge")
    return path


@click.command(context_settings={"show_default": True})
@collection_argument
@click.option(
    "--clusterer",
    type=click.Choice(list(CLUSTERERS)),
    default="embedding",
    help="What counts as one meaning. " + "; ".join(f"{name}: {text}" for name, text in CLUSTERERS.items()) + ".",
)
@click.option(
    "--same-numbers/--any-numbers",
    default=None,
    help="One meaning needs the same set of numbers; the default but for exact and world.",
)
@click.option(
    "--encoder",
    type=_A_FOLDER,
    help="Sentence encoder: model.onnx and tokenizer.json; default: the installed all-MiniLM-L6-v2.",
)
@click.option(
    "--min-cosine",
    type=click.FloatRange(0, 1),
    help=f"Least cosine of one meaning.  [default: {MIN_COSINE_SAME_NUMBERS:g}; with --any-numbers {MIN_COSINE:g}]",
)
@click.option("--nli-model", type=_A_FOLDER, help="Cross-encoder: model.onnx, tokenizer.json, config.json.")
@click.option(
    "--nli-classes", metavar="A,B,C", help="Order of its classes, one of them entailment; default: as in config.json."
)
@click.option("--judge", type=_A_FILE, help="GGUF to be asked; default: the collection's own target.")
@click.option("-t", "--threads", type=click.IntRange(1), default=default_threads, help="CPU threads of the judge.")
@click.option("--show", type=click.IntRange(0), default=3, help="Prefixes whose meanings are printed.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write a page with 100 prefixes there.")
@click.option(
    "--compare",
    nargs=2,
    type=click.Choice(list(CLUSTERERS)),
    metavar="A B",
    help="Label nothing: how far do two clusterers agree that have labelled this collection before?",
)
def label(collection: Path, **options: Any) -> None:
    """Cluster the samples of COLLECTION by meaning and write its labels.json."""
    from ..lab import label_report, labels
    from ..lab.collection import read_collection
    from ..provenance import atomic_write

    rows = read_collection(collection)
    if options["compare"]:
        _compare(rows, *options["compare"])
        return
    with ExitStack() as stack:
        clusterer = clusterer_of(options, rows, stack)
        bar = stack.enter_context(click.progressbar(length=len(rows.prefixes), label="prefixes", file=sys.stderr))
        found = labels.make_labels(rows, clusterer, progress=lambda done, total: bar.update(1))
    labels.write_labels(found, rows, labels.labels_file(options["clusterer"]))
    say(f"wrote {labels.write_labels(found, rows)}")
    for line in label_report.summary_lines(label_report.summary(rows, found)):
        click.echo(line)
    for line in label_report.example_lines(rows, found, options["show"]):
        click.echo(line)
    if options["html"]:
        atomic_write(options["html"], label_report.labels_page(rows, found, 100))
        say(f"wrote {options['html']}")


def _compare(rows: Collection, first: str, other: str) -> None:
    from ..lab.label_report import agreement
    from ..lab.labels import Labels, labels_file, read_labels

    found: list[Labels] = []
    for name in (first, other):
        if not (rows.folder / labels_file(name)).exists():
            raise ConfigError(f"{rows.folder} was not labelled by {name}; do: probe label --clusterer {name}")
        found.append(read_labels(rows, labels_file(name)))
    numbers = agreement(*found)
    click.echo(f"adjusted Rand index: {numbers['adjusted_rand']:.3f} (1: the same clusters, 0: as by chance)")
    click.echo(f"prefixes clustered alike: {numbers['same_clusters']:.1%} of {len(rows.prefixes)}")
    click.echo(f"pairs of steps put together: {first} {numbers['together_first']:.1%}, ", nl=False)
    click.echo(f"{other} {numbers['together_other']:.1%}; they disagree on {numbers['disagree']:.1%}")
