"""Does drafting still pay in this run? Asked before each step, and answered from measured costs and what was accepted.

The costs are those that `semspec-local costs` measured and kept, not the clock of the run: so a run with the same seed
and the same costs goes the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..metrics import Counters
from ..reasoner import Reasoner
from .cost_store import stored_costs
from .costs import TOKENS_PER_STEP
from .pair_costs import PairCosts

MIN_STEPS = 5
"""So many verified steps are waited for before their acceptance is believed."""


@dataclass(frozen=True)
class DraftingPays:
    """Implements `engine.Pays` with the cost model of `costs`."""

    costs: PairCosts

    def __call__(self, counters: Counters) -> bool:
        n_steps, acceptance = counters.n_proposed_steps, counters.token_acceptance_rate
        if n_steps < MIN_STEPS or acceptance is None:  # then only what cannot pay at all is given up
            acceptance, length = 1.0, TOKENS_PER_STEP
        else:
            length = max(1, round(counters.n_draft_tokens_proposed / n_steps))
        speedup = self.costs.at_step(length).at_acceptance(acceptance).ceiling(self.costs.c_t_alone)
        return speedup is None or speedup >= 1


def drafting_pays(reasoner: Reasoner) -> DraftingPays | None:
    """The answer for a loaded pair on this machine.

    None where its costs were never measured with the models loaded as they are (another policy wants other numbers of
    them), or are not to be trusted.
    """
    from .measure_costs import loaded_facts

    costs = stored_costs(reasoner.sources, reasoner.models, loaded_facts(reasoner))
    return DraftingPays(costs) if costs is not None and not costs.noise else None
