"""The benchmark on made-world problems: grading, true errors, costs, intervals and tables, on numbers known by hand."""

from __future__ import annotations

import json
import runpy
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from semspec_local.answer import final_answer
from semspec_local.bench.arms import ArmRun
from semspec_local.bench.costs import Costs, CostSums, cost_sums, costs, python_share, ratio, summed
from semspec_local.bench.report import best_arm, bootstrap, summaries, table
from semspec_local.bench.world_run import ItemResult, Progress, Results, item_seed, run_items
from semspec_local.bench.world_task import BENCH_SEED, TUNING_SEED, Verdicts, is_right, verdicts_on, world_items
from semspec_local.errors import ConfigError, DecodeError
from semspec_local.lab.world import PlannedStep, Problem, problems
from semspec_local.lab.world.text import Meaning
from semspec_local.metrics import Counters
from semspec_local.trace import StepRecord

SCRIPT = Path(__file__).parent.parent / "scripts" / "bench_world"


def planned(operation, operands, result, *needs) -> PlannedStep:
    return PlannedStep(Meaning(operation, operands, result), operands, frozenset(needs), "Anna")


PROBLEM = Problem(
    question="Anna has 14 shells and finds 9. Ben has 3 bags of 5. How many shells do they have together?",
    kind="shells",
    items="shells",
    steps=(
        planned("add", (14, 9), 23),
        planned("multiply", (3, 5), 15),
        planned("add", (23, 15), 38, 0, 1),
        planned("answer", (), 38, 0, 1, 2),
    ),
    answer=38,
)
GOOD = {
    "first": "First we see that 14 + 9 = 23.\n\n",
    "other": "Now 3 * 5 = 15.\n\n",
    "sum": "So 23 + 15 = 38.\n\n",
    "answer": "So the answer is \\boxed{38}.",
}


def steps(*told: tuple[str, str, bool | None]) -> list[StepRecord]:
    """Records from (origin, text, accepted); a candidate that was rejected is not committed."""
    records, n_committed = [], 0
    for index, (origin, text, accepted) in enumerate(told):
        committed = origin == "target" or accepted is True
        record = StepRecord(
            index=index,
            step_index=n_committed,
            origin=origin,
            committed=committed,
            text=text,
            accepted=accepted,
            reason="rejected" if origin == "target" else "score_ok" if accepted else "below_threshold",
            end="boundary",
        )
        records.append(record)
        n_committed += committed
    return records


def arm_run(text: str, stop_reason: str = "eos", records=None, **rest) -> ArmRun:
    defaults = {"wall_s": 2.0, "prefill_s": 0.5, "n_tokens": 30}
    found = None if records is None else tuple(records)
    counters = None if records is None else Counters.from_steps(records, wall_s=2.0, prefill_s=0.5)
    given = {**defaults, "counters": counters, "records": found, **rest}
    return ArmRun(answer=final_answer(text), text=text, stop_reason=stop_reason, **given)


# -- problems and grading ---------------------------------------------------------------------------


def test_the_problems_are_held_out_and_keep_their_numbers():
    assert world_items(3, offset=2) == list(problems(1_000_000, 5))[2:]
    assert len({BENCH_SEED, TUNING_SEED, 1, 2, 3}) == 5
    taught = {problem.question for seed in (1, 2, 3) for problem in problems(seed, 200)}
    assert not taught & {problem.question for problem in world_items(200)}


@pytest.mark.parametrize(
    ("text", "stop_reason", "right"),
    [
        ("".join(GOOD.values()), "eos", True),
        ("".join(GOOD.values()), "budget", False),
        ("So the answer is \\boxed{39}.", "eos", False),
        ("So the answer is \\boxed{38.0}.", "eos", False),
        ("So 23 + 15 = 38.", "eos", False),
        ("", "eos", False),
    ],
)
def test_only_the_right_number_in_a_finished_text_is_right(text, stop_reason, right):
    assert is_right(PROBLEM, arm_run(text, stop_reason)) is right


# -- the true error of a policy ------------------------------------------------------------------------


def test_a_perfect_policy_makes_no_error():
    records = steps(*(("draft", text, True) for text in GOOD.values()))
    assert verdicts_on(PROBLEM, records) == Verdicts(n_accepted=4)


def test_accepted_steps_are_wrong_without_a_meaning_out_of_order_or_repeated():
    records = steps(
        ("draft", "Let us think about shells.\n\n", True),  # says nothing
        ("draft", GOOD["sum"], True),  # too early
        ("draft", GOOD["other"], True),
        ("draft", GOOD["other"], True),  # once more
        ("draft", "So 14 + 9 = 24.\n\n", True),  # false
        ("draft", GOOD["first"], True),
        ("draft", "So the answer is \\boxed{38}.\n\n", True),  # the sum still does not count: it came too early
    )
    assert verdicts_on(PROBLEM, records) == Verdicts(n_accepted=7, n_accepted_wrong=5)


def test_a_rejected_step_is_judged_where_it_stood_and_is_not_done():
    records = steps(
        ("draft", GOOD["first"], False),  # needless
        ("target", GOOD["other"], None),
        ("draft", "So 23 + 15 = 38.\n\n", False),  # too early: `first` was rejected
        ("target", GOOD["first"], None),
        ("draft", GOOD["sum"], True),
        ("draft", "So the answer is \\boxed{28}.", False),
        ("target", GOOD["answer"], None),
    )
    assert verdicts_on(PROBLEM, records) == Verdicts(n_accepted=1, n_rejected=3, n_rejected_right=1)


def test_steps_that_no_policy_was_asked_about_count_in_nothing():
    records = steps(*(("target", text, None) for text in GOOD.values()), ("draft", "", None))
    assert verdicts_on(PROBLEM, records) == Verdicts()


# -- costs ------------------------------------------------------------------------------------------------


def costly_records() -> list[StepRecord]:
    """Written by the target; accepted; rejected and written again; one that was too long to be judged."""
    common = {"step_index": 0, "text": "", "end": "boundary"}
    told = [
        {"origin": "target", "committed": True, "n_target_tokens": 10, "n_draft_tokens": 10, "reason": "priming"}
        | {"write_s": 10.0, "read_s": 1.0},
        {"origin": "draft", "committed": True, "n_target_tokens": 30, "n_draft_tokens": 30, "reason": "score_ok"}
        | {"accepted": True, "propose_s": 6.0, "score_s": 3.0, "probe_s": 9.0},
        {"origin": "draft", "committed": False, "n_target_tokens": 10, "n_draft_tokens": 10, "accepted": False}
        | {"reason": "below_threshold", "propose_s": 2.0, "score_s": 1.0},
        {"origin": "target", "committed": True, "n_target_tokens": 10, "n_draft_tokens": 10, "reason": "rejected"}
        | {"write_s": 10.0, "read_s": 1.0},
        {"origin": "draft", "committed": False, "n_draft_tokens": 10, "reason": "forced_target", "propose_s": 2.0},
        {"origin": "target", "committed": True, "n_target_tokens": 5, "reason": "answer_phase", "write_s": 5.0}
        | {"read_s": 0.25},
        {"origin": "draft", "committed": True, "n_draft_tokens": 9, "reason": "answer_phase", "write_s": 7.0},
        {"origin": "forced", "committed": True, "n_target_tokens": 2, "reason": "think_budget", "read_s": 4.0},
    ]
    return [StepRecord(index=index, **common, **record) for index, record in enumerate(told)]


def test_costs_are_seconds_by_tokens_of_each_kind_of_work():
    measured = costs(cost_sums(costly_records()))
    assert measured == Costs(c_d=0.2, p_t=0.1, c_t=1.0, p_d=0.1, token_acceptance=0.75, step_acceptance=0.5)
    assert measured.predicted_s == pytest.approx(0.2 + 0.1 + 0.25 * 1.1)
    assert measured.ceiling(1.15) == pytest.approx(2.0)


def test_the_sums_of_runs_add_up():
    one = cost_sums(costly_records())
    assert costs(summed(CostSums, [one, one])) == costs(one)
    assert cost_sums([]) == CostSums() == summed(CostSums, [])


def test_costs_that_nothing_is_known_of_are_none():
    nothing = costs(CostSums())
    assert set(asdict(nothing).values()) == {None} and nothing.predicted_s is None and nothing.ceiling(1.0) is None
    rejected = Costs(c_d=0.1, p_t=0.1, c_t=None, p_d=None, token_acceptance=0.5, step_acceptance=0.5)
    assert rejected.predicted_s is None
    # Where all is accepted, the target never wrote: nothing of that is needed.
    accepted = Costs(c_d=0.1, p_t=0.1, c_t=None, p_d=None, token_acceptance=1.0, step_acceptance=1.0)
    assert accepted.predicted_s == pytest.approx(0.2) and accepted.ceiling(0.6) == pytest.approx(3.0)
    assert accepted.ceiling(None) is None


def test_the_share_outside_of_llama_cpp():
    assert python_share(3.0, 4.0) == 0.25
    assert python_share(0.0, 0.0) is None
    assert (ratio(1, 0), ratio(None, 2), ratio(1, None), ratio(0, 2)) == (None, None, None, 0)


# -- intervals --------------------------------------------------------------------------------------------


def test_an_interval_is_that_of_the_binomial_distribution():
    right = np.zeros(400)
    right[:300] = 1
    found = bootstrap(lambda rows: float(right[rows].mean()), 400, seed=1)
    assert found["value"] == 0.75
    half = 1.96 * np.sqrt(0.75 * 0.25 / 400)
    assert (found["low"], found["high"]) == pytest.approx((0.75 - half, 0.75 + half), abs=0.008)
    assert found == bootstrap(lambda rows: float(right[rows].mean()), 400, seed=1)


def test_items_that_are_all_alike_have_no_width_and_one_item_has_no_interval():
    assert bootstrap(lambda rows: 0.5, 20) == {"value": 0.5, "low": 0.5, "high": 0.5}
    assert bootstrap(lambda rows: 0.5, 1) == {"value": 0.5, "low": None, "high": None}
    assert bootstrap(lambda rows: 0.5, 0) == {"value": None, "low": None, "high": None}


# -- running ----------------------------------------------------------------------------------------------


class FakeArm:
    """Answers from a list, in turn; an exception in it is raised."""

    calls_back = False

    def __init__(self, name: str, runs, log: list[str]) -> None:
        self.name, self._runs, self._log = name, iter(runs), log

    def run(self, question: str, seed: int) -> ArmRun:
        self._log.append(f"{self.name}:{seed}")
        run = next(self._runs)
        if isinstance(run, BaseException):
            raise run
        return run


RIGHT, WRONG = "\\boxed{38}", "\\boxed{1}"


def results_of(*arms: FakeArm, n_items: int = 3, **options) -> Results:
    results = Results({"settings": {}}, {arm.name: [] for arm in arms})
    run_items(arms, [(number, PROBLEM) for number in range(n_items)], results, seed=100, **options)
    return results


def test_arms_take_turns_and_share_the_seed_of_an_item():
    log: list[str] = []
    results_of(*(FakeArm(name, [arm_run(RIGHT)] * 3, log) for name in "abc"))
    assert log == ["b:100", "c:100", "a:100", "c:101", "a:101", "b:101", "a:102", "b:102", "c:102"]
    assert item_seed(2**32 - 2, 1) == 0


def test_an_item_on_which_an_arm_fails_counts_for_none():
    log: list[str] = []
    broken = FakeArm("broken", [arm_run(RIGHT), DecodeError("no room"), arm_run(RIGHT)], log)
    results = results_of(FakeArm("target", [arm_run(RIGHT)] * 3, log), broken)
    assert [[item.item for item in items] for items in results.arms.values()] == [[0, 2], [0, 2]]
    assert results.failed == [{"item": 1, "arm": "broken", "error": "no room"}]


def test_ctrl_c_keeps_the_items_that_are_whole(tmp_path):
    results = Results({"settings": {}}, {"a": [], "b": []})
    arms = [
        FakeArm("a", [arm_run(RIGHT)] * 3, []),
        FakeArm("b", [arm_run(WRONG), KeyboardInterrupt()], []),
    ]
    with pytest.raises(KeyboardInterrupt):
        run_items(arms, [(number, PROBLEM) for number in range(3)], results, seed=0)
    assert [len(items) for items in results.arms.values()] == [1, 1]


def test_native_time_is_kept_only_when_asked_for():
    timed = results_of(FakeArm("a", [arm_run(RIGHT)] * 3, []), timed=True).arms["a"][0]
    assert timed.native_s == 0 and timed.elapsed_s > 0
    untimed = results_of(FakeArm("a", [arm_run(RIGHT)] * 3, [])).arms["a"][0]
    assert (untimed.native_s, untimed.elapsed_s) == (None, None)


def test_progress_says_what_is_left_and_saves():
    said, saved = [], []
    now = iter([0.0, 20.0, 40.0])
    each = Progress(70, say=said.append, save=lambda: saved.append(1), save_every=15, clock=lambda: next(now))
    for n_done in range(1, 31):
        if n_done == 30:
            break
        each(n_done)
    assert said == ["10 of 70 items, about 2 min 0 s left", "20 of 70 items, about 1 min 40 s left"]
    assert len(saved) == 1


def test_results_come_back_from_their_file(tmp_path):
    records = [*costly_records()]
    run = arm_run(RIGHT, records=records)
    results = results_of(FakeArm("target", [run] * 3, []), FakeArm("token-sd@4", [arm_run(WRONG)] * 3, []), timed=True)
    path = tmp_path / "results.json"
    results.save(path, summaries=summaries(results))
    assert Results.read(path) == results
    assert json.loads(path.read_text())["summaries"] == json.loads(json.dumps(summaries(results)))
    for text in ("", "[]", '{"arms": {}}', '{"facts": {}, "arms": {"a": [{}]}, "failed": [], "calls_back": []}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="holds no results"):
            Results.read(path)


# -- the report -------------------------------------------------------------------------------------------


def item(number: int, right: bool, wall_s: float, **rest) -> ItemResult:
    defaults = {"answer": "", "stop_reason": "eos", "prefill_s": 0.5, "n_tokens": 10}
    return ItemResult(item=number, right=right, wall_s=wall_s, **{**defaults, **rest})


def made_up() -> Results:
    alone = CostSums(write_s=10.0, n_written=10)
    split = cost_sums(costly_records())
    counters = Counters.from_steps(costly_records())
    verdicts = Verdicts(n_accepted=4, n_accepted_wrong=1, n_rejected=2, n_rejected_right=1)
    extra = {"costs": split, "counters": counters, "verdicts": verdicts, "native_s": 2.0, "elapsed_s": 4.0}
    return Results(
        {"settings": {}},
        {
            "target": [item(i, i < 8, 10.5, costs=alone) for i in range(10)],
            "loglik-ratio@0.9": [item(i, i < 7, 6.5 if i else 15.5, **extra) for i in range(10)],
            "token-sd@4": [item(i, i < 8, 21.0, n_proposed=8, n_accepted=2) for i in range(10)],
        },
    )


def test_the_numbers_of_an_arm_are_those_of_its_items():
    target, policy, by_tokens = summaries(made_up())
    assert target["accuracy"]["value"] == 0.8 and target["accuracy_to_target"] == {"value": 0, "low": 0, "high": 0}
    assert target["speedup"] == {"value": 1, "low": 1, "high": 1}
    assert (target["ceiling"], target["accept_error"], target["python_share"]) == (None, None, None)
    # Totals, not a mean of ratios: 105 / 74.
    assert policy["speedup"]["value"] == pytest.approx(105 / 74) and policy["speedup"]["low"] < 105 / 74
    assert policy["accuracy_to_target"]["value"] == pytest.approx(-0.1)
    assert (policy["accept_error"], policy["needless_rejection_rate"]) == (0.25, 0.5)
    assert policy["step_acceptance_rate"] == 0.5
    # c_t alone is 1 s per token; the model predicts 0.575 s; the target took 1 s and the arm 0.69 s without the prompt.
    assert policy["ceiling"] == pytest.approx(1 / 0.575)
    assert policy["ceiling_share"] == pytest.approx((100 / 69) / (1 / 0.575))
    assert (policy["python_share"], policy["overhead_s_per_token"]) == (0.5, 0.2)
    assert by_tokens["drafted_token_acceptance_rate"] == 0.25 and by_tokens["speedup"]["value"] == 0.5
    assert by_tokens["step_acceptance_rate"] is None and by_tokens["costs"] is None


def test_without_a_target_or_an_item_there_is_nothing_to_compare():
    results = made_up()
    del results.arms["target"]
    assert all(arm["speedup"] is None and arm["ceiling"] is None for arm in summaries(results))
    empty = summaries(Results({"settings": {}}, {"target": [], "draft": []}))
    assert all(arm["accuracy"]["value"] is None for arm in empty) and table(empty)


def test_the_table_has_a_row_for_each_arm_and_only_columns_that_say_something():
    arms = summaries(made_up())
    lines = table(arms).splitlines()
    assert len(lines) == 4 and len({len(line) for line in lines}) == 1
    assert lines[0].split()[0] == "arm" and "µs/token" in lines[0]
    assert "µs/token" not in table(arms[:1])
    markdown = table(arms, markdown=True).splitlines()
    assert len({line.count("|") for line in markdown}) == 1 and markdown[1].startswith("| --- | ---: |")
    assert "| 70.0 (" in markdown[3] and "| -10.0 (" in markdown[3]


def test_the_fastest_threshold_that_keeps_the_accuracy_is_chosen():
    def arm(name, n_right, speedup):
        return {"arm": name, "n_right": n_right, "speedup": {"value": speedup}}

    target = arm("target", 100, 1.0)
    assert best_arm([target, arm("a", 98, 3.0), arm("b", 99, 1.5), arm("c", 100, 1.2)])["arm"] == "b"
    assert best_arm([target, arm("a", 90, 3.0), arm("b", 95, 1.5), arm("c", 95, 1.2)])["arm"] == "b"


# -- the script -------------------------------------------------------------------------------------------


@pytest.fixture
def bench(tiny):
    command = runpy.run_path(str(SCRIPT))["main"]
    files = ["-m", str(tiny("llama")), "-md", str(tiny("llama-q8")), "-t", "1", "-n", "20", "-c", "512"]
    return lambda *arguments: CliRunner().invoke(command, [*files, *arguments], catch_exceptions=False)


def test_the_script_measures_prints_and_prints_again(bench, tmp_path):
    out = tmp_path / "results.json"
    arms = [f"--arm={name}" for name in ("target", "draft", "token-sd@2", "loglik-ratio@0.5")]
    done = bench(*arms, "--limit", "2", "--offset", "1", "--native-time", "--out", str(out))
    assert done.exit_code == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert [arm["arm"] for arm in last["arms"]] == ["target", "draft", "token-sd@2", "loglik-ratio@0.5"]
    assert last["settings"]["problem_seed"] == BENCH_SEED and len(last["files"]) == 2
    assert all(0 < arm["python_share"] < 1 and arm["n_items"] == 2 for arm in last["arms"])
    assert [item["item"] for item in json.loads(out.read_text())["arms"]["draft"]] == [1, 2]
    assert bench("--show", str(out)).stdout == done.stdout
    assert bench("--show", str(out), "--markdown").stdout.startswith("| arm | right % |")


def test_a_sweep_chooses_a_threshold_on_other_problems(bench):
    done = bench("--sweep", "loglik-ratio", "--threshold", "0.5", "--threshold", "0.9", "--limit", "1")
    last = json.loads(done.stdout.splitlines()[-1])
    assert [arm["arm"] for arm in last["arms"]] == ["target", "loglik-ratio@0.5", "loglik-ratio@0.9"]
    assert last["chosen"] in ("loglik-ratio@0.5", "loglik-ratio@0.9")
    assert last["settings"]["problem_seed"] == TUNING_SEED
