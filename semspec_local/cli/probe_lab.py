"""The commands of `semspec-local probe` that make probes: collect, label, train, evaluate."""

from __future__ import annotations

import json
import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..config import RunConfig, default_threads
from ..errors import ConfigError
from ..lab.collection import N_PREFIXES, N_SAMPLES, TARGET_ALONE
from ..lab.labels import DEFAULT_RECIPE, RECIPES
from ..policy import POLICIES
from ..probes.spec import USUAL_ACCEPT_ERROR
from ..provenance import command_line
from ..reasoner import Sources
from .counting import counting

if TYPE_CHECKING:
    from ..lab.problems import Problem

_SHOWN = {"show_default": True}
DEFAULT_POLICY = RunConfig().policy


def say(text: str) -> None:
    click.echo(text, err=True)


def problems_of(data: str, limit: int, offset: int) -> tuple[list[Problem], str]:
    """The problems that --data names, and their name."""
    from ..lab.problems import made_up_problems, read_problems

    kind, _, seed = data.partition(":")
    if kind == "world" and seed.isdigit():
        return made_up_problems(int(seed), limit, offset), data
    if not Path(data).is_file():
        raise click.BadParameter(f"{data!r} is no file; wanted a JSONL file, or world:SEED", param_hint="--data")
    return read_problems(Path(data), limit, offset), Path(data).stem


collection_argument = click.argument("collection", type=click.Path(exists=True, file_okay=False, path_type=Path))


@click.command(context_settings=_SHOWN)
@click.argument("collection", type=click.Path(file_okay=False, path_type=Path))
@click.option("--pair", default=None, help="A pulled pair; default: the default pair.")
@click.option("--data", required=True, help="Problems: a JSONL file of questions, or world:SEED for the made world.")
@click.option("--limit", type=click.IntRange(1), default=110, help="Problems to use, from the first line on.")
@click.option("--offset", type=click.IntRange(0), default=0, help="Lines to skip first.")
@click.option("--samples", type=click.IntRange(2), default=N_SAMPLES, help="Samples of each model at each prefix.")
@click.option("--prefixes", type=click.IntRange(1), default=N_PREFIXES, help="Prefixes of each problem.")
@click.option(
    "--target-layer",
    type=int,
    multiple=True,
    help="Layers to read; default: four from the middle up, with --post none.",
)
@click.option("--draft-layer", type=int, multiple=True, help="The same for the draft.")
@click.option("--post/--no-post", default=False, help="Read the last layer after the final norm.")
@click.option(
    "--policy",
    type=click.Choice(list(POLICIES)),
    default=TARGET_ALONE,
    help="Who writes the solutions that the prefixes are taken from: the target alone (never), or both, as in a run.",
)
@click.option("--threshold", type=float, help="That of --policy.  [default: the policy's own]", show_default=False)
@click.option(
    "--n-prime",
    type=click.IntRange(0),
    default=RunConfig().n_prime,
    help="Steps that are never drafted, as in run: prefixes hold at least so many.",
)
@click.option("--seed", type=click.IntRange(0), default=0, help="Seed of samples and prefixes.")
@click.option(
    "--time-budget",
    type=click.FloatRange(0, min_open=True),
    metavar="MINUTES",
    help="Stop after so long, when what is in work is done.",
)
@click.option("-t", "--threads", type=click.IntRange(1), default=default_threads, help="CPU threads.")
def collect(
    collection: Path,
    pair: str | None,
    data: str,
    limit: int,
    offset: int,
    samples: int,
    prefixes: int,
    target_layer: tuple[int, ...],
    draft_layer: tuple[int, ...],
    post: bool,
    policy: str,
    threshold: float | None,
    n_prime: int,
    seed: int,
    time_budget: float | None,
    threads: int,
) -> None:
    """Sample steps of both models into COLLECTION; run it again to go on where it stopped."""
    from ..lab.collect import CollectConfig, Collector, middle_layers
    from ..pairs import default_pair, resolve

    files = resolve(pair or default_pair())
    config = CollectConfig(
        system=files.manifest.system or "",
        n_samples=samples,
        n_prefixes=prefixes,
        target_layers=target_layer or (() if post else middle_layers(files.manifest.target.n_layer)),
        draft_layers=draft_layer or (() if post else middle_layers(files.manifest.draft.n_layer)),
        post=post,
        n_threads=threads,
        seed=seed,
        policy=policy,
        threshold=threshold,
        n_prime=n_prime,
    )
    problems, name = problems_of(data, limit, offset)
    with Collector(collection, Sources.from_pair(files.name), config, name) as collector:
        begun, before, n_stored = time.monotonic(), collector.n_stored, collector.n_stored
        with counting("prefixes", len(problems) * prefixes, done=before) as advance:
            for n_stored in collector.run(problems):
                minutes = (time.monotonic() - begun) / 60
                advance(n_stored, f"{2 * samples * (n_stored - before) / minutes:,.0f} samples a minute")
                if time_budget is not None and minutes >= time_budget:
                    say("the time is up; the same command goes on from here")
                    break
    say(f"{n_stored:,} prefixes in {collection}")


@click.command(context_settings=_SHOWN)
@collection_argument
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), default=Path("probes"), help="Where PAIR/ goes."
)
@click.option(
    "--recipe",
    type=click.Choice(list(RECIPES)),
    default=DEFAULT_RECIPE,
    help="On whose steps a probe is taught: own (the paper's), or joint, on those of both models.",
)
@click.option("--loss", type=click.Choice(["mse", "bce"]), default="mse", help="Loss on the share.")
@click.option(
    "--head",
    "heads",
    type=click.Choice(["linear", "mlp", "ridge"]),
    multiple=True,
    default=("linear", "mlp"),
    help="Heads to try for the probes of one model; ridge, for few problems, is chosen by cross-validation.",
)
@click.option(
    "--joint-head",
    "joint_heads",
    type=click.Choice(["linear", "mlp", "stacked"]),
    multiple=True,
    default=("linear", "mlp"),
    help="Heads to try for the probe of both; stacked, for few problems, is made of two ridge probes.",
)
@click.option(
    "--folds",
    type=click.IntRange(0),
    default=0,
    help="Test on every problem, by heads taught without it, and choose thresholds: so many trainings more.",
)
@click.option("--seed", type=click.IntRange(0), default=0, help="Seed of split, weights and intervals.")
@click.option("--max-epochs", type=click.IntRange(1), default=200, help="Most epochs of one fit.")
@click.option("-t", "--threads", type=click.IntRange(1), default=1, help="CPU threads for torch.")
def train(
    collection: Path,
    out: Path,
    recipe: Any,
    loss: Any,
    heads: Any,
    joint_heads: Any,
    folds: int,
    seed: int,
    max_epochs: int,
    threads: int,
) -> None:
    """Train on a labelled COLLECTION; write OUT/PAIR/{target,draft}.onnx and report.json."""
    try:
        from ..lab.build import build_probes
        from ..lab.train import TrainConfig
    except ImportError as error:
        raise click.ClickException(f"{error.name} is not installed: pip install '.[train]'") from None
    config = TrainConfig(
        recipe=recipe,
        loss=loss,
        heads=heads,
        joint_heads=joint_heads,
        seed=seed,
        max_epochs=max_epochs,
        n_threads=threads,
    )
    build_probes(collection, out, config, command=shlex.join(command_line("semspec-local")), n_folds=folds, say=say)


@click.command(context_settings=_SHOWN)
@collection_argument
@click.option("--probes", required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the whole report here (JSON).")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write it as a page, with pictures.")
@click.option(
    "--figures", type=click.Path(file_okay=False, path_type=Path), help="Write the pictures here, PNG and SVG."
)
def evaluate(collection: Path, probes: Path, out: Path | None, html: Path | None, figures: Path | None) -> None:
    """Test finished PROBES on another labelled COLLECTION, with problems that they were not trained on."""
    from ..lab import exam_page
    from ..lab.charts import save_all
    from ..lab.collection import read_collection
    from ..lab.exam import examine, verdict
    from ..lab.labels import read_labels
    from ..provenance import atomic_write
    from ..roles import PROBE_ROLES, ROLES

    rows = read_collection(collection)
    files = {role: path for role in PROBE_ROLES if (path := probes / f"{role}.onnx").exists() or role in ROLES}
    report = {"command": shlex.join(command_line("semspec-local")), **examine(files, rows, read_labels(rows))}
    if out:
        atomic_write(out, json.dumps(report, indent=2) + "\n")
    if html or figures:
        trained = probes / "report.json"
        training = json.loads(trained.read_text(encoding="utf-8")) if trained.exists() else None
        made = exam_page.pictures(report, training)
        if html:
            atomic_write(html, exam_page.exam_page(report, made))
        if figures:
            save_all(made, figures)
    shown = exam_page.shown
    for role in files:
        for steps, found in report["probes"][role].items():
            numbers = (f"{name} {shown(found[name])}" for name in ("r2", "spearman", "auroc", "calibration_error"))
            click.echo(f"{role} probe, {steps}: {', '.join(numbers)} (n {found['n_steps']})")
    for name, found in report["decision"]["scores"].items():
        click.echo(f"{name}: AUROC {shown(found['auroc_in_target_cluster'])}")
    click.echo(verdict(report["decision"]))


@click.command(context_settings=_SHOWN)
@collection_argument
@click.option("--probes", required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--policy", type=click.Choice(list(POLICIES)), default=DEFAULT_POLICY, help="Whose threshold to choose.")
@click.option(
    "--alpha",
    type=click.FloatRange(0, 1, True, True),
    default=USUAL_ACCEPT_ERROR,
    help="Most errors among accepted steps.",
)
@click.option("--delta", type=click.FloatRange(0, 1, True, True), default=0.1, help="Chance that this goes wrong.")
@click.option("--save/--no-save", default=True, help="Write the threshold into the target's probe (or the joint one).")
def calibrate(collection: Path, probes: Path, policy: str, alpha: float, delta: float, save: bool) -> None:
    """Choose a policy's threshold so that few accepted steps are ones that the target would not write.

    Use a labelled COLLECTION of problems that the probes were not trained on. An error is an accepted drafted step that
    lies in no cluster of the target's samples; at most a share of alpha of the accepted steps are errors, with
    confidence 1 - delta over problems. `run --max-accept-error` uses the threshold that was saved.
    """
    from ..lab.calibrate import calibrate_policy
    from ..lab.collection import read_collection
    from ..lab.exam import predict_rows
    from ..lab.labels import read_labels
    from ..probes import read_probe_file
    from ..probes.write import rewrite_spec
    from ..roles import PROBE_ROLES

    rows, needs = read_collection(collection), POLICIES[policy].needs
    paths = {role: probes / f"{role}.onnx" for role in PROBE_ROLES if f"{role}_semantic_prob" in needs}
    predicted = {role: predict_rows(path, role, rows) for role, path in paths.items()}
    found = calibrate_policy(policy, rows, read_labels(rows), predicted, alpha=alpha, delta=delta)
    seen = f"{found.n_steps} drafted steps of {found.n_problems} problems"
    if found.threshold is None:
        raise ConfigError(
            f"no threshold of {policy} is known to keep errors below {alpha:g} ({seen}); the best bound is "
            f"{found.bound:.3f}: collect more problems, or allow a larger --alpha"
        )
    click.echo(
        f"{policy} --threshold {found.threshold:g}: accepts {found.acceptance:.1%}, {found.risk:.1%} of that in error "
        f"(at most {found.bound:.1%} with confidence {1 - delta:g}; {seen})"
    )
    holder = paths.get("joint") or paths.get("target")
    if save and holder is not None:
        spec = read_probe_file(holder).spec
        others = [old for old in spec.calibrations if (old["policy"], old["alpha"]) != (policy, alpha)]
        rewrite_spec(holder, replace(spec, calibrations=(*others, found.to_json())))
        click.echo(f"saved in {holder}", err=True)
