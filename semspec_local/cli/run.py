"""`semspec-local run`: one question, streamed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import click

from ..config import check_seed
from ..costs.pays import go_by_costs
from ..costs.store import stored_costs
from ..engine import Speculation
from ..errors import ConfigError, SemspecError
from ..interrupts import HeldInterrupt
from ..reasoner import Reasoner, new_seed
from ..result import RunResult
from ..trace import RunSummary, StepRecord, TraceWriter
from . import INTERRUPTED, show
from .options import json_object
from .pair_options import calibrated, model_options, run_configs, set_verbosity, sources_of

_FILE = click.Path(path_type=Path)


@click.command()
@click.argument("question", required=False)
@click.option("-f", "--file", "question_file", type=_FILE, help="Read the question from a file.")
@model_options
@click.option("-s", "--seed", type=int, help="Seed of all random choices; 0 is a seed. Default: a new one, printed.")
@click.option("-sys", "--system", help="The system message. Default: the pair's own; '' for none.")
@click.option(
    "--template-kwargs", metavar="JSON", callback=json_object, help="Variables for the chat template, a JSON object."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line at the end instead of the text.")
@click.option(
    "--trace",
    "trace_file",
    type=_FILE,
    help="Write a trace of every step to this file (JSONL); replaces an older trace.",
)
@click.option("--stats", is_flag=True, help="Print all counters and rates as JSON to standard error.")
@click.option("--show-rejected", is_flag=True, help="Also print rejected steps, to standard error.")
@click.option("-q", "--quiet", is_flag=True, help="Print only the text, and what was asked for.")
@click.option("-v", "--verbose", count=True, help="Say what was decided about each step; twice: also llama.cpp's log.")
def run(**options: Any) -> int:
    """Answer QUESTION, step by step.

    QUESTION is text, or - to read it from standard input. The text goes to standard output as its steps are committed,
    coloured on a terminal by who wrote them; everything else goes to standard error.
    """
    set_verbosity(options["quiet"], options["verbose"])
    config, models = run_configs(options)
    seed = new_seed() if options["seed"] is None else check_seed(options["seed"])
    question = _question(options["question"], options["question_file"])
    with ExitStack() as stack:
        sources = sources_of(options)
        config = calibrated(config, sources, options["max_accept_error"])
        if options["trace_file"]:
            _check_trace(options["trace_file"], [options["question_file"], *sources.files()])
        reasoner = stack.enter_context(Reasoner(sources, config, models))
        go_by_costs(reasoner)
        speculation = reasoner.start(
            question, seed=seed, system=options["system"], template_options=options["template_kwargs"]
        )
        trace = None
        if options["trace_file"]:
            # Only now: a run that cannot start does not replace the trace of an earlier one.
            trace = stack.enter_context(TraceWriter(options["trace_file"]))
            trace.header(reasoner.header(question, speculation))
        records, failure = _stream(speculation, trace, options)
        costs = stored_costs(sources, models) if reasoner.policy.drafts else None
        c_t_alone = costs.c_t_alone if costs is not None and not costs.noise else None
        _report(reasoner.result(speculation, records, c_t_alone=c_t_alone), options, c_t_alone)
        if trace:
            stop_reason = speculation.stop_reason or "interrupted"
            trace.summary(RunSummary(stop_reason=stop_reason, counters=speculation.counters))
    if isinstance(failure, SemspecError):
        raise failure
    return INTERRUPTED if failure else 0


def _question(text: str | None, file: Path | None) -> str:
    if (text is None) == (file is None):
        raise click.UsageError("give one question: as text, with -f FILE, or - for standard input")
    try:
        if file is not None:
            found = file.read_text(encoding="utf-8-sig")
        else:
            assert text is not None
            found = _standard_input() if text == "-" else text
        found.encode()  # standard input and arguments may carry bytes that are not UTF-8
    except OSError as error:
        raise ConfigError(f"{file or 'standard input'} cannot be read: {error.strerror or error}") from error
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        source = file or ("standard input" if text == "-" else "the question")
        raise ConfigError(f"{source} is not UTF-8 text ({error.reason} at position {error.start})") from error
    if not found.strip():
        raise ConfigError("the question is empty; wanted some text")
    return found.strip()


def _standard_input() -> str:
    if sys.stdin is None:  # closed by whoever started us
        raise ConfigError("standard input is closed; give the question as text, or with -f FILE")
    return sys.stdin.read()


def _check_trace(trace: Path, inputs: Iterable[Path | None]) -> None:
    """Before minutes of loading: can the trace be written, and is what stands there an older one?"""
    try:
        _refuse_unwritable(trace)
        _refuse_to_overwrite(trace, inputs)
    except OSError as error:
        raise ConfigError(f"the trace {trace} cannot be written: {error.strerror or error}") from error


def _refuse_unwritable(trace: Path) -> None:
    if not trace.parent.is_dir():
        raise ConfigError(f"the trace {trace} cannot be written: there is no folder {trace.parent}")
    if trace.is_dir():
        raise ConfigError(f"the trace {trace} cannot be written: it is a folder; wanted a file")
    if not os.access(trace if trace.exists() else trace.parent, os.W_OK):
        raise ConfigError(f"the trace {trace} cannot be written: no permission")


def _refuse_to_overwrite(trace: Path, inputs: Iterable[Path | None]) -> None:
    for path in inputs:
        if path is not None and path.exists() and trace.exists() and trace.samefile(path):
            raise ConfigError(f"--trace {trace} is also an input of this run; give the trace a name of its own")
    if trace.is_file() and trace.stat().st_size:
        with trace.open("rb") as file:
            if not file.read(16).startswith(b'{"type": "run"'):
                raise ConfigError(f"--trace {trace} exists and is no trace; remove it, or choose another name")


def _stream(
    speculation: Speculation, trace: TraceWriter | None, options: dict[str, Any]
) -> tuple[list[StepRecord], BaseException | None]:
    """Print steps as they come. Ctrl-C or a failure ends the run and is returned; what is there is kept."""
    plain = not sys.stdout.isatty() or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    if not options["quiet"] and not plain and not options["as_json"] and speculation.policy.drafts:
        click.echo(show.legend() + "\n", err=True)
    records: list[StepRecord] = []
    failure: BaseException | None = None

    def take(record: StepRecord) -> None:
        with HeldInterrupt() as held:  # a step is in the text, the trace and the statistics, or in none of them
            show_step(record)
        held.check()

    def show_step(record: StepRecord) -> None:
        records.append(record)
        if trace:
            trace.step(record)
        if record.committed and not options["as_json"]:
            click.echo(show.styled(record, plain), nl=False)
        elif options["show_rejected"] and not record.committed:
            click.echo(show.rejected(record), err=True)
        if options["verbose"]:
            line_end = "" if record.text.endswith("\n") or not record.committed else "\n"
            click.echo(line_end + show.described(record), err=True)

    try:
        with closing(iter(speculation)) as steps:  # its end sets the seconds, also when printing was interrupted
            for record in steps:
                take(record)
    except (KeyboardInterrupt, SemspecError) as error:
        failure = error
        if isinstance(error, SemspecError):
            if speculation.stop_reason != "error":  # it was the trace that failed
                trace = None
            speculation.stop_reason = "error"
        for record in speculation.drain():
            if record.index == len(records):
                show_step(record)
    return records, failure


def _report(result: RunResult, options: dict[str, Any], c_t_alone: float | None) -> None:
    if options["as_json"]:
        click.echo(json.dumps(result.to_json(), ensure_ascii=False))
    else:
        click.echo()
    if options["stats"]:
        click.echo(json.dumps(result.stats), err=True)
    if options["quiet"]:
        return
    if result.stop_reason == "interrupted":
        click.echo("Interrupted; the text so far is kept.", err=True)
    for line in [*show.remarks(result), show.statistics(result, c_t_alone)]:
        click.echo("\n" + line, err=True)
