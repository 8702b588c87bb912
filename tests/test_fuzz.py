"""Files of every kind that the program reads, damaged at random: each is read, or refused in one line; nothing crashes.

`SEMSPEC_FUZZ_FACTOR=20 scripts/test tests/test_fuzz.py` tries so many times as many files. What llama.cpp reads is
tried in another process, because a crash there would take this one with it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from gguf_factory import write_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lab_support import make_collection

from semspec_local.bench.results import ItemResult, read_results
from semspec_local.errors import ConfigError, DecodeError, ModelError, ProbeError, SemspecError
from semspec_local.jobs import read_job
from semspec_local.jobs.output import OutputFile
from semspec_local.lab.collection import read_collection
from semspec_local.linefile import manifest_path
from semspec_local.metrics import Counters
from semspec_local.pairs.manifest import read_manifest
from semspec_local.probes import OnnxProbe, read_probe_file
from semspec_local.trace import RunSummary, RunTrace, StepRecord, read_trace, write_trace

FACTOR = int(os.environ.get("SEMSPEC_FUZZ_FACTOR", "1"))
REPOSITORY = Path(__file__).resolve().parent.parent

INTERESTING = [b"\0", b"\xff", b"\n", b"\r\n", b"{", b"}", b"[", b"]", b'"', b"\\", b"null", b"NaN", b"-1", b"1e999"]
INTERESTING += [b"9" * 400, b"[" * 3000, b"\xed\xa0\x80", b"\xef\xbb\xbf", bytes(8), b"\xff" * 8, b"\x7f" + b"\xff" * 7]


@st.composite
def damaged(draw: Callable[..., object], whole: bytes, hot: int | None = None) -> bytes:
    """`whole` with a few places changed, most of them among its first `hot` bytes."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        most = len(data) if hot is None or draw(st.integers(0, 9)) == 0 else min(hot, len(data))
        at = draw(st.integers(0, max(0, most - 1)))
        kind = draw(st.sampled_from(["flip", "put", "insert", "cut", "end", "double"]))
        if kind == "flip" and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "put":
            some = draw(st.sampled_from(INTERESTING))
            data[at : at + len(some)] = some
        elif kind == "insert":
            data[at:at] = draw(st.sampled_from(INTERESTING) | st.binary(min_size=1, max_size=8))
        elif kind == "cut":
            del data[at : at + draw(st.integers(1, 40))]
        elif kind == "end":
            del data[at:]
        else:
            data[at:at] = data[at : at + draw(st.integers(1, 200))]
    return bytes(data)


def tries(n: int):
    return settings(
        max_examples=n * FACTOR,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def one_line(error: SemspecError) -> None:
    assert str(error).strip() and "\n" not in str(error), error


# -- text ---------------------------------------------------------------------------------------------

JOB = b"".join(
    json.dumps(line).encode() + b"\n"
    for line in (
        {"id": "a", "prompt": "Why?", "semspec": {"policy": "never", "seed": 3, "stop": ["x"]}},
        {"messages": [{"role": "system", "content": "Brief."}, {"role": "user", "content": "How?"}]},
        {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"prompt": "?", "temperature": 0.5}},
    )
)
DONE = b'{"id": "a", "status": "ok", "error": null}\n{"id": "b", "status": "error", "error": {"type": "x"}}\n'
MANIFEST = {"version": 1, "job": {"seed": 1, "config": {"policy": "never"}}, "n_items": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@tries(600)
@given(damaged(JOB))
def test_a_damaged_job_is_read_or_refused(folder, data):
    path = folder / "in.jsonl"
    path.write_bytes(data)
    try:
        job = read_job(path)
    except ConfigError as error:
        one_line(error)
    else:
        assert len({entry.id for entry in job.entries}) == len(job.entries)
        assert all("\n" not in getattr(entry, "message", "") for entry in job.entries)


@tries(400)
@given(damaged(DONE), damaged(json.dumps(MANIFEST).encode()), st.booleans())
def test_a_damaged_output_is_taken_up_or_left_alone(folder, output, manifest, damage_manifest):
    path = folder / "out.jsonl"
    path.write_bytes(output)
    manifest_path(path).write_bytes(manifest if damage_manifest else json.dumps(MANIFEST).encode())
    try:
        with OutputFile(path, MANIFEST) as out:
            finished = dict(out.finished)
    except ConfigError as error:
        one_line(error)
        assert path.read_bytes() == output, "what cannot be understood is not touched"
    else:
        with OutputFile(path, MANIFEST) as again:
            assert again.finished == finished


@cache
def whole_trace(path: Path) -> bytes:
    common = {"committed": True, "text": "a\n\n", "n_target_tokens": 2, "end": "boundary"}
    steps = [
        StepRecord(index=0, step_index=0, origin="target", reason="priming", write_s=0.5, **common),
        StepRecord(index=1, step_index=1, origin="draft", reason="score_ok", score=0.5, accepted=True, **common),
    ]
    summary = RunSummary(stop_reason="eos", counters=Counters.from_steps(steps))
    write_trace(path, RunTrace({"seed": 1, "policy": "always"}, steps, summary))
    return path.read_bytes()


@tries(600)
@given(st.data())
def test_a_damaged_trace_is_read_or_refused(folder, data):
    whole, path = whole_trace(folder / "whole.jsonl"), folder / "trace.jsonl"
    path.write_bytes(data.draw(damaged(whole)))
    try:
        trace = read_trace(path)
    except ConfigError as error:
        one_line(error)
    else:
        assert isinstance(trace.header, dict)


@tries(400)
@given(damaged((REPOSITORY / "models" / "qwen2.5-coder.toml").read_bytes()))
def test_a_damaged_manifest_of_a_pair_is_read_or_refused(folder, data):
    path = folder / "pair.toml"
    path.write_bytes(data)
    try:
        read_manifest(path)
    except ConfigError as error:
        one_line(error)


@tries(300)
@given(st.data())
def test_damaged_results_are_read_or_refused(folder, data):
    path = folder / "results.jsonl"
    facts = {"settings": {}, "files": []}
    times = {"wall_s": 1.0, "prefill_s": 0.1, "n_tokens": 5}
    result = ItemResult(item="a", seed=1, right=True, answer="5", stop_reason="eos", counters=Counters(), **times)
    line = json.dumps({"arms": {"target": result.to_json()}}).encode() + b"\n"
    path.write_bytes(data.draw(damaged(line)))
    whole = json.dumps({"version": 1, "job": {"arms": ["target"]}, "facts": facts}).encode()
    manifest_path(path).write_bytes(data.draw(st.just(whole) | damaged(whole)))
    try:
        read_results(path)
    except ConfigError as error:
        one_line(error)


@cache
def collection_parts(folder: Path) -> tuple[bytes, bytes]:
    make_collection(folder, n_problems=2)
    return (folder / "collection.json").read_bytes(), (folder / "index.jsonl").read_bytes()


@tries(300)
@given(st.data())
def test_a_damaged_collection_is_read_or_refused(folder, data):
    header, index = collection_parts(folder / "collection")
    which = data.draw(st.sampled_from(["header", "index"]))
    (folder / "collection" / "collection.json").write_bytes(data.draw(damaged(header)) if which == "header" else header)
    (folder / "collection" / "index.jsonl").write_bytes(data.draw(damaged(index)) if which == "index" else index)
    try:
        read_collection(folder / "collection")
    except SemspecError as error:
        one_line(error)


# -- ONNX ---------------------------------------------------------------------------------------------

PROBE = (REPOSITORY / "probes" / "tiny" / "target.onnx").read_bytes()


@tries(500)
@given(st.data())
def test_a_damaged_probe_is_opened_or_refused(folder, data):
    """Most changes fall into the graph and the metadata, which stand around the weights."""
    path = folder / "probe.onnx"
    damage = data.draw(st.sampled_from(["front", "back"]))
    if damage == "front":
        path.write_bytes(data.draw(damaged(PROBE, hot=400)))
    else:
        cut = max(0, len(PROBE) - 4000)
        path.write_bytes(PROBE[:cut] + data.draw(damaged(PROBE[cut:])))
    try:
        found = read_probe_file(path)
        OnnxProbe(found)
    except ProbeError as error:
        one_line(error)
    else:
        assert found.spec.n_embd > 0


# -- GGUF ---------------------------------------------------------------------------------------------

_CHILD = """
import sys
from pathlib import Path
from semspec_local.errors import SemspecError
from semspec_local.config import SamplingConfig
from semspec_local.llama.memory import needed_bytes
from semspec_local.llama.session import LlamaStepModel
for line in sys.stdin:
    path = Path(line.rstrip("\\n"))
    try:
        needed_bytes(path, 64, 1)
        with LlamaStepModel(path, n_ctx=64, n_threads=1, sampling=SamplingConfig()) as model:
            model.prefill(model.vocabulary.encode_prompt("hello") or [0])
        said = "loaded"
    except SemspecError as error:
        said = "refused: " + str(error)
        assert chr(10) not in str(error), error
    print(said, flush=True)
"""


class Reader:
    """Another process that loads one model after another."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self._start()

    def _start(self) -> None:
        with self.log.open("w") as log:
            pipe = subprocess.PIPE
            words = [sys.executable, "-c", _CHILD]
            self._process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=log, text=True, bufsize=1)

    def load(self, path: Path) -> str:
        """What became of it; AssertionError when the process did not end in one line, with an exit code of ours."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{path}\n")
        self._process.stdin.flush()
        said = self._process.stdout.readline()
        if not said:
            code = self._end()
            said = self.log.read_text()
            self._start()
            if code not in (ModelError.exit_code, DecodeError.exit_code) or said.count("\n") != 1:
                raise AssertionError(f"the process that loaded it ended with {code}: {said[-1500:]}")
        return said

    def close(self) -> None:
        self._process.kill()
        self._end()

    def _end(self) -> int:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        return self._process.wait()


@pytest.fixture(scope="module")
def reader(folder: Path) -> Iterator[Reader]:
    found = Reader(folder / "reader.log")
    yield found
    found.close()


@cache
def small_model(folder: Path) -> tuple[bytes, int]:
    """A model, and where its header ends."""
    whole = write_model(folder / "whole.gguf", n_layer=1).read_bytes()
    return whole, whole.index(b"token_embd.weight") + 500


@tries(400)
@given(st.data())
def test_a_damaged_model_is_loaded_or_refused(folder, reader, data):
    """Bytes of its header, which says how large everything is; the tokens between are many and harmless."""
    whole, n_header = small_model(folder)
    edge = data.draw(st.sampled_from([0, n_header - 900]))
    width = 1200 if edge == 0 else 900
    part = data.draw(damaged(whole[edge : edge + width]))
    path = folder / "model.gguf"
    path.write_bytes(whole[:edge] + part + whole[edge + width :])
    reader.load(path)


NUMBERS = [0, 1, 2, 3, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1]


@tries(300)
@given(st.data())
def test_a_model_whose_numbers_make_no_sense_is_loaded_or_refused(folder, reader, data):
    """Keys with other values, in a file that is whole otherwise."""
    whole, _ = small_model(folder)
    keys = [
        *("block_count", "embedding_length", "feed_forward_length", "context_length", "vocab_size"),
        *("attention.head_count", "attention.head_count_kv", "rope.dimension_count", "attention.key_length"),
    ]
    changed = bytearray(whole)
    for key in data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=2, unique=True)):
        name = f"llama.{key}".encode()
        at = changed.find(name)
        if at >= 0:
            value = data.draw(st.sampled_from(NUMBERS) | st.integers(0, 600))
            start = at + len(name) + 4
            changed[start : start + 4] = np.uint32(value).tobytes()
    path = folder / "numbers.gguf"
    path.write_bytes(bytes(changed))
    reader.load(path)


@tries(200)
@given(st.data())
def test_a_model_whose_ids_make_no_sense_is_loaded_or_refused(folder, reader, data):
    """The special tokens of its vocabulary, anywhere."""
    whole, _ = small_model(folder)
    changed = bytearray(whole)
    for key in ("bos", "eos", "eot", "padding", "unknown"):
        name = f"tokenizer.ggml.{key}_token_id".encode()
        at = changed.find(name)
        if at >= 0 and data.draw(st.booleans()):
            start = at + len(name) + 4
            changed[start : start + 4] = np.uint32(data.draw(st.sampled_from(NUMBERS))).tobytes()
    path = folder / "ids.gguf"
    path.write_bytes(bytes(changed))
    reader.load(path)
