"""The made world: multi-step arithmetic word problems whose every step has a meaning that is known exactly.

A problem is a story, the steps that solve it, and which step needs which. The same generator teaches the embedded pair
`tiny`, makes its test problems, and says of any step whether it is right. All numbers are 2 to 60, and no two of a
problem are equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...config import DEFAULT_BOUNDARY
from ..meaning.cluster import greedy_clusters
from .stories import KINDS, NAMES, Kind
from .text import HANDS, Meaning, Operation, compute, meaning_of, word_step

MIN_VALUE, MAX_VALUE = 2, 60
MIN_STEPS, MAX_STEPS = 2, 8
_MAX_CHAIN = 4  # steps of one owner
OPERATION_MIX: tuple[Operation, ...] = ("add",) * 3 + ("subtract",) * 3 + ("multiply",) * 2 + ("divide",) * 2
_STAY = 0.8  # how often a solution goes on in the order of the story where it has a choice


@dataclass(frozen=True)
class PlannedStep:
    """A step of a solution. `numbers` are its operands in the order of the story, `needs` the steps before it."""

    meaning: Meaning
    numbers: tuple[int, ...]
    needs: frozenset[int]
    who: str


@dataclass(frozen=True)
class Problem:
    """A question, the steps that answer it (the last one states the answer), and the answer."""

    question: str
    kind: str
    items: str
    steps: tuple[PlannedStep, ...]
    answer: int

    @property
    def n_steps(self) -> int:
        """Steps of arithmetic; the one that states the answer is not counted."""
        return len(self.steps) - 1

    def next_steps(self, done: Sequence[Meaning]) -> list[int]:
        """The steps that may come next after steps of these meanings; wrong or idle ones among them change nothing."""
        open_steps = dict(enumerate(self.steps))
        for meaning in done:
            taken = next(
                (i for i, step in open_steps.items() if step.meaning == meaning and not step.needs & open_steps.keys()),
                None,
            )
            if taken is not None:
                del open_steps[taken]
        return [i for i, step in open_steps.items() if not step.needs & open_steps.keys()]

    def is_right(self, meaning: Meaning | None, done: Sequence[Meaning]) -> bool:
        """May a step of this meaning come next?"""
        return meaning in {self.steps[i].meaning for i in self.next_steps(done)}


@dataclass(frozen=True)
class WrittenStep:
    """One step as text, blank line included. `own`: by the hand that wrote the solution, and right.

    `right` is what every step is but a slip.
    """

    text: str
    meaning: Meaning
    own: bool = True
    right: bool = True


class WorldClusterer:
    """Steps mean the same when the parser reads the same meaning in them; a step without one only equals itself."""

    name = "world (exact: same operation, operands and result)"

    def cluster(self, texts: Sequence[str], context: str = "") -> list[int]:
        del context
        meanings = [meaning_of(text) for text in texts]

        def same(first: int, other: int) -> bool:
            if meanings[first] is None and meanings[other] is None:
                return texts[first].split() == texts[other].split()
            return meanings[first] == meanings[other]

        return greedy_clusters(len(texts), same)


# -- problems -------------------------------------------------------------------------------------------


class _Stuck(Exception):
    """The numbers drawn so far leave no room for what has to come."""


@dataclass
class _Draft:
    """A problem in the making. `last` is the step that the owner's amount comes from, None when it was given."""

    rng: np.random.Generator
    kind: Kind
    items: str
    story: list[str] = field(default_factory=list)
    steps: list[PlannedStep] = field(default_factory=list)
    used: set[int] = field(default_factory=set)

    def choose(self, options: Sequence[str]) -> str:
        return options[int(self.rng.integers(len(options)))]

    def number(self, low: int, high: int) -> int:
        """A number that neither the story nor a result has yet: the same one twice would leave open which is meant."""
        return self.one_of(range(low, high + 1))

    def one_of(self, values: Sequence[int]) -> int:
        new = [value for value in values if value not in self.used]
        if not new:
            raise _Stuck
        chosen = new[int(self.rng.integers(len(new)))]
        self.used.add(chosen)
        return chosen

    def tell(self, options: Sequence[str], **words: object) -> None:
        text = self.choose(options).format(i=self.items, **words)
        self.story.append(text[0].upper() + text[1:])

    def add_step(self, operation: Operation, a: int, b: int, needs: Sequence[int | None], who: str) -> int:
        result = compute(operation, a, b)
        if not MIN_VALUE <= result <= MAX_VALUE or result in self.used:
            raise _Stuck
        self.used.add(result)
        before = frozenset(step for step in needs if step is not None)
        self.steps.append(PlannedStep(Meaning(operation, (a, b), result), (a, b), before, who))
        return len(self.steps) - 1

    def operand(self, operation: Operation, value: int) -> int:
        """A second number for `value`, so that the result is in the world's range."""
        if operation == "add":
            return self.number(MIN_VALUE, MAX_VALUE - value)
        if operation == "subtract":
            return self.number(MIN_VALUE, value - MIN_VALUE)
        if operation == "multiply":
            return self.number(2, min(9, MAX_VALUE // value))
        return self.one_of([k for k in range(2, 10) if value % k == 0 and value // k >= MIN_VALUE])

    def operation(self) -> Operation:
        return OPERATION_MIX[int(self.rng.integers(len(OPERATION_MIX)))]


@dataclass
class _Owner:
    name: str
    value: int
    last: int | None


def make_problem(rng: np.random.Generator, n_steps: int | None = None) -> Problem:
    """A problem with `n_steps` steps of arithmetic (default: 2 to 8, all as likely)."""
    n_steps = int(rng.integers(MIN_STEPS, MAX_STEPS + 1)) if n_steps is None else n_steps
    if not MIN_STEPS <= n_steps <= MAX_STEPS:
        raise ValueError(f"n_steps is {n_steps}; wanted {MIN_STEPS} to {MAX_STEPS}")
    while True:
        try:
            return _try_problem(rng, n_steps)
        except _Stuck:
            continue


def problems(seed: int, n: int) -> Iterator[Problem]:
    """`n` problems, each from its own seed: number k of a seed is the same however many are asked for."""
    for number in range(n):
        yield make_problem(np.random.default_rng([seed, number]))


def _try_problem(rng: np.random.Generator, n_steps: int) -> Problem:
    kind = KINDS[int(rng.integers(len(KINDS)))]
    draft = _Draft(rng, kind, kind.items[int(rng.integers(len(kind.items)))])
    fewest = -(-(n_steps + 1) // (_MAX_CHAIN + 1))  # owners that are needed
    n_owners = int(rng.integers(fewest, min(3, 1 + n_steps // 2) + 1))
    parts = _share_out(rng, n_steps - (n_owners - 1), n_owners)
    names = rng.permutation(len(kind.owners or NAMES))[:n_owners]
    owners: list[_Owner] = []
    for part, name in zip(parts, names):
        owners.append(_tell_owner(draft, (kind.owners or NAMES)[int(name)], part, owners[-1] if owners else None))
    question, answer = _ask(draft, owners)
    for _ in range((0, 0, 0, 0, 1, 1, 1, 2)[int(rng.integers(8))]):
        idle = draft.choose(kind.idle).format(n=owners[0].name, x=draft.number(MIN_VALUE, MAX_VALUE))
        draft.story.insert(int(rng.integers(len(draft.story) + 1)), idle[0].upper() + idle[1:])
    everything = frozenset(range(len(draft.steps)))
    last = PlannedStep(Meaning("answer", (), answer), (), everything, "")
    return Problem(" ".join([*draft.story, question]), kind.name, draft.items, (*draft.steps, last), answer)


def _share_out(rng: np.random.Generator, n: int, n_owners: int) -> list[int]:
    parts = rng.multinomial(n, [1 / n_owners] * n_owners).tolist()
    if max(parts) > _MAX_CHAIN:
        raise _Stuck
    return [int(part) for part in parts]


def _tell_owner(draft: _Draft, name: str, n_steps: int, other: _Owner | None) -> _Owner:
    kind = draft.kind
    if n_steps and other is not None and draft.rng.random() < 0.4:
        owner = _compare(draft, name, other)
    elif n_steps and draft.rng.random() < 0.4:
        bags, each = draft.number(2, 9), draft.number(2, 10)
        draft.tell(kind.packs, n=name, a=bags, k=each)
        step = draft.add_step("multiply", bags, each, [], name)
        owner = _Owner(name, draft.steps[step].meaning.result, step)
    else:
        owner = _Owner(name, draft.number(MIN_VALUE, 40), None)
        draft.tell(kind.has, n=name, a=owner.value)
        n_steps += 1
    for _ in range(n_steps - 1):
        operation = draft.operation()
        b = draft.operand(operation, owner.value)
        draft.tell(kind.events[operation], n=name, b=b)
        owner.last = draft.add_step(operation, owner.value, b, [owner.last], name)
        owner.value = draft.steps[owner.last].meaning.result
    return owner


def _compare(draft: _Draft, name: str, other: _Owner) -> _Owner:
    operation = draft.operation()
    b = draft.operand(operation, other.value)
    draft.tell(draft.kind.comparisons[operation], n=name, m=other.name, b=b)
    step = draft.add_step(operation, other.value, b, [other.last], name)
    return _Owner(name, draft.steps[step].meaning.result, step)


def _ask(draft: _Draft, owners: Sequence[_Owner]) -> tuple[str, int]:
    first, *others = owners
    words = {"i": draft.items, "n": first.name}
    if not others:
        return draft.kind.question.format(**words), first.value
    if len(others) == 1 and abs(first.value - others[0].value) >= MIN_VALUE and draft.rng.random() < 0.4:
        more, less = sorted(owners, key=lambda owner: -owner.value)
        draft.add_step("subtract", more.value, less.value, [more.last, less.last], "the two")
        question = draft.kind.difference.format(i=draft.items, n=more.name, m=less.name)
        return question, draft.steps[-1].meaning.result
    total = first
    for owner in others:
        step = draft.add_step("add", total.value, owner.value, [total.last, owner.last], "all of them")
        total = _Owner("", draft.steps[step].meaning.result, step)
    return draft.kind.total.format(**words), total.value


# -- solutions ------------------------------------------------------------------------------------------


def solve(
    problem: Problem,
    rng: np.random.Generator,
    *,
    hand: str,
    foreign_rate: float = 0.0,
    slip_rate: float = 0.0,
) -> list[WrittenStep]:
    """A solution in an order that the problem allows.

    Each step of arithmetic is written by the other hand at `foreign_rate`; such a step is a slip, wrong in some
    number, at `slip_rate`, and then the next step corrects it.
    """
    done: list[Meaning] = []
    written: list[WrittenStep] = []
    corrects: int | None = None
    while choices := problem.next_steps(done):
        chosen = choices[0] if rng.random() < _STAY else choices[int(rng.integers(len(choices)))]
        chosen = chosen if corrects is None else corrects
        step = problem.steps[chosen]
        is_answer = step.meaning.operation == "answer"
        own = corrects is not None or is_answer or rng.random() >= foreign_rate
        meaning, numbers = step.meaning, step.numbers
        if not own and rng.random() < slip_rate:
            meaning, numbers = _slip(problem, step, done, rng)
        text = word_step(
            meaning,
            numbers,
            rng,
            hand=hand if own else HANDS[hand == HANDS[0]],
            who=step.who,
            items=problem.items,
            correction=corrects is not None,
        )
        corrects = None if meaning == step.meaning else chosen
        done.append(meaning)
        end = "" if is_answer else DEFAULT_BOUNDARY
        written.append(WrittenStep(text + end, meaning, own, right=meaning == step.meaning))
    return written


def _slip(
    problem: Problem, step: PlannedStep, done: Sequence[Meaning], rng: np.random.Generator
) -> tuple[Meaning, tuple[int, ...]]:
    """A wrong version of a step: a wrong result, a number from elsewhere in the story, or another operation."""
    a, b = step.numbers
    others = [number for other in problem.steps for number in other.numbers if number not in (a, b)]
    while True:
        operation, numbers, how = step.meaning.operation, (a, b), rng.random()
        if how < 0.55:
            result = step.meaning.result + int(rng.choice([-20, -10, -2, -1, 1, 2, 10, 20]))
        else:
            if how < 0.85 and others:
                numbers = (a, int(rng.choice(others))) if rng.random() < 0.5 else (int(rng.choice(others)), b)
            elif how >= 0.85:
                names: tuple[Operation, ...] = ("add", "subtract", "multiply", "divide")
                operation = names[int(rng.integers(4))]
            if operation == "divide" and numbers[0] % numbers[1]:
                continue
            result = compute(operation, *numbers)
        meaning = Meaning(operation, numbers, result)
        if MIN_VALUE <= result <= MAX_VALUE and not problem.is_right(meaning, done):
            return meaning, numbers
