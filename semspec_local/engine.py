"""The speculation loop: draft a step, verify it, commit it or let the target write (arXiv 2602.03708).

Knows models and probes only through `protocols`; knows nothing of files, chat templates or the command line.
After every record it yields, the tokens of both models are exactly the prompt and the committed tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .bridge import Bridge
from .candidate import Candidate, kept_part, shortened, verdict_of
from .config import MAX_SEED, THINK_CLOSE, RunConfig, check_seed
from .errors import SemspecError
from .features import needs_of, step_features
from .interrupts import HeldInterrupt
from .metrics import Counters
from .policy import Decision, Policy, Reason, StepScores
from .prefix import Prefix, Side
from .protocols import Guesser, JointProbe, ModelStep, StepModel, StepProbe
from .rating import Rater
from .roles import ROLES, Role
from .steps import StepReader, carry_for
from .trace import Origin, StepRecord, StopReason
from .waiting import WaitingRecords

Pays = Callable[[Counters], bool]
"""Says, of what was counted so far, whether drafting is worth its time; the first no is the last word in a run."""

Added = dict[Role, list[int]]
"""The token ids of one step, in each model that holds it."""


@dataclass(frozen=True)
class Prompts:
    """The prompt as each model reads it; `thinking` says that it ends inside an opened thinking block.

    `text` is the target's prompt as text, for the record; `n_chars_cut` of the question's characters are not in it.
    """

    target: Sequence[int]
    draft: Sequence[int] = ()
    thinking: bool = False
    text: str = ""
    n_chars_cut: int = 0


class Speculation:
    """One run. Iterate over it once for its records; then `stop_reason`, `text` and `counters` say how it went."""

    def __init__(
        self,
        prompts: Prompts,
        *,
        target: StepModel,
        draft: StepModel | None,
        policy: Policy,
        config: RunConfig,
        seed: int,
        probes: Mapping[Role, StepProbe] | None = None,
        joint_probe: JointProbe | None = None,
        pays: Pays | None = None,
        guesser: Guesser | None = None,
        guesses_pay: Pays | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.prompts, self.policy, self.config, self.seed = prompts, policy, config, check_seed(seed)
        self._clock = clock
        self.target = Side(target, prompts.target)
        self.counters = Counters(n_prompt_tokens=len(prompts.target))
        self._pays, self.gave_up = pays, policy.drafts and pays is not None and not pays(self.counters)
        self._drafts = policy.drafts and draft is not None and not self.gave_up
        self.guesser, self._guesses_pay = guesser, guesses_pay
        self.draft = Side(draft, prompts.draft) if draft is not None and (self._drafts or guesser) else None
        if self.draft is not None:
            self.draft.only_guesses = not self._drafts
        self.bridge = Bridge(self.draft.model.vocabulary, target.vocabulary) if self.draft is not None else None
        self.prefix = Prefix(opened=prompts.thinking)
        self.stop_reason: StopReason | None = None
        self._probes, self._joint_probe = dict(probes or {}), joint_probe
        self._rater = Rater(target.vocabulary) if "target_rating" in policy.needs else None
        self.n_guess = guesser.n if guesser is not None else 0
        self._needs = policy.needs | needs_of(joint_probe.features if joint_probe is not None else ())
        *self._seeds, policy_seed, guess_seed = np.random.SeedSequence(seed).generate_state(4).tolist()
        self._rng, self._guess_rng = np.random.default_rng(policy_seed), np.random.default_rng(guess_seed)
        self._n_records = self._n_tokens = self._n_think_tokens = 0
        self._waiting = WaitingRecords(config.stop)
        self._start: float | None = None

    def __iter__(self) -> Generator[StepRecord, None, None]:
        if self._start is not None:
            raise RuntimeError("a run can be iterated once; make another one for another run")
        self._start = self._clock()
        try:
            self.prefill()
            while self.stop_reason is None:
                reason = self.unverified()
                if reason is None:
                    candidate = self.propose()
                    decision = self.verify(candidate)
                    if decision.accepted:
                        self.commit(candidate, decision)
                    else:
                        self.reject(candidate, decision)
                        reason = decision.reason if decision.reason == "forced_target" else "rejected"
                    yield from self._release()
                if reason == "think_budget":
                    self.close_thinking()
                elif reason is not None:
                    self.write(reason)
                yield from self._release()
            yield from self.drain()
        except KeyboardInterrupt:
            self.stop_reason = "interrupted"
            raise
        except SemspecError:
            self.stop_reason = "error"
            raise
        finally:
            self.counters.wall_s = self._clock() - self._start
            self.rollback()

    def drain(self) -> Iterator[StepRecord]:
        """The records not handed out yet, for a run that was broken off; the first may have been, just before."""
        while self._waiting:
            yield self._waiting.first
            with HeldInterrupt() as held:
                self.counters.add(self._waiting.pop())
            held.check()

    @property
    def text(self) -> str:
        """The committed text, without the prompt."""
        return self.prefix.text

    # -- the verbs of the loop ----------------------------------------------------------------------

    def prefill(self) -> None:
        """Both models read the prompt and start their random numbers anew."""
        start = self._clock()
        for side, seed in zip(self.sides(), self._seeds):
            side.model.reseed(seed % (MAX_SEED + 1), self.config.sampling)
            side.model.read_states(self._drafts)
            n_read = side.model.prefill(side.prompt)
            if side is self.target:
                self.counters.n_prompt_tokens_read = n_read
        self.counters.prefill_s = self._clock() - start

    def unverified(self) -> Reason | None:
        """Why the next step is not to be drafted and verified; None when it is."""
        if self.prefix.thinking and self._think_room == 0:
            return "think_budget"
        if self.prefix.answering:
            return "answer_phase"
        if self._gives_up():
            return "no_gain"
        if not self._drafts:
            return "no_draft"
        return "priming" if self.prefix.n_steps < self.config.n_prime else None

    def propose(self) -> Candidate:
        """The draft writes a candidate step."""
        draft = self._draft
        reader = self._reader([draft] if self.bridge and not self.bridge.identical else self.sides())
        start = self._clock()
        step = draft.model.propose(reader, logprobs="draft_logprobs" in self._needs)
        seconds = self._clock() - start
        kept, text = kept_part(step, reader, draft)
        if kept < len(step.tokens):
            step = shortened(step, kept)
        return Candidate(step, text, fits=bool(step.tokens), times={"propose_s": seconds})

    def verify(self, candidate: Candidate) -> Decision:
        """The target reads the candidate in one pass, probes or its own rating score it, the policy decides."""
        assert self.bridge is not None
        target = self.target
        tokens = self.bridge.carry(candidate.drafted.tokens, candidate.text, target.model.vocabulary)
        n_asked = len(self._rater.prompt) if self._rater is not None else 0
        # An empty step, or one that is too long in the target's tokens: only the target can end the run exactly.
        if not candidate.fits or not 0 < len(tokens) <= min(*self._limits([target]), target.room - n_asked):
            return Decision(False, "forced_target")
        with_logprobs = bool(self._needs & {"target_logprobs", "target_in_top2"})
        start = self._clock()
        candidate.read = target.model.score(tokens, logprobs=with_logprobs)
        candidate.times["score_s"] = (scored := self._clock()) - start
        candidate.scores = self._scores(candidate.drafted, candidate.read)
        candidate.times["probe_s"] = self._clock() - scored
        return self.policy.decide(candidate.scores, self._rng)

    def commit(self, candidate: Candidate, decision: Decision) -> None:
        """The candidate becomes part of the prefix; both caches hold it already."""
        assert candidate.read is not None and candidate.drafted.end is not None
        added: Added = {"draft": candidate.drafted.tokens, "target": candidate.read.tokens}
        verdict = verdict_of(candidate, decision)
        end = candidate.drafted.end
        record = self._record("draft", decision.reason, candidate.text, end, added, committed=True, **verdict)
        self._append(record, candidate.text, added)

    def reject(self, candidate: Candidate, decision: Decision) -> None:
        """Both models forget the candidate."""
        self.rollback()
        added: Added = {"draft": candidate.drafted.tokens}
        if candidate.read is not None:
            added["target"] = candidate.read.tokens
        end = candidate.drafted.end or "eos"
        verdict = verdict_of(candidate, decision)
        self._waiting.add(self._record("draft", decision.reason, candidate.text, end, added, **verdict))

    def write(self, reason: Reason) -> None:
        """The target (or, in the answer, whom the configuration names) writes a step; the other model reads it."""
        role: Role = "target"
        if reason == "answer_phase":
            role = self._answer_role()
        writer = self._draft if role == "draft" else self.target
        reader = self._reader([side for side in self.sides() if side.active])
        start = self._clock()
        guesser = self._usable_guesser() if role == "target" else None
        step = guesser.write(reader, self._guess_rng) if guesser is not None else writer.model.propose(reader)
        written = self._clock()
        kept, text = kept_part(step, reader, writer)
        assert reader.end is not None
        if reader.end.n_bytes < 0:  # a stop string that began in an earlier step
            self._cut(-reader.end.n_bytes)
        if not kept:
            self.rollback()
            self._end(reader.end.kind)
            return
        added: Added = {role: step.tokens[:kept], **self._read_along(role, step.tokens[:kept], text)}
        times = {"write_s": written - start, "read_s": self._clock() - written}
        counts = {"n_reused_tokens": min(kept, step.n_reused)}
        counts |= {"n_guesses": step.n_guesses, "n_guesses_kept": step.n_guesses_kept}  # of all that was written
        record = self._record(role, reason, text, reader.end.kind, added, committed=True, **counts, **times)
        self._append(record, text, added)

    def close_thinking(self) -> None:
        """The thinking budget is used up: the closing tag is written for the model."""
        start = self._clock()
        text = f"\n{THINK_CLOSE}\n\n"
        added = {role: side.model.vocabulary.encode(text, control=True) for role, side in self._roles()}
        if len(added["target"]) > self._budget:
            self.stop_reason = "budget"
            return
        added = {role: added[role] for role, side in self._roles() if self._fits(side, len(added[role]))}
        if self.stop_reason is not None:
            return
        for role, side in self._roles():
            side.model.score(added[role])
        times = {"read_s": self._clock() - start}
        record = self._record("forced", "think_budget", text.encode(), "forced", added, committed=True, **times)
        self._append(record, text.encode(), added)

    def rollback(self) -> None:
        """Both models forget what is not committed, also when one of them fails."""
        with ExitStack() as stack:
            for side in self.sides():
                stack.callback(side.rollback)

    # -- helpers ------------------------------------------------------------------------------------

    @property
    def _draft(self) -> Side:
        assert self.draft is not None
        return self.draft

    def sides(self) -> list[Side]:
        """The target, and the draft where there is one."""
        return [self.target] + ([self.draft] if self.draft is not None else [])

    def _roles(self) -> list[tuple[Role, Side]]:
        """The sides that take part in the next step, by role."""
        return [(role, side) for role, side in zip(ROLES, self.sides()) if side.active]

    def _answer_role(self) -> Role:
        """Who writes the answer; the other model is not needed any more, and reads no further."""
        drafts = self.draft is not None and self.draft.limits
        role: Role = "draft" if self.config.answer_by == "draft" and drafts else "target"
        for other, side in self._roles():
            side.only_guesses = other == "draft" and role == "target"
            side.active = other == role or (side.only_guesses and self.guesser is not None)
            side.model.read_states(False)
        return role

    def _gives_up(self) -> bool:
        """Is drafting not worth its time? Then the draft reads no further."""
        if self._drafts and not self.gave_up and self._pays is not None and not self._pays(self.counters):
            self.gave_up, self._draft.only_guesses = True, True
            self._draft.active = self.guesser is not None
            for side in self.sides():
                side.model.read_states(False)
        return self.gave_up

    def _usable_guesser(self) -> Guesser | None:
        """Who guesses what the target writes next; for good nobody, once that has not paid."""
        if self.draft is None or not self.draft.active:
            return None
        if self.guesser is not None and self._guesses_pay is not None and not self._guesses_pay(self.counters):
            self.guesser, self.draft.active = None, not self.draft.only_guesses
        return self.guesser

    @property
    def _budget(self) -> int:
        """Tokens that may still be committed."""
        return self.config.max_tokens - self._n_tokens

    @property
    def _think_room(self) -> int | None:
        budget = self.config.think_budget
        return None if budget is None else max(0, budget - self._n_think_tokens)

    @property
    def _may_think(self) -> bool:
        """Is the next step part of the thinking? A first step may open it."""
        return self.prefix.thinking or not self.prefix.data

    def _limits(self, sides: Sequence[Side]) -> list[int]:
        """How many tokens the next step may have: in the run, in the contexts, in the thinking."""
        limits = [self._budget, *(side.room for side in sides if side.limits)]
        if self._may_think and self._think_room is not None:
            limits.append(max(1, self._think_room))
        return limits

    def _reader(self, sides: Sequence[Side]) -> StepReader:
        """A reader for the next step, with its limit in tokens."""
        n_tokens = max(1, min(self.config.max_step_tokens, *self._limits(sides)))
        stops, close_tag = self.config.stop, THINK_CLOSE if self._may_think else None
        carry = carry_for(stops, close_tag, self.prefix.data)
        return StepReader(max_tokens=n_tokens, stops=stops, close_tag=close_tag, carry=carry)

    def _scores(self, drafted: ModelStep, read: ModelStep) -> StepScores:
        """What is known of a candidate that both models hold."""
        scores = StepScores(
            n_tokens=len(read.tokens),
            draft_semantic_prob=self._semantic_prob("draft", drafted),
            target_semantic_prob=self._semantic_prob("target", read),
            draft_logprobs=drafted.logprobs,
            target_logprobs=read.logprobs,
            target_in_top2=read.in_top2,
            target_rating=self._rater.rate(self.target.model) if self._rater is not None else None,
        )
        probe = self._joint_probe
        if probe is None:
            return scores
        features = step_features(probe.features, scores, self.prefix.n_steps)
        target, draft = read.states[probe.taps["target"]], drafted.states[probe.taps["draft"]]
        return replace(scores, joint_semantic_prob=probe.semantic_prob(target, draft, features))

    def _semantic_prob(self, role: Role, step: ModelStep) -> float | None:
        probe = self._probes.get(role)
        return probe.semantic_prob(step.states[probe.tap]) if probe is not None else None

    def _read_along(self, writer: Role, tokens: Sequence[int], text: bytes) -> Added:
        """The other active model reads what one has written."""
        added: Added = {}
        for role, side in self._roles():
            if role != writer:
                assert self.bridge is not None
                carried = self.bridge.carry(tokens, text, side.model.vocabulary)
                if self._fits(side, len(carried)) and carried:
                    # Of what it guessed it holds the first tokens, or even more than are kept.
                    if unread := carried[side.model.n_past - side.n_committed :]:
                        side.model.score(unread)
                    added[role] = carried
        return added

    def _fits(self, side: Side, n_tokens: int) -> bool:
        """Can a side read so many tokens more? If not it reads no further, and one that limits the run ends it."""
        if n_tokens > side.room:
            if side.limits:
                self.stop_reason = "context_full"
            side.active = False
        return side.active

    def _record(self, origin: Origin, reason: Reason, text: bytes, end: str, added: Added, **rest: Any) -> StepRecord:
        self._n_records += 1
        return StepRecord(
            index=self._n_records - 1,
            step_index=self.prefix.n_steps,
            origin=origin,
            text=text.decode("utf-8", errors="replace"),
            n_target_tokens=len(added["target"]) if "target" in added else None,
            n_draft_tokens=len(added["draft"]) if "draft" in added else None,
            reason=reason,
            end=end,
            **{"committed": False, **rest},
        )

    def _append(self, record: StepRecord, text: bytes, added: Added) -> None:
        """Make a step part of the prefix, whole or not at all, then see whether the run is over."""
        with HeldInterrupt() as held:
            self._extend(record, text, added)
        held.check()
        self.rollback()  # what a stop string cut off the last token's end
        self._end(record.end)

    def _extend(self, record: StepRecord, text: bytes, added: Added) -> None:
        for role, tokens in added.items():
            side = self._draft if role == "draft" else self.target
            side.committed += tokens
        n_tokens = record.n_target_tokens if record.n_target_tokens is not None else record.n_draft_tokens or 0
        self._n_tokens += n_tokens
        if self._may_think:
            self._n_think_tokens += n_tokens
        self.prefix.data += text
        self.prefix.n_steps += 1
        self._waiting.add(record)
        if self.counters.ttft_s is None and self._start is not None:
            self.counters.ttft_s = self._clock() - self._start

    def _end(self, kind: str) -> None:
        """Set the stop reason when the run is over; the model's own end comes before any limit."""
        if kind in ("eos", "stop"):
            self.stop_reason = "eos" if kind == "eos" else "stop"
        elif self.stop_reason is not None:
            return
        elif self._budget <= 0:
            self.stop_reason = "budget"
        elif min(side.room for side in self.sides() if side.limits) <= 0:
            self.stop_reason = "context_full"

    def _release(self) -> Iterator[StepRecord]:
        """Hand out what is settled. A record is taken off when the consumer is back for more: no Ctrl-C loses it."""
        if self._waiting.settled(self.prefix.data):
            yield from self.drain()

    def _cut(self, n_bytes: int) -> None:
        """A stop string began this many bytes before the end of the committed text: take them and their tokens off."""
        self.prefix.data = self.prefix.data[: len(self.prefix.data) - n_bytes]
        dropped = {role: side.cut(len(self.prefix.data)) for role, side in zip(ROLES, self.sides())}
        self.prefix.n_steps -= self._waiting.cut(n_bytes, dropped)
