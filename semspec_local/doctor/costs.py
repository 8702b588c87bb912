"""What a token costs on this machine, where somebody has measured it."""

from __future__ import annotations

from .check import Verdict, ok, warn
from .examination import Examination


def costs(examination: Examination) -> Verdict | None:
    """Speculation pays here, as far as is known."""
    from ..costs.pair import Outlook
    from ..costs.store import stored_costs

    if examination.sources is None or examination.sources.draft is None:
        return None
    measured = stored_costs(examination.sources, examination.models)
    if measured is None:
        return ok("not measured for this pair and these threads; run: semspec-local costs")
    outlook = Outlook(costs=measured)
    said = f"{outlook.advice} Measured {measured.measured_at[:10]}"
    if measured.noise:
        return warn(f"{said}, and not to be trusted: {', '.join(measured.noise)}", "measure again: semspec-local costs")
    if outlook.ceiling is not None and outlook.ceiling <= 1:
        return warn(said, "--policy never, or another pair")
    return ok(said)
