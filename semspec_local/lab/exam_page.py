"""The report of an exam to be looked at: pictures, and one self-contained page."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from . import charts
from .exam import verdict
from .page import page, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUALITIES = {
    "mse": "mean squared error",
    "mae": "mean absolute error",
    "r2": "R2",
    "spearman": "Spearman",
    "auroc": "AUROC, share >= 0.5",
    "brier": "Brier score",
    "calibration_error": "calibration error",
}


def shown(interval: Mapping[str, float | None]) -> str:
    """A number with its interval; "-" for what is undefined."""
    value, low, high = (interval[name] for name in ("value", "low", "high"))
    if value is None:
        return "-"
    return f"{value:.3f}" if low is None or high is None else f"{value:.3f} ({low:.3f} to {high:.3f})"


def pictures(report: Mapping[str, Any], training: Mapping[str, Any] | None) -> dict[str, Figure]:
    """Every picture of an exam's report by name, and the sweeps of the training report where there is one."""
    found = {
        f"{role} probe, {steps.replace('_', ' ')}": quality
        for role, by_writer in report["probes"].items()
        for steps, quality in by_writer.items()
    }
    made = {
        "calibration": charts.calibration_chart({name: q["calibration_curve"] for name, q in found.items()}),
        "scores": charts.score_chart(report["decision"]["scores"]),
    }
    for role, by_writer in report["probes"].items():
        made[f"histogram-{role}"] = charts.histogram_chart(role, by_writer["draft_steps"]["histogram"])
        sweep = (training or {}).get("probes", {}).get(role, {}).get("sweep", [])
        if sweep and all("layer" in fit for fit in sweep):
            made[f"sweep-{role}"] = charts.sweep_chart(role, sweep)
    return made


CAPTIONS = {
    "calibration": "Is a probability of 0.7 right seven times in ten? Bigger dots stand for more steps.",
    "scores": "How well each score tells drafted steps that mean what the target might write from the others.",
    "histogram": "What the {role} probe says of drafted steps.",
    "sweep": "Which layer of the {role} was read best, on validation problems.",
}


def exam_page(report: Mapping[str, Any], made: Mapping[str, Figure]) -> str:
    """One page with every number and picture; nothing is loaded from elsewhere."""
    facts = (
        f"{report['n_prefixes']} prefixes of {report['data']}, {report['n_samples']} samples of each model at each; "
        f"one meaning: {report['clusterer']}. Intervals: 95 %, bootstrap over problems."
    )
    parts = [
        f"<p>{escape(facts)}</p>",
        f"<p><b>{escape(verdict(report['decision']))}.</b></p>",
    ]
    rows = [
        [f"{role}, {steps.replace('_', ' ')}", f"{q['n_steps']:,}", *(shown(q[name]) for name in QUALITIES)]
        for role, by_writer in report["probes"].items()
        for steps, q in by_writer.items()
    ]
    parts += ["<h2>Predicted against true shares</h2>", table(["probe", "steps", *QUALITIES.values()], rows)]
    constants = ", ".join(
        f"{role}, {steps.replace('_', ' ')}: {q['mse_constant']:.3f}"
        for role, by_writer in report["probes"].items()
        for steps, q in by_writer.items()
    )
    parts.append(f"<p>Mean squared error of the best constant: {escape(constants)}.</p>")
    scores = [
        [name.replace("_", " "), shown(found["auroc_in_target_cluster"]), shown(found["spearman"])]
        for name, found in report["decision"]["scores"].items()
    ]
    head = ["score", "AUROC, in a target cluster", "Spearman with the target's share"]
    parts += ["<h2>Telling drafted steps apart</h2>", table(head, scores)]
    for name, drawing in made.items():
        kind, _, role = name.partition("-")
        parts.append(f"<h2>{escape(kind.capitalize())}</h2><p>{escape(CAPTIONS[kind].format(role=role))}</p>")
        parts.append(charts.svg(drawing))
    return page("An exam of probes", parts)
