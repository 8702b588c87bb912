"""What a run looks like: steps coloured by who wrote them, and one line of statistics."""

from __future__ import annotations

import re

import click

from ..result import RunResult
from ..trace import StepRecord

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

# Accepted drafts are the point of the exercise, so they stand out.
_COLOURS = {"priming": "blue", "draft": "green", "target": "yellow", "forced": "magenta"}


def kind_of(record: StepRecord) -> str:
    """`priming`, `draft` (accepted), `target` (after a rejection, or alone) or `forced`."""
    return "priming" if record.reason == "priming" else record.origin


def legend() -> str:
    words = (("priming", "target, first"), ("draft", "draft, accepted"), ("target", "target, after a rejection"))
    return "Steps by " + "   ".join(click.style(text, fg=_COLOURS[kind]) for kind, text in words)


def styled(record: StepRecord, plain: bool) -> str:
    """The text of a committed step; on a terminal coloured, and without control characters that could command it."""
    return record.text if plain else click.style(harmless(record.text), fg=_COLOURS[kind_of(record)])


def harmless(text: str) -> str:
    """Control characters other than line ends and tabs become the replacement character."""
    return _CONTROLS.sub("\ufffd", text)


def rejected(record: StepRecord) -> str:
    """A rejected candidate, for standard error."""
    text = harmless(record.text.strip()).replace("\n", "\n  | ") or "(nothing: the draft wanted to stop)"
    return click.style(f"  | rejected ({_verdict(record)}):\n  | {text}", fg="red", dim=True) + "\n"


def described(record: StepRecord) -> str:
    """One line about a step: who, what was decided, and the numbers behind it."""
    n_tokens = record.n_target_tokens if record.n_target_tokens is not None else record.n_draft_tokens
    seconds = record.propose_s + record.score_s + record.probe_s + record.write_s + record.read_s
    state = "committed" if record.committed else "rejected"
    return f"[step {record.step_index} {record.origin} {state} {_verdict(record)} {n_tokens} tokens {seconds:.2f} s]"


def _verdict(record: StepRecord) -> str:
    parts: list[str] = ["in place of the rejected one" if record.reason == "rejected" else record.reason]
    if record.draft_semantic_prob is not None and record.target_semantic_prob is not None:
        parts.append(f"draft {record.draft_semantic_prob:.2f} target {record.target_semantic_prob:.2f}")
    if record.joint_semantic_prob is not None:
        parts.append(f"joint {record.joint_semantic_prob:.2f}")
    if record.score is not None and record.threshold is not None:
        parts.append(f"score {record.score:.2f} threshold {record.threshold:g}")
    return ", ".join(parts)


def statistics(result: RunResult, c_t_alone: float | None = None) -> str:
    """The one line at the end; `c_t_alone` are the target's seconds per token alone, where they were measured."""
    stats = result.stats
    parts = [f"{stats['n_steps']} step{'' if stats['n_steps'] == 1 else 's'}"]
    if stats["speculated"]:
        accepted, proposed = stats["n_accepted_steps"], stats["n_proposed_steps"]
        parts.append(f"{accepted} of {proposed} drafted steps accepted ({stats['step_acceptance_rate']:.0%})")
    else:
        parts.append("no drafted step was verified" if stats["propose_s"] else "nothing was drafted")
    forced = f", {stats['n_tokens_forced']} forced" if stats["n_tokens_forced"] else ""
    written = f"{stats['n_tokens_by_draft']} by the draft, {stats['n_tokens_by_target']} by the target"
    parts.append(f"tokens: {written}{forced}")
    if stats["n_guesses"]:
        parts.append(f"{stats['n_guesses_kept']} of {stats['n_guesses']} guessed tokens kept")
    tps = stats["decode_tps"]
    parts.append(f"{stats['wall_s']:.1f} s" + (f", {tps:.1f} tokens/s" if tps is not None else ""))
    if tps is not None and c_t_alone is not None:
        parts.append(f"{tps * c_t_alone:.2f} times the target's speed alone, as measured")
    ranges = [(role, stats[f"{role}_semantic_prob_range"]) for role in ("draft", "target", "joint")]
    known = [f"{role} {low:.2f}-{high:.2f}" for role, (low, high) in ((r, v) for r, v in ranges if v is not None)]
    if known:
        parts.append("semantic probability: " + ", ".join(known))
    parts.append(f"ended by {result.stop_reason}")
    parts.append(f"seed {result.seed}")
    return "; ".join(parts)


def remarks(result: RunResult) -> list[str]:
    """What a person should hear about a run at its end; what was said when its probes were loaded is not repeated."""
    return [remark["text"] for remark in result.stats["remarks"] if remark["kind"] != "probe_mismatch"]
