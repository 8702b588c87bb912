"""The made world: problems can be solved in every order they allow, and every step reads back to what it says."""

from __future__ import annotations

import operator
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semspec_local.lab.world import PlannedStep, Problem, WorldClusterer, WrittenStep, make_problem, problems, solve
from semspec_local.lab.world import text as world_text
from semspec_local.lab.world.stories import IDLE, IDLE_OF_PEOPLE, KINDS, NAMES
from semspec_local.lab.world.text import BRIEF, CORES, CORRECTIONS, HANDS, OPERATIONS, Meaning, Operation, meaning_of
from semspec_local.steps import split_steps

ARITHMETIC = {"add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "divide": Fraction}
SEEDS = st.integers(0, 2**32)
PROBLEMS = st.builds(lambda seed, n: make_problem(np.random.default_rng(seed), n), SEEDS, st.integers(2, 8))
RATES = st.sampled_from([0.0, 0.3, 1.0])


@cache
def sample() -> tuple[Problem, ...]:
    return tuple(problems(0, 300))


def numbers_of(text: str) -> list[int]:
    return [int(number) for number in re.findall("[0-9]+", text)]


def walk(problem: Problem, seed: int) -> Iterator[tuple[Meaning, list[Meaning]]]:
    """The steps of a solution in a random order, each with those before it."""
    rng = np.random.default_rng(seed)
    done: list[Meaning] = []
    while choices := problem.next_steps(done):
        meaning = problem.steps[choices[rng.integers(len(choices))]].meaning
        yield meaning, done.copy()
        done.append(meaning)


def test_a_problem_depends_on_its_seed_and_number_only() -> None:
    many = list(problems(3, 20))
    assert list(problems(3, 5)) == many[:5]
    assert make_problem(np.random.default_rng([3, 19])) == many[19]
    assert len({problem.question for problem in (*many, *problems(4, 20))}) == 40


@given(SEEDS, st.integers(-3, 12))
def test_a_problem_has_the_number_of_steps_asked_for(seed: int, n_steps: int) -> None:
    if 2 <= n_steps <= 8:
        assert make_problem(np.random.default_rng(seed), n_steps).n_steps == n_steps
    else:
        with pytest.raises(ValueError, match=f"n_steps is {n_steps}; wanted 2 to 8"):
            make_problem(np.random.default_rng(seed), n_steps)


@given(PROBLEMS)
def test_all_numbers_of_a_problem_are_2_to_60(problem: Problem) -> None:
    said = {number for step in problem.steps for number in (*step.numbers, step.meaning.result)}
    assert all(2 <= number <= 60 for number in {*said, problem.answer, *numbers_of(problem.question)})


@given(PROBLEMS)
def test_no_two_numbers_of_a_problem_are_equal(problem: Problem) -> None:
    """Or a solution would not say which one it means."""
    numbers = [*numbers_of(problem.question), *(step.meaning.result for step in problem.steps[:-1])]
    assert len(set(numbers)) == len(numbers)


@given(PROBLEMS)
def test_steps_compute_from_the_story_and_the_steps_they_need(problem: Problem) -> None:
    told = set(numbers_of(problem.question))
    *steps, answer = problem.steps
    for index, step in enumerate(steps):
        assert step.needs <= set(range(index))
        assert step.meaning == Meaning(step.meaning.operation, step.numbers, step.meaning.result)
        assert ARITHMETIC[step.meaning.operation](*step.numbers) == step.meaning.result
        assert step.meaning.holds
        from_steps = Counter(steps[needed].meaning.result for needed in step.needs)
        assert not from_steps - Counter(step.numbers)
        assert (Counter(step.numbers) - from_steps).keys() <= told
    assert answer.meaning == Meaning("answer", (), problem.answer)
    assert problem.answer == steps[-1].meaning.result
    assert answer.needs == set(range(len(steps)))


@given(PROBLEMS)
def test_every_step_leads_to_the_answer(problem: Problem) -> None:
    needed = {problem.n_steps - 1}
    for index in reversed(range(problem.n_steps)):
        assert index in needed
        needed |= problem.steps[index].needs


@cache
def story_rules(kind_name: str) -> list[tuple[re.Pattern[str], Callable[..., Any]]]:
    """What each sentence of a kind of story does to the amounts owned: the new amount of its {n}."""
    kind = next(kind for kind in KINDS if kind.name == kind_name)
    rules: list[tuple[tuple[str, ...], Callable[..., Any]]] = [
        (kind.has, lambda owned, w: int(w["a"])),
        (kind.packs, lambda owned, w: int(w["a"]) * int(w["k"])),
        ((*IDLE, *IDLE_OF_PEOPLE), lambda owned, w: owned.get(w.get("n"))),
        ((kind.question,), lambda owned, w: owned[w["n"]]),
        ((kind.total,), lambda owned, w: sum(owned.values())),
        ((kind.difference,), lambda owned, w: owned[w["n"]] - owned[w["m"]]),
    ]
    for operation, act in ARITHMETIC.items():
        rules.append((kind.events[operation], lambda owned, w, act=act: act(owned[w["n"]], int(w["b"]))))
        rules.append((kind.comparisons[operation], lambda owned, w, act=act: act(owned[w["m"]], int(w["b"]))))
    fields = {name: f"(?P<{name}>{'|'.join(kind.owners or NAMES)})" for name in "nm"}
    fields |= {name: f"(?P<{name}>[0-9]+)" for name in "abkx"} | {"i": f"(?:{'|'.join(kind.items)})"}
    patterns = [(t.replace("?", "[?]").format(**fields), rule) for templates, rule in rules for t in templates]
    return [(re.compile(pattern, re.IGNORECASE), rule) for pattern, rule in patterns]


def test_who_reads_only_the_story_comes_to_the_answer() -> None:
    for problem in sample():
        owned: dict[str, Any] = {}
        for sentence in re.split("(?<=[.?]) ", problem.question.lower()):
            [(found, rule)] = [(hit, rule) for p, rule in story_rules(problem.kind) if (hit := p.fullmatch(sentence))]
            words = found.groupdict()
            value = rule(owned, words)
            if value is not None and "n" in words:
                owned[words["n"]] = value
        assert value == problem.answer


def test_every_kind_operation_and_length_occurs() -> None:
    assert {problem.kind for problem in sample()} == {kind.name for kind in KINDS}
    assert {problem.n_steps for problem in sample()} == set(range(2, 9))
    assert {step.meaning.operation for problem in sample() for step in problem.steps} == set(OPERATIONS)


def test_some_problems_have_numbers_that_no_step_uses() -> None:
    used = [{number for step in problem.steps for number in step.numbers} for problem in sample()]
    idle = [set(numbers_of(problem.question)) - numbers for problem, numbers in zip(sample(), used)]
    assert 0.2 < np.mean([bool(numbers) for numbers in idle]) < 0.8


@given(PROBLEMS, SEEDS)
def test_every_allowed_order_solves_the_problem_and_only_ends_with_the_answer(problem: Problem, seed: int) -> None:
    meanings = [meaning for meaning, _ in walk(problem, seed)]
    assert Counter(meanings) == Counter(step.meaning for step in problem.steps)
    assert meanings[-1] == Meaning("answer", (), problem.answer)


@given(PROBLEMS, SEEDS, PROBLEMS)
def test_a_wrong_meaning_is_not_right_and_changes_nothing(problem: Problem, seed: int, other: Problem) -> None:
    candidates = {step.meaning for step in (*problem.steps, *other.steps)}
    for _, done in walk(problem, seed):
        choices = problem.next_steps(done)
        right = {problem.steps[index].meaning for index in choices}
        assert {meaning for meaning in candidates if problem.is_right(meaning, done)} == right
        assert not problem.is_right(None, done)
        assert all(problem.next_steps([*done, wrong]) == choices for wrong in candidates - right)


@given(PROBLEMS, SEEDS)
def test_a_meaning_is_right_no_more_often_than_the_plan_has_it(problem: Problem, seed: int) -> None:
    n_planned = Counter(step.meaning for step in problem.steps)
    for meaning, done in walk(problem, seed):
        assert not problem.is_right(meaning, [*done, meaning]) or done.count(meaning) + 1 < n_planned[meaning]


def test_a_meaning_that_is_planned_twice_is_right_twice() -> None:
    twice = Meaning("add", (3, 4), 7)
    steps = (
        PlannedStep(twice, (3, 4), frozenset(), "Anna"),
        PlannedStep(twice, (4, 3), frozenset(), "Ben"),
        PlannedStep(Meaning("add", (7, 7), 14), (7, 7), frozenset({0, 1}), "all of them"),
        PlannedStep(Meaning("answer", (), 14), (), frozenset({0, 1, 2}), ""),
    )
    problem = Problem("", "", "", steps, 14)
    assert [problem.next_steps([twice] * n) for n in range(4)] == [[0, 1], [1], [2], [2]]
    assert [problem.is_right(twice, [twice] * n) for n in range(4)] == [True, True, False, False]


def test_independent_branches_come_in_either_order() -> None:
    starts = [[problem.steps[index].meaning for index in problem.next_steps([])] for problem in sample()]
    for problem, (first, *others) in zip(sample(), starts):
        for other in others:
            assert problem.is_right(other, [first]) and problem.is_right(first, [other])
            assert problem.next_steps([first, other]) == problem.next_steps([other, first])
    assert sum(len(start) >= 2 for start in starts) > 30


def scripted(*draws: float) -> Any:
    """Stands in for a generator: hands out the given random numbers."""
    return SimpleNamespace(random=iter(draws).__next__)


@cache
def draws_for(options: tuple[str, ...], hand: str) -> list[float]:
    """For each option a random number that makes the hand pick it."""
    found = {world_text.pick(scripted(draw), options, hand): draw for draw in np.linspace(0, 0.999, 400)}
    assert sorted(found) == sorted(options)
    return list(found.values())


def word_step(meaning: Meaning, rng: Any, hand: str, who: str = "Anna", items: str = "eggs", **options: bool) -> str:
    return world_text.word_step(meaning, meaning.operands, rng, hand=hand, who=who, items=items, **options)


def worded(low: int, high: int) -> st.SearchStrategy[tuple[str, Meaning]]:
    """Texts of steps and what they say, true or not."""

    def step(operation: Operation, numbers: tuple[int, int, int], correction: bool, seed: int) -> tuple[str, Meaning]:
        rng = np.random.default_rng(seed)
        kind = KINDS[rng.integers(len(KINDS))]
        meaning = Meaning(operation, () if operation == "answer" else numbers[:2], numbers[2])
        who, items = str(rng.choice(kind.owners or NAMES)), str(rng.choice(kind.items))
        return word_step(meaning, rng, HANDS[seed % 2], who, items, correction=correction), meaning

    numbers = st.tuples(*[st.integers(low, high)] * 3)
    return st.builds(step, st.sampled_from(OPERATIONS), numbers, st.booleans(), SEEDS)


@pytest.mark.parametrize("hand", HANDS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_wording_reads_back_to_its_meaning(operation: Operation, hand: str) -> None:
    *numbers, result = (12, 7, 85) if hand == "target" else (4, 2, 2)
    meaning = Meaning(operation, () if operation == "answer" else tuple(numbers), result)
    kind = "ANSWER_" if operation == "answer" else ""
    first, last = (draws_for(getattr(world_text, kind + name), hand) for name in ("OPENERS", "CLOSERS"))
    core, fix = draws_for(CORES[operation], hand), draws_for(CORRECTIONS, hand)
    texts = [word_step(meaning, scripted(*draws), hand) for draws in product(first, core, last)]
    texts += [word_step(meaning, scripted(0, *draws), hand, correction=True) for draws in product(fix, core, last)]
    assert [text for text in texts if meaning_of(text) != meaning or "\n" in text or text[0].islower()] == []
    assert len(set(texts)) == len(texts) == (len(first) + len(fix)) * len(core) * len(last) >= 30


@given(worded(0, 9999))
def test_a_step_reads_back_whatever_its_numbers_case_and_spaces(step: tuple[str, Meaning]) -> None:
    text, meaning = step
    spread = text.replace(" ", "  \n ")
    for variant in (text, text.upper(), text.lower(), text.swapcase(), spread, f"\n \n\n{text}\n\n", f"\t{text} "):
        assert meaning_of(variant) == meaning


@given(st.permutations([12, 7]), st.sampled_from(OPERATIONS[:4]), SEEDS, st.sampled_from(HANDS))
def test_the_order_of_the_story_is_kept(numbers: list[int], operation: Operation, seed: int, hand: str) -> None:
    meaning, rng = Meaning(operation, tuple(numbers), 5), np.random.default_rng(seed)
    text = world_text.word_step(meaning, tuple(numbers), rng, hand=hand, who="Anna", items="eggs")
    assert meaning_of(text) == meaning
    assert meaning_of("3 fewer than 7 is 4") == meaning_of("taking 3 away from 7 leaves 4") == meaning_of("7 - 3 = 4")
    assert meaning_of("one of 3 parts of 6 is 2") == meaning_of("6 shared 3 ways makes 2") == meaning_of("6 / 3 = 2")
    assert (meaning == Meaning(operation, tuple(numbers[::-1]), 5)) == (operation in ("add", "multiply"))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_two_hands_rarely_use_the_same_words(operation: Operation) -> None:
    rng = np.random.default_rng(0)
    meaning = Meaning(operation, () if operation == "answer" else (3, 12), 15)
    target, draft = (Counter(word_step(meaning, rng, hand) for _ in range(200)) for hand in HANDS)
    across = sum(n * draft[text] for text, n in target.items()) / 200**2
    within = sum(n * (n - 1) for n in target.values()) / (200 * 199)
    assert across < 0.01 and across < within / 2
    assert min(len(target), len(draft)) >= 30


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_brief_hand_says_the_same_in_fewer_words_that_are_not_the_targets(operation: Operation) -> None:
    rng = np.random.default_rng(0)
    meaning = Meaning(operation, () if operation == "answer" else (3, 12), 15)
    texts = {hand: [word_step(meaning, rng, hand) for _ in range(300)] for hand in (*HANDS, BRIEF)}
    assert {meaning_of(text) for text in texts[BRIEF]} == {meaning}
    words = {hand: np.mean([len(text.split()) for text in found]) for hand, found in texts.items()}
    assert words[BRIEF] < 0.85 * min(words[hand] for hand in HANDS)
    target, brief = Counter(texts["target"]), Counter(texts[BRIEF])
    assert sum(n * brief[text] for text, n in target.items()) / 300**2 < 0.03


SCRAPS = [core.format(a=a, b=4, c=7) for cores in CORES.values() for core in cores for a in (3, 7)]
SCRAPS += [" ", "\n\n", "=", " + ", " / 0", "\\boxed{", "\\boxed{7}", "}", "7", "3", "0", "007", "-", ".", ","]
SCRAPS += ["1" * 5000, "٧", "７", "²", "½", "the sum of ", " is ", ". We write down 7", ", and we keep 8 in mind."]


@given(st.text() | st.lists(st.sampled_from(SCRAPS) | st.text(max_size=4), max_size=8).map("".join))
def test_any_text_has_one_meaning_or_none_and_a_meaning_accounts_for_all_its_numbers(text: str) -> None:
    meaning = meaning_of(text)
    if meaning is not None:
        numbers = {number.lstrip("0") or "0" for number in re.findall(r"\d+", text)}
        assert numbers == {str(number) for number in (*meaning.operands, meaning.result)}


LONG = ["1" * 9999, "1 " * 9999, "1." * 9999, "3 +" + " " * 9999, "the sum of " * 999, "1 and " * 999]
LONG += ["1 * 1 = " * 999, "3 + 4 = 7 " * 999, " ".join(f"{n} + 4 = 7" for n in range(999))]


@pytest.mark.parametrize("text", LONG, ids=lambda text: text[:9])
def test_long_texts_are_read_quickly(text: str) -> None:
    start_s = time.process_time()
    meaning_of(text)
    assert time.process_time() - start_s < 1


@given(worded(2, 60), worded(2, 60), st.sampled_from([" ", "\n", " So ", " = "]))
def test_two_equations_have_a_meaning_only_if_they_agree(first: Any, second: Any, joint: str) -> None:
    assert meaning_of(first[0] + joint + first[0]) == first[1]
    assert meaning_of(first[0] + joint + second[0]) == (first[1] if first[1] == second[1] else None)


NOT_ONE_EQUATION = ["1 + 2 = 3 + 3 = 3", "1 + 2 = 3 + 4 = 7", "3 + 4 = 7 * 1 = 7", "3 + 4 = 8. Wait, 3 + 4 = 7"]
NOT_ONE_EQUATION += ["3 + 4 = 7777. 77773 + 4 = 7777", "So \\boxed{7}. The result is \\boxed{7}, this gives \\boxed{8}"]
LONGER_NUMBERS = ["3 + 4 = 712345", "3 + 4 = 7,007", "3 + 4 = 7.7", "7,003 + 4 = 7", "123453 + 4 = 7", "3 + 4 = 7٧"]
LONGER_NUMBERS += ["the answer is \\boxed{12345}", "this gives \\boxed{" + "1" * 9999 + "}", "3 + 4 = 7" + "0" * 9999]
LONGER_NUMBERS += [f"3 + 4 = 7, and we keep {n} in mind." for n in ("000071", "0007000", "7.7", "٨", "7" * 9999)]


@pytest.mark.parametrize("text", NOT_ONE_EQUATION + LONGER_NUMBERS, ids=lambda text: text[-30:])
def test_a_second_equation_or_a_longer_number_leaves_no_meaning(text: str) -> None:
    assert meaning_of(text) is None


@pytest.mark.parametrize("closer", [closer for closer in world_text.CLOSERS if "{c}" in closer])
@pytest.mark.parametrize("operation", OPERATIONS[:4])
def test_a_closer_that_restates_another_number_leaves_no_meaning(operation: Operation, closer: str) -> None:
    for core in CORES[operation]:
        texts = {c: core.format(a=12, b=4, c=7) + closer.format(c=c, who="Anna", items="eggs") for c in (7, 4, 8, 70)}
        assert meaning_of(texts.pop(7)) == Meaning(operation, (12, 4), 7)
        assert {meaning_of(text) for text in texts.values()} == {None}


BEFORE = st.builds("{}{}".format, st.integers(1, 10**6), st.sampled_from(["", ".", ","]))
AFTER = st.builds("{}{}".format, st.sampled_from(["", ".", ","]), st.text("0123456789٧", min_size=1, max_size=6))


@given(worded(2, 60), st.integers(0), st.tuples(BEFORE, st.just("")) | st.tuples(st.just(""), AFTER))
def test_a_number_is_never_read_in_part(step: tuple[str, Meaning], which: int, around: tuple[str, str]) -> None:
    text, meaning = step
    parts = re.split("([0-9]+)", text)
    which = 2 * (which % (len(parts) // 2)) + 1
    parts[which] = parts[which].join(around)
    assert meaning_of("".join(parts)) != meaning


def check_solution(problem: Problem, written: list[WrittenStep]) -> None:
    assert split_steps("".join(step.text for step in written)) == [step.text for step in written]
    done: list[Meaning] = []
    slip: Meaning | None = None
    for step in written:
        right = problem.is_right(step.meaning, done)
        assert meaning_of(step.text) == step.meaning
        assert step.right == right and (right or not step.own)
        assert step.text.startswith(tuple(text.partition("{")[0] for text in CORRECTIONS)) == (slip is not None)
        assert slip is None or (step.own and set(slip.operands) & set(step.meaning.operands))
        slip = None if right else step.meaning
        done.append(step.meaning)
    assert not problem.next_steps(done)
    assert done.index(Meaning("answer", (), problem.answer)) == len(done) - 1


@given(PROBLEMS, SEEDS, st.sampled_from(HANDS))
def test_a_solution_in_one_hand_is_right_step_by_step(problem: Problem, seed: int, hand: str) -> None:
    written = solve(problem, np.random.default_rng(seed), hand=hand)
    assert solve(problem, np.random.default_rng(seed), hand=hand) == written
    assert Counter(step.meaning for step in written) == Counter(step.meaning for step in problem.steps)
    assert all(step.own for step in written)
    check_solution(problem, written)


@given(PROBLEMS, SEEDS, st.sampled_from(HANDS), st.fixed_dictionaries({"foreign_rate": RATES, "slip_rate": RATES}))
def test_every_slip_is_corrected_by_the_next_step(problem: Problem, seed: int, hand: str, rates: Any) -> None:
    check_solution(problem, solve(problem, np.random.default_rng(seed), hand=hand, **rates))


@pytest.mark.parametrize(("foreign_rate", "slip_rate"), [(0.5, 0.3), (0.3, 0.7), (1.0, 1.0)])
def test_foreign_steps_and_slips_come_at_the_asked_rates(foreign_rate: float, slip_rate: float) -> None:
    n_steps = n_foreign = n_slips = 0
    rng = np.random.default_rng(0)
    for problem in sample()[:150]:
        written = solve(problem, rng, hand="target", foreign_rate=foreign_rate, slip_rate=slip_rate)
        n_steps += problem.n_steps
        n_foreign += sum(not step.own for step in written)
        n_slips += len(written) - len(problem.steps)
    assert n_foreign / n_steps == pytest.approx(foreign_rate, abs=0.05)
    assert n_slips / n_foreign == pytest.approx(slip_rate, abs=0.07)


@pytest.mark.parametrize(("hand", "foreign_rate"), list(product(HANDS, [0.0, 1.0])))
def test_foreign_steps_are_in_the_other_hand(hand: str, foreign_rate: float) -> None:
    rng = np.random.default_rng(0)
    solutions = [solve(problem, rng, hand=hand, foreign_rate=foreign_rate) for problem in sample()[:100]]
    share = np.mean(["=" in step.text for solution in solutions for step in solution[:-1]])
    # An equals sign is the first choice of one hand and the last of the other.
    assert share > 0.3 if (hand == "target") == (foreign_rate == 0) else share < 0.15


STEP_TEXTS = ["3 + 4 = 7", "So 4 plus 3 is 7.", " 3 + 4 = 7\n\n", "3 + 4 = 8", "4 + 4 = 8", "4 - 3 = 7", "Hm.", " Hm. "]
STEP_TEXTS += ["\\boxed{7} is what was asked for", "The answer is \\boxed{7}.", "3 minus 4 is 7", "hm.", "", "\n", "7"]
TEXTS = st.lists(st.sampled_from(STEP_TEXTS), max_size=7)


@given(TEXTS)
def test_steps_share_a_cluster_exactly_when_they_mean_the_same(texts: list[str]) -> None:
    ids = WorldClusterer().cluster(texts)
    keys = [meaning_of(text) or text.split() for text in texts]
    assert [[one == other for other in ids] for one in ids] == [[one == other for other in keys] for one in keys]
    assert list(dict.fromkeys(ids)) == list(range(len(set(ids))))


@given(TEXTS, st.randoms(use_true_random=False))
def test_clusters_do_not_depend_on_the_order_of_the_steps(texts: list[str], random: Any) -> None:
    ids = dict(zip(texts, WorldClusterer().cluster(texts)))
    random.shuffle(texts)
    pairs = set(zip([ids[text] for text in texts], WorldClusterer().cluster(texts)))
    assert len(pairs) == len({one for one, _ in pairs}) == len({other for _, other in pairs})
