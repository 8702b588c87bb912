"""Results to numbers with intervals, and numbers to a table.

An interval comes from resampling items: all arms are resampled alike, so a difference or a ratio of two arms is paired.
Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..metrics import total
from .arms import DRAFT, TARGET
from .costs import CostSums, costs, python_share, ratio, summed
from .world_run import ItemResult, Results
from .world_task import Verdicts

N_RESAMPLES = 2000
MIN_ACCURACY = 0.99
"""A threshold is good enough when its accuracy is at least this share of the target's."""

Floats = NDArray[np.float64]
Interval = dict[str, float | None]
"""`value`, and `low` and `high` of the 95 % bootstrap interval over items; None where undefined."""


def bootstrap(
    statistic: Callable[[NDArray[np.int64]], float], n_items: int, *, seed: int = 0, n_resamples: int = N_RESAMPLES
) -> Interval:
    """`statistic(item indices)` on all items, and the range that holds 95 % of its values on items drawn anew.

    The same seed and number of items draw the same, so two arms are resampled alike. No interval for a single item.
    """
    if not n_items:
        return {"value": None, "low": None, "high": None}
    value = float(statistic(np.arange(n_items)))
    if n_items == 1:
        return {"value": value, "low": None, "high": None}
    rng = np.random.default_rng(seed)
    drawn = [statistic(rng.integers(n_items, size=n_items)) for _ in range(n_resamples)]
    low, high = np.quantile(np.asarray(drawn, dtype=np.float64), (0.025, 0.975)).tolist()
    return {"value": value, "low": low, "high": high}


def summaries(results: Results, *, seed: int = 0) -> list[dict[str, Any]]:
    """The numbers of every arm. What compares with the target is None where the target was no arm."""
    target = results.arms.get(TARGET)
    return [_summary(name, items, target, seed) for name, items in results.arms.items()]


def _summary(name: str, items: list[ItemResult], target: list[ItemResult] | None, seed: int) -> dict[str, Any]:
    n_tokens = sum(item.n_tokens for item in items)
    n_right = sum(item.right for item in items)
    counters = total(item.counters for item in items if item.counters is not None)
    verdicts = summed(Verdicts, (item.verdicts for item in items if item.verdicts is not None))
    drafted = [item for item in items if item.n_proposed is not None]
    return {
        "arm": name,
        "n_items": len(items),
        "n_right": n_right,
        "n_unfinished": sum(item.stop_reason != "eos" for item in items),
        **_compared(items, target, seed),
        "wall_s": sum(item.wall_s for item in items),
        "prefill_s": sum(item.prefill_s for item in items),
        "n_tokens": n_tokens,
        "tokens_per_item": ratio(n_tokens, len(items)),
        "step_acceptance_rate": counters.step_acceptance_rate,
        "token_acceptance_rate": counters.token_acceptance_rate,
        "target_token_share": None if name == DRAFT else counters.target_token_share,
        "mean_accepted_run": counters.mean_accepted_run,
        "probe_s": counters.probe_s,
        **vars(verdicts),
        "accept_error": ratio(verdicts.n_accepted_wrong, verdicts.n_accepted),
        "needless_rejection_rate": ratio(verdicts.n_rejected_right, verdicts.n_rejected),
        "drafted_token_acceptance_rate": ratio(
            sum(item.n_accepted or 0 for item in drafted), sum(item.n_proposed or 0 for item in drafted)
        ),
        **_ceiling(items, target),
        **_outside(items),
    }


def _compared(items: list[ItemResult], target: list[ItemResult] | None, seed: int) -> dict[str, Any]:
    right = np.array([item.right for item in items], dtype=np.float64)
    wall_s = np.array([item.wall_s for item in items])
    numbers: dict[str, Any] = {
        "accuracy": bootstrap(lambda rows: float(right[rows].mean()), len(items), seed=seed),
        "accuracy_to_target": None,
        "speedup": None,
    }
    if target is not None:
        gain = right - np.array([item.right for item in target], dtype=np.float64)
        target_s = np.array([item.wall_s for item in target])
        numbers["accuracy_to_target"] = bootstrap(lambda rows: float(gain[rows].mean()), len(items), seed=seed)
        numbers["speedup"] = bootstrap(
            lambda rows: float(target_s[rows].sum() / wall_s[rows].sum()), len(items), seed=seed
        )
    return numbers


def _ceiling(items: list[ItemResult], target: list[ItemResult] | None) -> dict[str, Any]:
    """Costs, the ceiling of the cost model, and how much of it was reached.

    Reached is compared per committed token and without the prompt on both sides, as the model predicts it:
    (target's seconds per token / this arm's) / ceiling.
    """
    measured = costs(_sums(items))
    alone = costs(_sums(target)).c_t if target is not None else None
    ceiling = measured.ceiling(alone)
    decode_speedup = ratio(_decode_s_per_token(target), _decode_s_per_token(items)) if target is not None else None
    return {
        "costs": measured.to_json() if any(item.costs for item in items) else None,
        "ceiling": ceiling,
        "decode_speedup": decode_speedup,
        "ceiling_share": ratio(decode_speedup, ceiling),
    }


def _sums(items: Sequence[ItemResult]) -> CostSums:
    return summed(CostSums, (item.costs for item in items if item.costs is not None))


def _decode_s_per_token(items: Sequence[ItemResult]) -> float | None:
    return ratio(sum(item.wall_s - item.prefill_s for item in items), sum(item.n_tokens for item in items))


def _outside(items: Sequence[ItemResult]) -> dict[str, float | None]:
    """Time outside llama.cpp, where it was measured."""
    timed = [(item.native_s, item.elapsed_s, item.n_tokens) for item in items if item.native_s is not None]
    native_s = sum(native or 0.0 for native, _, _ in timed)
    elapsed_s = sum(elapsed or 0.0 for _, elapsed, _ in timed)
    return {
        "python_share": python_share(native_s, elapsed_s),
        "overhead_s_per_token": ratio(elapsed_s - native_s, sum(n for _, _, n in timed)),
    }


# -- choosing a threshold -------------------------------------------------------------------------------


def best_arm(arms: Sequence[Mapping[str, Any]], *, min_accuracy: float = MIN_ACCURACY) -> Mapping[str, Any]:
    """The fastest of those that are about as accurate as the target, or the most accurate when none is.

    "About": at least `min_accuracy` of the target's accuracy. The target has to be among the arms; it is not chosen.
    """
    target = next(arm for arm in arms if arm["arm"] == TARGET)
    others = [arm for arm in arms if arm["arm"] != TARGET]
    good = [arm for arm in others if arm["n_right"] >= min_accuracy * target["n_right"]]
    if good:
        return max(good, key=lambda arm: arm["speedup"]["value"] or 0.0)
    return max(others, key=lambda arm: (arm["n_right"], arm["speedup"]["value"] or 0.0))


# -- tables ---------------------------------------------------------------------------------------------

Show = Callable[[Mapping[str, Any]], str]


def _percent(key: str) -> Show:
    return lambda arm: "-" if arm[key] is None else f"{100 * arm[key]:.1f}"


def _number(key: str, form: str, factor: float = 1.0) -> Show:
    return lambda arm: "-" if arm[key] is None else format(factor * arm[key], form)


def _interval(key: str, form: str, factor: float = 1.0) -> Show:
    def show(arm: Mapping[str, Any]) -> str:
        if arm[key] is None or arm[key]["value"] is None:
            return "-"
        value, low, high = (arm[key][name] for name in ("value", "low", "high"))
        if low is None:
            return format(factor * value, form)
        return f"{factor * value:{form}} ({factor * low:{form}} to {factor * high:{form}})"

    return show


COLUMNS: dict[str, Show] = {
    "arm": lambda arm: str(arm["arm"]),
    "right %": _interval("accuracy", ".1f", 100),
    "to target": _interval("accuracy_to_target", "+.1f", 100),
    "speedup": _interval("speedup", ".2f"),
    "tokens": _number("tokens_per_item", ".0f"),
    "steps accepted %": _percent("step_acceptance_rate"),
    "by target %": _percent("target_token_share"),
    "accept error %": _percent("accept_error"),
    "needless rejections %": _percent("needless_rejection_rate"),
    "tokens accepted %": _percent("drafted_token_acceptance_rate"),
    "ceiling": _number("ceiling", ".2f"),
    "of ceiling %": _percent("ceiling_share"),
    "python %": _percent("python_share"),
    "µs/token": _number("overhead_s_per_token", ".0f", 1e6),
}
"""The table's columns: a title, and how an arm's summary is shown."""


def table(arms: Sequence[Mapping[str, Any]], *, markdown: bool = False) -> str:
    """All arms as a table of aligned columns, or as GitHub's markdown. Columns that say nothing are left out."""
    shown = {title: [show(arm) for arm in arms] for title, show in COLUMNS.items()}
    shown = {title: cells for title, cells in shown.items() if set(cells) != {"-"}}
    rows = list(zip(*shown.values()))
    if markdown:
        lines = [list(shown), ["---", *["---:"] * (len(shown) - 1)], *map(list, rows)]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    widths = [max(map(len, (title, *cells))) for title, cells in shown.items()]
    lines = [list(shown), *map(list, rows)]
    return "\n".join(
        "  ".join(cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(cells, widths)))
        for cells in lines
    )
