"""Pairs on disk: resolve, verify, requantize, prune, offline, free space, one pull at a time."""

from __future__ import annotations

import io
import json
import sys
from collections import namedtuple
from pathlib import Path
from types import ModuleType
from typing import Any

import pairs_support
import pytest
from pairs_support import CONTENT, OTHER, local_pair, manifest_of, role, sha256, source, write_manifest

from semspec_local.errors import ConfigError, DownloadError, PairNotPulledError
from semspec_local.pairs import pull, resolve, verify
from semspec_local.pairs.files import format_size, one_writer
from semspec_local.pairs.places import is_offline
from semspec_local.pairs.progress import Bars, Lines, progress_on

home, no_network = pairs_support.home, pairs_support.no_network


def pretend_requantize(source: Path, destination: Path, file_type: str, n_threads: int) -> None:
    assert destination.name.endswith(".part") and n_threads >= 1
    destination.write_bytes(file_type.encode() + source.read_bytes())


def small(tmp_path: Path, **target_changes: Any) -> str:
    return write_manifest(tmp_path / "small.toml", local_pair(tmp_path / "mine", **target_changes))


def hub_pair(tmp_path: Path) -> str:
    """A pair whose target comes from a Hugging Face repository."""
    manifest = local_pair(tmp_path / "mine")
    manifest["target"] = role(CONTENT, source("huggingface", repo="org/repo", file="a/big.gguf"), "big.gguf")
    return write_manifest(tmp_path / "small.toml", manifest)


# resolve


def test_a_pair_that_was_not_pulled_says_the_command_and_the_size(home: Path) -> None:
    with pytest.raises(PairNotPulledError) as caught:
        resolve("qwen2.5-coder")
    assert str(caught.value) == (
        "the pair qwen2.5-coder is not on this machine; get it with: semspec-local models pull qwen2.5-coder  (1.6 GB)"
    )
    with pytest.raises(PairNotPulledError, match=r"offline, and qwen\S+gguf \(target\) and .* not in .*models"):
        resolve("qwen2.5-coder", offline=True)


def test_local_files_are_used_in_place_without_a_pull(home: Path, tmp_path: Path) -> None:
    files = resolve(small(tmp_path))
    assert (files.target, files.draft) == (tmp_path / "mine" / "big.gguf", tmp_path / "mine" / "little.gguf")
    assert files.state["draft"]["sha256"] == sha256(OTHER) and files.state["draft"]["requantized"] is None
    assert not home.exists()


def test_a_local_file_that_is_gone_is_named(home: Path, tmp_path: Path) -> None:
    pair = small(tmp_path)
    (tmp_path / "mine" / "big.gguf").unlink()
    for use in (resolve, pull):
        with pytest.raises(ConfigError, match=r"the target is not at .*big\.gguf"):
            use(pair)


def test_a_truncated_file_is_called_damaged(home: Path, tmp_path: Path) -> None:
    pair = small(tmp_path)
    (tmp_path / "mine" / "big.gguf").write_bytes(CONTENT[:-1])
    with pytest.raises(PairNotPulledError, match=f"damaged: got {len(CONTENT) - 1} bytes, wanted {len(CONTENT)}"):
        resolve(pair)


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 2}', '{"version": 1, "use": {}, "files": {"a": 1}}'])
def test_a_broken_state_file_is_one_clear_line(home: Path, tmp_path: Path, text: str) -> None:
    (home / "models" / "small").mkdir(parents=True)
    (home / "models" / "small" / "state.json").write_text(text)
    with pytest.raises(ConfigError, match=r"state\.json is broken .*; delete it") as caught:
        resolve(small(tmp_path))
    assert "\n" not in str(caught.value)


# requantize


def test_requantizing_follows_the_manifest_and_is_recorded(home: Path, tmp_path: Path) -> None:
    pair = small(tmp_path, requantize="Q4_0")
    with pytest.raises(PairNotPulledError, match="nothing to download"):
        resolve(pair)
    files = pull(pair, requantize=pretend_requantize)
    assert files.target == home / "models" / "small" / "big.requant-Q4_0.gguf"
    record = files.state["target"]
    assert record["source_sha256"] == sha256(CONTENT) and record["sha256"] == sha256(b"Q4_0" + CONTENT)
    assert (record["requantized"], record["size"]) == ("Q4_0", len(CONTENT) + 4)
    assert record["llama_cpp_python"] and record["date"].endswith("+00:00")
    assert resolve(pair) == files


def test_another_choice_makes_only_the_missing_file(home: Path, tmp_path: Path) -> None:
    pair = small(tmp_path, requantize="Q4_0")
    made: list[str] = []

    def requantize(source: Path, destination: Path, file_type: str, n_threads: int) -> None:
        made.append(file_type)
        pretend_requantize(source, destination, file_type, n_threads)

    choices: list[dict[str, str | None]] = [{}, {"target": None}, {"target": "q8_0"}, {"target": "Q4_0"}, {}]
    used = [pull(pair, requant=choice, requantize=requantize).target.name for choice in choices]
    q4, q8 = "big.requant-Q4_0.gguf", "big.requant-Q8_0.gguf"
    assert used == [q4, "big.gguf", q8, q4, q4]
    assert made == ["Q4_0", "Q8_0"]


def test_a_failed_requantizing_leaves_no_final_name(home: Path, tmp_path: Path) -> None:
    def broken(source: Path, destination: Path, file_type: str, n_threads: int) -> None:
        destination.write_bytes(b"half")
        raise KeyboardInterrupt

    pair = small(tmp_path, requantize="Q4_0")
    with pytest.raises(KeyboardInterrupt):
        pull(pair, requantize=broken)
    assert not (home / "models" / "small" / "big.requant-Q4_0.gguf").exists()
    with pytest.raises(PairNotPulledError):
        resolve(pair)


def test_a_local_file_that_changed_is_requantized_again(home: Path, tmp_path: Path) -> None:
    pair = small(tmp_path, requantize="Q4_0", sha256=None, size=None)
    pull(pair, requantize=pretend_requantize)
    (tmp_path / "mine" / "big.gguf").write_bytes(OTHER)
    assert pull(pair, requantize=pretend_requantize).target.read_bytes() == b"Q4_0" + OTHER


def test_unknown_types_and_roles_list_the_known_ones(home: Path, tmp_path: Path) -> None:
    pair = small(tmp_path)
    with pytest.raises(ConfigError, match=r"unknown file type 'Q9'; known: .*F16.*Q4_0.*Q8_0"):
        pull(pair, requant={"draft": "Q9"})
    with pytest.raises(ConfigError, match="unknown role 'drafter'; known: target, draft"):
        pull(pair, requant={"drafter": "Q4_0"})


def test_prune_deletes_what_is_not_used_but_no_file_of_the_users(home: Path, tmp_path: Path) -> None:
    pair = hub_pair(tmp_path)
    folder = home / "models" / "small"
    folder.mkdir(parents=True)
    (folder / "big.gguf").write_bytes(CONTENT)  # put there by hand
    both: dict[str, str | None] = {"target": "Q8_0", "draft": "Q8_0"}
    pull(pair, requant=both, prune=True, requantize=pretend_requantize)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["big.requant-Q8_0.gguf", "little.requant-Q8_0.gguf", "lock", "state.json"]
    assert (tmp_path / "mine" / "little.gguf").exists()
    pull(pair, requant=both, offline=True)  # the original is not wanted back


# verify


def test_verify_hashes_every_file(home: Path, tmp_path: Path) -> None:
    pair = small(tmp_path, requantize="Q4_0")
    pull(pair, requantize=pretend_requantize)
    results = verify(pair)
    assert {result.path.name for result in results} == {"big.gguf", "big.requant-Q4_0.gguf", "little.gguf"}
    assert all(result.got == result.wanted for result in results)


def test_verify_names_got_and_wanted_and_the_next_pull_repairs(home: Path, tmp_path: Path) -> None:
    pair = small(tmp_path, requantize="Q4_0")
    target = pull(pair, requantize=pretend_requantize).target
    target.write_bytes(bytes(len(CONTENT) + 4))
    bad, good = sha256(bytes(len(CONTENT) + 4)), sha256(b"Q4_0" + CONTENT)
    with pytest.raises(DownloadError, match=rf"big\.requant-Q4_0\.gguf: got sha256 {bad}, wanted {good}"):
        verify(pair)
    assert pull(pair, requantize=pretend_requantize).target.read_bytes() == b"Q4_0" + CONTENT


def test_verify_of_a_pair_that_is_not_there(home: Path) -> None:
    with pytest.raises(PairNotPulledError):
        verify("qwen2.5-coder")


# offline, Hugging Face


@pytest.mark.case(54)
def test_a_complete_pair_needs_no_network(home: Path, tmp_path: Path, no_network: None) -> None:
    pull(small(tmp_path, requantize="Q4_0"), offline=True, requantize=pretend_requantize)
    with pytest.raises(DownloadError, match=r"offline, and .*not in .*qwen2\.5-coder; run `semspec-local models pull"):
        pull("qwen2.5-coder", offline=True)


def pretend_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: str | None) -> None:
    def download(*, repo_id: str, filename: str, revision: str, local_dir: Path) -> str:
        if repo_id != "org/repo" or revision != "main":
            raise ValueError("no such repository\nand much more")
        (local_dir / "a").mkdir(parents=True)
        (local_dir / filename).write_bytes(CONTENT)
        return str(local_dir / filename)

    hub = ModuleType("huggingface_hub")
    hub.hf_hub_download = download  # type: ignore[attr-defined]
    hub.try_to_load_from_cache = lambda **_: cached  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def test_a_hub_file_is_fetched_and_checked(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_hub(tmp_path, monkeypatch, None)
    files = pull(hub_pair(tmp_path))
    assert files.target.read_bytes() == CONTENT
    assert sorted(path.name for path in files.target.parent.iterdir()) == ["big.gguf", "lock", "state.json"]


def test_the_hubs_error_becomes_one_line(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_hub(tmp_path, monkeypatch, None)
    manifest = local_pair(tmp_path / "mine")
    manifest["target"] = role(CONTENT, source("huggingface", repo="org/none", file="big.gguf"), "big.gguf")
    with pytest.raises(DownloadError, match=r"^org/none/big\.gguf could not be had: no such repository$"):
        pull(write_manifest(tmp_path / "small.toml", manifest))


@pytest.mark.case(54)
def test_offline_takes_a_hub_file_from_the_hubs_cache(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_network: None
) -> None:
    cached = tmp_path / "blob"
    cached.write_bytes(CONTENT)
    monkeypatch.setenv("HF_HUB_OFFLINE", "yes")
    pretend_hub(tmp_path, monkeypatch, None)
    pair = hub_pair(tmp_path)
    with pytest.raises(DownloadError, match=r"offline, and big\.gguf \(target\) not in"):
        pull(pair)
    pretend_hub(tmp_path, monkeypatch, str(cached))
    assert pull(pair).target.read_bytes() == CONTENT
    assert cached.exists()


def test_without_the_extra_the_error_names_it(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with pytest.raises(ConfigError, match=r'pip install "semspec-local\[hub\]"'):
        pull(hub_pair(tmp_path))


# disk, lock, places, progress


def test_a_full_disk_is_refused_with_the_numbers(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(2_000_000_000))
    with pytest.raises(DownloadError, match=r"not enough disk space in .*: 3\.5 GB needed, 2\.0 GB free"):
        pull("qwen2.5-coder", fetch=lambda part, folder: folder)


def test_two_pulls_do_not_write_the_same_folder(home: Path, tmp_path: Path) -> None:
    folder = home / "models" / "small"
    folder.mkdir(parents=True)
    with one_writer(folder), pytest.raises(DownloadError, match="another `models pull` is at work"):
        pull(small(tmp_path))
    pull(small(tmp_path))


def test_a_folder_that_cannot_be_written_is_a_download_error(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("SEMSPEC_CACHE", str(tmp_path / "file"))
    with pytest.raises((DownloadError, ConfigError), match="Not a directory"):
        pull(small(tmp_path))


@pytest.mark.parametrize(("value", "offline"), [("1", True), ("ON", True), ("yes", True), ("0", False), ("", False)])
def test_the_offline_switch(monkeypatch: pytest.MonkeyPatch, home: Path, value: str, offline: bool) -> None:
    monkeypatch.setenv("SEMSPEC_OFFLINE", value)
    assert is_offline() is offline


def test_plain_lines_come_every_few_seconds() -> None:
    now = [0.0]
    stream = io.StringIO()
    with Lines(stream, clock=lambda: now[0]).bar("target", 1_000_000) as advance:
        for _ in range(10):
            now[0] += 1.0
            advance(100_000)
    assert stream.getvalue() == "target: 50% of 1.0 MB\ntarget: 100% of 1.0 MB\n"
    assert isinstance(progress_on(io.StringIO()), Lines)


def test_a_terminal_gets_a_bar_without_colour_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = Terminal()
    progress = progress_on(stream)
    assert isinstance(progress, Bars)
    with progress.bar("target [x]", 1_000_000) as advance:
        advance(500_000)
        progress.note("a [bold] note")
    assert "a [bold] note" in stream.getvalue() and "target [x]" in stream.getvalue()
    assert "\x1b[3" not in stream.getvalue()  # no colour


def test_sizes_for_people() -> None:
    assert [format_size(n) for n in (512, 98_000_000, 491_400_064, 1_117_320_768)] == [
        "512 bytes",
        "98.0 MB",
        "0.5 GB",
        "1.1 GB",
    ]


def test_the_state_is_replaced_whole(home: Path, tmp_path: Path) -> None:
    pull(small(tmp_path, requantize="Q4_0"), requantize=pretend_requantize)
    state = json.loads((home / "models" / "small" / "state.json").read_text())
    assert set(state) == {"version", "use", "files"}
    assert state["use"] == {"target": "big.requant-Q4_0.gguf", "draft": str(tmp_path / "mine" / "little.gguf")}
    assert not list((home / "models" / "small").glob("*.tmp"))


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    manifest = local_pair(tmp_path / "mine")
    draft = {**manifest["draft"], "file": "big.gguf"}
    with pytest.raises(ConfigError, match=r"both 'big\.gguf'"):
        resolve(write_manifest(tmp_path / "small.toml", manifest_of(manifest["target"], draft)))
