"""The benchmark: true errors, costs, intervals and tables on numbers known by hand, and the command on tiny models."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest

from semspec_local.bench.arms import ArmRun, MatchedArm, check_arms
from semspec_local.bench.report import bars, best_arm, bootstrap, summaries, table
from semspec_local.bench.results import ItemResult, Results, ResultsFile, read_results
from semspec_local.bench.run import Bench, acceptance_so_far, in_turn, item_seed, run_trials, trials_of
from semspec_local.bench.tasks import BenchItem, find_task
from semspec_local.bench.world_task import BENCH_SEED, TUNING_SEED, Verdicts, verdicts_on, world_items
from semspec_local.cli import _run
from semspec_local.cli.bench import SWEEP, _swept
from semspec_local.costs.model import Costs, CostSums, cost_sums, costs, python_share, ratio, summed
from semspec_local.errors import ConfigError, DecodeError
from semspec_local.lab.world import PlannedStep, Problem, problems
from semspec_local.lab.world.text import Meaning
from semspec_local.machine import EnergyMeter, PeakMemory
from semspec_local.metrics import Counters
from semspec_local.trace import StepRecord


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
    return ArmRun(text=text, final=text, stop_reason=stop_reason, **given)


# -- problems --------------------------------------------------------------------------------------


def test_the_problems_are_held_out_and_keep_their_numbers():
    assert world_items(3, offset=2) == list(problems(1_000_000, 5))[2:]
    assert len({BENCH_SEED, TUNING_SEED, 1, 2, 3}) == 5
    taught = {problem.question for seed in (1, 2, 3) for problem in problems(seed, 200)}
    assert not taught & {problem.question for problem in world_items(200)}


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

    calls_back: bool | None = False

    def __init__(self, name: str, runs, log: list[str]) -> None:
        self.name, self._runs, self._log = name, iter(runs), log

    def run(self, question: str, seed: int) -> ArmRun:
        self._log.append(f"{self.name}:{seed}")
        run = next(self._runs)
        if isinstance(run, BaseException):
            raise run
        return run


RIGHT, WRONG = "\\boxed{38}", "\\boxed{1}"
ITEMS = [BenchItem(id=f"world:{i}", question=PROBLEM.question, expected="38") for i in range(3)]
BENCH = Bench(find_task("world"), judge=lambda item, records: verdicts_on(PROBLEM, records))


def run_all(*arms: FakeArm, n_seeds: int = 1, bench: Bench = BENCH, file=None) -> Results:
    results = Results({"settings": {}, "files": []}, {arm.name: [] for arm in arms})
    for _ in run_trials(bench, arms, trials_of(ITEMS, n_seeds, seed=100), results, file):
        pass
    return results


def test_arms_take_turns_and_share_the_seed_of_an_item():
    log: list[str] = []
    run_all(*(FakeArm(name, [arm_run(RIGHT)] * 3, log) for name in "abc"))
    seeds = [item_seed(100, number) for number in range(3)]
    order = ["b", "c", "a", "c", "a", "b", "a", "b", "c"]
    assert log == [f"{name}:{seeds[i // 3]}" for i, name in enumerate(order)]


def test_every_item_and_repetition_has_a_seed_of_its_own():
    trials = trials_of(ITEMS, 3, offset=7)
    assert [(trial.number, trial.seed) for trial in trials[:4]] == [(7, 0), (8, 0), (9, 0), (7, 1)]
    assert len({trial.run_seed for trial in trials}) == 9
    assert 0 <= item_seed(2**31, 2**31) < 2**32


def test_a_failure_is_a_wrong_answer_that_took_its_time():
    broken = FakeArm("broken", [arm_run(RIGHT), DecodeError("no room"), arm_run(RIGHT)], [])
    results = run_all(FakeArm("target", [arm_run(RIGHT)] * 3, []), broken)
    assert [result.right for result in results.arms["broken"]] == [True, False, True]
    failed = results.arms["broken"][1]
    assert (failed.error, failed.stop_reason, failed.n_tokens) == ("no room", "error", 0) and failed.wall_s > 0
    target, arm = summaries(results)
    assert (target["n_failed"], arm["n_failed"]) == (0, 1)
    assert arm["accuracy"]["value"] == pytest.approx(2 / 3) and arm["n_unfinished"] == 0


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("".join(GOOD.values()), True),
        ("So the answer is \\boxed{39}.", False),
        ("So 23 + 15 = 38.", False),
        ("", False),
    ],
)
def test_only_the_right_number_is_right(text, right):
    assert run_all(FakeArm("a", [arm_run(text)] * 3, [])).arms["a"][0].right is right


def test_what_is_done_is_not_run_again_and_ctrl_c_loses_the_unfinished_trial_only(tmp_path):
    path, log = tmp_path / "results.jsonl", []
    results = Results({"settings": {"limit": 3}, "files": []}, {"a": [], "b": []})
    arms = [FakeArm("a", [arm_run(RIGHT)] * 3, log), FakeArm("b", [arm_run(WRONG), KeyboardInterrupt()], log)]
    with ResultsFile(path, results) as file, pytest.raises(KeyboardInterrupt):
        for _ in run_trials(BENCH, arms, trials_of(ITEMS, 1), results, file):
            pass
    assert results.n_trials == 1 and len(log) == 4
    with path.open("ab") as torn:
        torn.write(b'{"arms": {"a"')
    again = Results({"settings": {"limit": 3}, "files": []}, {"a": [], "b": []})
    arms = [FakeArm("a", [arm_run(RIGHT)] * 3, log), FakeArm("b", [arm_run(WRONG)] * 3, log)]
    with ResultsFile(path, again) as file:
        assert again.n_trials == 1
        assert list(run_trials(BENCH, arms, trials_of(ITEMS, 1), again, file)) == [2, 3]
    assert read_results(path).arms == again.arms
    other = Results({"settings": {"limit": 4}, "files": []}, {"a": [], "b": []})
    with pytest.raises(ConfigError, match=r"made with other settings \(limit\)"):
        ResultsFile(path, other)


def test_results_come_back_from_their_file(tmp_path):
    arms = FakeArm("target", [arm_run(RIGHT, records=costly_records())] * 3, []), FakeArm("b", [arm_run(WRONG)] * 3, [])
    results = Results({"settings": {}, "files": []}, {"target": [], "b": []})
    with ResultsFile(tmp_path / "r.jsonl", results) as file:
        for _ in run_trials(Bench(BENCH.task, BENCH.judge, timed=True), arms, trials_of(ITEMS, 1), results, file):
            pass
    found = read_results(tmp_path / "r.jsonl")
    assert found.arms == results.arms and summaries(found) == summaries(results)
    for text in ("[]\n", "{}\n", '{"arms": {"a": {}}}\n'):
        (tmp_path / "r.jsonl").write_text(text)
        with pytest.raises(ConfigError, match="holds no results"):
            read_results(tmp_path / "r.jsonl")


def test_native_time_is_kept_only_when_asked_for():
    timed = run_all(FakeArm("a", [arm_run(RIGHT)] * 3, []), bench=Bench(BENCH.task, timed=True)).arms["a"][0]
    assert timed.native_s == 0 and timed.elapsed_s > 0
    untimed = run_all(FakeArm("a", [arm_run(RIGHT)] * 3, [])).arms["a"][0]
    assert (untimed.native_s, untimed.elapsed_s) == (None, None)


def test_of_an_arm_in_another_process_no_native_time_is_told():
    arm = FakeArm("a", [arm_run(RIGHT)] * 3, [])
    arm.calls_back = None
    found = run_all(arm, bench=Bench(BENCH.task, timed=True)).arms["a"][0]
    assert (found.native_s, found.elapsed_s) == (None, None)


class FakeMatched(MatchedArm):
    def __init__(self, follows: str, rates: list[float]) -> None:
        self.name, self.follows, self.rate, self._rates = f"random@rate-of:{follows}", follows, 0.5, rates

    calls_back = False

    def run(self, question: str, seed: int) -> ArmRun:
        self._rates.append(self.rate)
        return arm_run(WRONG)


def test_a_matched_arm_comes_last_and_gets_the_rate_so_far():
    rates: list[float] = []
    half = [("draft", GOOD["first"], True), ("draft", GOOD["sum"], False), ("target", GOOD["other"], None)]
    told = [steps(*half), steps(("draft", GOOD["first"], True), ("draft", GOOD["other"], True)), steps(*half)]
    policy = FakeArm("p", [arm_run(RIGHT, records=records) for records in told], [])
    matched = FakeMatched("p", rates)
    for position in range(4):
        assert in_turn([matched, policy], position)[-1] is matched
    run_all(matched, policy)
    assert rates == [0.5, 0.75, pytest.approx(4 / 6)]
    nothing = Results({}, {"p": []})
    assert acceptance_so_far(nothing, {"p": item(0, True, 1.0)}, "p") == 0.5


# -- the machine -----------------------------------------------------------------------------------------


def test_energy_is_the_sum_of_the_packages_or_unknown(tmp_path):
    for name in ("intel-rapl:0", "intel-rapl:1", "intel-rapl:0:0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text("1000000\n")
    meter = EnergyMeter.find(tmp_path)
    before = meter.read()
    assert before == (1_000_000, 1_000_000)
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("3500000\n")
    assert meter.since(before) == 2.5
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("5\n")  # it began again
    assert meter.since(before) is None
    assert EnergyMeter.find(tmp_path / "nothing").since(()) is None


def test_peak_memory_sees_what_was_taken_and_given_back(tmp_path):
    peak = PeakMemory()
    taken = np.ones(2**24)  # 128 MiB
    del taken
    found = peak.bytes()
    assert found is None or found > 2**26
    assert PeakMemory(tmp_path).bytes() is None


# -- the report -------------------------------------------------------------------------------------------


def item(number: int, right: bool, wall_s: float, **rest) -> ItemResult:
    defaults = {"answer": str(right), "stop_reason": "eos", "prefill_s": 0.5, "n_tokens": 10, "seed": 0}
    return ItemResult(item=f"world:{number:02}", right=right, wall_s=wall_s, **{**defaults, **rest})


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
    assert (by_tokens["agreement"], policy["agreement"], policy["token_inflation"]) == (1.0, 0.9, 1.0)
    assert (by_tokens["n_draft_tokens_rejected"], by_tokens["tokens_per_s"]) == (60, pytest.approx(100 / 205))


def test_what_an_arm_does_not_count_is_unknown_and_not_zero():
    counted = (
        "n_tokens_by_draft",
        "n_tokens_by_target",
        "n_draft_tokens_rejected",
        "n_target_tokens_written",
        "n_target_tokens_reused",
        "n_target_tokens_read",
    )
    (server,) = summaries(Results({}, {"llama-server": [item(i, True, 10.0) for i in range(3)]}))
    assert [server[name] for name in counted] == [None] * 6
    _, policy, by_tokens = summaries(made_up())
    assert None not in [policy[name] for name in counted]
    assert [by_tokens[name] for name in counted] == [None, None, 60, None, None, None]


def test_repetitions_of_an_item_are_resampled_together():
    once = {"target": [item(i, i < 8, 10.0) for i in range(10)]}
    thrice = {"target": [item(i, i < 8, 10.0, seed=k) for k in range(3) for i in range(10)]}
    (one,), (many,) = (summaries(Results({}, arms)) for arms in (once, thrice))
    assert many["accuracy"] == one["accuracy"] and (many["n_items"], many["n_trials"]) == (10, 30)


def test_bars_are_as_long_as_the_speedup():
    lines = bars(summaries(made_up())).splitlines()
    assert [line.count("#") for line in lines] == [round(40 / (105 / 74)), 40, round(20 / (105 / 74))]
    assert "1.42x, 70.0 % right" in lines[1]
    assert bars([arm | {"speedup": None} for arm in summaries(made_up())]) == ""


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


# -- the command ------------------------------------------------------------------------------------------


@pytest.fixture
def bench(tiny, capsys):
    files = ["-m", str(tiny("llama")), "-md", str(tiny("llama-q8")), "-t", "1", "-n", "20", "-c", "512"]

    def run(*arguments: str):
        words = [*arguments] if arguments[0] == "show" else [*arguments, *files]
        code = _run(["bench", *words])
        return (code, *capsys.readouterr())

    return run


ALL = "target,draft,token-sd@2,loglik-ratio@0.5,random@rate-of:loglik-ratio@0.5,loglik-ratio@0.5+guess@2"


def test_the_command_measures_goes_on_and_shows_again(bench, tmp_path):
    out, save = tmp_path / "r.jsonl", tmp_path / "r.json"
    arguments = ["--arms", ALL, "--limit", "2", "--offset", "1", "--native-time", "-o", str(out), "--save", str(save)]
    code, stdout, stderr = bench(*arguments)
    assert code == 0, stderr
    last = json.loads(stdout.splitlines()[-1])
    assert [arm["arm"] for arm in last["arms"]] == ALL.split(",")
    assert last["settings"]["seed"] == 0 and last["settings"]["task"] == "world" and len(last["files"]) == 2
    assert all(0 < arm["python_share"] < 1 and arm["n_items"] == 2 for arm in last["arms"])
    assert [result.item for result in read_results(out).arms["draft"]] == ["world:1", "world:2"]
    assert json.loads(save.read_text()) == last
    assert bench(*arguments)[0] == 0  # nothing is left to do
    assert len(out.read_text().splitlines()) == 2
    code, shown, _ = bench("show", str(out))
    assert code == 0 and json.loads(shown.splitlines()[-1])["arms"] == last["arms"]
    assert bench("show", str(out), "--markdown")[1].startswith("| arm | right % |")


def test_the_counters_of_an_arm_are_the_sums_of_its_runs(bench, tmp_path):
    out = tmp_path / "r.jsonl"
    code, stdout, _ = bench("--arms", "target,always", "--limit", "3", "--temp", "0", "-o", str(out))
    assert code == 0
    results = read_results(out)
    for arm in json.loads(stdout.splitlines()[-1])["arms"]:
        counters = [result.counters for result in results.arms[arm["arm"]]]
        assert arm["n_tokens"] == sum(c.n_committed_tokens for c in counters)
        assert arm["wall_s"] == pytest.approx(sum(c.wall_s for c in counters))
    again = tmp_path / "again.jsonl"
    assert bench("--arms", "target,always", "--limit", "3", "--temp", "0", "-o", str(again))[0] == 0
    answers = [[r.answer for found in read_results(path).arms.values() for r in found] for path in (out, again)]
    assert answers[0] == answers[1]


def test_a_sweep_names_the_best_threshold_of_each_policy(bench, tmp_path):
    words = ("--policy", "loglik-ratio", "--threshold", "0.5", "--threshold", "0.9", "--limit", "1")
    code, stdout, stderr = bench("sweep", "--task", f"world:{TUNING_SEED}", *words)
    assert code == 0, stderr
    last = json.loads(stdout.splitlines()[-1])
    expected = ["target", "draft", "loglik-ratio@0.5", "loglik-ratio@0.9", "random@0.3", "random@0.6", "random@0.9"]
    assert [arm["arm"] for arm in last["arms"]] == expected
    assert last["chosen"]["loglik-ratio"] in ("loglik-ratio@0.5", "loglik-ratio@0.9")
    assert last["settings"]["seed"] == 0 and f"best of loglik-ratio: {last['chosen']['loglik-ratio']}" in stdout


def test_a_policy_without_a_threshold_is_swept_as_one_arm(bench):
    code, stdout, stderr = bench("sweep", "--policy", "always", "--task", f"world:{TUNING_SEED}", "--limit", "1")
    assert code == 0, stderr
    assert json.loads(stdout.splitlines()[-1])["chosen"] == {"always": "always"}


@pytest.mark.parametrize(
    ("policy", "given", "arms"),
    [
        ("specreason", (), [f"specreason@{rating}" for rating in range(1, 10)]),
        ("mean-loglik", (), [f"mean-loglik@{threshold:g}" for threshold in SWEEP]),
        ("semantic-ratio", (0.5,), ["semantic-ratio@0.5"]),
        ("always", (0.5,), ["always"]),
    ],
)
def test_what_is_swept_fits_the_policy(policy, given, arms):
    assert _swept(policy, given) == arms
    check_arms(arms)


def test_pictures_and_page(bench, tmp_path):
    pytest.importorskip("matplotlib", reason="the extra `report` is not installed")
    page, figures = tmp_path / "page.html", tmp_path / "figures"
    code, _, stderr = bench("--arms", "target,always", "--limit", "2", "--html", str(page), "--figures", str(figures))
    assert code == 0, stderr
    text = page.read_text()
    assert "<svg" in text and "always" in text and "http-equiv" not in text and "<script" not in text
    assert {path.name for path in figures.iterdir()} == {
        f"{n}.{s}" for n in ("trade-off", "speedup") for s in ("png", "svg")
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--arms", "target,nonsense"], "the arm is 'nonsense'; known are"),
        (["--arms", "target,target"], "is there twice"),
        (["--arms", "random@rate-of:always"], "follows always, which is no arm here"),
        (["--arms", "target,random@rate-of:target"], "which accepts no steps"),
        (["--task", "gsm8k"], "--data"),
        (["--task", "nothing"], "known are gsm8k"),
        (["--limit", "2", "sweep"], "got --limit before sweep; wanted options after it"),
    ],
)
def test_what_cannot_be_run_is_said_before_anything_is_loaded(bench, arguments, said):
    code, stdout, stderr = bench(*arguments)
    assert (code, stdout) == (2, "") and said in stderr and len(stderr.splitlines()) == 1
