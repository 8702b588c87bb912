"""Versions without imports, whole files or none, and a large file hashed once."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from semspec_local import provenance as module
from semspec_local.provenance import atomic_write, fingerprint_file, provenance, sha256_file
from semspec_local.resources import cache_dir, config_dir, shipped

LARGE = b"gguf" * (1 << 18)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("SEMSPEC_CACHE", str(folder))
    return folder


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were hashed, in order."""
    names: list[str] = []

    def spy(path: str | os.PathLike[str]) -> str:
        names.append(Path(path).name)
        return sha256_file(path)

    monkeypatch.setattr(module, "sha256_file", spy)
    return names


def test_provenance_is_plain_and_names_what_made_a_result() -> None:
    facts = provenance(["semspec-local", "run"])
    assert facts["argv"] == ["semspec-local", "run"]
    wanted = {"semspec_local", "llama_cpp_python", "onnxruntime", "numpy", "python", "platform", "argv"}
    assert set(facts) == wanted
    assert all(facts.values())
    assert json.loads(json.dumps(facts)) == facts
    assert provenance()["argv"] == sys.argv


def test_what_is_not_installed_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> str:
        raise OSError("unreadable metadata")

    monkeypatch.setattr(module.metadata, "version", broken)
    monkeypatch.setattr(module.platform, "platform", broken)
    facts = provenance([])
    assert facts["onnxruntime"] == facts["platform"] == "unknown"


def test_asking_for_provenance_imports_nothing_heavy() -> None:
    code = (
        "import sys, semspec_local.provenance as p, semspec_local.trace; p.provenance();"
        "print([m for m in ('llama_cpp', 'onnxruntime', 'torch', 'gguf') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_atomic_write_replaces_the_whole_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    atomic_write(path, "one\n歪\r\n")
    assert path.read_bytes() == "one\n歪\r\n".encode()
    atomic_write(path, b"\xff")
    assert path.read_bytes() == b"\xff"
    assert [item.name for item in tmp_path.iterdir()] == ["out.json"]


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.json"
    atomic_write(path, "old")

    def full(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(module.os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        atomic_write(path, "new")
    assert path.read_text() == "old"
    assert [item.name for item in tmp_path.iterdir()] == ["out.json"]


@pytest.mark.skipif(os.name != "posix", reason="modes and links of POSIX")
def test_atomic_write_keeps_modes_links_and_devices(tmp_path: Path) -> None:
    path, link = tmp_path / "out", tmp_path / "link"
    atomic_write(path, "new")
    plain = tmp_path / "plain"
    plain.write_text("x")
    assert path.stat().st_mode == plain.stat().st_mode
    path.chmod(0o640)
    link.symlink_to(path)
    atomic_write(link, "through the link")
    assert link.is_symlink() and path.read_text() == "through the link"
    assert path.stat().st_mode & 0o777 == 0o640
    atomic_write("/dev/null", "gone")
    assert Path("/dev/null").is_char_device()


def test_a_fingerprint_names_the_contents(tmp_path: Path) -> None:
    path = tmp_path / "probe.onnx"
    path.write_bytes(b"abc")
    wanted = hashlib.sha256(b"abc").hexdigest()
    assert sha256_file(path) == wanted
    assert fingerprint_file(str(path)) == {"sha256": wanted, "size_bytes": 3, "name": "probe.onnx"}
    with pytest.raises(FileNotFoundError):
        fingerprint_file(tmp_path / "none")


def test_a_large_file_is_hashed_once_until_it_changes(tmp_path: Path, hashed: list[str]) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(LARGE)
    first = fingerprint_file(path)
    assert fingerprint_file(path) == first
    assert hashed == ["model.gguf"]
    path.write_bytes(LARGE[::-1])
    os.utime(path, ns=(1, 1))
    assert fingerprint_file(path)["sha256"] == hashlib.sha256(LARGE[::-1]).hexdigest()
    assert len(hashed) == 2


def test_two_files_share_the_cache(tmp_path: Path, hashed: list[str]) -> None:
    for name in ("a.gguf", "b.gguf", "a.gguf", "b.gguf"):
        path = tmp_path / name
        if not path.exists():
            path.write_bytes(LARGE + name.encode())
        fingerprint_file(path)
    assert hashed == ["a.gguf", "b.gguf"]


@pytest.mark.parametrize(
    "broken", [b"", b"\xff", b"[]", b"{", b"[" * 100_000, b'{"%s": 1}', b'{"%s": [4, 1, "00"]}', b'{"%s": [[], {}, 0]}']
)
def test_a_corrupt_cache_only_costs_time(tmp_path: Path, cache: Path, broken: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(LARGE)
    cache.mkdir()
    (cache / "fingerprints.json").write_bytes(broken.replace(b"%s", str(path).encode()))
    assert fingerprint_file(path)["sha256"] == hashlib.sha256(LARGE).hexdigest()
    assert str(path.resolve()) in json.loads((cache / "fingerprints.json").read_text())


def test_an_unwritable_cache_only_costs_time(tmp_path: Path, cache: Path, hashed: list[str]) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(LARGE)
    cache.write_text("a file where the folder should be")
    assert fingerprint_file(path) == fingerprint_file(path)
    assert len(hashed) == 2


def test_the_folders_of_the_user_follow_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_dir() == tmp_path / "cache"
    for name in ("SEMSPEC_CACHE", "SEMSPEC_CONFIG", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    places = {
        "linux": (".cache/semspec-local", ".config/semspec-local"),
        "darwin": ("Library/Caches/semspec-local", "Library/Application Support/semspec-local"),
        "win32": ("AppData/Local/semspec-local/Cache", "AppData/Local/semspec-local/Config"),
    }
    for name, (cache, config) in places.items():
        monkeypatch.setattr(sys, "platform", name)
        assert (cache_dir(), config_dir()) == (tmp_path / cache, tmp_path / config)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "x"))
    assert (cache_dir(), config_dir()) == (tmp_path / ".cache/semspec-local", tmp_path / "x/semspec-local")
    monkeypatch.setenv("SEMSPEC_CONFIG", str(tmp_path / "own"))
    assert config_dir() == tmp_path / "own"


def test_shipped_files_stand_beside_the_package_in_a_checkout() -> None:
    assert shipped("models").name == "models"
