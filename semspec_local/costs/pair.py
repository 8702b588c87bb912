"""What was measured of a pair on this machine, and what that says of speculation: numbers, and one sentence.

Knows nothing of models and files; `measure` fills it, `store` keeps it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..roles import Role
from .model import TOKENS_PER_STEP, Costs, at_length, token_speedup

Curve = Mapping[int, float]
"""Seconds per token, by how many tokens are read in one pass."""

ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
TOKEN_ACCEPTANCES = (0.6, 0.7, 0.8, 0.9)
N_DRAFTED = (4, 8)

GUESS_ACCEPTANCE = 0.9
"""How often a guessed token stays when those before it did: of four at a time, 78 to 80 % stay (docs/benchmarks.md)."""

NOISY_SPREAD = 0.3
"""Repetitions that lie further apart than this share of their median were disturbed."""

_SPARE_LOAD = 0.5
"""What a machine does besides, such as what a program that has just ended leaves in the average."""

_HIGH = 0.6
"""A break-even above this leaves little to gain: a hint is given at what would move it."""

_REMEDY = "a larger target, a target of more bits, a smaller draft or a GPU would change that"


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """How the models ran while they were measured, as far as their costs depend on it.

    `taps` are the places where hidden states were read, such as `26 pre`; `logprobs` the models whose log-probabilities
    the policy wants; `all_logits` those whose reading passes gave the logits of all tokens, not of the last one alone.
    """

    taps: dict[Role, list[str]] = field(default_factory=dict)
    logprobs: list[Role] = field(default_factory=list)
    all_logits: list[Role] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class PairCosts:
    """Seconds per token of a pair; None, or an empty curve, for what was not measured.

    `c_d` and `c_t` are those of writing, `p_d` and `p_t` of reading behind `n_prefix` tokens, all as in a run.
    `c_t_alone` is a target of which no states are read: what speculation is compared with. `spread` is how far
    repetitions lay apart (the median over all points of largest - smallest, by their median), `load` how many processes
    wanted the machine's `n_cores` before the start, when `n_threads` were to come. `measured_at` is UTC, ISO 8601.
    """

    c_d: float | None = None
    c_t: float | None = None
    c_t_alone: float | None = None
    p_d: Curve = field(default_factory=dict)
    p_t: Curve = field(default_factory=dict)
    loaded: Loaded = field(default_factory=Loaded)
    n_prefix: int = 0
    spread: float | None = None
    load: float | None = None
    n_cores: int = 1
    n_threads: int = 1
    measured_at: str = ""

    @property
    def noise(self) -> list[str]:
        """Why these numbers are not to be trusted; empty when nothing speaks against them."""
        reasons = []
        if self.load is not None and self.load + self.n_threads > self.n_cores + _SPARE_LOAD:
            reasons.append(f"the load was {self.load:.1f} on {self.n_cores} cores before the start")
        if self.spread is not None and self.spread > NOISY_SPREAD:
            reasons.append(f"repetitions lay {self.spread:.0%} apart")
        return reasons

    def at_step(self, tokens_per_step: int) -> Costs:
        """The costs of steps of that many tokens."""
        return Costs(
            c_d=self.c_d,
            p_t=at_length(self.p_t, tokens_per_step),
            c_t=self.c_t,
            p_d=at_length(self.p_d, tokens_per_step),
            token_acceptance=None,
            step_acceptance=None,
        )

    def in_lanes(self, n_lanes: int) -> PairCosts:
        """About the costs per token where so many runs write together; each reads by itself.

        A pass over one token of each lane takes about as long as one that reads as many, if that gives the logits of
        all; where it does not, what the target writes in lanes is unknown, and the draft is taken to gain nothing by
        them. That all lanes write at once is seldom so in speculation, and always so for the target alone.
        """
        if n_lanes == 1:
            return self
        known = "target" in self.loaded.all_logits

        def together(alone: float | None, curve: Curve) -> float | None:
            read = at_length(curve, n_lanes)
            return alone if read is None or alone is None else min(alone, read)

        c_t, c_t_alone = (together(one, self.p_t) if known else None for one in (self.c_t, self.c_t_alone))
        c_d = together(self.c_d, self.p_d) if "draft" in self.loaded.all_logits else self.c_d
        return replace(self, c_d=c_d, c_t=c_t, c_t_alone=c_t_alone)

    def guess_speedup(self, n: int) -> float | None:
        """How many times as fast as alone the target writes where `n` tokens are guessed at a time.

        None where it is unknown: reading so few tokens, with the logits of all, was not measured.
        """
        if "target" not in self.loaded.all_logits or min(self.p_t, default=n + 2) > n + 1:
            return None
        return token_speedup(n, GUESS_ACCEPTANCE, c_d=self.c_d, c_t=self.c_t_alone, p_t=self.p_t)

    def guess_speedup_at(self, n: int, kept: float) -> float | None:
        """The same where a share `kept` of all guesses stays: then a round commits 1 + n * kept tokens."""
        read = at_length(self.p_t, n + 1)
        if self.c_d is None or self.c_t_alone is None or read is None:
            return None
        return (1 + n * kept) * self.c_t_alone / (n * self.c_d + (n + 1) * read)

    def guessing(self, n: int) -> PairCosts:
        """About the costs where the draft guesses `n` tokens at a time of what the target writes; 0: none."""
        speedup = self.guess_speedup(n) if n else None
        if speedup is None or self.c_t_alone is None:
            return self
        c_t = self.c_t_alone / speedup  # a pass over guesses is the same, whether a probe reads states or not
        return replace(self, c_t=c_t, c_t_alone=c_t)

    def to_json(self) -> dict[str, Any]:
        """What was measured, for the file that keeps it; `from_json` reads it back."""
        return {**asdict(self), "p_d": _named(self.p_d), "p_t": _named(self.p_t)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> PairCosts:
        """Raises ValueError for anything that `to_json` does not write."""
        try:
            curves = {name: {int(n): float(s) for n, s in values[name].items()} for name in ("p_d", "p_t")}
            found = cls(**{**values, **curves, "loaded": Loaded(**values["loaded"])})
            costs = [found.c_d, found.c_t, found.c_t_alone, *found.p_d.values(), *found.p_t.values()]
            others = [found.spread, found.load, found.n_cores, found.n_threads, found.n_prefix]
            if not all(number is None or 0 < number < math.inf for number in costs):
                raise ValueError("a cost is no positive number")
            if not all(number is None or 0 <= number < math.inf for number in others):
                raise ValueError("a count or a load is no number")
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"{error!r}") from None
        return found


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What the costs let one hope for with steps of `tokens_per_step` tokens. Speedups are over the target alone."""

    costs: PairCosts
    tokens_per_step: int = TOKENS_PER_STEP
    expected_acceptance: float | None = None
    """The share of steps that the policy accepted when its probe was calibrated."""
    can_guess: bool = True
    """Can the draft guess the target's tokens? One with another vocabulary cannot."""

    @property
    def ceiling(self) -> float | None:
        """The speedup when everything is accepted."""
        return self._speedup(1.0)

    @property
    def break_even(self) -> float | None:
        """The acceptance from which on there is a gain; over 1 where there is none."""
        return self._at_step.break_even(self.costs.c_t_alone)

    @property
    def predicted(self) -> dict[float, float | None]:
        """The speedup by acceptance."""
        return {acceptance: self._speedup(acceptance) for acceptance in ACCEPTANCES}

    @property
    def expected_speedup(self) -> float | None:
        """The speedup at the expected acceptance."""
        return None if self.expected_acceptance is None else self._speedup(self.expected_acceptance)

    @property
    def token_speculation(self) -> dict[int, dict[float, float | None]]:
        """The speedup of speculation by tokens, by how many are drafted at a time, then by acceptance of a token."""
        measured = {"c_d": self.costs.c_d, "c_t": self.costs.c_t_alone}
        return {
            n: {a: token_speedup(n, a, **measured, p_t=self.costs.p_t) for a in TOKEN_ACCEPTANCES} for n in N_DRAFTED
        }

    def _speedup(self, acceptance: float) -> float | None:
        return self._at_step.at_acceptance(acceptance).ceiling(self.costs.c_t_alone)

    @property
    def _at_step(self) -> Costs:
        return self.costs.at_step(self.tokens_per_step)

    @property
    def advice(self) -> str:
        """One plain sentence."""
        ceiling, break_even = self.ceiling, self.break_even
        if ceiling is None or break_even is None:
            return "What a draft would bring is unknown, for no draft was measured."
        if ceiling <= 1:
            return (
                "On this machine this pair gains nothing at any acceptance, for drafting and reading a token take "
                f"longer than the target takes to write it: use --policy never; {_REMEDY}."
            )
        here, most = "On this machine this pair gains", f"reaches at most {ceiling:.2f} times the target's speed"
        if break_even > _HIGH:
            return f"{here} nothing below {break_even:.2f} acceptance and {most}; {_REMEDY}."
        return f"{here} from {max(break_even, 0):.2f} acceptance on and {most}."

    @property
    def token_advice(self) -> str:
        """One sentence about speculation by tokens, with the option that turns it on where the draft can guess."""
        known = [
            (speedup, n, acceptance)
            for n, by_acceptance in self.token_speculation.items()
            for acceptance, speedup in by_acceptance.items()
            if speedup is not None
        ]
        if not known:
            return "Speculation by tokens: unknown."
        paying = [acceptance for speedup, _, acceptance in known if speedup > 1]
        if not paying:
            return f"Speculation by tokens would not pay, even with {TOKEN_ACCEPTANCES[-1]:.0%} of tokens accepted."
        speedup, n, acceptance = max(known)
        return (
            f"Speculation by tokens would pay from {min(paying):.0%} of tokens accepted on: {speedup:.2f} times the "
            f"target's speed with {n} tokens at a time and {acceptance:.0%} accepted"
            f"{f' (--guess {n})' if self.can_guess else ''}."
        )

    def to_json(self) -> dict[str, Any]:
        """Costs and predictions; None for what is unknown. Acceptances are keys like "0.5"."""
        return {
            **self.costs.to_json(),
            "tokens_per_step": self.tokens_per_step,
            "ceiling": self.ceiling,
            "break_even_acceptance": self.break_even,
            "predicted": _named(self.predicted),
            "expected_step_acceptance": self.expected_acceptance,
            "expected_speedup": self.expected_speedup,
            "token_speculation": {str(n): _named(speedups) for n, speedups in self.token_speculation.items()},
            "advice": self.advice,
            "noisy": bool(self.costs.noise),
        }


def _named(values: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(key): value for key, value in values.items()}
