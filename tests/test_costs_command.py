"""`semspec-local costs`: shape of what is measured, what is kept, and who compares with it. No times are asserted."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from semspec_local import jobs
from semspec_local.cli import _run
from semspec_local.cli.costs import _expectation
from semspec_local.config import ModelConfig, RunConfig, SamplingConfig
from semspec_local.costs import store as cost_store
from semspec_local.costs.measure import N_READ, loaded_facts, measure_costs
from semspec_local.costs.pair import Loaded, Outlook, PairCosts
from semspec_local.costs.pays import (
    EVIDENCE_GUESSES,
    EVIDENCE_STEPS,
    REACHED,
    DraftingPays,
    GuessingPays,
    go_by_costs,
    is_worth_it,
    n_guess_that_pays,
)
from semspec_local.costs.store import cost_key, store_costs, stored_costs
from semspec_local.jobs import Item
from semspec_local.jobs.ray_engine import PairWorker, RayJob
from semspec_local.machine import cpu_name, load_average, n_cores
from semspec_local.metrics import Counters
from semspec_local.policy import make_policy
from semspec_local.provenance import fingerprint_file, known_sha256
from semspec_local.reasoner import Reasoner, Sources
from semspec_local.resources import cache_dir

MODELS = ModelConfig(n_threads=1, n_ctx=512)
TINY = ("--pair", "tiny", "-t", "1")

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Command]:
    """Runs `semspec-local` in this process, in a folder of its own: exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("SEMSPEC_COSTS_", "SEMSPEC_RUN_", "SEMSPEC_BATCH_"))]:
        monkeypatch.delenv(name)
    loggers = [logging.getLogger(name) for name in ("semspec_local", "semspec_local.llama.logs")]
    levels = [logger.level for logger in loggers]

    def invoke(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = _run(list(map(str, arguments)))
        return code, *capsys.readouterr()

    yield invoke
    for logger, level in zip(loggers, levels):
        logger.setLevel(level)


def strict_json(text: str) -> dict[str, Any]:
    """One line of JSON, without NaN and infinity."""
    assert text.endswith("\n") and text.count("\n") == 1
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in the JSON"))


def measured(sources: Sources, models: ModelConfig = MODELS, **options: Any) -> PairCosts:
    config = RunConfig(**{"policy": "loglik-ratio", **options})
    with Reasoner(sources, config, models) as reasoner:
        return measure_costs(reasoner, n_trials=2)


# -- measuring ------------------------------------------------------------------------------------------


def test_every_point_is_measured_and_the_models_are_left_as_they_were():
    with Reasoner(Sources.from_pair("tiny"), RunConfig(policy="semantic-joint"), MODELS) as reasoner:
        costs = measure_costs(reasoner, tokens_per_step=8, n_trials=2)
        for model in reasoner.step_models.values():
            assert model.n_past == costs.n_prefix == 256
        reasoner.answer("How many?", seed=1)
    assert list(costs.p_t) == list(costs.p_d) == list(N_READ)
    numbers = [costs.c_d, costs.c_t, costs.c_t_alone, *costs.p_d.values(), *costs.p_t.values()]
    assert all(number > 0 for number in numbers)
    assert costs.c_t_alone != costs.c_t  # states are read of one, and not of the other
    assert costs.spread >= 0 and costs.load is None and costs.n_threads == 1
    taps = {"target": ["3 post"], "draft": ["1 post"]}
    assert costs.loaded == Loaded(
        taps=taps, logprobs=["target", "draft"], all_logits=["target", "draft"]
    )  # the last layer is there for output tokens only


def test_what_the_policy_needs_is_measured_and_no_more():
    facts = {}
    for policy in ("loglik-ratio", "mean-loglik", "always", "never"):
        with Reasoner(Sources.from_pair("tiny"), RunConfig(policy=policy), MODELS) as reasoner:
            facts[policy] = loaded_facts(reasoner)
    nothing: dict[str, list[str]] = {"target": [], "draft": []}
    assert facts == {
        "loglik-ratio": Loaded(taps=nothing, logprobs=["target", "draft"], all_logits=["target"]),
        "mean-loglik": Loaded(taps=nothing, logprobs=["target"], all_logits=["target"]),
        "always": Loaded(taps=nothing),
        "never": Loaded(taps={"target": []}),
    }


def test_of_the_target_alone_the_draft_is_unknown():
    costs = measured(Sources.from_pair("tiny"), policy="never")
    assert (
        costs.c_d is None and costs.p_d == {} and costs.c_t == costs.c_t_alone > 0 and list(costs.p_t) == list(N_READ)
    )


def test_a_small_context_has_fewer_points():
    costs = measured(Sources.from_pair("tiny"), replace(MODELS, n_ctx=24))
    assert costs.n_prefix == 12 and list(costs.p_t) == list(costs.p_d) == [1, 4, 8]
    assert costs.c_d > 0 and costs.c_t > 0


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_models_that_write_anything_are_measured_too(tiny, temperature):
    sources = Sources(target=tiny("llama"), draft=tiny("other-vocab"))
    costs = measured(sources, sampling=SamplingConfig(temperature=temperature))
    assert costs.c_t > 0 and all(seconds > 0 for seconds in (*costs.p_t.values(), *costs.p_d.values()))
    assert costs.c_d is None or costs.c_d > 0  # it may do nothing but end its text


def test_a_slow_point_is_not_repeated():
    n_calls = [0]

    def clock() -> float:  # every look at it takes a second
        n_calls[0] += 1
        return float(n_calls[0])

    with Reasoner(Sources.from_pair("tiny"), RunConfig(policy="never"), MODELS) as reasoner:
        measure_costs(reasoner, n_trials=1, clock=clock)
        n_once, n_calls[0] = n_calls[0], 0
        costs = measure_costs(reasoner, n_trials=5, point_s=0.5, clock=clock)
    assert n_calls[0] == n_once and costs.spread is None


def test_the_machine_is_named(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nmodel name\t: A Processor (R) \nprocessor\t: 1\nmodel name\t: Another\n")
    assert cpu_name(path) == "A Processor (R)"
    assert cpu_name(tmp_path / "none") and cpu_name() and n_cores() >= 1
    load = load_average()
    assert load is None or load >= 0


# -- the store ------------------------------------------------------------------------------------------

COSTS = PairCosts(c_d=0.1, c_t=1.0, c_t_alone=1.0, p_d={1: 0.1}, p_t={1: 0.5})


def test_costs_are_kept_by_files_threads_and_layers_and_by_how_models_were_loaded():
    sources = Sources.from_pair("tiny")
    assert stored_costs(sources, MODELS) is None
    key = cost_key(sources, MODELS)
    other = replace(COSTS, c_t=2.0, loaded=Loaded(logprobs=["target"]))
    for costs in (replace(COSTS, c_t=9.0), other, COSTS):
        store_costs(key, costs)
    assert stored_costs(sources, MODELS) == COSTS == stored_costs(sources, MODELS, Loaded())
    assert stored_costs(sources, MODELS, other.loaded) == other
    assert stored_costs(sources, MODELS, Loaded(logprobs=["draft"])) is None
    for changed in ({"n_threads": 2}, {"n_threads_draft": 2}, {"n_gpu_layers": 1}, {"n_gpu_layers_draft": -1}):
        assert stored_costs(sources, replace(MODELS, **changed)) is None
    assert stored_costs(replace(sources, draft=None), MODELS) is None
    assert stored_costs(replace(sources, draft=sources.target), MODELS) is None
    assert stored_costs(replace(sources, draft=Path("gone.gguf")), MODELS) is None
    assert stored_costs(sources, replace(MODELS, n_ctx=99)) == COSTS


def test_another_processor_has_other_costs(monkeypatch):
    sources = Sources.from_pair("tiny")
    store_costs(cost_key(sources, MODELS), COSTS)
    monkeypatch.setattr(cost_store, "cpu_name", lambda: "another")
    assert stored_costs(sources, MODELS) is None


@pytest.mark.parametrize("broken", [b"", b"\xff", b"[]", b"{", b"[" * 100_000, b"null", None])
def test_a_broken_file_is_ignored_with_a_warning_and_replaced(broken, caplog):
    sources = Sources.from_pair("tiny")
    key = cost_key(sources, MODELS)
    store_costs(key, COSTS)
    whole = json.loads(key.path.read_text())
    for number, text in enumerate([broken] if broken is not None else torn(whole)):
        key.path.write_bytes(text)
        caplog.clear()
        assert stored_costs(sources, MODELS) is None, number
        (record,) = caplog.records
        assert "is broken and was ignored" in record.getMessage() and str(key.path) in record.getMessage()
    store_costs(key, COSTS)
    assert stored_costs(sources, MODELS) == COSTS


def torn(whole: dict[str, Any]) -> Iterator[bytes]:
    """What `store_costs` writes, with something wrong in it."""
    yield json.dumps(whole | {"version": 2}).encode()
    yield json.dumps(whole | {"key": {}}).encode()
    for measurements in (3, {}, [3], [{}], [whole["measured"][0] | {"c_t": 0}], [whole["measured"][0] | {"c_d": {}}]):
        wrong = {**whole, "measured": measurements}
        if measurements:
            yield json.dumps(wrong).encode()


def test_no_large_file_is_read_to_look_costs_up(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(2 << 20))
    assert known_sha256(path) is None
    assert known_sha256(path) is None
    sha256 = fingerprint_file(path)["sha256"]
    assert known_sha256(path) == sha256
    path.write_bytes(b"small")
    assert known_sha256(path) == fingerprint_file(path)["sha256"] != sha256


# -- the command ----------------------------------------------------------------------------------------


def test_json_has_the_promised_keys_and_is_kept(command):
    code, out, err = command("costs", *TINY, "--policy", "loglik-ratio", "--json", "--tokens-per-step", "8")
    assert code == 0 and "measuring" in err
    facts = strict_json(out)
    assert {"c_d", "c_t", "p_d", "p_t", "ceiling", "break_even_acceptance", "predicted"} <= set(facts)
    assert facts["expected_speedup"] is facts["expected_step_acceptance"] is None, "nobody calibrated this policy"
    assert list(facts["p_t"]) == list(facts["p_d"]) == [str(n) for n in N_READ]
    assert list(facts["predicted"]) == ["0.5", "0.6", "0.7", "0.8", "0.9", "1.0"]
    assert (
        facts["ceiling"]
        == facts["predicted"]["1.0"]
        == pytest.approx(facts["c_t_alone"] / (facts["c_d"] + facts["p_t"]["8"]))
    )
    assert facts["tokens_per_step"] == 8 and facts["pair"] == "tiny" and facts["policy"] == "loglik-ratio"
    assert facts["threads"] == {"target": 1, "draft": 1} and facts["measured_at"].endswith("+00:00")
    assert isinstance(facts["noisy"], bool) and ("Note: the machine was busy" in err) == facts["noisy"]
    sources = Sources.from_pair("tiny")
    assert facts["fingerprints"]["target"] == fingerprint_file(sources.target)["sha256"]
    kept = stored_costs(sources, ModelConfig(n_threads=1))
    assert kept is not None and kept.c_t_alone == facts["c_t_alone"]
    assert kept.p_t == {int(n): seconds for n, seconds in facts["p_t"].items()}


def test_people_get_tables_and_a_sentence(command):
    code, out, err = command("costs", *TINY)
    assert code == 0 and "Error" not in err
    for word in ("target alone", "draft", "steps of 32 tokens: ceiling", "break-even acceptance", "by tokens, 8"):
        assert word in out
    assert "semantic-joint at 0." in out and "was calibrated to accept" in out
    assert "calibrated" not in command("costs", *TINY, "--policy", "loglik-ratio")[1]
    assert "On this machine this pair gains" in out and "nan" not in out.lower()


def test_the_target_alone_can_be_measured(command):
    code, out, _ = command("costs", *TINY, "--policy", "never", "--json")
    facts = strict_json(out)
    assert code == 0 and facts["c_d"] is facts["ceiling"] is facts["break_even_acceptance"] is None
    assert facts["c_t"] > 0 and facts["p_d"] == {} and "unknown" in facts["advice"]
    assert "unknown" in command("costs", *TINY, "--policy", "never")[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--pair", "tiny", "--tokens-per-step", "0"), "--tokens-per-step"),
        (("--pair", "tiny", "--policy", "nope"), "--policy is 'nope'"),
        (("--pair", "nope"), "nope"),
        (("--pair", "tiny", "-t", "-1"), "-t is -1"),
        (("--pair", "tiny", "--temp", "-1"), "--temp is -1"),
        (("-md", "draft.gguf"), "no target is given"),
        (("--pair", "tiny", "--max-tokens", "5"), "No such option"),
        (("question",), "unexpected extra argument"),
    ],
)
def test_bad_options_are_refused_before_anything_is_measured(command, words, message):
    code, out, err = command("costs", *words)
    assert code == 2 and out == "" and message in err and "measuring" not in err


def test_a_pair_without_a_draft_or_probes_is_refused_with_what_to_do(command, tiny):
    code, _, err = command("costs", "-m", tiny("llama"))
    assert code == 2 and "give one with -md, or use --policy never" in err
    code, _, err = command("costs", "-m", tiny("llama"), "-md", tiny("llama"))
    assert code == 2 and "such as loglik-ratio" in err


def test_a_cache_that_cannot_be_written_costs_nothing_but_the_memory(command):
    cache_dir().mkdir(parents=True, exist_ok=True)
    (cache_dir() / "costs").write_text("a file where the folder should be")
    code, out, err = command("costs", *TINY, "--policy", "never", "--json")
    assert code == 0 and strict_json(out)["c_t"] > 0 and "Note: not kept for later" in err


# -- who compares ---------------------------------------------------------------------------------------


@pytest.fixture
def questions(tmp_path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "Anna starts with 40 bolts. Anna drops 34 bolts. How many bolts does Anna have?"}\n')
    return path


def test_a_batch_says_what_speculation_brought(command, questions, tmp_path):
    sources = Sources.from_pair("tiny")
    n_files = iter(range(9))

    def summary(*words: str) -> str:
        out = tmp_path / f"out{next(n_files)}.jsonl"
        code, _, err = command("batch", questions, "-o", out, *TINY, "--lanes", "1", *words)
        assert code == 0
        return err

    assert "`semspec-local costs`" in summary("--policy", "always")
    key = cost_key(sources, ModelConfig(n_threads=1))
    store_costs(key, replace(COSTS, c_t_alone=1000.0))
    assert "speculation: " in (gained := summary("--policy", "always")) and "1e+06 ms a token" in gained
    assert "measured while the machine was busy" not in gained
    store_costs(key, replace(COSTS, c_t_alone=1e-9, spread=2.0))
    lost = summary("--policy", "always", "--no-give-up")
    assert "speculation lost time: 0.00 times" in lost and "try --policy never" in lost
    assert "measured while the machine was busy" in lost
    assert "speculation" not in summary("--policy", "never")
    assert "speculation in 2 lanes: " in summary("--policy", "always", "--lanes", "2")


def test_a_run_says_it_in_one_field(command):
    words = ("run", *TINY, "--seed", "1", "--policy", "always", "-n", "40", "Anna has 4 bolts. How many?")
    assert "the target's speed alone" not in command(*words)[2]
    store_costs(cost_key(Sources.from_pair("tiny"), ModelConfig(n_threads=1)), COSTS)
    assert "times the target's speed alone, as measured; " in command(*words)[2]
    assert "the target's speed alone" not in command(*words, "--policy", "never")[2]


# -- who gives up ---------------------------------------------------------------------------------------


def counted(n_steps: int, n_accepted: int) -> Counters:
    counters = Counters(n_proposed_steps=n_steps, n_accepted_steps=n_accepted)
    counters.n_draft_tokens_proposed, counters.n_draft_tokens_accepted = 10 * n_steps, 10 * n_accepted
    return counters


def test_drafting_pays_above_the_break_even_and_is_judged_by_enough_steps():
    break_even = COSTS.at_step(10).break_even(COSTS.c_t_alone * REACHED)
    assert 0 < break_even < 1
    pays = DraftingPays(COSTS)
    assert pays(Counters()) and all(pays(counted(n, 0)) for n in range(EVIDENCE_STEPS))
    for n in (EVIDENCE_STEPS, 20, 99):
        assert [pays(counted(n, accepted)) for accepted in range(n + 1)] == [
            accepted / n >= break_even for accepted in range(n + 1)
        ]


def test_what_the_probe_was_calibrated_to_accept_is_believed_until_enough_steps_say_otherwise():
    at = COSTS.at_step(10).break_even(COSTS.c_t_alone * REACHED)
    likely, unlikely = DraftingPays(COSTS, expected=at + 0.05), DraftingPays(COSTS, expected=at - 0.05)
    assert likely(Counters()) and not unlikely(Counters()), "nothing was drafted yet"
    assert likely(counted(EVIDENCE_STEPS - 1, 0)) and not likely(counted(EVIDENCE_STEPS, 0))
    assert likely(counted(EVIDENCE_STEPS, EVIDENCE_STEPS - 1))
    assert not likely(counted(99, 0)) and unlikely(counted(99, 99)), "in the end what was seen decides"


@pytest.mark.parametrize(("speedup", "worth"), [(None, True), (1.0, False), (1 / REACHED + 1e-9, True), (0.5, False)])
def test_a_promise_must_be_large_enough_to_be_left_after_what_the_model_leaves_out(speedup, worth):
    assert is_worth_it(speedup) is worth


def test_in_lanes_writing_costs_what_a_pass_over_all_lanes_costs():
    curve = {1: 1.5, 4: 0.5, 16: 0.25}
    loaded = Loaded(all_logits=["target"])
    costs = replace(COSTS, c_d=0.4, c_t=1.0, c_t_alone=0.9, p_d=curve, p_t=curve, loaded=loaded)
    shared = costs.in_lanes(4)
    assert costs.in_lanes(1) == costs
    assert (shared.c_d, shared.c_t, shared.c_t_alone) == (0.4, 0.5, 0.5), "never dearer than alone"
    assert shared.p_t == shared.p_d == curve, "each lane reads by itself"
    dear = replace(costs, c_d=0.9)
    assert dear.in_lanes(4).c_d == 0.9, "a pass that leaves out the vocabulary does not say what writing costs"
    assert replace(dear, loaded=Loaded(all_logits=["target", "draft"])).in_lanes(4).c_d == 0.5
    for unknown in (PairCosts().in_lanes(8), replace(costs, loaded=Loaded()).in_lanes(4)):
        assert unknown.c_t_alone is None and DraftingPays(unknown)(Counters())


@pytest.mark.parametrize(
    ("c_t_alone", "spread", "end"),
    [(2.0, None, "; so a run drafts."), (0.5, None, "; so a run lets the target write alone."), (2.0, 2.0, "speed.")],
)
def test_what_a_run_will_do_is_said_with_the_costs(c_t_alone, spread, end):
    costs = PairCosts(c_d=0.1, c_t=0.9, c_t_alone=c_t_alone, p_d={32: 0.1}, p_t={32: 0.4}, spread=spread)
    said = _expectation(Outlook(costs=costs, expected_acceptance=0.5), make_policy("semantic-joint", 0.7))
    assert said.startswith("semantic-joint at 0.7 was calibrated to accept 50% of steps, which allows ")
    assert f"{c_t_alone:.2f} times" in said and said.endswith(end)
    shorter = Outlook(costs=costs, expected_acceptance=0.5, tokens_per_step=8)
    assert "a run" not in _expectation(shorter, make_policy("semantic-joint", 0.7)), "it decides by the usual length"


GUESSING = replace(COSTS, c_d=0.05, c_t=1.0, c_t_alone=0.9, p_t={1: 1.0, 5: 0.3, 9: 0.15, 32: 0.2})


def test_as_many_tokens_are_guessed_as_pay():
    known = replace(GUESSING, c_t_alone=1.0, loaded=Loaded(all_logits=["target"]))
    assert n_guess_that_pays(known) == 8
    assert n_guess_that_pays(replace(known, p_t={5: 0.3, 9: 0.6, 32: 0.2})) == 4
    assert n_guess_that_pays(replace(known, p_t={1: 1.0, 5: 0.9})) == 0, "reading is no cheaper than writing"
    barely = 5 * 0.3 / sum(0.9**i for i in range(5))
    for gain, n in ((1.01 / REACHED, 4), (0.99 / REACHED, 0)):
        exact = replace(known, c_d=1e-9, c_t=9.9, c_t_alone=gain * barely, p_t={5: 0.3, 9: 1.0})
        assert n_guess_that_pays(exact) == n, "compared with the target alone, whose states nobody reads"
    for unknown in (GUESSING, PairCosts(), replace(known, c_d=None)):
        assert n_guess_that_pays(unknown) == 0


def test_guesses_are_judged_by_how_many_stay_once_enough_were_made():
    pays = GuessingPays(replace(GUESSING, loaded=Loaded(all_logits=["target"])), 4)
    # A round of four takes 4 * 0.05 + 5 * 0.3 s; the target alone writes a token in 0.9 s.
    even = ((4 * 0.05 + 5 * 0.3) / 0.9 - 1) / 4
    for kept, said in ((even + 0.02, True), (even - 0.02, False)):
        counters = Counters(n_guesses=1000, n_guesses_kept=round(1000 * kept))
        assert pays(counters) is said
    assert pays(Counters()) and pays(Counters(n_guesses=EVIDENCE_GUESSES - 1))
    assert not pays(Counters(n_guesses=EVIDENCE_GUESSES))
    assert GuessingPays(PairCosts(), 4)(Counters(n_guesses=1000)), "of unknown costs nothing is foretold"


def test_guesses_that_pay_are_made_in_runs_that_leave_it_open(command, questions):
    sources, models = Sources.from_pair("tiny"), ModelConfig(n_threads=1)
    with Reasoner(sources, None, models) as reasoner:
        loaded = loaded_facts(reasoner)
    store_costs(cost_key(sources, models), replace(GUESSING, loaded=loaded))
    run = ("run", *TINY, "--seed", "1", "-n", "60", questions.read_text(), "--json")

    def stats(*options):
        return json.loads(command(*run, *options)[1])["stats"]

    assert stats()["n_guesses"] > 0 and stats()["n_guess"] in (4, 8) and stats("--guess", "0")["n_guess"] == 0
    assert "guessed tokens kept" in command(*run[:-1])[2]
    assert stats("--guess", "0")["n_guesses"] == stats("--policy", "never")["n_guesses"] == 0
    assert stats("--policy", "never", "--guess", "2")["n_guesses"] > 0
    with Reasoner(sources, None, models, n_lanes=2) as reasoner:
        go_by_costs(reasoner)
        assert reasoner.n_guess == 0, "lanes write together"
    # Guesses make the target cheaper, so that steps may pay without them and not beside them.
    dear = replace(GUESSING, c_d=0.3, loaded=loaded, p_t={1: 1.0, 5: 0.3, 9: 0.3, 32: 0.25})
    store_costs(cost_key(sources, models), dear)
    assert stats("--guess", "0")["n_proposed_steps"] > 0
    given_up = stats()
    assert given_up["n_proposed_steps"] == 0 < given_up["n_guesses"]
    assert "The draft guessed tokens and no steps" in given_up["remarks"][0]["text"]


def test_what_cannot_pay_at_any_acceptance_is_given_up_at_once():
    assert not DraftingPays(replace(COSTS, c_t_alone=0.5))(Counters())
    assert DraftingPays(PairCosts())(counted(99, 0)), "of unknown costs nothing is foretold"


def test_a_calibrated_acceptance_decides_before_the_first_step(command, questions, tmp_path):
    sources, models = Sources.from_pair("tiny"), ModelConfig(n_threads=1)
    with Reasoner(sources, None, models) as reasoner:
        go_by_costs(reasoner)
        assert reasoner.pays_for is None and reasoner.n_guess == 0, "nothing was measured"
        loaded = loaded_facts(reasoner)
        acceptance = reasoner.joint_probe.spec.calibrated_acceptance("semantic-joint", reasoner.policy.threshold)
    assert 0.5 < acceptance < 1
    # Of steps of 32 tokens: written and read at 1, so at an acceptance of a the speedup is c_t_alone / (2 - a).
    costs = PairCosts(c_d=0.5, c_t=0.9, p_d={32: 0.1}, p_t={32: 0.5}, loaded=loaded)
    run = ("run", *TINY, "--seed", "1", "-n", "60", "--n-prime", "0", questions.read_text())
    for gain in (0.9, 1.3):
        store_costs(cost_key(sources, models), replace(costs, c_t_alone=gain * (2 - acceptance)))
        stats = json.loads(command(*run, "--json")[1])["stats"]
        assert (stats["n_proposed_steps"] == 0) is (gain < 1)
        assert ("gave_up" in [one["kind"] for one in stats["remarks"]]) is (gain < 1)
        lax = json.loads(command(*run, "--threshold", "0.1", "--json")[1])["stats"]
        assert lax["n_proposed_steps"] > 0, "of another threshold nothing is expected"
    # The last costs pay where one run has the machine to itself; in lanes the target writes cheaply, too.
    config = RunConfig(max_tokens=60, n_prime=0)
    worker = PairWorker(RayJob(sources=sources, config=config, models=models, seed=0, n_lanes=2).with_files())
    (record,) = worker.run([Item("a", 1, ({"role": "user", "content": questions.read_text()},))])
    assert record.stats["n_proposed_steps"] == 0, "an actor decides by what its machine measured"
    for n_lanes, drafts in ((1, True), (2, False)):
        (record,) = jobs.run([questions.read_text()], "tiny", config=config, models=models, n_lanes=n_lanes)
        assert (record.stats["n_proposed_steps"] > 0) is drafts
    out = tmp_path / "lanes.jsonl"
    assert "gave_up 1" in command("batch", questions, "-o", out, *TINY, "--lanes", "2", "--n-prime", "0")[2]


def test_a_run_and_a_batch_give_up_by_measured_costs_unless_told_otherwise(command, questions, tmp_path):
    sources, models = Sources.from_pair("tiny"), ModelConfig(n_threads=1)
    key = cost_key(sources, models)
    with Reasoner(sources, RunConfig(policy="always"), models) as reasoner:
        losing = replace(COSTS, c_t_alone=0.5, loaded=loaded_facts(reasoner))
    store_costs(key, losing)
    run = ("run", *TINY, "--seed", "1", "--policy", "always", "-n", "60", questions.read_text())
    stats = json.loads(command(*run, "--json")[1])["stats"]
    assert stats["n_tokens_by_draft"] == 0 and [one["kind"] for one in stats["remarks"]] == ["gave_up"]
    assert "--no-give-up" in command(*run)[2]
    assert json.loads(command(*run, "--json", "--no-give-up")[1])["stats"]["n_tokens_by_draft"] > 0
    out = tmp_path / "out.jsonl"
    code, _, err = command("batch", questions, "-o", out, *TINY, "--lanes", "1", "--policy", "always")
    assert code == 0 and "gave_up 1" in err
    other = [*run, "--policy", "loglik-ratio", "--threshold", "0", "--json"]
    assert json.loads(command(*other)[1])["stats"]["n_tokens_by_draft"] > 0, "nor do costs of another policy decide"
    store_costs(key, replace(losing, spread=2.0))
    assert json.loads(command(*run, "--json")[1])["stats"]["n_tokens_by_draft"] > 0, "noisy costs decide nothing"
