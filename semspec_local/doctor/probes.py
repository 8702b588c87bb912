"""The probes of the pair: do they run, and were they made for these models?"""

from __future__ import annotations

from ..config import RunConfig
from ..policy import POLICIES
from ..roles import PROBE_ROLES, ROLES, ProbeRole
from .check import Verdict, fail, ok, warn
from .examination import Examination


def target_probe(examination: Examination) -> Verdict | None:
    return _probe(examination, "target")


def draft_probe(examination: Examination) -> Verdict | None:
    return _probe(examination, "draft")


def joint_probe(examination: Examination) -> Verdict | None:
    return _probe(examination, "joint")


def _probe(examination: Examination, role: ProbeRole) -> Verdict | None:
    sources = examination.sources
    if sources is None:
        return None
    path = sources.probes.get(role)
    if path is None:
        return _missing(role) if role in _default_probes() and sources.draft is not None else None
    answer = examination.probe_answers[role]
    read = [one for one in ROLES if role in (one, "joint")]
    if not answer.ok:
        return fail(f"{answer.error}", "use the probe that was made for this model, or a policy without probes")
    facts = answer.value
    said = f"made for {facts['made_for']}, layer {facts['layer']}; {facts['calibrated']} calibrated thresholds"
    known = {one: model for one in read if (model := examination.facts(one)) is not None}
    if len(known) < len(read):
        return warn(f"{said}; not compared with the model, which could not be read", "first mend what is above")
    for one, model in known.items():
        if model["states"] is not None:
            return fail(f"{said}; it reads the {one}: {model['states']}", "use a policy without probes")
    if facts["warnings"]:
        return warn(
            "; ".join(facts["warnings"]),
            "pull the file that it was trained on, or train one for this file (semspec-local probe collect)",
        )
    return ok(said)


def _default_probes() -> list[str]:
    needs = POLICIES[RunConfig().policy].needs
    return [role for role in PROBE_ROLES if f"{role}_semantic_prob" in needs]


def _missing(role: ProbeRole) -> Verdict:
    return warn(
        f"there is none, and the default policy {RunConfig().policy} needs one",
        f"use a policy without probes, such as --policy loglik-ratio, or give --{role}-probe",
    )
