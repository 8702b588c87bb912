"""Results to numbers with intervals, and numbers to a table.

An interval comes from resampling items, each with all its seeds: all arms are resampled alike, so a difference or a
ratio of two arms is paired. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..answer_forms import normal
from ..costs.model import CostSums, costs, python_share, ratio, summed
from ..metrics import Counters, total
from .arms import DRAFT, TARGET
from .results import ItemResult, Results
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
    return [
        _summary(name, found, target, seed) | {"memory_bytes": results.memory_bytes.get(name)}
        for name, found in results.arms.items()
    ]


def _summary(name: str, found: list[ItemResult], target: list[ItemResult] | None, seed: int) -> dict[str, Any]:
    n_tokens = sum(result.n_tokens for result in found)
    counters = total(result.counters for result in found if result.counters is not None)
    verdicts = summed(Verdicts, (result.verdicts for result in found if result.verdicts is not None))
    drafted = [result for result in found if result.n_proposed is not None]
    sums = _sums(found)
    decode_s = sum(result.wall_s - result.prefill_s for result in found)
    by_steps = any(result.counters for result in found)
    two_models = by_steps and name not in (TARGET, DRAFT)
    costed = any(result.costs for result in found) and not drafted and name != DRAFT
    return {
        "arm": name,
        "n_trials": len(found),
        "n_right": sum(result.right for result in found),
        "n_exact": sum(result.exact is True for result in found),
        "n_unfinished": sum(result.stop_reason not in ("eos", "stop", "error") for result in found),
        "n_failed": sum(result.error is not None for result in found),
        **_compared(found, target, seed),
        "wall_s": sum(result.wall_s for result in found),
        "prefill_s": sum(result.prefill_s for result in found),
        "ttft_s": _median(result.ttft_s for result in found),
        "n_tokens": n_tokens,
        "tokens_per_item": ratio(n_tokens, len(found)),
        "token_inflation": ratio(n_tokens, sum(result.n_tokens for result in target)) if target is not None else None,
        "tokens_per_s": ratio(n_tokens, decode_s),
        "n_tokens_by_draft": counters.n_tokens_by_draft if two_models else None,
        "n_tokens_by_target": counters.n_tokens_by_target if two_models else None,
        "n_draft_tokens_rejected": _n_rejected(counters if by_steps else None, drafted),
        "n_target_tokens_written": sums.n_written if costed else None,
        "n_target_tokens_reused": counters.n_tokens_reused if costed else None,
        "n_target_tokens_read": sums.n_scored if costed else None,
        "step_acceptance_rate": counters.step_acceptance_rate,
        "token_acceptance_rate": counters.token_acceptance_rate,
        "target_token_share": None if name == DRAFT else counters.target_token_share,
        "mean_accepted_run": counters.mean_accepted_run,
        "probe_s": counters.probe_s,
        **vars(verdicts),
        "accept_error": ratio(verdicts.n_accepted_wrong, verdicts.n_accepted),
        "needless_rejection_rate": ratio(verdicts.n_rejected_right, verdicts.n_rejected),
        "drafted_token_acceptance_rate": ratio(
            sum(result.n_accepted or 0 for result in drafted), sum(result.n_proposed or 0 for result in drafted)
        ),
        "energy_j": _sum_of_known(result.energy_j for result in found),
        **_ceiling(found, target),
        **_outside(found),
    }


def _n_rejected(counters: Counters | None, drafted: list[ItemResult]) -> int | None:
    """Drafted tokens that did not stay, by a policy or in speculation by tokens; None where nobody counts."""
    if drafted:
        return sum((result.n_proposed or 0) - (result.n_accepted or 0) for result in drafted)
    return counters.n_draft_tokens_proposed - counters.n_draft_tokens_accepted if counters is not None else None


def _compared(found: list[ItemResult], target: list[ItemResult] | None, seed: int) -> dict[str, Any]:
    items = sorted({result.item for result in found})
    places = {item: i for i, item in enumerate(items)}
    at = np.array([places[result.item] for result in found], dtype=np.int64)

    def by_item(values: Iterable[float]) -> Floats:
        sums = np.bincount(at, weights=np.fromiter(values, dtype=np.float64), minlength=len(items))
        return np.asarray(sums, dtype=np.float64)

    def rate(part: Floats, whole: Floats) -> Interval:
        return bootstrap(lambda rows: float(part[rows].sum() / whole[rows].sum()), len(items), seed=seed)

    n, right, wall_s = by_item(1.0 for _ in found), by_item(r.right for r in found), by_item(r.wall_s for r in found)
    numbers: dict[str, Any] = {
        "n_items": len(items),
        "accuracy": rate(right, n),
        "accuracy_to_target": None,
        "agreement": None,
        "speedup": None,
    }
    if target is not None and found:
        same = by_item(normal(a.answer) == normal(b.answer) for a, b in zip(found, target))
        numbers["accuracy_to_target"] = rate(right - by_item(r.right for r in target), n)
        numbers["agreement"] = float(same.sum() / n.sum())
        numbers["speedup"] = rate(by_item(r.wall_s for r in target), wall_s)
    return numbers


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def _sum_of_known(values: Iterable[float | None]) -> float | None:
    """The sum; None where any is unknown, for a part of it says nothing."""
    found = list(values)
    return None if not found or any(value is None for value in found) else sum(value or 0.0 for value in found)


def _ceiling(found: list[ItemResult], target: list[ItemResult] | None) -> dict[str, Any]:
    """Costs, the ceiling of the cost model, and how much of it was reached.

    Reached is compared per committed token and without the prompt on both sides, as the model predicts it:
    (target's seconds per token / this arm's) / ceiling.
    """
    measured = costs(_sums(found))
    alone = costs(_sums(target)).c_t if target is not None else None
    ceiling = measured.ceiling(alone)
    decode_speedup = ratio(_decode_s_per_token(target), _decode_s_per_token(found)) if target is not None else None
    return {
        "costs": measured.to_json() if any(result.costs for result in found) else None,
        "ceiling": ceiling,
        "decode_speedup": decode_speedup,
        "ceiling_share": ratio(decode_speedup, ceiling),
    }


def _sums(found: Sequence[ItemResult]) -> CostSums:
    return summed(CostSums, (result.costs for result in found if result.costs is not None))


def _decode_s_per_token(found: Sequence[ItemResult]) -> float | None:
    return ratio(sum(r.wall_s - r.prefill_s for r in found), sum(r.n_tokens for r in found))


def _outside(found: Sequence[ItemResult]) -> dict[str, float | None]:
    """Time outside of native code, where it was measured."""
    timed = [(r.native_s, r.elapsed_s, r.n_tokens) for r in found if r.native_s is not None]
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
    "agrees %": _percent("agreement"),
    "speedup": _interval("speedup", ".2f"),
    "tokens": _number("tokens_per_item", ".0f"),
    "tokens/s": _number("tokens_per_s", ".1f"),
    "steps accepted %": _percent("step_acceptance_rate"),
    "by target %": _percent("target_token_share"),
    "accept error %": _percent("accept_error"),
    "needless rejections %": _percent("needless_rejection_rate"),
    "tokens accepted %": _percent("drafted_token_acceptance_rate"),
    "ceiling": _number("ceiling", ".2f"),
    "of ceiling %": _percent("ceiling_share"),
    "first text s": _number("ttft_s", ".2g"),
    "energy J": _number("energy_j", ".0f"),
    "python %": _percent("python_share"),
    "µs/token": _number("overhead_s_per_token", ".0f", 1e6),
    "failed": lambda arm: str(arm["n_failed"]) if arm["n_failed"] else "-",
}
"""The table's columns: a title, and how an arm's summary is shown."""


def table_cells(arms: Sequence[Mapping[str, Any]], columns: Iterable[str] = COLUMNS) -> dict[str, list[str]]:
    """The cells of every column by its title; columns that say nothing are left out."""
    shown = {title: [COLUMNS[title](arm) for arm in arms] for title in columns}
    return {title: cells for title, cells in shown.items() if set(cells) != {"-"}}


def which_items(document: Mapping[str, Any]) -> str:
    """The items of a results document in words; a run that was stopped before its end says so."""
    settings, n_done = document["settings"], document["arms"][0]["n_items"]
    every = f", one in {settings['every']}" if settings.get("every", 1) > 1 else ""  # older results have no such word
    stopped = f" (stopped; {settings['limit']} were asked for)" if n_done < settings["limit"] else ""
    return f"{n_done} items of {settings['task']} from number {settings['offset']} on{every}{stopped}"


def table(arms: Sequence[Mapping[str, Any]], *, markdown: bool = False, columns: Iterable[str] = COLUMNS) -> str:
    """All arms as a table of aligned columns, or as GitHub's markdown. Columns that say nothing are left out."""
    shown = table_cells(arms, columns)
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


def bars(arms: Sequence[Mapping[str, Any]], *, width: int = 40) -> str:
    """Speed and accuracy as bars of characters, for a terminal; empty without a target to compare with."""
    known = [arm for arm in arms if arm["speedup"] is not None and arm["speedup"]["value"] is not None]
    if not known:
        return ""
    longest = max(arm["speedup"]["value"] for arm in known)
    names = max(len(str(arm["arm"])) for arm in known)
    return "\n".join(
        f"{arm['arm']:<{names}}  {'#' * max(1, round(width * arm['speedup']['value'] / longest)):<{width}} "
        f"{arm['speedup']['value']:.2f}x, {100 * (arm['accuracy']['value'] or 0):.1f} % right"
        for arm in known
    )
