"""`semspec-local policies`: the rules there are."""

from __future__ import annotations

import json
from typing import Any

import click

from ..config import RunConfig
from ..policy import POLICIES


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
def policies(as_json: bool) -> None:
    """List the policies: the rules that accept or reject a drafted step, with their default thresholds."""
    facts: list[dict[str, Any]] = [
        {
            "name": policy.name,
            "summary": policy.summary,
            "threshold": policy.default_threshold,
            "needs": sorted(policy.needs),
            "lossless": policy.lossless,
            "default": policy.name == RunConfig().policy,
        }
        for policy in POLICIES.values()
    ]
    if as_json:
        click.echo(json.dumps(facts))
        return
    for fact in facts:
        mark = " (default)" if fact["default"] else ""
        threshold = "" if fact["threshold"] is None else f"threshold {fact['threshold']:g}"
        click.echo(f"{fact['name'] + mark:<25}{threshold}\n    {fact['summary']}")
