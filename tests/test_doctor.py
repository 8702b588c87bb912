"""`semspec-local doctor`: the right verdict on every kind of broken library, model and probe."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import doctor_support
import pytest
from doctor_support import (
    FAKE_ABSENT,
    FAKE_CALLING,
    FAKE_HANGING,
    FAKE_ILLEGAL,
    answered,
    checks_of,
    fake_llama_cpp,
)
from gguf_factory import bpe_vocab, write_model
from pairs_support import pretend_shipped

from semspec_local.config import ModelConfig
from semspec_local.costs.pair import PairCosts
from semspec_local.costs.store import cost_key, store_costs
from semspec_local.doctor import Examination, checks, costs, examine, library, machine, models, smoke
from semspec_local.doctor.child import Answer, Task, ask
from semspec_local.llama import memory
from semspec_local.llama.quantize import requantize
from semspec_local.pairs import resolve
from semspec_local.probes import shipped_probe

asked_here = doctor_support.asked_here
SKIP_WINDOWS = pytest.mark.skipif(sys.platform == "win32", reason="signals and /proc are POSIX")


# -- children ---------------------------------------------------------------------------------------


@SKIP_WINDOWS
def test_a_crash_is_named_and_only_what_needs_it_is_lost(tmp_path, monkeypatch, tiny):
    fake_llama_cpp(FAKE_ILLEGAL, tmp_path, monkeypatch)
    found = checks_of(target=tiny("llama"))
    assert found["llama-cpp"].status == "fail" and "SIGILL" in found["llama-cpp"].detail
    assert "another processor" in found["llama-cpp"].detail and "--no-binary" in (found["llama-cpp"].fix or "")
    assert found["onnxruntime"].status == "ok"
    assert found["target"].status == "warn" and "cannot be imported" in found["target"].detail
    assert not {"build", "symbols", "structures", "vocabularies"} & set(found)


def test_without_llama_cpp(tmp_path, monkeypatch, tiny):
    fake_llama_cpp(FAKE_ABSENT, tmp_path, monkeypatch)
    broken = checks_of(pair="tiny")["llama-cpp"]
    assert broken.status == "fail" and "build it anew: pip install" in (broken.fix or "")
    monkeypatch.setattr(library, "_installed", lambda: None)
    found = checks_of(pair="tiny", smoke=True)
    assert found["llama-cpp"].status == "fail" and "is not installed" in found["llama-cpp"].detail
    assert found["llama-cpp"].fix == "pip install llama-cpp-python==0.3.36"
    assert found["memory"].status == "warn" and "not estimated" in found["memory"].detail
    assert found["target-probe"].status == "warn" and "not compared" in found["target-probe"].detail
    assert found["smoke"].status == "fail" and "not tried" in found["smoke"].detail
    assert {found[name].status for name in ("python", "onnxruntime", "pair", "cache", "offline")} == {"ok"}


def test_a_child_that_hangs_is_ended(tmp_path, monkeypatch):
    fake_llama_cpp(FAKE_HANGING, tmp_path, monkeypatch)
    answer = ask([Task("llama", "llama"), Task("build", "build", needs=("llama",))], time_limit_s=3)["llama"]
    assert answer.kind == "timeout" and answer.error == "it did not end within 3 s"
    assert library.llama_cpp(answered({"llama": answer})).fix.startswith("try again")


def test_a_child_that_cannot_begin_answers_for_all(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    answers = ask([Task("llama", "llama"), Task("onnx", "onnx", {"path": "x"})])
    assert set(answers) == {"llama", "onnx"}
    assert all(answer.kind == "exit" and "exit code 1" in answer.error for answer in answers.values())


def test_no_process_can_be_started(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert "no process can be started" in ask([Task("llama", "llama")])["llama"].error


def test_use_of_the_network_is_seen(tmp_path, monkeypatch):
    fake_llama_cpp(FAKE_CALLING, tmp_path, monkeypatch)
    found = checks_of(pair="tiny")
    assert found["offline"].status == "fail" and "socket.getaddrinfo" in found["offline"].detail


# -- llama.cpp and ONNX Runtime ---------------------------------------------------------------------


def identity(**changes: str) -> dict[str, Answer]:
    file = str(metadata.distribution("llama-cpp-python").locate_file("llama_cpp/__init__.py"))
    return {"llama": Answer({"version": "0.3.36", "file": file, **changes})}


def test_the_bindings_that_were_installed_are_ok():
    assert library.llama_cpp(answered(identity())).status == "ok"


def test_another_version_is_a_warning():
    verdict = library.llama_cpp(answered(identity(version="0.3.2")))
    assert verdict.status == "warn" and "wanted 0.3.36" in verdict.detail


def test_a_source_tree_that_shadows_the_package_is_a_warning(tmp_path):
    (tmp_path / "__init__.py").touch()
    verdict = library.llama_cpp(answered(identity(file=str(tmp_path / "__init__.py"))))
    assert verdict.status == "warn" and "is not the installed package" in verdict.detail


def test_a_fork_is_a_warning(monkeypatch):
    real = metadata.distribution("llama-cpp-python")
    pages = {"Project-URL": ["Homepage, https://example.org/JamePeng/llama-cpp-python"]}
    fork = SimpleNamespace(locate_file=real.locate_file, metadata=SimpleNamespace(get_all=pages.get))
    monkeypatch.setattr(library, "_installed", lambda: fork)
    verdict = library.llama_cpp(answered(identity()))
    assert verdict.status == "warn" and "fork" in verdict.detail


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        ("libcudart.so.12: cannot open shared object file", "OSError", "CUDA runtime"),
        ("Shared library with base name 'llama' not found", "FileNotFoundError", "build it anew"),
        ("the process died of SIGABRT (Aborted)", "signal", "build it anew"),
    ],
)
def test_an_import_that_fails_has_its_own_fix(error, kind, words):
    verdict = library.llama_cpp(answered({"llama": Answer(error=error, kind=kind)}))
    assert verdict.status == "fail" and error in verdict.detail and words in verdict.fix


def built(*features: str, gpu: bool = False) -> dict[str, Answer]:
    return {"build": Answer({"features": list(features), "gpu": gpu, "mmap": True, "mlock": True})}


def cpu(root: Path, line: str) -> Path:
    (root / "proc").mkdir()
    (root / "proc" / "cpuinfo").write_text(f"processor : 0\n{line}\n")
    return root


@pytest.mark.parametrize(
    ("line", "features", "status", "words"),
    [
        ("flags : fpu avx avx2 fma", ["AVX", "AVX2", "FMA", "REPACK"], "ok", "AVX AVX2"),
        ("flags : fpu avx avx2 fma", ["AVX"], "warn", "also has AVX2 FMA"),
        ("flags : fpu avx", ["AVX", "AVX512"], "fail", "built for AVX512"),
        ("Features : fp asimd asimddp", ["NEON", "DOTPROD"], "ok", "DOTPROD"),
        ("nothing : known", ["AVX"], "ok", "not known here"),
    ],
)
def test_the_build_is_compared_with_the_processor(tmp_path, line, features, status, words):
    verdict = library.build(answered(built(*features)), cpu(tmp_path, line))
    assert verdict.status == status and words in verdict.detail


def test_layers_for_a_gpu_that_the_build_does_not_know(tmp_path):
    for option in ("n_gpu_layers", "n_gpu_layers_draft"):
        wanted = ModelConfig(**{option: 9})
        assert library.build(answered(built(), models=wanted), tmp_path).status == "fail"
        assert library.build(answered(built(gpu=True), models=wanted), tmp_path).status == "ok"


def test_symbols_and_structures():
    assert library.symbols(answered({"symbols": Answer([])})).status == "ok"
    assert "cb_eval" in library.symbols(answered({"symbols": Answer(["cb_eval"])})).detail
    assert library.structures(answered({"defaults": Answer([])})).status == "ok"
    odd = answered({"defaults": Answer(["n_batch is 7, wanted 2,048"])})
    assert library.structures(odd).status == "fail" and "n_batch is 7" in library.structures(odd).detail


def test_a_library_from_elsewhere_is_thought_of(monkeypatch):
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", "/elsewhere")
    assert library.structures(answered({"defaults": Answer(["odd"])})).fix == "unset LLAMA_CPP_LIB_PATH"


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        ("No module named 'onnxruntime'", "ModuleNotFoundError", "pip install"),
        ("a.onnx has ONNX IR version 99, too new", "ProbeError", "update onnxruntime"),
        ("the process died of SIGILL (Illegal instruction)", "signal", "pip install"),
    ],
)
def test_onnxruntime_that_does_not_work(error, kind, words):
    verdict = library.onnxruntime(answered({"onnx": Answer(error=error, kind=kind)}))
    assert verdict.status == "fail" and error in verdict.detail and words in verdict.fix


# -- models and probes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"<!doctype html><title>log in", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"GGUF", "broken or truncated"),
        (b"pickle", "not a GGUF file"),
        (None, "no model file at"),
    ],
)
@pytest.mark.usefixtures("asked_here")
def test_a_file_that_is_no_model(tmp_path, tiny, content, words):
    path = tmp_path / "bad.gguf"
    if content is not None:
        path.write_bytes(content)
    for options in ({"target": path}, {"target": tiny("llama"), "draft": path}):
        found = checks_of(**options, smoke=True)
        bad = found[list(options)[-1]]
        assert bad.status == "fail" and words in bad.detail and "get the file again" in (bad.fix or "")
        assert found["memory"].status == "warn" and "vocabularies" not in found
        assert found["smoke"].status == "fail" and "not tried" in found["smoke"].detail


@pytest.mark.case(53)
@pytest.mark.usefixtures("asked_here")
def test_a_model_that_was_cut_off(tmp_path, tiny):
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny("llama").read_bytes()[:-1000])
    found = checks_of(target=path)["target"]
    assert found.status == "fail" and "is truncated" in found.detail


@pytest.mark.usefixtures("asked_here")
def test_an_architecture_that_llama_cpp_does_not_know(tmp_path, tiny):
    path, data = tmp_path / "new.gguf", tiny("llama").read_bytes()
    path.write_bytes(data.replace(b"llama", b"lhama", 1))
    found = checks_of(target=path)["target"]
    assert found.status == "fail" and "unknown model architecture" in found.detail and "older GGUF" in (found.fix or "")


@pytest.mark.usefixtures("asked_here")
def test_a_model_whose_weights_are_incomplete(tmp_path):
    path, other = tmp_path / "less.gguf", tmp_path / "other.gguf"
    data = write_model(other).read_bytes()
    path.write_bytes(data.replace(b"blk.2.ffn_down.weight", b"blk.2.ffn_gown.weight"))
    found = checks_of(target=path)["target"]
    assert found.status == "fail" and "blk.2.ffn_down.weight" in found.detail


@pytest.mark.usefixtures("asked_here")
def test_a_missing_chat_template_is_a_warning(tiny):
    found = checks_of(target=tiny("llama"), draft=tiny("no-template"))
    assert found["target"].status == "ok"
    assert found["draft"].status == "warn" and "no chat template" in found["draft"].detail


@pytest.mark.usefixtures("asked_here")
def test_a_chat_template_that_cannot_be_read_is_a_warning(tmp_path):
    path = write_model(tmp_path / "a.gguf", chat_template="{% for %}")
    found = checks_of(target=path)["target"]
    assert found.status == "warn" and "cannot be read" in found.detail


@pytest.mark.usefixtures("asked_here")
def test_names_from_files_command_no_terminal(tmp_path):
    path = write_model(tmp_path / "a.gguf", name="evil\x1b[2J\nname")
    assert "evil [2J name" in checks_of(target=path)["target"].detail


def test_a_model_without_an_end_is_a_warning(tiny):
    with_end = Examination(target=tiny("llama")).facts("target")
    assert with_end is not None
    answers = {"target": Answer({**with_end, "eog": []})}
    verdict = models.target(answered(answers, target=tiny("llama")))
    assert verdict.status == "warn" and "no token that ends a text" in verdict.detail


@pytest.mark.parametrize(
    ("draft", "status", "words"),
    [
        ("llama-other-seed", "ok", "carried as tokens"),
        ("more-padding", "ok", "carried as tokens"),
        ("spm", "warn", "the target's is BPE, the draft's SentencePiece"),
        ("other-vocab", "warn", "in the target,"),
        ("mamba", "ok", "draft memory: recurrent, rolls back by checkpoints"),
        ("lfm2", "ok", "draft memory: hybrid, rolls back by checkpoints"),
        ("gemma2", "ok", "draft memory: sliding window, rolls back by cutting"),
    ],
)
@pytest.mark.usefixtures("asked_here")
def test_vocabularies_and_memories(tiny, draft, status, words):
    found = checks_of(target=tiny("llama"), draft=tiny(draft))["vocabularies"]
    assert found.status == status and words in found.detail and "target memory: plain" in found.detail


@pytest.mark.usefixtures("asked_here")
def test_vocabularies_of_different_size_and_end(tmp_path, tiny):
    longer = write_model(
        tmp_path / "longer.gguf", vocab=bpe_vocab(n_pad=0, controls=(*bpe_vocab().tokens[-11:-8], "<x>"))
    )
    assert checks_of(target=tiny("llama-unpadded"), draft=longer)["vocabularies"].status == "warn"
    ends = write_model(tmp_path / "ends.gguf", vocab=bpe_vocab(eos="<think>"))
    found = checks_of(target=tiny("llama"), draft=ends)["vocabularies"]
    assert found.status == "warn" and "ends a text in one of the models only" in found.detail


@pytest.mark.usefixtures("asked_here")
def test_a_probe_for_another_quantization_is_a_warning(tmp_path):
    pair, path = resolve("tiny"), tmp_path / "q8.gguf"
    requantize(pair.target, path, "Q8_0", 1)
    probes = {"target": shipped_probe("tiny", "target"), "joint": shipped_probe("tiny", "joint")}
    found = checks_of(target=path, draft=pair.draft, probes=probes)
    for role in probes:
        assert found[f"{role}-probe"].status == "warn" and "was trained on" in found[f"{role}-probe"].detail
        assert "this model is Q8_0" in found[f"{role}-probe"].detail
    found = checks_of(target=path, draft=pair.draft, probes={"target": probes["target"]})
    assert found["joint-probe"].status == "warn" and "there is none" in found["joint-probe"].detail


@pytest.mark.usefixtures("asked_here")
def test_probes_that_cannot_be_used(tmp_path, tiny):
    pickle = tmp_path / "a.onnx"
    pickle.write_bytes(b"\x80\x04.")
    bad = {"pickle": pickle, "missing": tmp_path / "none.onnx", "n_embd": shipped_probe("tiny", "target")}
    for words, path in bad.items():
        found = checks_of(target=tiny("llama"), probes={"target": path})["target-probe"]
        assert found.status == "fail" and words in found.detail.replace("does not exist", "missing")


@pytest.mark.usefixtures("asked_here")
def test_no_models_pulled():
    found = checks_of()
    assert found["pair"].status == "warn" and "tiny answers" in found["pair"].detail
    assert found["pair"].fix == "semspec-local models pull qwen2.5-coder"
    assert found["target"].status == "ok" and found["joint-probe"].status == "ok"
    named = checks_of(pair="qwen2.5-coder")
    assert named["pair"].status == "fail" and named["pair"].fix == "semspec-local models pull qwen2.5-coder"
    assert not {"target", "draft", "memory", "target-probe"} & set(named)
    unknown = checks_of(pair="nope")["pair"]
    assert unknown.status == "fail" and "unknown pair 'nope'" in unknown.detail


@pytest.mark.usefixtures("asked_here")
def test_a_damaged_embedded_pair_cannot_be_pulled(tmp_path, monkeypatch):
    files = pretend_shipped(tmp_path, monkeypatch, (b"big", b"small"))
    (files / "draft.gguf").write_bytes(b"cut")
    found = checks_of(pair="tiny")["pair"]
    assert (found.status, found.fix) == ("fail", "install semspec-local anew") and "is damaged" in found.detail


@pytest.mark.usefixtures("asked_here")
def test_a_broken_manifest_beside_a_good_pair():
    folder = Path(os.environ["SEMSPEC_CONFIG"]) / "models"
    folder.mkdir(parents=True)
    (folder / "mine.toml").write_text("[pair")
    found = checks_of(pair="tiny")["pair"]
    assert found.status == "warn" and "mine.toml" in found.detail


# -- memory -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("free", "status", "words"),
    [
        (lambda needed: needed - 1, "fail", "use -c 2048, which fits"),
        (lambda needed: needed + 1, "warn", "that is tight"),
        (lambda needed: 2 * needed, "ok", "free within the limits"),
        (lambda needed: 1000, "fail", "smaller models"),
        (lambda needed: None, "warn", "does not tell"),
    ],
)
@pytest.mark.usefixtures("asked_here")
def test_memory_of_both_models_against_what_is_free(tiny, monkeypatch, free, status, words):
    paths = [tiny("llama"), tiny("llama-q8")]
    needed = sum(memory.needed_bytes(path, 4096, 1) for path in paths)
    monkeypatch.setattr(memory, "free_bytes", lambda: free(needed))
    found = checks_of(target=paths[0], draft=paths[1], smoke=status == "fail")
    check = found["memory"]
    assert check.status == status and words in f"{check.detail} {check.fix}" and "-c 4096" in check.detail
    if status == "fail":
        assert found["smoke"].status == "fail" and "do not fit" in found["smoke"].detail


# -- costs ------------------------------------------------------------------------------------------

CURVE = {1: 0.01, 32: 0.001}
PAYS = PairCosts(c_d=0.001, c_t=0.01, c_t_alone=0.01, p_d=CURVE, p_t=CURVE, measured_at="2031-02-03T04:05:06Z")


@pytest.mark.parametrize(
    ("found", "status", "words"),
    [
        (None, "ok", "run: semspec-local costs"),
        (PAYS, "ok", "acceptance on"),
        (PAYS, "ok", "Measured 2031-02-03"),
        (replace(PAYS, c_d=0.1), "warn", "gains nothing"),
        (replace(PAYS, spread=0.9), "warn", "repetitions lay 90% apart"),
    ],
)
def test_costs_where_they_were_measured(found, status, words):
    examination = Examination(pair="tiny", models=ModelConfig(n_threads=1))
    assert examination.sources is not None
    if found is not None:
        store_costs(cost_key(examination.sources, examination.models), found)
    verdict = costs.costs(examination)
    assert verdict is not None and verdict.status == status and words in verdict.detail


def test_costs_of_a_target_alone(tiny):
    assert costs.costs(Examination(target=tiny("llama"))) is None


# -- smoke ------------------------------------------------------------------------------------------


def test_smoke_on_the_embedded_pair():
    found = checks_of(pair="tiny", smoke=True)["smoke"]
    assert found.status == "ok", found.detail
    assert "policy semantic-joint" in found.detail and "rejected steps leave the target's text" in found.detail
    assert found.detail.count("with states read at l_out-") == 2


@pytest.mark.parametrize(
    ("target", "draft", "words"),
    [
        ("llama", "spm", "policy always"),
        ("mamba", "llama", "target: .*checkpoints"),
        ("llama", None, "the target alone wrote"),
    ],
)
@pytest.mark.usefixtures("asked_here")
def test_smoke_on_other_pairs(tiny, target, draft, words):
    found = checks_of(target=tiny(target), draft=draft and tiny(draft), smoke=True)["smoke"]
    assert found.status == "ok", found.detail
    assert all(word in found.detail for word in words.split(".*"))


TRIED = {"trials": {}, "policy": "always", "n_drafted": 3, "n_accepted": 3, "texts_differ_at": None}


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({}, "ok", "3 of 3"),
        ({"texts_differ_at": 7}, "fail", "from character 7 on"),
        ({"n_drafted": 0, "n_accepted": 0}, "fail", "no step of it was verified"),
        ({"n_accepted": 0}, "warn", "costs time only"),
    ],
)
def test_what_a_trial_says(change, status, words):
    verdict = smoke._judged({**TRIED, **change})
    assert verdict.status == status and words in verdict.detail


def test_a_pair_that_dies_when_it_is_loaded(tiny):
    examination = answered({}, target=tiny("llama"), smoke=True)
    examination.__dict__["smoke_answer"] = Answer(error="the process died of SIGKILL (Killed)", kind="signal")
    verdict = smoke.smoke(examination)
    assert verdict.status == "fail" and "SIGKILL" in verdict.detail


def test_where_two_texts_differ():
    pairs = {("ab", "ab"): None, ("ab", "ac"): 1, ("ab", "abc"): 2, ("", "a"): 0}
    assert all(smoke._first_difference(*pair) == wanted for pair, wanted in pairs.items())


# -- one check does not stop the others -------------------------------------------------------------


@pytest.mark.usefixtures("asked_here")
def test_a_check_that_breaks_is_a_failed_check(monkeypatch):
    def broken(_: Examination) -> None:
        raise RuntimeError("oh\nno")

    monkeypatch.setattr(checks, "CHECKS", (("first", broken), ("threads", machine.threads)))
    first, second = examine(Examination())
    assert first.status == "fail" and first.detail == "this check broke: RuntimeError: oh no" and first.fix
    assert second.name == "threads"
