"""`semspec-local batch`: a file of questions in, a file of answers out; a rerun goes on where it stopped."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import click

from ..config import ModelConfig, RunConfig, check_seed
from ..costs.pays import go_by_costs
from ..costs.store import stored_costs
from ..errors import ConfigError
from ..jobs import TASKS, BadLine, Item, ItemRecord, Runner, read_job
from ..jobs.items import Job, digest_of
from ..jobs.output import MANIFEST_VERSION, OutputFile
from ..jobs.records import FORMATS
from ..jobs.runner import Stopped
from ..jobs.summary import Tally
from ..jobs.tasks import FREE
from ..provenance import command_line, fingerprint_file, provenance
from ..reasoner import MAX_LANES, Reasoner, Sources
from . import INTERRUPTED, SOME_FAILED
from .counting import counting
from .options import json_object
from .pair_options import calibrated, model_options, run_configs, set_verbosity, sources_of


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
@click.option(
    "--template-kwargs", metavar="JSON", callback=json_object, help="Variables for the chat template, a JSON object."
)
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
@click.option(
    "--engine",
    type=click.Choice(["here", "ray"]),
    default="here",
    show_default=True,
    help="Where: on this machine, or on a Ray cluster, one pair of models per actor.",
)
@click.option(
    "--actors", type=click.IntRange(1), default=2, show_default=True, help="Pairs of models on the Ray cluster."
)
@click.option("--ray-address", help="A running Ray cluster (auto, ray://...); default: start one on this machine.")
@click.option("--ordered", is_flag=True, help="At the end, rewrite the output in the order of the input.")
@click.option("--retry-failed", is_flag=True, help="Run items again that failed before.")
@click.option("--force", is_flag=True, help="Go on in an output that was made with other settings, models or items.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing unless something is wrong.")
@click.option("-v", "--verbose", count=True, help="Say more about the models; twice: also llama.cpp's log.")
def batch(source: str, output: Path, **options: Any) -> int:
    """Answer every question of IN and write the results to a file.

    IN is a .jsonl or .csv file, a folder of .jsonl files, or - for standard input. A line is {"prompt": "..."},
    {"messages": [...]} or a line of an OpenAI batch; "id" names it, and "semspec": {...} sets policy, threshold, seed,
    sampling, budgets, overflow, template_kwargs or "draft": false for it alone.

    Each result is on the disk before the next one begins. Ctrl-C stops after the step that is running.
    """
    set_verbosity(options["quiet"], options["verbose"])
    config, models = run_configs(options)
    seed = check_seed(options["seed"])
    _check_engine(options)
    _refuse_to_overwrite(output, source)
    job = read_job(source, column=options["column"])
    sources = sources_of(options)
    setup = _Setup(sources, calibrated(config, sources, options["max_accept_error"]), models, seed, options)
    say = _silent if options["quiet"] else _say
    with OutputFile(output, setup.manifest(job), force=options["force"], retry=options["retry_failed"]) as out:
        entries = [entry for entry in job.entries if entry.id not in out.finished]
        tally = Tally(n_failed_before=sum(out.finished.values()))
        _begin(job, len(entries), say)
        finished = _answer(entries, setup, out, tally, len(job.entries)) if entries else True
        if options["ordered"] and finished:
            out.order([entry.id for entry in job.entries])
    for line in _summary(tally, setup) if tally.n_new else ():
        say(line)
    if digest_of(source) not in (job.sha256, None):
        click.echo(f"Note: {source} was changed meanwhile; what was there at the start was run", err=True)
    if not finished:
        done = f"{len(out.finished):,} of {len(job.entries):,} items are in {output}"
        click.echo(f"Stopped; {done}. The same command goes on.", err=True)
        return INTERRUPTED
    return SOME_FAILED if any(out.finished.values()) else 0


@dataclass(frozen=True)
class _Setup:
    """What a job is run with."""

    sources: Sources
    config: RunConfig
    models: ModelConfig
    seed: int
    options: dict[str, Any]

    def manifest(self, job: Job) -> dict[str, Any]:
        """What the output is made of; a rerun with something else under `job` is refused."""
        facts = {
            "input_sha256": job.sha256,
            "files": [fingerprint_file(path) for path in self.sources.files() if path.exists()],
            "config": asdict(self.config),
            "n_ctx": self.models.n_ctx,
            "seed": self.seed,
            **{name: self.options[name] for name in ("task", "column", "system", "template_kwargs", "form")},
        }
        made_by = provenance(command_line("semspec-local"))
        return {"version": MANIFEST_VERSION, "job": facts, "n_items": len(job.entries), "provenance": made_by}


def _answer(entries: list[Item | BadLine], setup: _Setup, out: OutputFile, tally: Tally, n_all: int) -> bool:
    """Run what is left, each result to the output as it comes; False when somebody stopped it."""
    options = setup.options
    if options["traces"] is not None:
        options["traces"].mkdir(parents=True, exist_ok=True)
    run = _on_ray if options["engine"] == "ray" else _here
    with ExitStack() as stack:
        should_stop = stack.enter_context(_stop_on_interrupt())
        records = stack.enter_context(closing(run(entries, setup, should_stop, tally)))
        advance = None
        if not options["quiet"]:
            advance = stack.enter_context(counting("items", n_all, done=len(out.finished)))
        try:
            for record in records:
                out.append(record.to_json(options["form"], setup.sources.target.stem))
                tally.add(record)
                if advance is not None:
                    advance(len(out.finished), tally.note())
        except Stopped:
            return False
    return True


def _summary(tally: Tally, setup: _Setup) -> Iterator[str]:
    """The end of the job, for people, and what drafting gained or lost where that can be told."""
    yield from tally.lines()
    costs = stored_costs(setup.sources, setup.models) if tally.n_tokens_drafting else None
    line = tally.speculation(costs.c_t_alone if costs is not None else None)
    if line is not None:
        yield line
        if costs is not None and costs.noise:
            yield "that cost was measured while the machine was busy; semspec-local costs measures it anew"


def _cost(setup: _Setup) -> float | None:
    """The measured seconds per token of the target alone; None where nobody measured them here."""
    costs = stored_costs(setup.sources, setup.models)
    return costs.c_t_alone if costs is not None and not costs.noise else None


def _here(
    entries: list[Item | BadLine], setup: _Setup, should_stop: Callable[[], bool], tally: Tally
) -> Generator[ItemRecord, None, None]:
    options, most = setup.options, min(MAX_LANES, len(entries))
    with Reasoner(setup.sources, setup.config, setup.models, n_lanes=options["lanes"], max_lanes=most) as reasoner:
        tally.n_lanes = reasoner.n_lanes
        if not options["quiet"]:
            _say(f"lanes: {reasoner.n_lanes}")
        go_by_costs(reasoner)
        yield from Runner(
            reasoner=reasoner,
            seed=setup.seed,
            task=TASKS[options["task"]] if options["task"] else FREE,
            system=options["system"],
            template_options=options["template_kwargs"] or {},
            traces=options["traces"],
            should_stop=should_stop,
            c_t_alone=_cost(setup) if reasoner.n_lanes == 1 else None,
        ).run(entries)


def _on_ray(
    entries: list[Item | BadLine], setup: _Setup, should_stop: Callable[[], bool], tally: Tally
) -> Generator[ItemRecord, None, None]:
    from ..jobs.ray_engine import RayJob, run_on_ray

    del tally  # other machines have other costs
    options = setup.options
    job = RayJob(
        sources=setup.sources,
        config=setup.config,
        models=setup.models,
        seed=setup.seed,
        n_lanes=options["lanes"] or 1,
        task=options["task"],
        system=options["system"],
        template_options=options["template_kwargs"] or {},
    )
    yield from run_on_ray(
        entries, job, n_actors=options["actors"], address=options["ray_address"], should_stop=should_stop
    )


def _check_engine(options: dict[str, Any]) -> None:
    if options["engine"] == "ray":
        if options["traces"] is not None:
            raise ConfigError("--traces is for this machine alone; leave it out with --engine ray")
        return
    for name, flag in (("actors", "--actors"), ("ray_address", "--ray-address")):
        if click.get_current_context().get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise ConfigError(f"{flag} is for --engine ray; add that, or leave it out")


def _refuse_to_overwrite(output: Path, source: str) -> None:
    paths = [Path(source)] if source != "-" else []
    paths += sorted(paths[0].glob("*.jsonl")) if paths and paths[0].is_dir() else []
    if output.suffix == ".jsonl" and output.parent.resolve() == Path(source).resolve():
        raise ConfigError(
            f"-o {output} lies among the inputs, and would be one of them next time; wanted another folder"
        )
    if any(output.exists() and path.exists() and output.samefile(path) for path in paths):
        raise ConfigError(f"-o {output} is also an input; wanted another file")


def _begin(job: Job, n_left: int, say: Any) -> None:
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
