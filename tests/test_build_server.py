"""scripts/build_llama_server, with stand-ins for cmake and the archive: nothing is compiled here."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path

import pytest

from semspec_local.bench.server_binary import built_server, find_llama_server

SCRIPT = Path(__file__).parent.parent / "scripts" / "build_llama_server"
VERSION = metadata.version("llama-cpp-python")
CMAKE = """
import json, os, sys
from pathlib import Path

words = sys.argv[1:]
with Path(os.environ["CALLS"]).open("a") as calls:
    calls.write(json.dumps(words) + "\\n")
if words[0] == os.environ.get("FAILS"):
    sys.exit("-- looking around\\nCMake Error at CMakeLists.txt:7 (message):\\n  no luck today\\nbye")
if words[0] == "--build":
    programs = Path(words[1]) / "bin"
    programs.mkdir(parents=True, exist_ok=True)
    for name in ("llama-server", "llama-bench"):
        (programs / name).write_text("#!/bin/sh\\n" + os.environ.get("PROGRAM", "echo version 1\\n"))
        (programs / name).chmod(0o755)
else:
    assert (Path(words[1]) / "CMakeLists.txt").is_file()
"""

pytestmark = pytest.mark.skipif(not SCRIPT.is_file() or sys.platform == "win32", reason="needs a checkout and a shell")


@pytest.fixture
def tools(tmp_path, monkeypatch) -> Path:
    """A PATH with nothing but a compiler, make and cmake; none of them does anything."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("c++", "make"):
        (folder / name).write_text("#!/bin/sh\n")
    (folder / "cmake").write_text(f"#!{sys.executable}\n{CMAKE}")
    for path in folder.iterdir():
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    for name in ("CXX", "CMAKE_ARGS", "SEMSPEC_LLAMA_SERVER"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def archive(tmp_path) -> Path:
    return write_archive(tmp_path, VERSION)


def write_archive(folder: Path, version: str) -> Path:
    source = folder / f"llama_cpp_python-{version}" / "vendor" / "llama.cpp"
    source.mkdir(parents=True)
    (source / "CMakeLists.txt").write_text("")
    path = folder / f"llama_cpp_python-{version}.tar.gz"
    with tarfile.open(path, "w:gz") as file:
        file.add(source.parents[1], f"llama_cpp_python-{version}")
    return path


def build(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)], capture_output=True, text=True, check=False
    )


def calls() -> str:
    return Path(os.environ["CALLS"]).read_text()


def test_it_builds_once_and_says_where(tools, archive, monkeypatch):
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_CUDA=on -DX='a b'")
    done = build("--archive", archive)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{built_server()}\n" and find_llama_server() == built_server()
    assert built_server().with_name("llama-bench").is_file() and not (built_server().parent / "build").exists()
    for word in ("CMAKE_BUILD_TYPE=Release", "GGML_NATIVE=ON", "LLAMA_BUILD_TOOLS=ON", "LLAMA_USE_PREBUILT_UI=OFF"):
        assert f'"-D{word}"' in calls()
    assert '"-DGGML_CUDA=on", "-DX=a b"]' in calls()
    assert '"--target", "llama-server", "llama-bench"]' in calls()
    tools.joinpath("cmake").unlink()
    again = build()
    assert (again.returncode, again.stdout, again.stderr) == (0, done.stdout, "it is built already\n")


@pytest.mark.parametrize(
    ("step", "what"), [("-S", "cmake could not set up the build"), ("--build", "could not be built")]
)
def test_a_failure_is_one_line_that_names_the_log_and_the_next_try_goes_on(tools, archive, monkeypatch, step, what):
    monkeypatch.setenv("FAILS", step)
    done = build("--archive", archive)
    *_, last = done.stderr.splitlines()
    log = built_server().parent / "build.log"
    assert done.returncode == 1 and done.stdout == "" and not built_server().exists()
    assert last.startswith("Error: ") and f"{what}: CMake Error at CMakeLists.txt:7 (message): no luck today" in last
    assert last.endswith(f"(all of it is in {log})") and "looking around" in log.read_text()
    monkeypatch.delenv("FAILS")
    assert build("--archive", archive).returncode == 0


def test_a_server_that_does_not_run_is_not_kept(tools, archive, monkeypatch):
    monkeypatch.setenv("PROGRAM", "echo no such instruction; exit 132\n")
    done = build("--archive", archive)
    assert done.returncode == 1 and "was built, and does not run: no such instruction" in done.stderr
    assert not built_server().exists()


def test_what_is_missing_is_said(tools, archive, tmp_path, monkeypatch):
    other = build("--archive", write_archive(tmp_path, "0.0.1"))
    assert other.returncode == 2 and f"wanted the source archive of llama-cpp-python {VERSION}" in other.stderr
    torn = tmp_path / "torn.tar.gz"
    torn.write_bytes(archive.read_bytes()[:60])
    assert "cannot be unpacked" in build("--archive", torn).stderr
    monkeypatch.setenv("SEMSPEC_OFFLINE", "1")
    assert "the network is off; give the source archive" in build().stderr
    (tools / "c++").unlink()
    done = build("--archive", archive)
    assert done.returncode == 1 and "no C++ compiler found; install one, such as: apt install" in done.stderr
