"""Files that are no whole GGUF: one clear line each, before llama.cpp loads anything."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf_factory import write_model

from semspec_local.errors import ModelError
from semspec_local.llama.ggufcheck import check_gguf
from semspec_local.llama.model import LlamaModel

HEAD = b"GGUF" + struct.pack("<I", 3)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    return write_model(tmp_path_factory.mktemp("whole") / "whole.gguf", n_layer=1).read_bytes()


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        check_gguf(path)
    message = str(caught.value)
    assert "\n" not in message and str(path) in message
    with pytest.raises(ModelError):
        LlamaModel(path)
    return message


def test_a_whole_file_passes(tiny):
    check_gguf(tiny("llama"))
    check_gguf(tiny("llama-q8"))


def test_the_factory_writes_the_same_file_for_the_same_seed(tmp_path, whole):
    assert write_model(tmp_path / "again.gguf", n_layer=1).read_bytes() == whole
    assert write_model(tmp_path / "other.gguf", n_layer=1, seed=1).read_bytes() != whole


def test_a_path_that_is_no_file(tmp_path):
    assert "no model file at" in refusal(tmp_path / "missing.gguf")
    assert "no model file at" in refusal(tmp_path / "missing" / "too.gguf")
    assert "is a folder" in refusal(tmp_path)
    assert "cannot be read" in refusal(tmp_path / ("x" * 300))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this platform has no named pipes")
def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "device or pipe" in refusal(tmp_path / "pipe.gguf")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path, whole):
    path = tmp_path / "secret.gguf"
    path.write_bytes(whole)
    path.chmod(0)
    assert "cannot be read" in refusal(path)


@pytest.mark.case(36)
@pytest.mark.case(53)
@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (b"", r"is empty \(0 bytes\)"),
        (b"<!DOCTYPE html><html>Sign in</html>", "is a web page"),
        (b"\n\n <html lang='en'>", "is a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS pointer"),
        (b"PK\x03\x04 a zip file, such as torch saves", "another model format"),
        (b'{"__metadata__": {}}', "another model format"),
        (b"ggjt\x03\x00\x00\x00", "not a GGUF file: it starts with"),
        (b"G", "not a GGUF file"),
        (b"\x00" * 4096, "not a GGUF file"),
    ],
)
def test_what_people_take_for_a_model_is_named(tmp_path, content, wanted):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=wanted):
        check_gguf(path)
    refusal(path)


@pytest.mark.case(53)
def test_a_cut_file_is_truncated(tmp_path, whole):
    path = tmp_path / "cut.gguf"
    for n in (4, 8, 23, 24, 100, 3000):
        path.write_bytes(whole[:n])
        assert "broken or truncated" in refusal(path)
    for n in (len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:n])
        assert f"is truncated: it has {n:,} bytes, its tensors need {len(whole):,}" in refusal(path)


def test_a_file_without_weights_is_refused(tmp_path):
    path = tmp_path / "empty.gguf"
    path.write_bytes(HEAD + struct.pack("<QQ", 0, 0))
    assert "holds no weights" in refusal(path)


def _key(kind: int, *rest: bytes) -> bytes:
    return HEAD + struct.pack("<QQQ", 1, 1, 1) + b"k" + struct.pack("<I", kind) + b"".join(rest)


HOSTILE = {
    "random": b"GGUF" + np.random.default_rng(0).bytes(5000),
    "version 0": b"GGUF" + struct.pack("<IQQ", 0, 1, 1) + bytes(100),
    "another byte order": b"GGUF" + struct.pack(">IQQ", 3, 1, 1) + bytes(100),
    **{
        f"{n_tensors} tensors, {n_keys} keys": HEAD + struct.pack("<QQ", n_tensors, n_keys) + bytes(4000)
        for n_tensors, n_keys in [
            (2**63 - 1, 0),
            (2**64 - 1, 0),
            (0, 2**63 - 1),
            (0, 2**64 - 1),
            (2**40, 2**40),
            (10**9, 0),
            (0, 10**9),
        ]
    },
    "a string of 4 EB": _key(8, struct.pack("<Q", 2**62)),
    "a string of 16 GB": _key(8, struct.pack("<Q", 2**34)),
    "a name of 4 EB": HEAD + struct.pack("<QQQ", 1, 1, 2**62) + bytes(50),
    "an array of 2**60": _key(9, struct.pack("<IQ", 4, 2**60)),
    "an array of 2**34": _key(9, struct.pack("<IQ", 4, 2**34)),
    "2**36 strings": _key(9, struct.pack("<IQ", 8, 2**36)),
    "an array of arrays": _key(9, struct.pack("<IQ", 9, 2)),
    "no such type": _key(77),
}

_CHECK = """
import sys
from pathlib import Path
from semspec_local.errors import ModelError
from semspec_local.llama.ggufcheck import check_gguf
for name in sorted(Path(sys.argv[1]).iterdir()):
    print(name.name, flush=True)
    try:
        check_gguf(name)
    except ModelError as error:
        assert len(str(error).splitlines()) == 1, error
print("done")
"""


def survives(folder: Path) -> None:
    """Every file of the folder gets an answer, in another process, because a crash would take this one with it."""
    result = subprocess.run([sys.executable, "-c", _CHECK, str(folder)], capture_output=True, text=True, timeout=60)
    assert result.stdout.endswith("done\n"), (result.returncode, result.stdout[-200:], result.stderr[-2000:])
    assert result.stderr == ""


def test_hostile_headers_do_not_crash(tmp_path):
    for i, content in enumerate(HOSTILE.values()):
        (tmp_path / f"{i:02}.gguf").write_bytes(content)
    survives(tmp_path)
    for path in tmp_path.iterdir():
        assert "broken or truncated" in refusal(path)


def test_mutated_headers_do_not_crash(tmp_path, whole):
    """100 files with a few bytes of their header changed: 0, 255 or random bytes, in runs of 1 to 8."""
    rng = np.random.default_rng(1)
    n_header = whole.index(b"token_embd.weight") + 500
    for i in range(100):
        content = bytearray(whole)
        for _ in range(int(rng.integers(1, 4))):
            length = int(rng.integers(1, 9))
            # The counts and the description of the tensors are the dangerous parts.
            low, high = ((4, 40), (n_header - 900, n_header), (0, n_header))[int(rng.integers(3))]
            start = int(rng.integers(low, high))
            value = (bytes(length), b"\xff" * length, rng.bytes(length))[int(rng.integers(3))]
            content[start : start + length] = value
        (tmp_path / f"{i:03}.gguf").write_bytes(content)
    survives(tmp_path)


@pytest.mark.case(36)
def test_a_model_that_llama_cpp_refuses_says_why(tmp_path):
    path = write_model(tmp_path / "odd.gguf", n_layer=1, general__architecture="no-such-architecture")
    with pytest.raises(ModelError, match=r"cannot be loaded: .*no-such-architecture"):
        LlamaModel(path)


# -- split models ---------------------------------------------------------------------------------


def part(folder: Path, index: int, name: str = "m-{:05}-of-00003.gguf") -> Path:
    path = folder / name.format(index + 1)
    return write_model(path, n_layer=1, split__no=np.uint16(index), split__count=np.uint16(3))


@pytest.mark.case(52)
def test_a_split_model_has_to_be_whole_and_is_given_by_its_first_part(tmp_path):
    first, second = part(tmp_path, 0), part(tmp_path, 1)
    assert "m-00003-of-00003.gguf is not in its folder" in refusal(first)
    assert "is part 2 of 3 of a split model; give its first part, m-00001-of-00003.gguf" in refusal(second)
    third = part(tmp_path, 2)
    check_gguf(first)
    third.write_bytes(third.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"m-00003-of-00003.gguf is truncated"):
        check_gguf(first)


@pytest.mark.case(52)
def test_a_renamed_part_names_the_pattern_and_the_way_out(tmp_path):
    for name in ("renamed.gguf", "m-00001-of-00002.gguf", "m-00002-of-00003.gguf"):
        message = refusal(part(tmp_path, 0, name))
        assert "NAME-00001-of-00003.gguf" in message and "llama-gguf-split --merge" in message


def test_odd_split_keys_do_not_crash(tmp_path):
    for i, values in enumerate([{"split__count": 3}, {"split__no": "x", "split__count": True}, {"split__no": 7}]):
        write_model(tmp_path / f"{i}.gguf", n_layer=1, **values)
    survives(tmp_path)
