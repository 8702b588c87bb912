"""What a token costs in a run, and what that lets one hope for: the cost model of speculation by steps.

With seconds per token c_d (the draft writes), p_t (the target reads a candidate), c_t (the target writes), p_d (the
draft reads what the target wrote), and the share a of drafted tokens that is accepted:

    seconds per committed token = c_d + p_t + (1 - a) * (c_t + p_d)
    ceiling                     = c_t of the target alone / that
    break-even                  = the share a at which the ceiling is 1

The model is our own: every committed step was once drafted and read, and each rejected one is written again and read by
the draft. It leaves out the prompt, the first `n_prime` steps, probes, rollbacks and Python; so the prompt's time is on
neither side of any number here. Rejected and written steps need not be equally long, so `a` counts tokens; where all
steps are equally long it is the share of steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeVar

from ..trace import StepRecord

_T = TypeVar("_T")

TOKENS_PER_STEP = 32
"""The length of a step where none is known: about what models write of school mathematics between two blank lines."""


@dataclass(frozen=True, kw_only=True)
class CostSums:
    """Seconds and tokens of the four kinds of work in a run, each in the tokens of the model that does it.

    All drafted candidates count, also those that were not put to the policy.
    """

    propose_s: float = 0.0
    n_proposed: int = 0
    score_s: float = 0.0
    n_scored: int = 0
    write_s: float = 0.0
    n_written: int = 0
    read_s: float = 0.0
    n_read: int = 0
    n_judged: int = 0
    n_accepted: int = 0
    n_judged_steps: int = 0
    n_accepted_steps: int = 0


def cost_sums(records: Iterable[StepRecord]) -> CostSums:
    """The sums of one run. Work without a record (an end of text alone) is not in them.

    Tokens that the target wrote without evaluating them again are in `n_written`: `c_t` is what one costs on average.
    """
    return summed(CostSums, (_of_record(record) for record in records))


def _of_record(record: StepRecord) -> CostSums:
    n_target, n_draft = record.n_target_tokens or 0, record.n_draft_tokens or 0
    if record.origin == "target":
        return CostSums(
            write_s=record.write_s, n_written=n_target, read_s=record.read_s * (n_draft > 0), n_read=n_draft
        )
    if record.origin != "draft" or record.reason == "answer_phase":  # nothing was proposed
        return CostSums()
    judged = record.accepted is not None
    return CostSums(
        propose_s=record.propose_s,
        n_proposed=n_draft,
        score_s=record.score_s,
        n_scored=n_target,
        n_judged=n_draft * judged,
        n_accepted=n_draft * (record.accepted is True),
        n_judged_steps=int(judged),
        n_accepted_steps=int(record.accepted is True),
    )


def summed(kind: type[_T], items: Iterable[_T]) -> _T:
    """The sum of dataclasses whose fields are all numbers."""
    found = list(items)
    return kind(**{item.name: sum(getattr(one, item.name) for one in found) for item in fields(kind)})  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Measured costs and the model's prediction; None for what did not happen. See the head of this file.

    In an arm of one model alone, that model is `c_t`.
    """

    c_d: float | None
    p_t: float | None
    c_t: float | None
    p_d: float | None
    token_acceptance: float | None
    step_acceptance: float | None

    @property
    def predicted_s(self) -> float | None:
        """Seconds per committed token by the cost model."""
        a = self.token_acceptance
        if self.c_d is None or self.p_t is None or a is None:
            return None
        if a == 1:
            return self.c_d + self.p_t
        if self.c_t is None or self.p_d is None:
            return None
        return self.c_d + self.p_t + (1 - a) * (self.c_t + self.p_d)

    def ceiling(self, c_t_alone: float | None) -> float | None:
        """The speedup that the cost model allows over a target that writes alone at `c_t_alone` seconds per token."""
        return ratio(c_t_alone, self.predicted_s)

    def at_acceptance(self, token_acceptance: float) -> Costs:
        """The same costs, should that share of drafted tokens be accepted."""
        return replace(self, token_acceptance=token_acceptance, step_acceptance=None)

    def break_even(self, c_t_alone: float | None) -> float | None:
        """The share of accepted tokens from which on there is a gain; over 1 where there is none at any share."""
        if self.c_d is None or self.p_t is None or self.c_t is None or self.p_d is None or c_t_alone is None:
            return None
        lost = ratio(c_t_alone - self.c_d - self.p_t, self.c_t + self.p_d)
        return None if lost is None else 1 - lost

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "predicted_s": self.predicted_s}


def costs(sums: CostSums) -> Costs:
    """Costs per token from the sums of one run or of many."""
    return Costs(
        c_d=ratio(sums.propose_s, sums.n_proposed),
        p_t=ratio(sums.score_s, sums.n_scored),
        c_t=ratio(sums.write_s, sums.n_written),
        p_d=ratio(sums.read_s, sums.n_read),
        token_acceptance=ratio(sums.n_accepted, sums.n_judged),
        step_acceptance=ratio(sums.n_accepted_steps, sums.n_judged_steps),
    )


def at_length(curve: Mapping[int, float], n_tokens: int) -> float | None:
    """Seconds per token of a pass over `n_tokens`, where passes of some lengths were measured; None where none was.

    Between two lengths the seconds of the whole pass lie on a line; outside of all, the nearest one's hold per token.
    """
    if not curve:
        return None
    lengths = sorted(curve)
    n_tokens = min(max(n_tokens, lengths[0]), lengths[-1])
    upper = next(length for length in lengths if length >= n_tokens)
    if upper == n_tokens:
        return curve[n_tokens]
    lower = max(length for length in lengths if length < n_tokens)
    share = (n_tokens - lower) / (upper - lower)
    return ((1 - share) * lower * curve[lower] + share * upper * curve[upper]) / n_tokens


def token_speedup(
    n_drafted: int, acceptance: float, *, c_d: float | None, c_t: float | None, p_t: Mapping[int, float]
) -> float | None:
    """The speedup to expect of speculation by tokens (arXiv 2211.17192): `n_drafted` at a time, each one accepted with
    probability `acceptance`.

    A round commits (1 - acceptance ** (n_drafted + 1)) / (1 - acceptance) tokens (its equation 1). It costs the draft
    `n_drafted` tokens, and the target one pass over these and the token before them, whose seconds are read off `p_t`.
    """
    n_read = n_drafted + 1
    read = at_length(p_t, n_read)
    if c_d is None or c_t is None or read is None:
        return None
    n_committed = sum(acceptance**i for i in range(n_read))  # the same, and defined at 1 too
    return ratio(n_committed * c_t, n_drafted * c_d + n_read * read)


def python_share(native_s: float, elapsed_s: float) -> float | None:
    """The share of time outside llama.cpp and onnxruntime: Python and NumPy."""
    share = ratio(native_s, elapsed_s)
    return None if share is None else 1 - share


def ratio(part: float | None, whole: float | None) -> float | None:
    """A rate, None where a side is unknown or there is nothing to divide by."""
    return None if part is None or whole is None or not whole > 0 else part / whole
