"""`semspec-local models`: list, pull, verify and find the files of model pairs."""

from __future__ import annotations

import json
from typing import Any

import click

from .. import pairs
from ..errors import ConfigError
from ..pairs.files import format_size
from ..pairs.manifest import PairManifest
from ..roles import ROLES

_NAME = click.argument("name", metavar="NAME")


@click.group()
def models() -> None:
    """List, pull and check model pairs. NAME is a known pair, or the path of a manifest (.toml) of your own."""


@models.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
def list_command(as_json: bool) -> None:
    """List the known pairs and say which are on this machine.

    An embedded pair ships with the program.
    """
    facts = [_facts(manifest) for manifest in pairs.list_pairs()]
    if as_json:
        click.echo(json.dumps(facts))
        return
    width = max((len(fact["name"]) for fact in facts), default=0)
    for fact in facts:
        here = "embedded" if fact["embedded"] else "pulled"
        there = here if fact["pulled"] else "not pulled"
        mark = " (default)" if fact["default"] else ""
        size = format_size(fact["size"]) if fact["size"] else "local"
        click.echo(f"{fact['name']:<{width}}  {size:>8}  {there:<10}  {fact['description']}{mark}")


@models.command()
@_NAME
@click.option("--offline", is_flag=True, help="Open no connection; fail when a file is missing.")
@click.option(
    "--requant",
    multiple=True,
    metavar="ROLE=TYPE",
    help="Turn the file of a role (target or draft) into another llama.cpp file type, such as draft=Q4_0; "
    "none keeps the original. Roles not named follow the manifest.",
)
@click.option("--prune", is_flag=True, help="Afterwards, delete the pair's files that are not used, such as originals.")
def pull(name: str, offline: bool, requant: tuple[str, ...], prune: bool) -> None:
    """Download what is missing of a pair, check it, and requantize where that is wanted."""
    progress = pairs.progress_on()
    choices = dict(_choice(text) for text in requant)
    files = pairs.pull(name, requant=choices, prune=prune, offline=offline or None, progress=progress)
    for role in ROLES:
        record = files.state[role]
        if record["date"] is None:  # an embedded file, used where it is: nothing was done
            continue
        made = f", requantized to {record['requantized']}" if record["requantized"] else ""
        progress.note(f"{role}: {record['file']} ({format_size(record['size'])}{made})")


@models.command()
@_NAME
def verify(name: str) -> None:
    """Hash the files of a pair again; exit code 1 when one is not what it should be."""
    for result in pairs.verify(name, progress=pairs.progress_on()):
        word = "ok" if result.wanted is not None else "no sha256 to compare with"
        click.echo(f"{result.got}  {result.path}  {word}")


@models.command()
@_NAME
@click.option("--role", type=click.Choice(ROLES), help="Print only this role's path.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, role to path.")
def path(name: str, role: str | None, as_json: bool) -> None:
    """Print the paths of a pair's files: the target's, then the draft's."""
    files = pairs.resolve(name)
    paths = {"target": str(files.target), "draft": str(files.draft)}
    chosen = {key: value for key, value in paths.items() if role in (None, key)}
    click.echo(json.dumps(chosen) if as_json else "\n".join(chosen.values()))


def _choice(text: str) -> tuple[str, str | None]:
    role, equals, file_type = text.partition("=")
    if role not in ROLES or not equals or not file_type:
        raise click.BadParameter(
            f"{text!r}; wanted ROLE=TYPE, such as draft=Q4_0 or target=none", param_hint="--requant"
        )
    return role, None if file_type.lower() == "none" else file_type


def _facts(manifest: PairManifest) -> dict[str, Any]:
    try:
        files = pairs.resolve(manifest.name)
    except ConfigError:  # not pulled, or a local file that is gone
        files = None
    return {
        "name": manifest.name,
        "description": manifest.description,
        "license": manifest.license,
        "default": manifest.default,
        "size": sum(manifest.role(role).size or 0 for role in ROLES),
        "embedded": pairs.is_embedded(manifest),
        "pulled": files is not None,
        "target": str(files.target) if files is not None else None,
        "draft": str(files.draft) if files is not None else None,
        "manifest": str(manifest.path),
    }
