"""What becomes of an item: one JSON line, in this program's form or in that of OpenAI's batches."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["ok", "truncated", "error"]
Format = Literal["semspec", "openai"]

INVALID_REQUEST, SERVER_ERROR = "invalid_request_error", "server_error"
"""Types of errors, as a llama.cpp server names them: what was asked for cannot be done, or doing it failed."""

FORMATS: tuple[Format, ...] = ("semspec", "openai")

_STATUS: dict[str, Status] = {"eos": "ok", "stop": "ok", "budget": "truncated", "context_full": "truncated"}
_FINISH = {"ok": "stop", "truncated": "length"}


@dataclass(frozen=True, kw_only=True)
class ItemError:
    """Why an item has no answer."""

    type: str
    message: str

    @property
    def status_code(self) -> int:
        return 400 if self.type == INVALID_REQUEST else 500


@dataclass(frozen=True, kw_only=True)
class ItemRecord:
    """One finished item. Of a failed one `error` says why, and what is not known is None or empty.

    `seconds` is wall time from the item's start to its end; with several lanes others ran meanwhile.
    """

    id: str
    line: int
    status: Status
    answer: str | None = None
    text: str = ""
    reasoning: str | None = None
    stop_reason: str | None = None
    seed: int | None = None
    usage: dict[str, int] = field(default_factory=dict)
    stats: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    error: ItemError | None = None

    def to_json(self, form: Format, model: str) -> dict[str, Any]:
        return asdict(self) if form == "semspec" else self._openai(model)

    def _openai(self, model: str) -> dict[str, Any]:
        """A line of an OpenAI batch's output. A failed one says so in both places where readers look."""
        request = "req_" + hashlib.sha256(self.id.encode()).hexdigest()[:24]
        line: dict[str, Any] = {"id": f"batch_{request}", "custom_id": self.id}
        own: dict[str, Any] = {"line": self.line, "status": self.status, "seed": self.seed, "seconds": self.seconds}
        if self.error is not None:
            error = {"message": self.error.message, "type": self.error.type, "code": self.error.type}
            response = {"status_code": self.error.status_code, "request_id": request, "body": {"error": error}}
            return line | {"response": response, "error": error, "semspec": own}
        message = {"role": "assistant", "content": self.text}
        if self.reasoning is not None:
            message |= {"reasoning_content": self.reasoning}
        body = {
            "id": f"chatcmpl-{request}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model,
            "choices": [{"index": 0, "message": message, "finish_reason": _FINISH[self.status]}],
            "usage": self.usage,
        }
        own |= {"answer": self.answer, "stop_reason": self.stop_reason, "stats": self.stats}
        return (
            line
            | {"response": {"status_code": 200, "request_id": request, "body": body}, "error": None}
            | {"semspec": own}
        )


def status_of(stop_reason: str) -> Status:
    """Is a run that ended so finished, or cut off?"""
    return _STATUS[stop_reason]


def failed(line: Mapping[str, Any]) -> bool:
    """Does an output line, of either form, say that its item failed?"""
    return line.get("error") is not None


def id_of(line: Mapping[str, Any]) -> str:
    """The item's id in an output line of either form; KeyError where there is none."""
    return str(line["custom_id"] if "custom_id" in line else line["id"])
