"""`semspec-local doctor`: Python, cores, load, folders, the network."""

from __future__ import annotations

import errno
import os
import platform
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from doctor_support import answered

from semspec_local.config import ModelConfig
from semspec_local.doctor import Examination, folders, machine

# -- the machine ------------------------------------------------------------------------------------


def test_this_python_is_one_that_is_supported():
    assert machine.python(Examination()).status == "ok" and len(machine._wanted_python()) == 2


def test_a_python_that_is_not(monkeypatch):
    monkeypatch.setattr(machine, "_wanted_python", lambda: [(">=", (3, 99))])
    assert machine.python(Examination()).status == "fail"
    monkeypatch.undo()
    monkeypatch.setattr(machine.struct, "calcsize", lambda _: 4)
    assert "32 bits" in machine.python(Examination()).detail


def test_a_translated_python_is_a_warning(monkeypatch):
    done = subprocess.CompletedProcess([], 0, stdout=b"1\n")
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(machine.subprocess, "run", lambda *_, **__: done)
    assert machine.python(Examination()).status == "warn"
    done.stdout = b"0\n"
    assert machine.python(Examination()).status == "ok"


@pytest.mark.parametrize(
    ("files", "chosen", "status", "words"),
    [
        ({}, {}, "ok", "4 cores for this process; threads: target 4"),
        ({"sys/fs/cgroup/cpu.max": "max 100000"}, {}, "ok", "4 cores"),
        ({"sys/fs/cgroup/cpu.max": "150000 100000"}, {}, "warn", "1.5 by the container's quota"),
        ({"sys/fs/cgroup/cpu.max": "150000 100000"}, {"n_threads": 2}, "ok", "target 2, draft 2"),
        ({"sys/fs/cgroup/cpu.max": "150000 100000"}, {"n_threads": 2, "n_threads_draft": 3}, "warn", "draft 3"),
        (
            {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"},
            *({}, "warn", "2 by the container's quota"),
        ),
        (
            {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"},
            *({}, "ok", "4 cores"),
        ),
        (
            {f"sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list": f"{i % 2},{i % 2 + 2}" for i in range(4)},
            *({}, "ok", "2 physical"),
        ),
    ],
)
def test_threads_against_cores(tmp_path, monkeypatch, files, chosen, status, words):
    monkeypatch.setattr("semspec_local.config.default_threads", lambda: 4)
    monkeypatch.setattr(machine, "default_threads", lambda: 4)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    verdict = machine.threads(Examination(models=ModelConfig(**chosen)), tmp_path)
    assert verdict.status == status and words in verdict.detail


def test_a_loaded_machine_is_a_warning(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(machine, "default_threads", lambda: 3)
    for now, fix in ((0.5, None), (4.0, None), (4.1, "end them, or use -t 3"), (9.0, "end them, or use -t 1")):
        monkeypatch.setattr(os, "getloadavg", lambda now=now: (now, 0.0, 0.0), raising=False)
        assert machine.load(Examination()).fix == fix
    monkeypatch.delattr(os, "getloadavg")
    assert machine.load(Examination()).status == "ok"


# -- folders and the network ------------------------------------------------------------------------


def test_a_cache_that_does_not_exist_yet_is_ok_and_is_not_made(tmp_path, monkeypatch):
    monkeypatch.setenv("SEMSPEC_CACHE", str(tmp_path / "a" / "b"))
    verdict = folders.cache(Examination(pair="tiny"))
    assert verdict.status == "ok" and "by SEMSPEC_CACHE" in verdict.detail
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("below", ["", "deep/er"])
def test_a_cache_folder_that_is_a_file(tmp_path, monkeypatch, below):
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("SEMSPEC_CACHE", str(tmp_path / "file" / below))
    verdict = folders.cache(Examination(pair="tiny"))
    assert verdict.status == "fail" and "is no folder" in verdict.detail and "SEMSPEC_CACHE" in verdict.fix


def test_a_cache_that_may_not_be_written(tmp_path, monkeypatch):
    def refuse(**_: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setenv("SEMSPEC_CACHE", str(tmp_path))
    assert folders.cache(Examination(pair="tiny")).status == "ok" and not list(tmp_path.iterdir())
    monkeypatch.setattr(folders.tempfile, "TemporaryFile", refuse)
    verdict = folders.cache(Examination(pair="tiny"))
    assert verdict.status == "fail" and "Read-only file system" in verdict.detail


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there")
def test_a_cache_behind_a_dangling_link(tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    monkeypatch.setenv("SEMSPEC_CACHE", str(tmp_path / "link"))
    assert folders.cache(Examination(pair="tiny")).status == "fail"


def test_a_disk_without_room_for_the_pair(monkeypatch):
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda _: SimpleNamespace(free=10**6))
    for options in ({}, {"pair": "qwen2.5-coder"}):
        verdict = folders.cache(Examination(**options))
        assert verdict.status == "warn" and "qwen2.5-coder still needs 1.6 GB" in verdict.detail
    assert folders.cache(Examination(pair="tiny")).status == "ok"


def test_what_an_interrupted_pull_left(tmp_path, monkeypatch):
    monkeypatch.setenv("SEMSPEC_CACHE", str(tmp_path))
    (tmp_path / "models" / "some").mkdir(parents=True)
    (tmp_path / "models" / "some" / "big.gguf.part").write_text("x")
    verdict = folders.cache(Examination(pair="tiny"))
    assert verdict.status == "warn" and "big.gguf.part" in verdict.detail
    assert "semspec-local models pull some" in verdict.fix


@pytest.mark.parametrize(
    ("variables", "status", "words"),
    [
        ({}, "ok", "only models pull"),
        ({"SEMSPEC_OFFLINE": "1"}, "ok", "the network is off"),
        ({"HF_HUB_OFFLINE": "YES"}, "ok", "the network is off"),
        ({"SEMSPEC_OFFLINE": "0"}, "ok", "only models pull"),
        ({"SEMSPEC_OFFLINE": "maybe"}, "warn", "'maybe'"),
        ({"SEMSPEC_OFFLINE": "maybe", "HF_HUB_OFFLINE": "1"}, "ok", "HF_HUB_OFFLINE"),
    ],
)
def test_the_offline_switch(monkeypatch, variables, status, words):
    for name in ("SEMSPEC_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    verdict = folders.offline(answered({}, pair="nope"))
    assert verdict.status == status and words in verdict.detail
