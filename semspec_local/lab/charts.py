"""Pictures: how they are made and saved, and those of how good probes are. Needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"target": "#0072b2", "draft": "#009e73", "joint": "#d55e00"}
"""As in docs/loop.svg where they mean the same; told apart by people who do not see red or green."""

_LIKELY, _UNLIKELY, _OTHER = "#0072b2", "#d55e00", "#888888"


def figure(width: float = 6.4, height: float = 4.0) -> tuple[Figure, Axes]:
    """An empty figure, in inches; ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("pictures need matplotlib: pip install 'semspec-local[report]'") from None
    made = Figure(figsize=(width, height), layout="constrained")
    axes = made.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return made, axes


def calibration_chart(curves: Mapping[str, Sequence[Mapping[str, float]]]) -> Figure:
    """True share against predicted, a line per probe; a dot's area tells how many steps it stands for."""
    made, axes = figure(5.0, 4.6)
    axes.plot([0, 1], [0, 1], color=_OTHER, linewidth=1, linestyle=":", label="as it should be")
    for name, curve in curves.items():
        x, y = ([point[key] for point in curve] for key in ("predicted", "share"))
        total = sum(point["n"] for point in curve)
        colour = COLOURS[name.split()[0]]
        style = "-" if "draft steps" in name else "--"
        axes.plot(x, y, color=colour, linestyle=style, label=name)
        axes.scatter(x, y, [10 + 200 * point["n"] / total for point in curve], color=colour, alpha=0.6)
    axes.set(xlabel="predicted semantic probability", ylabel="true share", xlim=(-0.05, 1.05), ylim=(-0.05, 1.05))
    axes.legend(frameon=False)
    return made


def histogram_chart(name: str, histogram: Mapping[str, Sequence[int]]) -> Figure:
    """How often a probe says what, apart for steps that are likely and steps that are not."""
    made, axes = figure(6.4, 3.2)
    n_bins = len(histogram["likely"])
    left = [i / n_bins for i in range(n_bins)]
    for kind, colour, text in (
        ("likely", _LIKELY, "true share of at least 0.5"),
        ("unlikely", _UNLIKELY, "true share below 0.5"),
    ):
        total = max(1, sum(histogram[kind]))
        axes.bar(
            left,
            [n / total for n in histogram[kind]],
            1 / n_bins,
            align="edge",
            color=colour,
            alpha=0.55,
            label=f"{text} ({sum(histogram[kind]):,} steps)",
        )
    axes.set(xlabel=f"what the {name} probe says", ylabel="share of these steps", xlim=(0, 1))
    axes.legend(frameon=False)
    return made


def score_chart(scores: Mapping[str, Mapping[str, Mapping[str, float | None]]]) -> Figure:
    """AUROC for "in a target cluster" of every score, with intervals, the best on top."""
    known = {name: found["auroc_in_target_cluster"] for name, found in scores.items()}
    drawn = sorted((value["value"], name) for name, value in known.items() if value["value"] is not None)
    made, axes = figure(6.4, 0.8 + 0.34 * max(1, len(drawn)))
    for row, (value, name) in enumerate(drawn):
        low, high = known[name]["low"], known[name]["high"]
        colour = next(
            (COLOURS[role] for role in ("joint", "draft", "target") if name == f"{role}_semantic_prob"), _OTHER
        )
        if low is not None and high is not None:
            axes.plot([low, high], [row, row], color=colour, linewidth=2)
        axes.plot([value], [row], "o", color=colour)
    axes.axvline(0.5, color=_OTHER, linewidth=1, linestyle=":")
    axes.set(xlabel="AUROC: drafted steps in a target cluster above the others", xlim=(0, 1.02))
    axes.set_yticks(range(len(drawn)), [name.replace("_", " ") for _, name in drawn])
    return made


def sweep_chart(role: str, sweep: Sequence[Mapping[str, Any]]) -> Figure:
    """Validation error of the best fit of every kind of state, by layer; from a training report's sweep."""
    made, axes = figure()
    lines: dict[str, dict[float, float]] = {}
    for fit in sweep:
        place = fit["layer"] + 0.5 * (fit["norm"] == "post")
        key = f"{fit['head']}, {fit['pooling']} over {fit['window']}"
        best = lines.setdefault(key, {})
        best[place] = min(best.get(place, float("inf")), fit["validation_mse"])
    for key, best in sorted(lines.items()):
        places = sorted(best)
        axes.plot(places, [best[place] for place in places], "o-", markersize=4, label=key)
    axes.set(xlabel=f"layer of the {role} (half a layer up: after the final norm)", ylabel="validation error (MSE)")
    axes.legend(frameon=False, fontsize=8)
    return made


def svg(made: Figure) -> str:
    """The figure as an SVG element, with letters as letters; the same bytes for the same numbers."""
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "semspec-local"}):
        made.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def save(made: Figure, path: Path) -> None:
    """Write PNG or SVG, as the suffix says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".svg":
        path.write_text(svg(made) + "\n", encoding="utf-8")
    else:
        made.savefig(path, dpi=150)


def save_all(made: Mapping[str, Figure], folder: Path) -> None:
    """Each picture by its name, as PNG and SVG."""
    for name, drawing in made.items():
        for suffix in (".png", ".svg"):
            save(drawing, folder / f"{name}{suffix}")
