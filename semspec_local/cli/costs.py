"""`semspec-local costs`: what a token costs on this machine, and whether speculation is worth it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from ..costs.model import TOKENS_PER_STEP
from ..costs.pair import Curve, Outlook
from ..costs.pays import DraftingPays, expected_acceptance, n_guess_that_pays
from ..costs.store import CostKey, cost_key, store_costs
from ..machine import load_average
from ..metrics import Counters
from ..policy import Policy, make_policy
from ..reasoner import Reasoner
from ..roles import Role
from ..trace import json_line
from .options import configs
from .pair_options import cost_options, set_verbosity, sources_of


@click.command()
@cost_options
@click.option(
    "--tokens-per-step",
    type=click.IntRange(1, 4096),
    default=TOKENS_PER_STEP,
    show_default=True,
    help="Tokens of a drafted step: how much the target reads in one pass.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line instead of the tables.")
def costs(**options: Any) -> None:
    """Measure this pair on this machine, and say whether speculation is worth it.

    Takes up to a minute, and wants the machine to itself. What is measured is what a run does: both models write one
    token after another, with the states that the policy's probes read, and read 1 to 128 tokens in one pass.
    `--policy never` measures the target alone. The last measurement is kept: `run` and `batch` decide by it whether to
    draft, and compare with it.
    """
    set_verbosity(quiet=False, verbose=0)
    load = load_average()
    config, models = configs(options)
    make_policy(config.policy)
    sources = sources_of(options)
    with Reasoner(sources, config, models) as reasoner:
        from ..costs.measure import measure_costs

        key, policy = cost_key(sources, models), reasoner.policy
        expected, can_guess = expected_acceptance(reasoner, policy), reasoner.can_guess
        click.echo("measuring; this takes up to a minute, and wants the machine to itself", err=True)
        measured = measure_costs(reasoner, tokens_per_step=options["tokens_per_step"], load=load)
    try:
        store_costs(key, measured)
    except OSError as error:
        click.echo(f"Note: not kept for later, for {key.path} cannot be written ({error.strerror or error})", err=True)
    outlook = Outlook(
        costs=measured,
        tokens_per_step=options["tokens_per_step"],
        expected_acceptance=expected,
        can_guess=can_guess,
    )
    if as_json := options["as_json"]:
        facts = {"pair": sources.pair, "policy": config.policy, **outlook.to_json(), **asdict(key)}
        click.echo(json_line(facts), nl=False)
    else:
        _show(outlook, key, policy)
    if measured.noise:
        note = f"Note: the machine was busy ({', '.join(measured.noise)}); measure again when it is not"
        click.echo(note, err=as_json)


def _show(outlook: Outlook, key: CostKey, policy: Policy) -> None:
    from rich.console import Console

    console, measured = Console(highlight=False, markup=False, soft_wrap=True), outlook.costs
    threads = ", ".join(f"{role} {n}" for role, n in key.threads.items())
    taps = "; ".join(f"{role} {', '.join(places)}" for role, places in measured.loaded.taps.items() if places)
    logits = ", ".join(f"{role} {_read_logits(outlook, role)}" for role in measured.loaded.taps)
    console.print(f"{key.cpu}, {key.n_cores} cores; threads: {threads}; policy {policy.name}")
    console.print(f"states read after layers: {taps or 'none'}; logits while reading: {logits}")
    console.print(_cost_table(outlook))
    if outlook.ceiling is not None and outlook.break_even is not None:
        even = f"{outlook.break_even:.2f}" if outlook.break_even <= 1 else "none"
        step = f"steps of {outlook.tokens_per_step} tokens"
        console.print(f"{step}: ceiling {outlook.ceiling:.2f}, break-even acceptance {even}")
        console.print(_speedup_table(outlook))
        console.print(outlook.token_advice)
    console.print(outlook.advice, style="bold")
    if outlook.expected_speedup is not None:
        console.print(_expectation(outlook, policy), style="bold")


def _expectation(outlook: Outlook, policy: Policy) -> str:
    """What the policy's own acceptance makes of it, and what a run does then."""
    said = (
        f"{policy.name} at {policy.threshold:.3g} was calibrated to accept {outlook.expected_acceptance:.0%} of steps, "
        f"which allows {outlook.expected_speedup:.2f} times the target's speed"
    )
    if outlook.costs.noise or outlook.tokens_per_step != TOKENS_PER_STEP:  # a run decides by others, or by none
        return f"{said}."
    n_guess = n_guess_that_pays(outlook.costs) if outlook.can_guess else 0
    begins = DraftingPays(outlook.costs.guessing(n_guess), outlook.expected_acceptance)(Counters())
    does = "drafts" if begins else "lets the target write alone" if not n_guess else "lets the target write"
    return f"{said}; so a run {does}{f', with {n_guess} tokens guessed at a time' if n_guess else ''}."


def _read_logits(outlook: Outlook, role: Role) -> str:
    return "of all tokens" if role in outlook.costs.loaded.all_logits else "of the last token"


def _cost_table(outlook: Outlook) -> Any:
    from rich.table import Table

    measured = outlook.costs
    lengths = sorted({*measured.p_t, *measured.p_d})
    read = [f"read {n}" if n == lengths[0] else f"{n}" for n in lengths]
    table = Table("ms per token", "write", *read, box=None, pad_edge=False)
    rows: list[tuple[str, float | None, Curve]] = [
        ("target", measured.c_t, measured.p_t),
        ("draft", measured.c_d, measured.p_d),
    ]
    if measured.c_t_alone != measured.c_t:
        rows.insert(1, ("target alone", measured.c_t_alone, {}))
    for name, written, curve in rows:
        table.add_row(name, _ms(written), *(_ms(curve.get(n)) for n in lengths))
    return table


def _speedup_table(outlook: Outlook) -> Any:
    from rich.table import Table

    table = Table("speedup at acceptance", *(f"{a:.1f}" for a in outlook.predicted), box=None, pad_edge=False)
    table.add_row("by steps", *map(_times, outlook.predicted.values()))
    for n, speedups in outlook.token_speculation.items():
        table.add_row(f"by tokens, {n} at a time", *(_times(speedups.get(a)) for a in outlook.predicted))
    return table


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.3g}"


def _times(speedup: float | None) -> str:
    return "-" if speedup is None else f"{speedup:.2f}"
