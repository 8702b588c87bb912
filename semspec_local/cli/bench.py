"""`semspec-local bench`: several ways to answer the same questions, side by side: how fast, and how often right."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from ..config import RunConfig
from ..errors import ConfigError
from ..policy import POLICIES
from ..provenance import atomic_write, command_line
from ..trace import json_line
from . import INTERRUPTED, SOME_FAILED
from .counting import counting
from .options import configs
from .pair_options import bench_options, sources_of, with_options

F = TypeVar("F", bound=Callable[..., Any])

_DEFAULT_POLICY = RunConfig().policy
DEFAULT_ARMS = f"target,draft,{_DEFAULT_POLICY},random@rate-of:{_DEFAULT_POLICY},token-sd@4"
SWEEP = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)

_FILE = click.Path(dir_okay=False, path_type=Path)

_ASKED = (
    click.option(
        "--task",
        default="world",
        show_default=True,
        help="gsm8k, math500, aime24, world (made-up problems; the pair is tiny then), or a JSONL file.",
    ),
    click.option(
        "--data", type=click.Path(file_okay=False, path_type=Path), help="The folder of the known tasks' files."
    ),
    click.option("--limit", type=click.IntRange(1), default=20, show_default=True, help="Items to run."),
    click.option("--offset", type=click.IntRange(0), default=0, show_default=True, help="Items to skip first."),
    click.option("--every", type=click.IntRange(1), default=1, show_default=True, help="Of the rest, one in so many."),
    click.option("--seeds", type=click.IntRange(1), default=1, show_default=True, help="Runs of every item."),
    click.option("-s", "--seed", type=click.IntRange(0), default=0, show_default=True, help="The first of the seeds."),
)

_KEPT = (
    click.option("-o", "--output", type=_FILE, help="Keep every result here (JSONL); the same command goes on."),
    click.option("--force", is_flag=True, help="Go on in an output that was made with other settings."),
    click.option("--native-time", is_flag=True, help="Also time llama.cpp's own calls; all arms get a little slower."),
    click.option(
        "--llama-server", type=_FILE, help="The binary for arms of that name. Default: what was built, or is on PATH."
    ),
)

_REPORTED = (
    click.option("--save", type=_FILE, help="Write the last line of the output here too."),
    click.option("--html", type=_FILE, help="Write tables and pictures as one page."),
    click.option("--figures", type=click.Path(file_okay=False, path_type=Path), help="Write the pictures here."),
    click.option("--markdown", is_flag=True, help="Print the table as GitHub's markdown."),
)


def _options(*groups: tuple[Callable[[Any], Any], ...]) -> Callable[[F], F]:
    return lambda command: with_options(command, *(option for group in groups for option in group))


_MEASURED = (*_ASKED, *_KEPT, *_REPORTED, bench_options)


@click.group(invoke_without_command=True)
@click.option(
    "--arms",
    default=DEFAULT_ARMS,
    show_default=True,
    help="target, draft, POLICY[@threshold][+guess@N], random@rate-of:ARM, token-sd@N, lookup@N, llama-server, "
    "llama-server+draft@N; with commas between them.",
)
@_options(_MEASURED)
@click.pass_context
def bench(ctx: click.Context, /, arms: str, **options: Any) -> int | None:
    """Run several arms on the same questions, in turns, and say how fast each was and how often right.

    The arms take turns on every question, so that a machine that changes its speed hits all alike. The last line of
    standard output is one JSON document.
    """
    if ctx.invoked_subcommand is not None:
        given = [name for name in ctx.params if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]
        if given:
            raise ConfigError(f"got --{given[0]} before {ctx.invoked_subcommand}; wanted options after it")
        return None
    return _measure([name.strip() for name in arms.split(",") if name.strip()], options)


@bench.command()
@click.option(
    "--policy",
    "policies",
    multiple=True,
    type=click.Choice(list(POLICIES)),
    default=(_DEFAULT_POLICY, "loglik-ratio"),
    show_default=True,
    help="Whose thresholds; give it several times for several policies.",
)
@click.option(
    "--threshold",
    "thresholds",
    type=float,
    multiple=True,
    help=f"The thresholds. Default: {SWEEP[0]:g} to {SWEEP[-1]:g}, or the ratings from 1 on for a policy that rates.",
)
@_options(_MEASURED)
def sweep(policies: tuple[str, ...], thresholds: tuple[float, ...], **options: Any) -> int:
    """Run policies over several thresholds, beside target, draft and blind acceptance, and name the best of each.

    The best is the fastest that is right at least 99 % as often as the target. Do not report it on the items that it
    was chosen on: tune on other ones (--offset, or world:SEED).
    """
    arms = ["target", "draft", *(arm for policy in policies for arm in _swept(policy, thresholds))]
    if "random" not in policies:
        arms += [f"random@{rate:g}" for rate in (0.3, 0.6, 0.9)]
    return _measure(arms, options, choose=policies)


def _swept(policy: str, thresholds: Sequence[float]) -> list[str]:
    """The arms of a policy, one for each threshold; a policy that has none is one arm."""
    kind = POLICIES[policy]
    if kind.default_threshold is None:
        return [policy]
    highest = kind.threshold_range[1]
    if not thresholds:
        thresholds = range(1, int(highest) + 1) if 1 < highest < 100 else SWEEP
    return [f"{policy}@{threshold:g}" for threshold in thresholds]


@bench.command()
@click.argument("results", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@_options(_REPORTED)
def show(results: Path, **options: Any) -> int:
    """Show the results kept in a file again, without measuring anything."""
    from ..bench.results import read_results

    return _report(read_results(results), options)


def _measure(arms: list[str], options: dict[str, Any], choose: tuple[str, ...] = ()) -> int:
    from ..bench.arms import check_arms
    from ..bench.suite import Suite, new_results, running

    check_arms(arms)
    if options["task"].partition(":")[0] == "world" and options["target"] is None and options["pair"] is None:
        options["pair"] = "tiny"
    if options["output"] is not None:
        options["output"].parent.mkdir(parents=True, exist_ok=True)
    config, models = configs(options)
    suite = Suite(
        task=options["task"],
        arms=arms,
        sources=sources_of(options),
        data=options["data"],
        limit=options["limit"],
        offset=options["offset"],
        every=options["every"],
        n_seeds=options["seeds"],
        seed=options["seed"],
        config=replace(config, threshold=None),
        models=models,
        timed=options["native_time"],
        llama_server=options["llama_server"],
    )
    suite.items()  # wrong data are said before the models are looked at
    results = new_results(suite, command_line("semspec-local"))
    stopped = False
    click.echo("loading and warming up each arm", err=True)
    try:
        with (
            running(suite, results, options["output"], force=options["force"]) as (n_trials, steps),
            counting("trials", n_trials, done=results.n_trials) as advance,
        ):
            begun, before = time.monotonic(), results.n_trials
            for n_done in steps:
                advance(n_done, f"{(time.monotonic() - begun) / (n_done - before):.1f} s each")
    except KeyboardInterrupt:
        stopped = True
        results.facts["interrupted"] = True
        again = "; the same command goes on" if options["output"] else ""
        click.echo(f"Interrupted; this is what there is{again}.", err=True)
        if not results.n_trials:
            return INTERRUPTED
    code = _report(results, options, choose=choose)
    return INTERRUPTED if stopped else code


def _report(results: Any, options: dict[str, Any], choose: tuple[str, ...] = ()) -> int:
    from ..bench.report import bars, best_arm, summaries, table
    from ..bench.suite import document

    if not results.n_trials:
        raise ConfigError("there are no results yet")
    arms = summaries(results)
    click.echo(table(arms, markdown=options["markdown"]))
    if not options["markdown"] and (drawn := bars(arms)):
        click.echo("\n" + drawn)
    found = document(results, arms)
    for policy in choose:
        family = [arm for arm in arms if arm["arm"] == "target" or arm["arm"].partition("@")[0] == policy]
        found.setdefault("chosen", {})[policy] = chosen = best_arm(family)["arm"]
        click.echo(f"best of {policy}: {chosen}")
    for failure in found["failed"]:
        click.echo(f"failed: {failure['arm']} on {failure['item']}: {failure['error']}", err=True)
    if results.calls_back and options.get("native_time"):
        called = ", ".join(results.calls_back)
        click.echo(f"Note: Python that llama.cpp calls is not seen in the python share of {called}", err=True)
    _write(found, arms, options)
    line = json_line(found)
    if options["save"]:
        atomic_write(options["save"], line)
    click.echo(line, nl=False)
    return SOME_FAILED if found["failed"] else 0


def _write(found: dict[str, Any], arms: list[dict[str, Any]], options: dict[str, Any]) -> None:
    if not options["html"] and not options["figures"]:
        return
    from ..bench.pictures import bench_page, pictures
    from ..lab.charts import save_all

    made = pictures(arms)
    if options["html"]:
        atomic_write(options["html"], bench_page(found, made))
    if options["figures"]:
        save_all(made, options["figures"])
