"""The pictures and the page of a benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from ..lab.charts import figure, svg
from ..lab.page import page, table
from .arms import DRAFT, TARGET
from .report import table_cells, which_items

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Arms = Sequence[Mapping[str, Any]]

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_CONTROL = "#888888"


def trade_off(arms: Arms) -> Figure:
    """Accuracy against speedup: a line per policy over its thresholds, a point for every other arm.

    `random` is drawn in grey: what accepting blindly brings.
    """
    made, axes = figure(7.0, 4.6)
    colours = iter(_COLOURS * 3)
    for family, members in _families(arms).items():
        points = sorted(((a["speedup"]["value"], 100 * a["accuracy"]["value"], a) for a in members), key=lambda p: p[0])
        x, y = [point[0] for point in points], [point[1] for point in points]
        colour = _CONTROL if family == "random" else "#222222" if family in (TARGET, DRAFT) else next(colours)
        low = [point[1] - 100 * (point[2]["accuracy"]["low"] or point[1] / 100) for point in points]
        high = [100 * (point[2]["accuracy"]["high"] or point[1] / 100) - point[1] for point in points]
        marker, line = "s" if family in (TARGET, DRAFT) else "o", "--" if family == "random" else "-"
        axes.errorbar(
            x,
            y,
            yerr=[low, high],
            color=colour,
            label=family,
            marker=marker,
            linestyle=line,
            capsize=2,
            elinewidth=0.6,
        )
        if len(points) > 1:
            for a, b, arm in points:
                axes.annotate(
                    arm["arm"].partition("@")[2], (a, b), fontsize=7, textcoords="offset points", xytext=(4, 4)
                )
    axes.axvline(1.0, color=_CONTROL, linewidth=0.8, linestyle=":")
    axes.set(xlabel="speedup over the target alone", ylabel="right answers, %")
    axes.legend(frameon=False, fontsize=8)
    return made


def speed_bars(arms: Arms) -> Figure:
    """Speedups side by side, with their intervals and how much is right."""
    known = [arm for arm in arms if arm["speedup"] is not None and arm["speedup"]["value"] is not None]
    made, axes = figure(7.0, 0.6 + 0.36 * len(known))
    for place, arm in enumerate(reversed(known)):
        value, low, high = (arm["speedup"][name] for name in ("value", "low", "high"))
        spread = [[value - (low or value)], [(high or value) - value]]
        axes.barh(place, value, xerr=spread, color="#222222" if arm["arm"] in (TARGET, DRAFT) else _COLOURS[0])
        axes.text(value, place, f"  {100 * arm['accuracy']['value']:.1f} % right", va="bottom", fontsize=8)
    axes.set_yticks(range(len(known)), [arm["arm"] for arm in reversed(known)])
    axes.axvline(1.0, color=_CONTROL, linewidth=0.8, linestyle=":")
    axes.set(xlabel="speedup over the target alone")
    return made


def _families(arms: Arms) -> dict[str, list[Mapping[str, Any]]]:
    """Arms of one policy together, those without a speedup left out."""
    families: dict[str, list[Mapping[str, Any]]] = {}
    for arm in arms:
        if arm["speedup"] is not None and arm["speedup"]["value"] is not None:
            families.setdefault(str(arm["arm"]).partition("@")[0], []).append(arm)
    return families


def pictures(arms: Arms) -> dict[str, Figure]:
    """Every picture by its name; none where there is no target to compare with."""
    return {"trade-off": trade_off(arms), "speedup": speed_bars(arms)} if _families(arms) else {}


CAPTIONS = {
    "trade-off": "Further right is faster, further up is more often right. Bars: 95 % bootstrap intervals over items.",
    "speedup": "Seconds of the target alone, divided by those of the arm, over all items.",
}


def bench_page(document: Mapping[str, Any], made: Mapping[str, Figure]) -> str:
    """One page with the table and the pictures; nothing is loaded from elsewhere."""
    settings, cells = document["settings"], table_cells(document["arms"])
    facts = (
        f"{which_items(document)}, "
        f"{settings['n_seeds']} seed(s), temperature {settings['config']['sampling']['temperature']:g}; "
        f"{', '.join(document['models'].values())}; "
        f"{document['machine']['cpu']}, {document['machine']['n_cores']} cores."
    )
    parts = [f"<p>{escape(facts)}</p>", table(list(cells), list(zip(*cells.values())))]
    for name, one in made.items():
        parts += [f"<h2>{escape(name)}</h2>", f"<p>{escape(CAPTIONS[name])}</p>", svg(one)]
    command = " ".join(document["provenance"]["argv"])
    parts += ["<h2>How it was made</h2>", f"<pre>{escape(command)}</pre>"]
    return page(f"Benchmark: {settings['task']}", parts)
