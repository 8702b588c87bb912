"""The process that runs math-verify: one JSON request a line on standard input, one JSON reply on standard output.

    [expected, answer]  ->  true, false, or null where one of them cannot be read as mathematics

Comparing formulas may take for ever or all memory, inside calls that no exception reaches. So each request has an alarm
that ends the process; the caller starts another. Stands alone: it imports nothing of this package.
"""

from __future__ import annotations

import json
import math
import signal
import sys
from contextlib import suppress
from functools import lru_cache
from typing import Any

_MAX_MEMORY_BYTES = 2 * 2**30
_ROUNDING = 6
"""Digits after which two decimal fractions are one: math-verify counts from the point, `_rounding` from the first."""


def main() -> None:
    limit_s = float(sys.argv[1])
    with suppress(ImportError, OSError, ValueError):  # not all systems know limits
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the caller, who closes the pipe
    try:
        import math_verify  # noqa: F401
    except Exception as error:
        _reply({"error": f"{type(error).__name__}: {error}"})
        return
    _reply({"ready": True})
    for line in sys.stdin:
        expected, answer = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        verdict = _same(expected, answer)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _reply(verdict)


def _reply(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def _same(expected: str, answer: str) -> bool | None:
    from math_verify import verify

    try:
        gold, found = _parsed(expected), _parsed(answer)
        if not gold or not found:
            return None
        return bool(
            verify(
                gold,
                found,
                float_rounding=_rounding(gold[0]),
                allow_set_relation_comp=True,
                timeout_seconds=None,
            )
        )
    except (Exception, RecursionError, MemoryError):  # hostile text ends in any of them
        return None


@lru_cache(maxsize=256)
def _parsed(answer: str) -> list[Any]:
    from math_verify import parse

    return list(parse(f"${answer}$", fallback_mode="no_fallback", parsing_timeout=None))


def _rounding(gold: Any) -> int:
    """Decimal places to compare: more for a small number, or all small numbers would be equal."""
    try:
        size = abs(float(gold))
    except (TypeError, ValueError, OverflowError):
        return _ROUNDING
    return _ROUNDING - math.floor(math.log10(size)) if 0 < size < 1 else _ROUNDING


if __name__ == "__main__":
    main()
