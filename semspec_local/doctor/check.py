"""What one check says."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from ..errors import one_line

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Verdict:
    """What a check found: `fail` for what does not work, `warn` for what works but costs something.

    `detail` and `fix` are one line each, without control characters, whatever file they come from; `fix` is None
    where nothing has to be done.
    """

    status: Status
    detail: str
    fix: str | None = None

    def __post_init__(self) -> None:
        assert (self.fix is None) == (self.status == "ok"), "what is not ok has a fix, and nothing else has one"
        object.__setattr__(self, "detail", one_line(self.detail))
        if self.fix is not None:
            object.__setattr__(self, "fix", one_line(self.fix))


def ok(detail: str) -> Verdict:
    return Verdict("ok", detail)


def warn(detail: str, fix: str) -> Verdict:
    return Verdict("warn", detail, fix)


def fail(detail: str, fix: str) -> Verdict:
    return Verdict("fail", detail, fix)


@dataclass(frozen=True, kw_only=True)
class Check:
    """A verdict with the name of what was checked."""

    name: str
    status: Status
    detail: str
    fix: str | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
