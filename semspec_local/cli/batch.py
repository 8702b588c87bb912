"""`semspec-local batch`: a file of questions in, a file of answers out; a rerun goes on where it stopped."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import click

from ..config import check_seed
from ..errors import ConfigError
from ..jobs import TASKS, Runner, read_job
from ..jobs.items import Job, digest_of
from ..jobs.output import OutputFile
from ..jobs.records import FORMATS
from ..jobs.runner import Stopped
from ..jobs.summary import Tally
from ..jobs.tasks import FREE
from ..provenance import fingerprint_file, provenance
from ..reasoner import MAX_LANES, Reasoner
from . import INTERRUPTED
from .counting import counting
from .pair_options import calibrated, model_options, run_configs, set_verbosity, sources_of

SOME_FAILED = 3


@click.command()
@click.argument("source", metavar="IN")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="Append a JSON line per finished item here; the same command goes on where it stopped.",
)
@model_options
@click.option(
    "-s", "--seed", type=int, default=0, show_default=True, help="The items' seeds are made of it and their ids."
)
@click.option("-sys", "--system", help="The system message. Default: the pair's own; '' for none.")
@click.option("--task", type=click.Choice(list(TASKS)), help="Ask, and read answers, as such problems want it.")
@click.option("--column", metavar="NAME", help="The column of a CSV file that holds the questions.")
@click.option(
    "--format", "form", type=click.Choice(FORMATS), default=FORMATS[0], show_default=True, help="Form of a line."
)
@click.option(
    "--traces", type=click.Path(file_okay=False, path_type=Path), help="Keep one trace per item in this folder."
)
@click.option(
    "--lanes",
    type=click.IntRange(0, 64),
    default=0,
    show_default=True,
    help="Run so many items at once; 0 measures how many are worth it, and takes what fits; 1 is one after the other.",
)
@click.option("--ordered", is_flag=True, help="At the end, rewrite the output in the order of the input.")
@click.option("--retry-failed", is_flag=True, help="Run items again that failed before.")
@click.option("--force", is_flag=True, help="Go on in an output that was made with other settings, models or items.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing unless something is wrong.")
@click.option("-v", "--verbose", count=True, help="Say more about the models; twice: also llama.cpp's log.")
def batch(source: str, output: Path, **options: Any) -> int:
    """Answer every question of IN and write the results to a file.

    IN is a .jsonl or .csv file, a folder of .jsonl files, or - for standard input. A line is {"prompt": "..."},
    {"messages": [...]} or a line of an OpenAI batch; "id" names it, and "semspec": {...} sets policy, threshold, seed,
    budgets or "draft": false for it alone.

    Each result is on the disk before the next one begins. Ctrl-C stops after the step that is running.
    """
    set_verbosity(options["quiet"], options["verbose"])
    config, models = run_configs(options)
    seed = check_seed(options["seed"])
    job = read_job(source, column=options["column"])
    _refuse_to_overwrite(output, source)
    with ExitStack() as stack:
        sources = sources_of(options)
        config = calibrated(config, sources, options["max_accept_error"])
        asked = {name: options[name] for name in ("task", "system", "form")}
        facts = {
            "input_sha256": job.sha256,
            "files": [fingerprint_file(path) for path in sources.files() if path.exists()],
            "config": asdict(config),
            "n_ctx": models.n_ctx,
            "seed": seed,
            **asked,
        }
        manifest = {"version": 1, "job": facts, "n_items": len(job.entries), "provenance": provenance()}
        out = stack.enter_context(OutputFile(output, manifest, force=options["force"], retry=options["retry_failed"]))
        entries = [entry for entry in job.entries if entry.id not in out.finished]
        tally = Tally(n_before=len(out.finished), n_failed_before=sum(out.finished.values()))
        say = _silent if options["quiet"] else _say
        _begin(job, len(entries), say)
        stopped = False
        if entries:
            if options["traces"] is not None:
                options["traces"].mkdir(parents=True, exist_ok=True)
            most = min(MAX_LANES, len(entries))
            loaded = Reasoner(sources, config, models, n_lanes=options["lanes"], max_lanes=most)
            reasoner = stack.enter_context(loaded)
            say(f"lanes: {reasoner.n_lanes}")
            should_stop = stack.enter_context(_stop_on_interrupt())
            runner = Runner(
                reasoner=reasoner,
                seed=seed,
                task=TASKS[options["task"]] if options["task"] else FREE,
                system=options["system"],
                traces=options["traces"],
                should_stop=should_stop,
            )
            stopped = _run(runner, entries, out, tally, len(job.entries), options, model=sources.target.stem)
        if options["ordered"] and not stopped:
            out.order([entry.id for entry in job.entries])
    for line in tally.lines() if tally.n_new else ():
        say(line)
    if digest_of(source) not in (job.sha256, None):
        click.echo(f"Note: {source} was changed meanwhile; what was there at the start was run", err=True)
    if stopped:
        done = f"{len(out.finished):,} of {len(job.entries):,} items are in {output}"
        click.echo(f"Stopped; {done}. The same command goes on.", err=True)
        return INTERRUPTED
    return SOME_FAILED if any(out.finished.values()) else 0


def _run(
    runner: Runner,
    entries: list[Any],
    out: OutputFile,
    tally: Tally,
    n_all: int,
    options: dict[str, Any],
    *,
    model: str,
) -> bool:
    """Run what is left; True when somebody stopped it."""
    with ExitStack() as stack:
        advance = None
        if not options["quiet"]:
            advance = stack.enter_context(counting("items", n_all, done=len(out.finished)))
        try:
            for record in runner.run(entries):
                out.append(record.to_json(options["form"], model))
                tally.add(record)
                if advance is not None:
                    advance(len(out.finished), tally.note())
        except Stopped:
            return True
    return False


def _refuse_to_overwrite(output: Path, source: str) -> None:
    paths = [Path(source)] if source != "-" else []
    paths += sorted(paths[0].glob("*.jsonl")) if paths and paths[0].is_dir() else []
    if any(output.exists() and path.exists() and output.samefile(path) for path in paths):
        raise ConfigError(f"-o {output} is also an input; wanted another file")


def _begin(job: Job, n_left: int, say: Any) -> None:
    if job.n_blank:
        say(f"blank lines left out: {job.n_blank:,}")
    if n_left < len(job.entries):
        say(f"{len(job.entries) - n_left:,} of {len(job.entries):,} items are finished already")


@contextmanager
def _stop_on_interrupt() -> Iterator[Any]:
    """The first Ctrl-C is noted, for the job to end after its step; the second one is raised at once."""
    noted: list[float] = []

    def note(number: int, frame: FrameType | None) -> None:
        if noted:
            raise KeyboardInterrupt
        noted.append(time.monotonic())
        click.echo("\nStopping after this step; Ctrl-C again stops now.", err=True)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(noted)
    finally:
        signal.signal(signal.SIGINT, before)


def _say(text: str) -> None:
    click.echo(text, err=True)


def _silent(text: str) -> None:
    del text
