"""The arms of a benchmark: what a name means, and that arms which should write the same text do."""

from __future__ import annotations

import numpy as np
import pytest
from gguf_factory import write_model

from semspec_local.bench.arms import ArmRun, ArmSpec, make_arms, parse_arm
from semspec_local.config import ModelConfig, RunConfig, SamplingConfig
from semspec_local.errors import ConfigError
from semspec_local.llama.cache import PROMPT_BLOCK
from semspec_local.llama.context import LlamaContext
from semspec_local.llama.model import LlamaModel
from semspec_local.llama.native import C
from semspec_local.llama.native_time import LLAMA, native_time
from semspec_local.probes import ProbeSpec
from semspec_local.probes.mlp import Mlp
from semspec_local.probes.write import write_mlp_onnx
from semspec_local.provenance import sha256_file
from semspec_local.reasoner import Sources

QUESTION = "Anna has 14 shells. Anna finds 9 more shells. How many shells does Anna have?"
GREEDY = SamplingConfig(temperature=0.0)
MODELS = ModelConfig(n_ctx=512, n_threads=1)


@pytest.fixture(scope="session")
def sources(tiny, tmp_path_factory):
    """A target, and the same in four bits as the draft."""
    draft = write_model(tmp_path_factory.mktemp("coarse") / "coarse.gguf", quantization="Q4_0")
    return Sources(target=tiny("llama"), draft=draft)


def config(**options) -> RunConfig:
    return RunConfig(**{"max_tokens": 40, "max_step_tokens": 8, "n_prime": 0, **options})


def run(name: str, sources: Sources, *, seed: int = 0, **options) -> ArmRun:
    with make_arms([name], sources, config(**options), MODELS) as (arm,):
        assert arm.name == name
        return arm.run(QUESTION, seed)


# -- names ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        ArmSpec("target", "target"),
        ArmSpec("draft", "draft"),
        ArmSpec("token-sd", "token-sd", "always", n_draft=4),
        ArmSpec("token-sd@7", "token-sd", "always", n_draft=7),
        ArmSpec("lookup", "lookup", "never", n_draft=4),
        ArmSpec("lookup@10", "lookup", "never", n_draft=10),
        ArmSpec("semantic-ratio", "policy", "semantic-ratio"),
        ArmSpec("loglik-ratio@0.9", "policy", "loglik-ratio", 0.9),
        ArmSpec("never", "policy", "never"),
        ArmSpec("never+guess@4", "policy", "never", guess=4),
        ArmSpec("loglik-ratio@0.9+guess@16", "policy", "loglik-ratio", 0.9, guess=16),
        ArmSpec("random@rate-of:always+guess@2", "matched", "random", 0.5, follows="always+guess@2"),
    ],
    ids=lambda spec: spec.name,
)
def test_a_name_says_what_to_run(spec):
    assert parse_arm(spec.name) == spec


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("semspec", "known are target, draft, token-sd@N, lookup@N, semantic-ratio, .*never"),
        ("", "known are"),
        ("target@1", "stands alone"),
        ("draft@", "stands alone"),
        ("token-sd@0", "1 or more"),
        ("token-sd@", "1 or more"),
        ("token-sd@two", "1 or more"),
        ("lookup@0", "wanted lookup@N for N drafted tokens, 1 or more"),
        ("never+guess@0", "wanted 1 to 16 tokens behind .guess@"),
        ("never+guess@17", "wanted 1 to 16 tokens behind .guess@"),
        ("never+guess@", "wanted 1 to 16 tokens behind .guess@"),
        ("target+guess@4", "wanted a policy before .guess@N .token-sd@N is the target with it"),
        ("semspec+guess@4", "known are target"),
        ("loglik-ratio@", "wanted a number"),
        ("loglik-ratio@high", "wanted a number"),
        ("random@1.5", "wanted a number from 0 to 1"),
        ("always@0.5", "has no threshold"),
    ],
)
def test_a_name_that_says_nothing_is_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        parse_arm(name)


def test_every_name_is_read_before_the_first_file(tmp_path):
    nowhere = Sources(target=tmp_path / "nothing.gguf")
    with pytest.raises(ConfigError, match="known are"), make_arms(["target", "nonsense"], nowhere):
        pass
    with pytest.raises(ConfigError, match="twice"), make_arms(["target", "always", "target"], nowhere):
        pass


@pytest.mark.parametrize("name", ["draft", "always", "token-sd@2"])
def test_an_arm_that_drafts_needs_a_draft(tiny, name):
    with pytest.raises(ConfigError, match="-md"), make_arms([name], Sources(target=tiny("llama")), config(), MODELS):
        pass


@pytest.mark.parametrize("name", ["token-sd@2", "lookup"])
def test_an_arm_that_cannot_close_thinking_is_not_compared_with_those_that_do(sources, name):
    with pytest.raises(ConfigError, match=f"the arm {name} cannot close a model's thinking; leave out --think-budget"):
        run(name, sources, think_budget=5)


# -- runs -------------------------------------------------------------------------------------------


def test_all_kinds_answer_one_question_after_another(sources):
    names = ["target", "draft", "token-sd@3", "lookup@3", "loglik-ratio@0.9", "mean-loglik", "specreason"]
    names += ["always", "never", "random@0.85", "never+guess@2", "loglik-ratio@0.9+guess@3"]
    with make_arms(names, sources, config(), MODELS) as arms:
        assert [arm.name for arm in arms] == names
        for arm in arms:
            first, again = arm.run(QUESTION, 1), arm.run(QUESTION, 1)
            assert (first.text, first.stop_reason, first.n_tokens) == (again.text, again.stop_reason, again.n_tokens)
            assert first.text and 0 < first.n_tokens <= 40 and first.wall_s > first.prefill_s > 0
            assert arm.run(QUESTION, 2).text != first.text
            assert not arm.calls_back
            by_tokens = arm.name.startswith(("token-sd", "lookup"))
            assert (first.counters is None, first.records is None) == (by_tokens, by_tokens)
            guesses = by_tokens or "+guess" in arm.name
            assert (first.n_proposed is None, first.n_accepted is None) == (not guesses, not guesses)


@pytest.mark.parametrize("name", ["target", "always", "random@0.5", "token-sd@3"])
def test_every_run_reads_its_prompt_whole(sources, monkeypatch, name):
    """A batch keeps the beginning that two prompts share; an arm is timed against programs that keep nothing."""
    decode, counts = LlamaContext.decode, []

    def counting(context, tokens, *arguments, **options):
        counts.append(len(tokens))
        return decode(context, tokens, *arguments, **options)

    with make_arms([name], sources, config(sampling=GREEDY), MODELS) as (arm,):
        monkeypatch.setattr(LlamaContext, "decode", counting)
        arm.run(3 * QUESTION, 0)
        first = list(counts)
        arm.run(3 * QUESTION, 0)
    assert max(first) == PROMPT_BLOCK
    assert counts == 2 * first


@pytest.mark.parametrize("max_tokens", [5, 40])
def test_at_temperature_0_speculation_by_tokens_writes_the_targets_text(sources, max_tokens):
    alone = run("target", sources, sampling=GREEDY, max_tokens=max_tokens)
    for name in ("token-sd@4", "never+guess@4"):
        by_tokens = run(name, sources, sampling=GREEDY, max_tokens=max_tokens)
        assert by_tokens.text == alone.text
        assert (by_tokens.stop_reason, by_tokens.n_tokens) == (alone.stop_reason, alone.n_tokens)
        assert by_tokens.n_proposed >= by_tokens.n_accepted > 0


def test_the_draft_alone_is_a_run_with_the_draft_as_target(sources):
    alone = run("draft", sources, seed=3)
    assert alone.text == run("target", Sources(target=sources.draft), seed=3).text
    assert alone.text != run("target", sources, seed=3).text
    assert alone.counters.n_proposed_steps == 0


def test_a_draft_that_is_the_target_is_accepted_and_never_is_the_target(tiny):
    twins = Sources(target=tiny("llama"), draft=tiny("llama"))
    same = run("loglik-ratio@0.9", twins, sampling=GREEDY)
    assert same.counters.step_acceptance_rate == 1
    assert same.text == run("target", twins, sampling=GREEDY).text == run("never", twins, sampling=GREEDY).text
    by_tokens = run("token-sd@4", twins, sampling=GREEDY)
    assert by_tokens.n_accepted == by_tokens.n_proposed


def test_all_arms_share_the_settings(sources):
    for name in ("target", "draft", "token-sd@3", "always"):
        assert run(name, sources, max_tokens=7).n_tokens <= 7
    primed = run("always", sources, n_prime=2, max_step_tokens=4)
    assert [record.origin for record in primed.records[:3]] == ["target", "target", "draft"]


def write_probe(folder, model, role, *, last: bool):
    """A probe that says 0.5 of every step, from the last layer after its norm or from the first."""
    with LlamaModel(model) as loaded:
        info = loaded.info()
    spec = ProbeSpec(
        role=role,
        layer=info.n_layer - 1 if last else 0,
        norm="post" if last else "pre",
        pooling="mean",
        window="token",
        n_embd=info.n_embd,
        n_layer=info.n_layer,
        architecture=info.architecture,
        model_name=info.name,
        fingerprint=sha256_file(model),
        quantization=info.quantization,
    )
    layers = [(np.zeros((info.n_embd, 1), np.float32), np.zeros(1, np.float32))]
    mlp = Mlp(layers=layers, mean=np.zeros(info.n_embd, np.float32), std=np.ones(info.n_embd, np.float32))
    path = folder / f"{role}.onnx"
    write_mlp_onnx(path, mlp, spec, states=np.zeros((1, info.n_embd), np.float32))
    return path


@pytest.mark.parametrize("last", [True, False])
def test_an_arm_gets_the_probes_that_its_policy_needs_and_says_whether_they_call_back(sources, tmp_path, last):
    probes = {
        "target": write_probe(tmp_path, sources.target, "target", last=last),
        "draft": write_probe(tmp_path, sources.draft, "draft", last=last),
    }
    with_probes = Sources(target=sources.target, draft=sources.draft, probes=probes)
    names = ["target", "draft", "semantic-ratio", "loglik-ratio", "token-sd"]
    with make_arms(names, with_probes, config(), MODELS) as arms:
        assert [arm.name for arm in arms if arm.calls_back] == ([] if last else ["semantic-ratio"])
        found = arms[2].run(QUESTION, 0).records
    assert {record.acceptance_ratio for record in found if record.accepted is not None} == {1.0}


# -- llama.cpp's own time -----------------------------------------------------------------------------


def test_llama_cpps_time_is_part_of_the_whole(sources):
    with make_arms(["always", "token-sd@3"], sources, config(), MODELS) as arms:
        for arm in arms:
            with native_time() as spent:
                run = arm.run(QUESTION, 0)
            assert 0 < spent.native_s < spent.elapsed_s and run.wall_s < spent.elapsed_s
            # At least a decode and a draw for each token.
            assert spent.n_calls > run.n_tokens


def test_the_functions_are_put_back_also_after_a_failure():
    before = [getattr(C, name) for name in LLAMA[1]]
    with pytest.raises(KeyboardInterrupt), native_time() as spent:
        assert all(getattr(C, name) is not function for name, function in zip(LLAMA[1], before))
        raise KeyboardInterrupt
    assert all(getattr(C, name) is function for name, function in zip(LLAMA[1], before))
    assert spent.elapsed_s > 0 and spent.n_calls == 0


def test_seconds_are_summed_also_of_a_call_that_fails(monkeypatch):
    now = iter([0.0, 1.0, 3.0, 10.0, 14.0, 20.0])

    def decode(outcome):
        if outcome is None:
            raise ZeroDivisionError
        return outcome

    monkeypatch.setattr(C, "llama_decode", decode)
    with native_time(clock=lambda: next(now)) as spent:
        assert C.llama_decode(7) == 7
        with pytest.raises(ZeroDivisionError):
            C.llama_decode(None)
    assert (spent.native_s, spent.n_calls, spent.elapsed_s) == (2 + 4, 2, 20)


def test_no_time_is_taken_when_it_is_not_asked_for(sources, monkeypatch):
    def refuse(*_):
        raise AssertionError("timed")

    monkeypatch.setattr("semspec_local.llama.native_time._timed", refuse)
    assert run("target", sources).n_tokens


def test_the_draft_may_have_threads_of_its_own(sources):
    def threads(name: str, models: ModelConfig) -> dict[str, int]:
        with make_arms([name], sources, config(), models) as (arm,):
            step_models = arm._reasoner.step_models
            return {role: C.llama_n_threads(step_models[role].context.handle) for role in step_models}

    both, one = ModelConfig(n_ctx=512, n_threads=2), ModelConfig(n_ctx=512, n_threads=2, n_threads_draft=1)
    assert threads("loglik-ratio", both) == {"target": 2, "draft": 2}
    assert threads("loglik-ratio", one) == {"target": 2, "draft": 1}
    assert threads("draft", one) == {"target": 1}  # alone, the draft is loaded as a target
