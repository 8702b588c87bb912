"""The pair that ships with the program: when it answers in place of the default pair, and what `models` says of it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pairs_support
import pytest
from click.testing import CliRunner, Result
from pairs_support import CONTENT, OTHER, local_pair, pretend_shipped, role, sha256, source, write_manifest

from semspec_local import Sources
from semspec_local.cli.models import models
from semspec_local.errors import ConfigError, DownloadError, PairNotPulledError
from semspec_local.pairs import is_embedded, load_manifest, pull, resolve, usual_pair, verify
from semspec_local.pairs.state import FileRecord, PairState, write_state

home, no_network = pairs_support.home, pairs_support.no_network

DEFAULT = "qwen2.5-coder"
REMARK = (
    "the pair qwen2.5-coder is not on this machine, so the embedded pair tiny answers; it knows made-up "
    'arithmetic problems only, such as "Anna has 9 shells. Anna finds 6 more shells. ... '
    'How many shells do they have together?"; for real questions: semspec-local models pull qwen2.5-coder  (1.6 GB)'
)


@pytest.fixture
def shipped_files(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an embedded pair's two files, on a machine where nothing was pulled."""
    return pretend_shipped(tmp_path / "program", monkeypatch, (CONTENT, OTHER))


def pull_in_part(home: Path, *, n_bytes: int | None) -> None:
    """Leave the default pair's target as an earlier pull did, but `n_bytes` long; None leaves no file."""
    target = load_manifest(DEFAULT).target
    assert target.size is not None and target.sha256 is not None
    record = FileRecord(
        file=target.file,
        source_sha256=target.sha256,
        size=target.size,
        sha256=target.sha256,
        requantized=None,
        llama_cpp_python=None,
        date="2026-01-01T00:00:00+00:00",
    )
    folder = home / "models" / DEFAULT
    folder.mkdir(parents=True)
    if n_bytes is not None:
        (folder / target.file).write_bytes(bytes(n_bytes))
    write_state(folder, PairState(use={"target": target.file}, files={target.file: record}))


# which pair is used when none is named


def test_where_nothing_was_pulled_the_embedded_pair_is_used_and_one_warning_says_so(
    shipped_files: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert usual_pair() == "tiny"
    (record,) = caplog.records
    assert (record.getMessage(), record.levelno) == (REMARK, logging.WARNING)
    sources = Sources.from_pair()
    assert (sources.pair, sources.target, sources.draft) == (
        "tiny",
        shipped_files / "target.gguf",
        shipped_files / "draft.gguf",
    )


def test_a_pair_that_is_named_is_used_without_a_word(shipped_files: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert Sources.from_pair("tiny").target == shipped_files / "target.gguf"
    with pytest.raises(PairNotPulledError, match="get it with"):
        Sources.from_pair(DEFAULT)
    assert not caplog.records


@pytest.mark.parametrize(
    ("n_bytes", "said"), [(9, "is damaged: got 9 bytes, wanted 1117320768"), (None, "is not on this machine")]
)
def test_a_default_pair_that_was_pulled_and_is_damaged_is_not_replaced(
    home: Path, shipped_files: Path, caplog: pytest.LogCaptureFixture, n_bytes: int | None, said: str
) -> None:
    pull_in_part(home, n_bytes=n_bytes)
    assert usual_pair() == DEFAULT
    with pytest.raises(PairNotPulledError, match=said):
        Sources.from_pair()
    assert not caplog.records


def test_a_broken_state_of_the_default_pair_is_said(home: Path, shipped_files: Path) -> None:
    pull_in_part(home, n_bytes=9)
    (home / "models" / DEFAULT / "state.json").write_text("{")
    with pytest.raises(ConfigError, match=r"state\.json is broken"):
        Sources.from_pair()


def test_a_pull_that_finished_no_file_is_none(home: Path, shipped_files: Path) -> None:
    (home / "models" / DEFAULT / "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf.parts").mkdir(parents=True)
    (home / "models" / DEFAULT / "lock").touch()
    assert usual_pair() == "tiny"


@pytest.mark.parametrize("broken", ["gone", "short", "not shipped"])
def test_without_a_whole_embedded_pair_the_error_is_the_default_pairs(
    shipped_files: Path, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    draft = shipped_files / "draft.gguf"
    if broken == "short":
        draft.write_bytes(OTHER[:-1])
    else:
        (draft if broken == "gone" else shipped_files.parent / "tiny.toml").unlink()
    with pytest.raises(PairNotPulledError, match=r"semspec-local models pull qwen2\.5-coder"):
        Sources.from_pair()
    assert not caplog.records


def test_a_users_own_manifests_are_not_mistaken_for_the_embedded_pair(
    shipped_files: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = local_pair(tmp_path / "mine")
    own["pair"]["name"] = "tiny"
    write_manifest(tmp_path / "config" / "models" / "tiny.toml", own)
    assert not is_embedded(load_manifest("tiny"))
    assert usual_pair() == DEFAULT
    own["pair"]["name"] = DEFAULT  # a default pair whose files the user has already
    write_manifest(tmp_path / "config" / "models" / f"{DEFAULT}.toml", own)
    (tmp_path / "config" / "models" / "tiny.toml").unlink()
    assert Sources.from_pair().target == tmp_path / "mine" / "big.gguf"
    assert not caplog.records


# the one line of `run`


@pytest.fixture
def ask(
    tiny: Callable[[str], Path], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `semspec-local run` in a process of its own, on a machine that has the embedded pair only."""
    root = tmp_path / "program"
    pretend_shipped(root, monkeypatch, (tiny("llama").read_bytes(), tiny("llama-other-seed").read_bytes()))
    start = (
        "import sys; from pathlib import Path; from semspec_local import cli, resources\n"
        f"resources._PACKAGE = Path({str(root / 'semspec_local')!r}); cli.main(sys.argv[1:])"
    )
    short = ["--policy", "loglik-ratio", "-n", "4", "-t", "1", "-s", "7"]

    def asked(*arguments: str) -> subprocess.CompletedProcess[str]:
        program = [sys.executable, "-c", start, "run", "hi", *short, *arguments]
        return subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=False)

    return asked


@pytest.mark.parametrize("options", [(), ("--json",)], ids=["text", "json"])
def test_run_says_in_one_line_that_the_embedded_pair_answers(ask, options):
    done = ask(*options)
    first, *rest = [line for line in done.stderr.splitlines() if line]
    assert (done.returncode, first) == (0, REMARK)
    assert rest[-1].endswith("seed 7") and "tiny" not in "".join(rest)
    assert REMARK not in done.stdout
    if options:
        assert json.loads(done.stdout)["usage"]["completion_tokens"] > 0


def test_run_says_nothing_of_it_when_quiet_or_when_the_pair_was_named(ask):
    quiet = ask("-q")
    assert (quiet.returncode, quiet.stderr) == (0, "")
    named = ask("--pair", "tiny")
    assert named.returncode == 0 and "embedded" not in named.stderr


def test_run_shows_what_is_wrong_with_a_damaged_default_pair(ask, home):
    pull_in_part(home, n_bytes=9)
    done = ask("-q")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Error: ") and "is damaged: got 9 bytes" in done.stderr


# models list, pull, verify, path


def command(*arguments: str) -> Result:
    return CliRunner().invoke(models, list(arguments))


def test_list_calls_it_embedded_and_path_finds_it_where_it_ships(shipped_files: Path) -> None:
    real, tiny = command("list").stdout.splitlines()
    assert tiny.split() == ["tiny", "0.8", "MB", "embedded", "Embedded"] and "not pulled" in real
    facts = {fact["name"]: fact for fact in json.loads(command("list", "--json").stdout)}
    assert (facts["tiny"]["embedded"], facts["tiny"]["pulled"]) == (True, True)
    assert (facts[DEFAULT]["embedded"], facts[DEFAULT]["pulled"]) == (False, False)
    target, draft = str(shipped_files / "target.gguf"), str(shipped_files / "draft.gguf")
    assert command("path", "tiny").stdout == f"{target}\n{draft}\n"


@pytest.mark.parametrize("options", [(), ("--offline",), ("--prune",), ("--requant", "draft=none")])
def test_pull_says_in_one_line_that_it_is_here_and_writes_nothing(
    home: Path, shipped_files: Path, no_network: None, options: tuple[str, ...]
) -> None:
    before = sorted(shipped_files.parent.rglob("*"))
    for name in ("tiny", str(shipped_files.parent / "tiny.toml")):
        result = command("pull", name, *options)
        assert (result.exit_code, result.stdout) == (0, "")
        assert result.stderr == "tiny: ships with the program and is here already (0.8 MB); nothing to download\n"
    assert sorted(shipped_files.parent.rglob("*")) == before and not home.exists()


def test_pull_requantizes_it_into_the_users_folder_and_goes_back(home: Path, shipped_files: Path) -> None:
    def pretend_requantize(source: Path, destination: Path, file_type: str, n_threads: int) -> None:
        destination.write_bytes(b"q")

    before = sorted(shipped_files.rglob("*"))
    made = pull("tiny", requant={"draft": "Q4_0"}, requantize=pretend_requantize)
    assert (made.draft, made.target.parent) == (home / "models" / "tiny" / "draft.requant-Q4_0.gguf", shipped_files)
    assert pull("tiny").draft == shipped_files / "draft.gguf"
    assert sorted(shipped_files.rglob("*")) == before


def test_verify_hashes_both_files(home: Path, shipped_files: Path) -> None:
    lines = command("verify", "tiny").stdout.splitlines()
    assert lines == [
        f"{sha256(data)}  {shipped_files / name}  ok"
        for data, name in ((CONTENT, "target.gguf"), (OTHER, "draft.gguf"))
    ]
    assert not home.exists()


def test_a_damaged_embedded_file_is_nothing_that_a_pull_repairs(shipped_files: Path) -> None:
    (shipped_files / "draft.gguf").write_bytes(bytes(len(OTHER)))
    with pytest.raises(DownloadError, match=r"draft\.gguf: got sha256 .*\nit came with semspec-local; get that again$"):
        verify("tiny")
    (shipped_files / "draft.gguf").write_bytes(b"x")
    for use in (resolve, pull):
        with pytest.raises(PairNotPulledError, match="got 1 bytes, wanted 300000; it came with semspec-local"):
            use("tiny")


def test_a_damaged_local_file_of_the_users_own_names_its_manifest(home: Path, tmp_path: Path) -> None:
    path = write_manifest(tmp_path / "small.toml", local_pair(tmp_path / "mine"))
    (tmp_path / "mine" / "big.gguf").write_bytes(b"x")
    with pytest.raises(PairNotPulledError, match=r"put the right one there, or correct .*small\.toml"):
        resolve(path)


def test_a_new_version_of_a_local_file_replaces_what_an_earlier_pull_noted(home: Path, tmp_path: Path) -> None:
    manifest = local_pair(tmp_path / "mine")
    path = write_manifest(tmp_path / "small.toml", manifest)
    pull(path)
    big = tmp_path / "mine" / "big.gguf"
    big.write_bytes(OTHER[:1000])
    manifest["target"] = role(OTHER[:1000], source("path", path=str(big)), "big.gguf")
    write_manifest(tmp_path / "small.toml", manifest)
    assert resolve(path).state["target"]["sha256"] == sha256(OTHER[:1000])
    assert {result.wanted for result in verify(path)} == {sha256(OTHER[:1000]), sha256(OTHER)}
