"""`semspec-local probe`: make probes, bring those from elsewhere, look at them, install them for a pair."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from .. import pairs
from ..errors import ConfigError, SemspecError
from ..modelinfo import ModelInfo
from ..protocols import Norm, Pooling, Window
from ..roles import PROBE_ROLES, ROLES, ProbeRole, Role
from . import show
from .probe_lab import calibrate, collect, evaluate, train
from .probe_label import label

if TYPE_CHECKING:
    from ..probes import OnnxJointProbe, OnnxProbe

_A_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_ROLE = click.Choice(ROLES)


@click.group()
def probe() -> None:
    """Make, convert, inspect, install and list probes."""


for _command in (collect, label, train, evaluate, calibrate):
    probe.add_command(_command)


@probe.command()
@click.argument("source", type=_A_FILE)
@click.option("-o", "--out", type=click.Path(dir_okay=False, path_type=Path), help="Default: SOURCE, named .onnx.")
@click.option("--role", type=_ROLE, help="The model that the probe reads.")
@click.option("--pair", help="The pair whose model it reads; default: the default pair.")
@click.option("-m", "--model", type=_A_FILE, help="The GGUF of the model that it reads, instead of a pair.")
@click.option("--layer", type=click.IntRange(0), help="The layer it reads, counted from 0: llama.cpp's l_out-N.")
@click.option("--norm", type=click.Choice(get_args(Norm)), help="Is the state read before or after the final norm?")
@click.option("--hidden-state", type=int, help="Instead of both: k of Hugging Face's hidden_states[k]; -1 is the last.")
@click.option("--pooling", type=click.Choice(get_args(Pooling)), help="How the states of a step become one.")
@click.option(
    "--window", type=click.Choice(get_args(Window)), help="States that predict the step's tokens, or at these tokens."
)
@click.option(
    "--activation",
    type=click.Choice(["relu", "gelu", "tanh", "sigmoid"]),
    default="relu",
    show_default=True,
    help="Between the layers, where the file has only weights.",
)
@click.option(
    "--sigmoid/--no-sigmoid", default=True, show_default=True, help="At the end, where there are only weights."
)
@click.option("--force", is_flag=True, help="Replace a file of that name.")
def convert(source: Path, out: Path | None, role: Role | None, **options: Any) -> None:
    """Turn a trained probe into ONNX with its spec.

    SOURCE is a PyTorch state dict (.pt, .pth), .safetensors, .npz, a scikit-learn pipeline kept by skops (.skops), or
    an ONNX file of your own. No code in it is run, and nothing is written unless the result computes what SOURCE does.
    """
    from ..probes.convert import Reading, convert_probe, from_hidden_state, read_probe

    out = out or source.with_suffix(".onnx")
    if out.exists() and not out.is_file():
        raise ConfigError(f"{out} is no file; give another name with -o")
    if out.exists() and (not options["force"] or out.samefile(source)):
        raise ConfigError(f"{out} exists; give another name with -o" + ("" if out.samefile(source) else ", or --force"))
    role = role or _asked({"role": ROLES})["role"]
    info = _model_info(options["pair"], options["model"], role)
    found = read_probe(source, info, activation=options["activation"], sigmoid=options["sigmoid"])
    told = Reading(**{name: options[name] for name in ("layer", "norm", "pooling", "window")})
    if options["hidden_state"] is not None:
        if told.layer is not None or told.norm is not None:
            raise ConfigError("--hidden-state says the layer and the norm; leave out --layer and --norm")
        told = told.filled(from_hidden_state(options["hidden_state"], info.n_layer))
    reading = told.filled(found.reading)
    if found.is_official and reading != told:
        click.echo(
            "The layers are called fc1, fc2, ... as those of SemanticSpec's authors, so what you did not say is taken "
            "from there: the last layer after the final norm, mean over the predictor window.",
            err=True,
        )
    choices = {"layer": [str(i) for i in range(info.n_layer)], **_CHOICES}
    answers = _asked({name: choices[name] for name in reading.missing})
    asked: dict[str, Any] = {name: int(text) if name == "layer" else text for name, text in answers.items()}
    reading = replace(reading, **asked)
    spec, difference = convert_probe(found, out, info, role, reading)
    click.echo(
        f"{out}: {role} probe for {info.name} {info.quantization}, layer {spec.layer} of {spec.n_layer} "
        f"({spec.norm} norm), {spec.pooling} over the {spec.window} window; largest difference {difference:.1e}"
    )


_CHOICES = {"norm": get_args(Norm), "pooling": get_args(Pooling), "window": get_args(Window)}


def _asked(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Ask for what nobody has said; without a terminal, say which options are missing."""
    if wanted and not sys.stdin.isatty():
        flags = ", ".join(f"--{name}" for name in wanted)
        raise ConfigError(f"the file does not say everything; give {flags} (see semspec-local probe convert --help)")
    return {name: click.prompt(name, type=click.Choice(list(choices)), err=True) for name, choices in wanted.items()}


@probe.command()
@click.argument("file", type=_A_FILE)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def inspect(file: Path, as_json: bool) -> None:
    """Say what a probe is made for, and what is in the file; nothing is run."""
    from ..probes import read_probe_file

    found = read_probe_file(file)
    facts: dict[str, Any] = {
        "path": str(file),
        "size_bytes": file.stat().st_size,
        "sha256": found.fingerprint,
        "ir_version": found.header.ir_version,
        "opsets": {domain or "ai.onnx": version for domain, version in found.header.opsets.items()},
        "operators": sorted(found.header.operators),
        "spec": asdict(found.spec),
    }
    if as_json:
        click.echo(json.dumps(facts))
        return
    spec = found.spec
    click.echo(f"{spec.role} probe for {_pairs({spec.model_name: spec.quantization, 'of': spec.architecture})}")
    click.echo(f"reads       layer {spec.layer} of {spec.n_layer} ({spec.norm} norm), width {spec.n_embd}")
    click.echo(f"pools       {spec.pooling} over the {spec.window} window")
    if spec.role == "joint":
        draft = spec.draft_spec
        where = f"layer {draft.layer} of {draft.n_layer} ({draft.norm} norm), width {draft.n_embd}"
        click.echo(f"and reads   {where}, of the draft {_pairs({draft.model_name: draft.quantization})}")
        click.echo(f"and pools   {draft.pooling} over the {draft.window} window")
        click.echo(f"features    {', '.join(spec.features) or 'none'}")
    click.echo(f"model file  sha256 {spec.fingerprint}")
    click.echo(f"this file   sha256 {found.fingerprint}")
    click.echo(
        f"ONNX        IR {facts['ir_version']}, opsets {_pairs(facts['opsets'])}: {', '.join(facts['operators'])}"
    )
    click.echo(f"training    {_pairs(spec.training)}")
    click.echo(f"evaluation  {_pairs(spec.evaluation)}")


def _pairs(values: Any) -> str:
    shown = (f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items())
    return show.harmless(" ".join(", ".join(shown).split())) or "nothing is said"


@probe.command()
@click.argument("file", type=_A_FILE)
@click.option("--pair", help="The pair to use it with; default: the default pair.")
@click.option("--force", is_flag=True, help="Replace a probe that you installed before.")
def install(file: Path, pair: str | None, force: bool) -> None:
    """Put a probe into your own folder, where every run of that pair finds it before the shipped one."""
    from ..probes import load_joint_probe, load_probe, read_probe_file, user_probe
    from ..provenance import atomic_write

    name = pairs.load_manifest(pair or pairs.default_pair()).name
    looked_at = read_probe_file(file)
    role = looked_at.spec.role
    if looked_at.header.external_files:
        raise ConfigError(f"{file} keeps weights in other files; make it one file with semspec-local probe convert")
    loaded: OnnxProbe | OnnxJointProbe
    if role == "joint":
        loaded = load_joint_probe(file, {one: _model_info(pair, None, one) for one in ROLES})
    else:
        loaded = load_probe(file, role, _model_info(pair, None, role))
    place = user_probe(name, role)
    if place.exists() and not force:
        raise ConfigError(f"{place} is there already; --force replaces it")
    place.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(place, file.read_bytes())
    for warning in loaded.warnings:
        click.echo(f"Warning: {warning}", err=True)
    click.echo(str(place))


@probe.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
def list_command(as_json: bool) -> None:
    """List the probes of the known pairs: those that ship, and those that you installed."""
    rows = [row for manifest in pairs.list_pairs() for role in PROBE_ROLES for row in _rows(manifest.name, role)]
    if as_json:
        click.echo(json.dumps(rows))
        return
    for row in rows:
        used = "used" if row["used"] else "hidden by yours"
        click.echo(f"{row['pair']:<16} {row['role']:<7} {row['whose']:<8} {used:<16} {row['reads']:<28} {row['path']}")


def _rows(pair: str, role: ProbeRole) -> list[dict[str, Any]]:
    from ..probes import find_probe, read_probe_file, shipped_probe, user_probe

    used, rows = find_probe(pair, role), []
    for whose, path in (("yours", user_probe(pair, role)), ("shipped", shipped_probe(pair, role))):
        if path.is_file():
            try:
                spec = read_probe_file(path).spec
                reads = f"layer {spec.layer} {spec.norm}, {spec.pooling} of {spec.window}"
            except SemspecError as error:
                reads = f"broken: {error}"
            facts = {"pair": pair, "role": role, "whose": whose, "used": path == used, "reads": reads}
            rows.append({**facts, "path": str(path)})
    return rows


def _model_info(pair: str | None, model: Path | None, role: Role) -> ModelInfo:
    """The model that a probe is for, with the sha256 of its file."""
    from ..llama.model import LlamaModel
    from ..provenance import fingerprint_file

    if model is not None and pair is not None:
        raise ConfigError("--pair and -m both name a model; give one of them")
    path = model
    if path is None:
        files = pairs.resolve(pair or pairs.default_pair())
        path = files.target if role == "target" else files.draft
    with LlamaModel(path) as loaded:
        return replace(loaded.info(), fingerprint=fingerprint_file(path)["sha256"])
