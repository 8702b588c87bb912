"""Ctrl-C while llama.cpp computes, and where llama.cpp's log goes."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread, Timer

import numpy as np
import pytest
from gguf_factory import write_model
from llama_support import GREEDY, TOKENS, at_most, session

from semspec_local.errors import ModelError
from semspec_local.interrupts import HeldInterrupt
from semspec_local.llama.model import LlamaModel
from semspec_local.llama.taps import LayerTaps
from semspec_local.protocols import TapPoint

LONG = (TOKENS * 10)[:3500]
POSIX = pytest.mark.skipif(sys.platform == "win32", reason="a process cannot send itself Ctrl-C on Windows")


@pytest.fixture(scope="module")
def slow(tmp_path_factory) -> Path:
    """A model that needs a second or more for `LONG`."""
    return write_model(tmp_path_factory.mktemp("slow") / "slow.gguf", n_layer=8, n_embd=256)


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    timer = Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        yield
    finally:
        timer.join()


@pytest.mark.case(46)
@POSIX
@pytest.mark.parametrize("taps", [[], [TapPoint(1)]])
def test_ctrl_c_stops_a_long_prefill_and_the_session_is_usable_after(slow, taps):
    with session(slow, n_ctx=4096, taps=taps) as model:
        start = time.perf_counter()
        with pytest.raises(KeyboardInterrupt), interrupted_after(0.1):
            model.prefill(LONG)
        stopped = time.perf_counter() - start
        assert model.n_past == len(model.tokens) == 0
        start = time.perf_counter()
        model.prefill(LONG[:1500])
        assert stopped < 0.1 + (time.perf_counter() - start), "less than half of it was read"
        with session(slow, n_ctx=4096, taps=taps) as fresh:
            fresh.prefill(LONG[:1500])
            assert np.array_equal(model._logits, fresh._logits)


@POSIX
def test_ctrl_c_stops_a_verification_and_the_step_is_forgotten(slow):
    with session(slow, n_ctx=4096, taps=[TapPoint(1)]) as model, session(slow, n_ctx=4096) as calm:
        for one in (model, calm):
            one.prefill(TOKENS[:40])
        with pytest.raises(KeyboardInterrupt), interrupted_after(0.1):
            model.score(LONG)
        assert model.tokens == TOKENS[:40]
        assert model.propose(at_most(5)).tokens == calm.propose(at_most(5)).tokens


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "mamba", "lfm2"])
def test_an_interrupt_inside_the_callback_is_neither_lost_nor_printed(tiny, architecture, monkeypatch, capfd):
    with session(tiny(architecture), taps=[TapPoint(1)]) as model, session(tiny(architecture)) as calm:
        for one in (model, calm):
            one.prefill(TOKENS[:40])
        copy = LayerTaps._copy

        def interrupt(self, tap, tensor):
            signal.raise_signal(signal.SIGINT)
            copy(self, tap, tensor)

        with monkeypatch.context() as patched:
            patched.setattr(LayerTaps, "_copy", interrupt)
            for action in (lambda: model.score(TOKENS[40:45]), lambda: model.propose(at_most(5))):
                with pytest.raises(KeyboardInterrupt):
                    action()
                assert model.tokens == TOKENS[:40]
        assert model.propose(at_most(8)).tokens == calm.propose(at_most(8)).tokens
    assert capfd.readouterr() == ("", "")


def test_a_handler_that_does_not_raise_stops_nothing(tiny):
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append("here"))
    try:
        with session(tiny("llama"), taps=[TapPoint(1)]) as model:
            copy = LayerTaps._copy

            def interrupt(self, tap, tensor):
                signal.raise_signal(signal.SIGINT)
                copy(self, tap, tensor)

            LayerTaps._copy = interrupt
            try:
                model.prefill(TOKENS[:100])
            finally:
                LayerTaps._copy = copy
        assert seen == ["here"]
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_handlers_are_given_back(tiny):
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with session(tiny("llama")) as model:
        model.prefill(TOKENS[:100])
    with pytest.raises(KeyboardInterrupt), HeldInterrupt() as held:
        signal.raise_signal(signal.SIGINT)
        assert isinstance(held.error, KeyboardInterrupt)
        held.check()
    assert {number: signal.getsignal(number) for number in before} == before


def test_another_thread_may_compute(tiny):
    results = []

    def work() -> None:
        with session(tiny("llama"), taps=[TapPoint(1)]) as model:
            model.prefill(TOKENS[:100])
            results.append(model.propose(at_most(5)).tokens)

    thread = Thread(target=work)
    thread.start()
    thread.join()
    assert len(results[0]) >= 1


@POSIX
def test_ctrl_c_while_a_model_is_loaded_is_not_lost(tiny, monkeypatch):
    """The log is a callback too: a signal that arrives there waits for the end of loading."""
    from semspec_local.llama import logs

    def interrupt(*_: object) -> None:
        monkeypatch.undo()
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(logs.logger, "log", interrupt)
    with pytest.raises(KeyboardInterrupt):
        LlamaModel(tiny("llama"))
    with LlamaModel(tiny("llama")) as model:
        assert model.n_layer == 3


# -- the log --------------------------------------------------------------------------------------


@pytest.mark.case(48)
def test_llama_cpp_writes_to_the_log_and_to_nothing_else(tiny, tmp_path, caplog, capfd):
    caplog.set_level(logging.DEBUG, logger="semspec_local")
    with session(tiny("llama"), taps=[TapPoint(1)], n_ctx=8192) as model:  # trained for 4096: a warning
        model.prefill(TOKENS)
        model.propose(at_most(5))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(tiny("llama").read_bytes()[:1000])
    with pytest.raises(ModelError):
        LlamaModel(broken)
    assert capfd.readouterr() == ("", "")
    levels = {record.levelno for record in caplog.records}
    assert {logging.DEBUG, logging.INFO, logging.WARNING} <= levels
    assert not any(record.getMessage().strip(".") == "" for record in caplog.records)
    assert any("n_ctx" in record.getMessage() for record in caplog.records if record.levelno == logging.INFO)


_QUIET = """
import sys
from pathlib import Path
from llama_support import TOKENS, at_most, session
from semspec_local.errors import ModelError
with session(Path(sys.argv[1]), n_ctx=8192) as model:
    model.prefill(TOKENS)
    model.propose(at_most(5))
try:
    session(Path(sys.argv[2]))
except ModelError as error:
    print(error)
"""


def test_a_program_that_set_up_no_logging_has_an_empty_stderr(tiny, tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(tiny("llama").read_bytes()[:1000])
    command = [sys.executable, "-c", _QUIET, str(tiny("llama")), str(broken)]
    result = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0
    assert result.stdout.count("\n") == 1 and "broken or truncated" in result.stdout
    assert result.stderr == ""


def test_closing_twice_is_harmless(tiny):
    model = session(tiny("llama"), sampling=GREEDY)
    model.close()
    model.close()
