"""Read the weights of a trained probe from the formats that people keep them in; nothing in a file is run.

PyTorch state dicts, safetensors, NumPy's .npz, and scikit-learn pipelines kept by skops. Each becomes an `Mlp`, and
what the file says about itself.
"""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, ProbeError
from .mlp import Activation, Mlp, mlp_from_tensors
from .onnxfile import read_header
from .runtime import MAX_PROBE_BYTES, is_safetensors, one_line
from .torchfile import ZIP_ERRORS, from_bfloat16, read_torch_file

_PICKLE = (
    "is a pickle, which can run any code when opened; save a PyTorch model again with "
    "torch.save(model.state_dict(), ...), a scikit-learn one with skops.io.dump(pipeline, 'probe.skops')"
)
_WANTED = "wanted a PyTorch state dict (.pt, .pth), safetensors, .npz, .skops or .onnx"


@dataclass(frozen=True)
class Weights:
    """A probe from somewhere else. `says` are the facts that the file has about itself, as texts."""

    mlp: Mlp
    says: Mapping[str, str]
    is_official: bool = False


# What is left of fitting in an MLPClassifier: numbers, which skops does not know yet.
_TRUSTED = [f"sklearn.neural_network._stochastic_optimizers.{name}Optimizer" for name in ("Adam", "SGD")]


def read_weights(path: Path, *, activation: Activation = "relu", sigmoid: bool = True) -> Weights:
    """The probe in a weight file. `activation` and `sigmoid` hold where the file does not say them itself.

    Raises ProbeError, with what the file is and what was wanted, for one that cannot be read without running code.
    """
    kind = kind_of(path)
    says: dict[str, str] = {}
    try:
        if kind == "skops":
            return Weights(_read_skops(path), {})
        if kind == "torch":
            tensors = read_torch_file(path, max_bytes=MAX_PROBE_BYTES)
        else:
            tensors, says = _read_npz(path) if kind == "npz" else _read_safetensors(path)
        official = is_official(tensors)
        says = {**OFFICIAL, **says} if official else says
        keeps_order = kind != "safetensors"
        mlp = mlp_from_tensors(_floats(tensors), activation=activation, sigmoid=sigmoid, keeps_order=keeps_order)
        return Weights(mlp, says, official)
    except ConfigError:
        raise
    except ProbeError as error:
        raise ProbeError(str(error) if str(error).startswith(str(path)) else f"{path}: {error}") from None
    except Exception as error:  # a stranger's file may break its reader in ways that nobody has thought of
        raise ProbeError(f"{path} cannot be read ({type(error).__name__}: {one_line(error)})") from None


WORDS = ("layer", "hidden_state", "norm", "pooling", "window")
"""What a file may say about itself, in safetensors' metadata or as texts of an .npz."""

OFFICIAL = {"hidden_state": "-1", "pooling": "mean", "window": "predictor"}
"""What the probes of SemanticSpec's authors read: the code of arXiv 2602.03708, whose layers are fc1, fc2, ..."""


def is_official(tensors: Mapping[str, Any]) -> bool:
    """Are these the weights and biases of fc1, fc2, ..., and nothing else?"""
    n = len(tensors) // 2
    return n >= 2 and set(tensors) == {f"fc{i}.{part}" for i in range(1, n + 1) for part in ("weight", "bias")}


def kind_of(path: Path) -> str:
    """torch, safetensors, npz, skops or onnx, by the file's first bytes; ProbeError for anything else."""
    try:
        with path.open("rb") as stream:
            head = stream.read(16)
        size = path.stat().st_size
    except OSError as error:
        raise ProbeError(f"{path} cannot be read: {error.strerror or error}") from None
    if size > MAX_PROBE_BYTES:
        raise ProbeError(f"{path} has {size / 2**20:.0f} MiB; wanted at most {MAX_PROBE_BYTES // 2**20} for a probe")
    if head.startswith(b"PK\x03\x04"):
        return _kind_of_archive(path)
    if is_safetensors(head, size):
        return "safetensors"
    if head.startswith((b"\x80", b"\x1f\x8b", b"\x78")):
        raise ProbeError(f"{path} {_PICKLE}")
    try:
        read_header(path.read_bytes())
    except ValueError:
        raise ProbeError(f"{path} is no file of weights, or not a whole one; {_WANTED}") from None
    return "onnx"


def _kind_of_archive(path: Path) -> str:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            n_bytes = sum(info.file_size for info in archive.infolist())
    except ZIP_ERRORS as error:
        raise ProbeError(f"{path} is a broken zip archive ({one_line(error)}); fetch or save it again") from None
    if n_bytes > MAX_PROBE_BYTES:
        raise ProbeError(f"{path} unpacks to more than {MAX_PROBE_BYTES // 2**20} MiB; wanted a probe's weights")
    if any(name.endswith("data.pkl") for name in names):
        return "torch"
    if "schema.json" in names:
        return "skops"
    if names and all(name.endswith(".npy") for name in names):
        return "npz"
    raise ProbeError(f"{path} is a zip archive of something else; {_WANTED}")


def _read_npz(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Arrays, and what of WORDS is among them."""
    try:
        with np.load(path, allow_pickle=False) as file:
            found = {name: np.asarray(file[name]) for name in file.files}
    except (*ZIP_ERRORS, MemoryError) as error:
        raise ProbeError(f"{path} cannot be read as NumPy arrays without pickles ({one_line(error)})") from None
    says = {name: str(found.pop(name)) for name in WORDS if name in found and found[name].ndim == 0}
    return found, says


def _read_safetensors(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ConfigError("reading safetensors needs the package: pip install 'semspec-local[train]'") from None
    try:
        with safe_open(path, framework="numpy") as file:
            kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 - it is no dict
            plain = {name: file.get_tensor(name) for name, kind in kinds.items() if kind != "BF16"}
            facts = file.metadata() or {}
        tensors = {name: plain[name] if name in plain else _bfloat16(path, name) for name in kinds}
        return tensors, {name: facts[name] for name in WORDS if name in facts}
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise ProbeError(f"{path} is not a whole safetensors file ({one_line(error)})") from None


def _bfloat16(path: Path, name: str) -> NDArray[Any]:
    data = path.read_bytes()
    n_header = struct.unpack("<Q", data[:8])[0]
    facts = json.loads(data[8 : 8 + n_header])[name]
    begin, end = (8 + n_header + offset for offset in facts["data_offsets"])
    items = np.frombuffer(data[begin:end], "<u2").reshape(facts["shape"])
    return from_bfloat16(items)


def _read_skops(path: Path) -> Mlp:
    from .estimator import mlp_from_estimator

    try:
        import skops.io
        from skops.io.exceptions import UntrustedTypesFoundException
    except ImportError:
        raise ConfigError("reading .skops needs skops: pip install 'semspec-local[sklearn]'") from None
    try:
        estimator = skops.io.load(path, trusted=_TRUSTED)
    except UntrustedTypesFoundException as error:
        raise ProbeError(f"{path} holds more than a scikit-learn pipeline ({one_line(error)})") from None
    except Exception as error:  # skops raises what it likes for a broken file
        raise ProbeError(f"{path} cannot be read by skops ({type(error).__name__}: {error})") from None
    return mlp_from_estimator(estimator)


def _floats(tensors: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    if odd := next((name for name, value in tensors.items() if value.dtype.kind not in "fiu"), None):
        raise ProbeError(f"{odd!a} is no array of numbers; wanted weights, and of texts {', '.join(WORDS)}")
    return {
        name: value if value.dtype in (np.float32, np.float64) else value.astype(np.float32)
        for name, value in tensors.items()
    }
