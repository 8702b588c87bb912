"""A trace comes back as it was written, survives interruption, and nothing broken is read as a trace."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from semspec_local.errors import ConfigError, SemspecError
from semspec_local.metrics import Counters
from semspec_local.policy import Reason
from semspec_local.trace import (
    Origin,
    RunSummary,
    RunTrace,
    StepRecord,
    StopReason,
    TraceWriter,
    json_line,
    read_trace,
    write_trace,
)

FINITE = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | FINITE | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
HEADERS = st.dictionaries(st.text().filter(lambda key: key not in ("type", "version")), JSON, max_size=4)
STEPS = st.builds(
    StepRecord,
    index=st.just(0),
    step_index=st.integers(0),
    origin=st.sampled_from(get_args(Origin)),
    committed=st.booleans(),
    text=st.text(),
    n_target_tokens=st.none() | st.integers(0),
    n_draft_tokens=st.none() | st.integers(0),
    draft_semantic_prob=st.none() | FINITE,
    score=st.none() | FINITE,
    accepted=st.none() | st.booleans(),
    reason=st.sampled_from(get_args(Reason)),
    end=st.text(),
    propose_s=FINITE,
)
COUNTERS = st.builds(
    Counters,
    n_steps=st.integers(0),
    accepted_run_lengths=st.dictionaries(st.integers(0, 10**8), st.integers(1), max_size=3),
    wall_s=FINITE,
    ttft_s=st.none() | FINITE,
)
SUMMARIES = st.none() | st.builds(RunSummary, stop_reason=st.sampled_from(get_args(StopReason)), counters=COUNTERS)
TRACES = st.builds(
    lambda header, steps, summary: RunTrace(header, [replace(s, index=i) for i, s in enumerate(steps)], summary),
    HEADERS,
    st.lists(STEPS, max_size=4),
    SUMMARIES,
)
# one folder for all examples of a test is fine: each example replaces the file
on_files = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

STEP = StepRecord(
    index=0,
    step_index=0,
    origin="draft",
    committed=True,
    text="2 + 2 = 4 歪\u2028\n\n",
    n_target_tokens=9,
    draft_semantic_prob=0.1 + 0.2,
    accepted=True,
    reason="ratio_ok",
    end="boundary",
)
TRACE = RunTrace(
    {"seed": 7, "config": {"policy": "semantic-ratio"}, "provenance": {"argv": ["run"]}},
    [STEP, replace(STEP, index=1, origin="target", accepted=None, reason="rejected")],
    RunSummary(stop_reason="eos", counters=Counters(n_steps=2, accepted_run_lengths={0: 1, 2: 3}, ttft_s=0.5)),
)


@on_files
@given(TRACES)
def test_a_trace_is_read_back_as_it_was_written(tmp_path: Path, trace: RunTrace) -> None:
    write_trace(tmp_path / "t.jsonl", trace)
    assert read_trace(tmp_path / "t.jsonl") == trace


@settings(on_files, max_examples=200)
@given(st.data())
def test_a_broken_trace_raises_only_config_error(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "t.jsonl"
    write_trace(path, TRACE)
    raw = path.read_bytes()
    at, n_lost = data.draw(st.integers(0, len(raw))), data.draw(st.integers(0, 30))
    junk = st.binary(max_size=4) | st.sampled_from(
        [b"NaN", b"1e999", b"-1", b"null", b"9" * 5000, b"[" * 10000, b"\n", b'"', b"true", b"{}", b"\xff"]
    )
    path.write_bytes(raw[:at] + data.draw(junk) + raw[at + n_lost :])
    try:
        read_trace(path)
    except ConfigError as error:
        assert "line" in str(error) and "wanted" in str(error) and len(str(error)) < 600


@on_files
@given(st.data())
def test_an_interrupted_trace_keeps_every_finished_line(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "t.jsonl"
    write_trace(path, TRACE)
    raw = path.read_bytes()
    header_end = raw.index(b"\n") + 1
    torn = raw[: data.draw(st.integers(header_end, len(raw)))]
    path.write_bytes(torn)
    got = read_trace(path)
    n_lines = torn.count(b"\n") + (torn[-1:] == b"}" and raw.startswith(torn + b"\n"))
    assert got.header == TRACE.header
    assert got.steps == TRACE.steps[: n_lines - 1]
    assert got.summary == (TRACE.summary if n_lines == 4 else None)


def test_each_line_is_on_disk_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with TraceWriter(path) as writer:
        writer.header(TRACE.header)
        assert read_trace(path) == RunTrace(TRACE.header)
        writer.step(STEP)
        assert read_trace(path).steps == [STEP]


def test_the_file_is_plain_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_trace(path, TRACE)
    raw = path.read_bytes()
    assert b"\r" not in raw and raw.endswith(b"\n") and "歪".encode() in raw
    lines = [json.loads(line) for line in raw.decode().split("\n")[:-1]]
    assert [line["type"] for line in lines] == ["run", "step", "step", "summary"]
    assert lines[0]["version"] == 1
    assert set(lines[1]) == {"type", *(item.name for item in fields(StepRecord))}
    assert lines[1]["draft_semantic_prob"] == 0.30000000000000004
    assert lines[1]["score"] is None
    assert lines[3]["counters"]["accepted_run_lengths"] == {"0": 1, "2": 3}
    assert not [key for key in lines[3]["counters"] if key.startswith("_")]


def test_numbers_that_are_none_are_null(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    odd = replace(STEP, score=math.nan, threshold=math.inf, acceptance_ratio=-math.inf)
    write_trace(path, RunTrace({"x": [math.nan, (1.0, math.inf)]}, [odd]))
    got = read_trace(path)
    assert got.header == {"x": [None, [1.0, None]]}
    assert (got.steps[0].score, got.steps[0].threshold, got.steps[0].acceptance_ratio) == (None, None, None)


def test_half_a_surrogate_pair_in_an_argument_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_trace(path, RunTrace({"argv": ["file-\udcff", "歪"]}))
    path.read_bytes().decode()
    assert read_trace(path).header == {"argv": ["file-\udcff", "歪"]}
    assert json_line({"a": "歪"}) == '{"a": "歪"}\n'.encode()


def test_a_header_cannot_pass_for_another_kind_of_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_trace(path, RunTrace({"type": "step", "version": 99, "seed": 1}))
    assert read_trace(path).header == {"seed": 1}


def test_fields_of_a_later_writer_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_trace(path, RunTrace({}, [STEP]))
    path.write_bytes(path.read_bytes().replace(b'"index": 0', b'"new": [1], "index": 0', 1))
    assert read_trace(path).steps == [STEP]


def test_a_trace_from_before_tokens_were_reused_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_trace(path, TRACE)
    raw = path.read_bytes().replace(b'"n_reused_tokens": 0, ', b"").replace(b'"n_tokens_reused": 0, ', b"")
    assert b"reused" not in raw
    path.write_bytes(raw)
    assert read_trace(path) == TRACE


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"version": 1', b'"version": 2', "line 1: got trace version 2; wanted 1"),
        (b'"type": "run"', b'"type": "step"', "line 1: got type 'step'; wanted 'run'"),
        (b'"index": 1', b'"index": 4', "line 3: got index 4; wanted 1"),
        (b'"committed": true', b'"committed": 1', "line 2: got committed 1; wanted bool"),
        (b'"n_target_tokens": 9', b'"n_target_tokens": -9', "line 2: got n_target_tokens -9; wanted int or null"),
        (b'"n_target_tokens": 9', b'"n_target_tokens": true', "got n_target_tokens True; wanted int or null"),
        (b'"reason": "ratio_ok"', b'"reason": "luck"', "line 2: got reason 'luck'; wanted one of ratio_ok"),
        (b'"propose_s": 0.0', b'"propose_s": null', "line 2: got propose_s None; wanted float"),
        (b'"score": null', b'"score": 1e999', "line 2: .*wanted"),
        (b'"score": null, ', b"", "line 2: got no score; wanted all fields"),
        (b'"2": 3', b'"2": 0', "line 4: .*whole numbers"),
        (b'{"type": "summary"', b"", "line 4: .*wanted a JSON object"),
    ],
)
def test_a_malformed_line_says_its_number_got_and_wanted(tmp_path: Path, old: bytes, new: bytes, message: str) -> None:
    path = tmp_path / "t.jsonl"
    write_trace(path, TRACE)
    raw = path.read_bytes()
    assert old in raw
    path.write_bytes(raw.replace(old, new, 1))
    with pytest.raises(ConfigError, match=message):
        read_trace(path)


def test_nothing_follows_a_summary(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_trace(path, TRACE)
    path.write_bytes(path.read_bytes() + json_line({"type": "step"}))
    with pytest.raises(ConfigError, match="line 5: got a line after the summary"):
        read_trace(path)


def test_whole_seconds_are_read_as_floats(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_trace(path, RunTrace({}, [STEP]))
    path.write_bytes(path.read_bytes().replace(b'"propose_s": 0.0', b'"propose_s": 3'))
    assert type(read_trace(path).steps[0].propose_s) is float


@pytest.mark.parametrize("raw", [b"", b"\n", b'{"type": "ru'])
def test_a_file_without_a_header_is_no_trace(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(raw)
    with pytest.raises(ConfigError, match="line 1"):
        read_trace(path)


def test_a_missing_file_or_folder_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="cannot be written"):
        TraceWriter(tmp_path / "none" / "t.jsonl")


def test_a_full_disk_is_one_clear_error() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    with pytest.raises(SemspecError, match="cannot be written"), TraceWriter(full) as writer:
        writer.header({})
