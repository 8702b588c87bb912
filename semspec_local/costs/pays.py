"""Is drafting worth its time in this run? Asked before each step, and answered from measured costs and acceptance.

The costs are those that `semspec-local costs` measured and kept, not the clock of the run, and nothing is learnt from
other runs: with the same seed, costs and number of lanes a run goes the same way, whatever ran before it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..metrics import Counters
from ..policy import Policy
from ..reasoner import Reasoner
from .model import TOKENS_PER_STEP
from .pair import N_DRAFTED, PairCosts
from .store import stored_costs

EVIDENCE_STEPS = 5
"""So many verified steps are waited for before their acceptance counts; then they weigh as much as an expected one."""

EVIDENCE_GUESSES = 64
"""So many guesses are waited for before it counts how many of them stayed."""

REACHED = 0.93
"""The share of the cost model's speedup that runs with probes reach: 0.91 to 1.00 on two pairs (docs/benchmarks.md).

What the model leaves out is the probes, Python and that texts with drafted steps are a little longer.
"""


@dataclass(frozen=True)
class DraftingPays:
    """Implements `engine.Pays` with the cost model of `costs`.

    `expected` is the share of steps to be accepted, as far as is known beforehand; it stands for the share of tokens,
    which is less where long steps are rejected. Where it is None, only what cannot pay at any acceptance is given up
    before `EVIDENCE_STEPS` were verified.
    """

    costs: PairCosts
    expected: float | None = None

    def __call__(self, counters: Counters) -> bool:
        n_steps, seen = counters.n_proposed_steps, counters.token_acceptance_rate
        if seen is None or n_steps < EVIDENCE_STEPS:
            acceptance, length = self.expected if self.expected is not None else 1.0, TOKENS_PER_STEP
        else:
            acceptance, length = seen, max(1, round(counters.n_draft_tokens_proposed / n_steps))
            if self.expected is not None:
                acceptance = (EVIDENCE_STEPS * self.expected + n_steps * seen) / (EVIDENCE_STEPS + n_steps)
        return is_worth_it(self.costs.at_step(length).at_acceptance(acceptance).ceiling(self.costs.c_t_alone))


@dataclass(frozen=True)
class GuessingPays:
    """Implements `engine.Pays` for guesses, `n` at a time: until `EVIDENCE_GUESSES` were made they do."""

    costs: PairCosts
    n: int

    def __call__(self, counters: Counters) -> bool:
        kept = counters.guess_acceptance_rate
        if kept is None or counters.n_guesses < EVIDENCE_GUESSES:
            return True
        speedup = self.costs.guess_speedup_at(self.n, kept)
        return speedup is None or speedup >= 1


def is_worth_it(speedup: float | None) -> bool:
    """Does a speedup that the cost model promises leave a gain in a run? Of an unknown one nothing is foretold."""
    return speedup is None or speedup * REACHED >= 1


def go_by_costs(reasoner: Reasoner) -> None:
    """Let the runs of a loaded pair draft, and guess, where that pays by what was measured of it on this machine.

    Nothing changes where its costs were never measured with the models loaded as they are (another policy wants other
    numbers of them), or are not to be trusted.
    """
    from .measure import loaded_facts

    costs = stored_costs(reasoner.sources, reasoner.models, loaded_facts(reasoner))
    if costs is None or costs.noise:
        return
    # In lanes nothing is known of guesses: they write together, which makes the target's tokens cheap already.
    reasoner.n_guess = n_guess_that_pays(costs) if reasoner.n_lanes == 1 and reasoner.can_guess else 0
    reasoner.guesses_pay = GuessingPays(costs, reasoner.n_guess)
    chosen = reasoner.n_guess if reasoner.config.guess is None else reasoner.config.guess
    as_run = costs.in_lanes(reasoner.n_lanes).guessing(chosen)
    reasoner.pays_for = lambda policy: DraftingPays(as_run, expected_acceptance(reasoner, policy))


def n_guess_that_pays(costs: PairCosts) -> int:
    """How many tokens the draft should guess at a time for the target; 0 where guessing gains nothing."""
    known = {n: speedup for n in N_DRAFTED if (speedup := costs.guess_speedup(n)) is not None}
    best = max(known, key=lambda n: known[n], default=0)
    return best if best and is_worth_it(known[best]) else 0


def expected_acceptance(reasoner: Reasoner, policy: Policy) -> float | None:
    """The share of steps that the policy accepted when its probe was calibrated to its threshold; None elsewhere."""
    probe = reasoner.joint_probe
    return probe.spec.calibrated_acceptance(policy.name, policy.threshold) if probe is not None else None
