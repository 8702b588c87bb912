"""Made-up arithmetic word problems whose every step has a meaning that is known exactly."""

from .problem import (
    MIN_STEPS,
    PlannedStep,
    Problem,
    WorldClusterer,
    WrittenStep,
    make_problem,
    problems,
    solve,
)

__all__ = [
    "MIN_STEPS",
    "PlannedStep",
    "Problem",
    "WorldClusterer",
    "WrittenStep",
    "make_problem",
    "problems",
    "solve",
]
