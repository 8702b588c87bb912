"""Files of weights from strangers: nothing in them runs, and whatever is wrong with them is one line."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semspec_local.errors import ProbeError
from semspec_local.probes.weightfile import read_weights


class _Evil:
    def __reduce__(self):
        return (print, ("this ran",))


def zipped(path: Path, pickled: bytes, **parts: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", pickled)
        for name, data in parts.items():
            archive.writestr(f"a/data/{name}", data)
    return path


def test_code_in_a_torch_file_does_not_run(tmp_path, capfd):
    for number, content in enumerate((_Evil(), {"fc1.weight": _Evil()}, [{"deep": (_Evil(),)}])):
        path = zipped(tmp_path / f"{number}.pt", pickle.dumps(content))
        with pytest.raises(ProbeError, match="more than tensors"):
            read_weights(path)
    assert "this ran" not in capfd.readouterr().out


def opcodes(*parts: bytes) -> bytes:
    return b"\x80\x02" + b"".join(parts) + b"."


HOSTILE = {
    "a memo index of 4 billion": opcodes(b"Nr\xff\xff\xff\xff"),
    "a tuple as deep as the file is long": opcodes(b"}N", b"\x85" * 400_000, b"Ns"),
    "the same dictionary many times": None,
    "an attribute that hides a method": opcodes(b"ccollections\nOrderedDict\n)R}U\x05itemsNsb"),
    "a tensor that is changed after it was checked": None,
    "a stride beyond all memory": None,
}


def hostile(path: Path, name: str) -> Path:
    storage = "X\x05\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x04t"
    tensor = "ctorch._utils\n_rebuild_tensor_v2\n(("
    if name == "the same dictionary many times":
        inner: dict[str, Any] = {}
        for _ in range(7):
            inner = dict.fromkeys(map(str, range(60)), inner)
        return zipped(path, pickle.dumps(inner, 2))
    if name == "a tensor that is changed after it was checked":
        change = "}X\x06\0\0\0strideK\x09\x85sb"
        data = f"\x80\x02}}X\x01\0\0\0w{tensor}{storage}QK\0K\x02\x85K\x01\x85tR{change}s.".encode("latin1")
        return zipped(path, data, **{"0": b"\0" * 16})
    if name == "a stride beyond all memory":
        data = f"\x80\x02}}X\x01\0\0\0w{tensor}{storage}QK\0K\x01\x85".encode("latin1")
        return zipped(path, data + b"\x8a\x0d" + b"\xff" * 12 + b"\x00\x85tRs.", **{"0": b"\0" * 16})
    data = HOSTILE[name]
    assert data is not None
    return zipped(path, data)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pickle_is_refused_quickly(tmp_path, name):
    path = hostile(tmp_path / "a.pt", name)
    code = "import sys; from pathlib import Path; from semspec_local.probes import weightfile as w; "
    code += "w.read_weights(Path(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1 and "ProbeError" in done.stderr.splitlines()[-1], done.stderr[-300:]


def test_many_tensors_on_one_storage_do_not_fill_the_memory(tmp_path):
    torch = pytest.importorskip("torch", reason="makes the file with torch: pip install '.[train]'")
    storage = torch.zeros(2**21)
    torch.save({f"w{i}": storage for i in range(40)}, tmp_path / "a.pt")
    with pytest.raises(ProbeError, match="holds tensors of over 512 MiB"):
        read_weights(tmp_path / "a.pt")


@given(st.binary(max_size=80))
def test_any_bytes_for_a_pickle_are_refused_in_one_line(tmp_path_factory, data):
    path = zipped(tmp_path_factory.mktemp("any") / "a.pt", data)
    with pytest.raises(ProbeError) as error:
        read_weights(path)
    assert str(error.value).startswith(str(path)) and str(error.value).isprintable()


def test_a_cut_or_spoiled_file_is_refused(tmp_path):
    torch = pytest.importorskip("torch", reason="makes the file with torch: pip install '.[train]'")
    torch.save(torch.nn.Sequential(torch.nn.Linear(9, 4), torch.nn.Linear(4, 1)).state_dict(), tmp_path / "whole.pt")
    whole = (tmp_path / "whole.pt").read_bytes()
    for size in (0, 3, 40, len(whole) // 2, len(whole) - 30):
        path = tmp_path / "cut.pt"
        path.write_bytes(whole[:size])
        with pytest.raises(ProbeError):
            read_weights(path)
    rng = np.random.default_rng(0)
    for _ in range(100):
        spoiled = bytearray(whole)
        spoiled[int(rng.integers(len(whole)))] ^= int(rng.integers(1, 256))
        path.write_bytes(spoiled)
        try:
            read_weights(path)  # bytes that nobody reads may change
        except ProbeError:
            continue


def test_files_that_break_their_reader_give_one_line(tmp_path):
    path = tmp_path / "p"
    bodies = {"npz": zip_of(path, {"w.npy": b"no array"}), "header": zip_of(path, {"w.npy": np_header("{'descr': (")})}
    bodies |= {"name": npz_bytes({"9" * 5000: np.ones((4, 1))}), "escape": npz_bytes({"\x1brunning_mean": np.ones(4)})}
    bodies |= {"huge": npz_bytes({"w": np.full((4, 1), 1e300)}), "text": npz_bytes({"w": np.array("x")})}
    for name, body in bodies.items():
        path.write_bytes(body)
        try:
            read_weights(path)
        except ProbeError as error:
            assert str(error).startswith(str(path)) and str(error).isprintable(), name
        else:
            assert name == "name"  # odd, but a probe


def zip_of(path: Path, parts: dict[str, bytes]) -> bytes:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    return path.read_bytes()


def np_header(text: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


def npz_bytes(arrays_by_name: dict[str, Any]) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **arrays_by_name)
    return stream.getvalue()


def test_arrays_that_need_a_pickle_are_refused(tmp_path):
    np.savez(tmp_path / "p.npz", w=np.array([_Evil()], dtype=object))
    with pytest.raises(ProbeError, match="without pickles"):
        read_weights(tmp_path / "p.npz")
