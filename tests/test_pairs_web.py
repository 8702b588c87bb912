"""Downloads over HTTP from a server on loopback: continued after a break, and never half a file by its final name."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pairs_support
import pytest
from pairs_support import CONTENT, OTHER, Server, manifest_of, role, source, write_manifest

import semspec_local
from semspec_local.errors import DownloadError
from semspec_local.pairs import PairFiles, pull
from semspec_local.pairs.files import file_bytes

home, server, no_network = pairs_support.home, pairs_support.server, pairs_support.no_network

CUT = 200_000


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semspec_local.pairs.web.RETRY_AFTER_S", 0.0)


class Notes:
    """Keeps what was said, and how far the bar came."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.done = 0

    def note(self, text: str) -> None:
        self.said.append(text)

    def bar(self, label: str, total: int) -> Any:
        return self

    def __enter__(self) -> Any:
        self.done = 0
        return self._advance

    def __exit__(self, *_: object) -> None:
        pass

    def _advance(self, n_bytes: int) -> None:
        self.done += n_bytes


def url_pair(tmp_path: Path, server: Server, **target_changes: Any) -> str:
    """A pair whose target comes from the server and whose draft is a local file."""
    little = tmp_path / "little.gguf"
    little.write_bytes(OTHER)
    target = role(CONTENT, source("url", url=server.url), "big.gguf", **target_changes)
    draft = role(OTHER, source("path", path=str(little)), "little.gguf")
    return write_manifest(tmp_path / "small.toml", manifest_of(target, draft))


def half(home: Path) -> Path:
    return home / "models" / "small" / "big.gguf.part"


def break_once(pair: str, server: Server, home: Path) -> None:
    """A first pull whose connection breaks at CUT, and is then refused, so that the pull gives up."""
    server.cuts = [CUT, -1]
    with pytest.raises(DownloadError, match=f"got {CUT} of {len(CONTENT)} bytes"):
        pull(pair)
    assert file_bytes(half(home)) == CUT
    assert not half(home).with_name("big.gguf").exists()


def check_complete(files: PairFiles, home: Path) -> None:
    assert files.target.read_bytes() == CONTENT
    assert sorted(path.name for path in files.target.parent.iterdir()) == ["big.gguf", "lock", "state.json"]


def test_a_whole_file_is_fetched_and_recorded(home: Path, tmp_path: Path, server: Server) -> None:
    notes = Notes()
    files = pull(url_pair(tmp_path, server), progress=notes)
    check_complete(files, home)
    assert notes.done == len(CONTENT)
    assert files.state["target"]["sha256"] == files.manifest.target.sha256
    assert notes.said[0] == f"small: target 0.5 MB, 0.5 MB to download into {home / 'models' / 'small'}"


def test_a_broken_connection_is_continued_at_once(home: Path, tmp_path: Path, server: Server) -> None:
    server.cuts = [CUT]
    check_complete(pull(url_pair(tmp_path, server)), home)
    assert server.seen == [None, f"bytes={CUT}-"]


@pytest.mark.case(55)
def test_a_second_pull_continues_where_the_first_ended(home: Path, tmp_path: Path, server: Server) -> None:
    pair = url_pair(tmp_path, server)
    break_once(pair, server, home)
    notes = Notes()
    check_complete(pull(pair, progress=notes), home)
    assert server.seen[-1] == f"bytes={CUT}-" and notes.done == len(CONTENT)
    assert "0.3 MB to download" in notes.said[0]


@pytest.mark.case(55)
@pytest.mark.parametrize("etag", ['"two"', None])
def test_a_server_that_ignores_range_is_said_aloud(
    home: Path, tmp_path: Path, server: Server, etag: str | None
) -> None:
    server.ranges, server.etag = False, etag
    pair = url_pair(tmp_path, server)
    break_once(pair, server, home)
    notes = Notes()
    check_complete(pull(pair, progress=notes), home)
    assert any("starting over" in text for text in notes.said) and notes.done == len(CONTENT)


def test_a_file_that_changed_on_the_server_is_not_glued_to_the_old_half(
    home: Path, tmp_path: Path, server: Server
) -> None:
    server.content = bytes(len(CONTENT))
    pair = url_pair(tmp_path, server)
    break_once(pair, server, home)
    server.content, server.etag = CONTENT, '"two"'
    check_complete(pull(pair), home)


def test_a_half_file_without_etag_is_continued_and_checked_at_the_end(
    home: Path, tmp_path: Path, server: Server
) -> None:
    server.etag = None
    pair = url_pair(tmp_path, server)
    break_once(pair, server, home)
    half(home).write_bytes(b"x" * CUT)
    with pytest.raises(DownloadError, match=r"got sha256 [0-9a-f]{64}, wanted [0-9a-f]{64}"):
        pull(pair)
    assert not half(home).exists()
    check_complete(pull(pair), home)


def test_a_half_file_that_is_too_long_is_dropped(home: Path, tmp_path: Path, server: Server) -> None:
    pair = url_pair(tmp_path, server)
    break_once(pair, server, home)
    half(home).write_bytes(CONTENT + b"more")
    check_complete(pull(pair), home)


@pytest.mark.case(55)
def test_a_wrong_sha256_never_gets_the_final_name(home: Path, tmp_path: Path, server: Server) -> None:
    pair = url_pair(tmp_path, server, sha256="0" * 64)
    with pytest.raises(DownloadError, match="wanted " + "0" * 64):
        pull(pair)
    assert [path.name for path in (home / "models" / "small").iterdir()] == ["lock"]


def test_a_page_in_place_of_the_file_is_refused_before_it_is_fetched(
    home: Path, tmp_path: Path, server: Server
) -> None:
    pair = url_pair(tmp_path, server)
    server.content = b"<!doctype html>"
    with pytest.raises(DownloadError, match=f"the server offers 15 bytes, wanted {len(CONTENT)}"):
        pull(pair)


def test_nobody_at_the_address_is_a_download_error(home: Path, tmp_path: Path) -> None:
    pair = url_pair(tmp_path, Server(url="http://127.0.0.1:9/model.gguf"))
    with pytest.raises(DownloadError, match=r"127\.0\.0\.1:9.*run the same command again"):
        pull(pair)


@pytest.mark.case(54)
def test_offline_opens_no_socket(home: Path, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = url_pair(tmp_path, server)
    pull(pair)
    monkeypatch.setenv("SEMSPEC_OFFLINE", "1")
    with monkeypatch.context() as patch:
        patch.setattr("socket.socket", None)
        check_complete(pull(pair), home)
        (home / "models" / "small" / "big.gguf").unlink()
        with pytest.raises(DownloadError, match=r"offline, and big\.gguf \(target\) not in .*small; run"):
            pull(pair)


@pytest.mark.case(55)
def test_a_killed_pull_is_continued_by_the_next(home: Path, tmp_path: Path, server: Server) -> None:
    pair = url_pair(tmp_path, server)
    server.stall_at = CUT
    code = f"from semspec_local.pairs import pull; pull({pair!r})"
    package = Path(semspec_local.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(package)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment) as process:
        deadline = time.monotonic() + 20
        while file_bytes(half(home)) < CUT // 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        process.kill()
    have = file_bytes(half(home))
    assert 0 < have <= CUT
    assert not half(home).with_name("big.gguf").exists()
    check_complete(pull(pair), home)
    assert server.seen == [None, f"bytes={have}-"]
