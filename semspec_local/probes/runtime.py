"""Open a probe file, check all of it, and read semantic probabilities off pooled hidden states.

Knows nothing of llama.cpp: a model is a `ModelInfo` and arrays. A file is looked at in this order, so that a strange
one reaches onnxruntime last: kind of file, ONNX header, spec, model, session, one trial row.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from ..errors import ConfigError, ProbeError
from ..errors import one_line as on_one_line
from ..modelinfo import ModelInfo
from ..protocols import FloatArray, StepStates, TapPoint
from ..resources import config_dir, shipped
from ..roles import Role
from .onnxfile import OnnxHeader, read_header
from .spec import METADATA_KEY, ProbeSpec

INPUT_NAME, OUTPUT_NAME = "hidden", "semantic_prob"
JOINT_INPUTS = ("target_hidden", "draft_hidden", "features")
PROB_TOLERANCE = 1e-6
"""How far outside [0, 1] rounding may put a probability; it is clipped then."""

MAX_PROBE_BYTES = 512 * 2**20
"""A probe for the widest models in use takes tens of MB; more is some other kind of ONNX file."""

_PAIR_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*")
_OTHER_SUFFIXES = {".pkl", ".pickle", ".pt", ".pth", ".ckpt", ".bin", ".joblib", ".npy", ".npz", ".safetensors"}
_CONVERT_FIRST = "wanted an ONNX probe: convert it first (semspec-local probe convert)"
_FETCH_AGAIN = "wanted an ONNX probe: fetch the file itself"
_MAGICS: tuple[tuple[bytes, str], ...] = (
    (b"GGUF", "is a GGUF model; wanted an ONNX probe"),
    (b"PK\x03\x04", f"is a zip archive, as PyTorch and NumPy write them; {_CONVERT_FIRST}"),
    (b"\x80", f"is a pickle, which can run any code when opened; {_CONVERT_FIRST}"),
    (b"\x93NUMPY", f"is a NumPy array; {_CONVERT_FIRST}"),
    (b"\x1f\x8b", f"is compressed, as joblib writes pickles; {_CONVERT_FIRST}"),
    (b"\x78\x01", f"is compressed, as joblib writes pickles; {_CONVERT_FIRST}"),
    (b"\x78\x9c", f"is compressed, as joblib writes pickles; {_CONVERT_FIRST}"),
    (b"\x78\xda", f"is compressed, as joblib writes pickles; {_CONVERT_FIRST}"),
    (b"version https://git-lfs", f"is a Git LFS pointer, not the file it points to; {_FETCH_AGAIN}"),
)

# A probe is a small feed-forward net. These draw random numbers, loop, or make large memory out of a small file.
_REFUSED_OPERATORS = frozenset(
    {"If", "Loop", "Scan", "SequenceMap", "Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike"}
    | {"RandomUniform", "RandomUniformLike", "ConstantOfShape", "Expand", "EyeLike", "OneHot", "Pad", "Range"}
    | {"Resize", "Tile", "Upsample"}
)


@dataclass(frozen=True)
class ProbeFile:
    """A probe file that has been looked at but not run; `fingerprint` is its own sha256 in hex."""

    path: Path
    spec: ProbeSpec
    header: OnnxHeader
    fingerprint: str


def native_calls() -> tuple[Any, tuple[str, ...]]:
    """Where onnxruntime computes, a class and its method's name, for who measures it."""
    import onnxruntime

    return onnxruntime.InferenceSession, ("run",)


class _OnnxFile:
    """An opened probe: named rows in, probabilities out."""

    def __init__(self, file: ProbeFile, warnings: tuple[str, ...]) -> None:
        """Raise ProbeError when onnxruntime cannot load the file, or its inputs and outputs are not a probe's."""
        self.path = file.path
        self.spec = file.spec
        self.fingerprint = file.fingerprint
        self.warnings = warnings
        self._widths = input_widths(file.spec)
        self._session = _open_probe(file)
        self._row_by_row = _check_signature(file.path, self._widths, self._session)
        self._probs({name: np.zeros((1, width), np.float32) for name, width in self._widths.items()})

    def predict_rows(self, rows: FloatArray) -> FloatArray:
        """Probabilities float32 [n] of rows float32 [n, width] in which all inputs stand side by side."""
        edges = np.cumsum([0, *self._widths.values()])
        return self._probs({name: rows[:, a:b] for name, a, b in zip(self._widths, edges, edges[1:])})

    def _probs(self, inputs: Mapping[str, FloatArray]) -> FloatArray:
        """Probabilities float32 [n] of rows float32 [n, width], by the names of the inputs."""
        for name, rows in inputs.items():
            if rows.ndim != 2 or rows.shape[1] != self._widths[name]:
                what = "hidden states" if "hidden" in name else name
                raise ProbeError(f"{self.path}: {what} are {list(rows.shape)}; wanted [n, {self._widths[name]}]")
            if not np.isfinite(rows).all():
                what = "hidden states" if "hidden" in name else name
                raise ProbeError(f"{self.path}: {what} hold NaN or infinity; wanted finite numbers")
        ready = {name: np.ascontiguousarray(rows, dtype=np.float32) for name, rows in inputs.items()}
        n = len(next(iter(ready.values())))
        edges = range(n) if self._row_by_row else ([0] if n else [])
        size = 1 if self._row_by_row else n
        results = [self._run({name: rows[at : at + size] for name, rows in ready.items()}, size) for at in edges]
        return np.concatenate(results) if results else np.zeros(0, np.float32)

    def _run(self, inputs: Mapping[str, FloatArray], n: int) -> FloatArray:
        try:
            result = np.asarray(self._session.run([OUTPUT_NAME], dict(inputs))[0])
        except Exception as error:  # onnxruntime's errors share no base of their own
            raise ProbeError(f"{self.path}: onnxruntime cannot run it: {one_line(error)}") from None
        if result.dtype != np.float32 or result.shape not in ((n,), (n, 1)):
            _refuse_signature(self.path, self._widths, f"its output is {result.dtype}{list(result.shape)}")
        probs = result.reshape(-1)
        bad = ~(np.isfinite(probs) & (probs >= -PROB_TOLERANCE) & (probs <= 1 + PROB_TOLERANCE))
        if bad.any():
            raise ProbeError(f"{self.path}: it gave {probs[bad][0]} for a probability; wanted a number from 0 to 1")
        return np.asarray(np.clip(probs, 0, 1), dtype=np.float32)


class OnnxProbe(_OnnxFile):
    """A `protocols.StepProbe` on onnxruntime, for one model.

    `warnings` are the lesser differences between the probe's model and the one it was loaded for.
    """

    def __init__(self, file: ProbeFile, *, warnings: tuple[str, ...] = ()) -> None:
        """Raise ProbeError for a joint probe, and as its base does."""
        if file.spec.role == "joint":
            raise ProbeError(f"{file.path} is a joint probe; wanted one that reads the target or the draft alone")
        super().__init__(file, warnings)

    @property
    def tap(self) -> TapPoint:
        return self.spec.tap

    def semantic_prob(self, states: StepStates) -> float:
        """The semantic probability of one step, in [0, 1], pooled as the spec says."""
        return float(self.predict(states.pool(self.spec.window, self.spec.pooling)[None, :])[0])

    def predict(self, hidden: FloatArray) -> FloatArray:
        """Semantic probabilities float32 [n] of pooled states float32 [n, n_embd].

        Raises ProbeError for states of another width, and for results that are no probabilities.
        """
        return self._probs({INPUT_NAME: hidden})


class OnnxJointProbe(_OnnxFile):
    """A `protocols.JointProbe` on onnxruntime, for one pair."""

    def __init__(self, file: ProbeFile, *, warnings: tuple[str, ...] = ()) -> None:
        """Raise ProbeError for a probe of one model, and as its base does."""
        if file.spec.role != "joint":
            raise ProbeError(f"{file.path} is a probe of the {file.spec.role} alone; wanted a joint one")
        self.draft_spec = file.spec.draft_spec
        super().__init__(file, warnings)

    @property
    def taps(self) -> dict[Role, TapPoint]:
        return {"target": self.spec.tap, "draft": self.draft_spec.tap}

    @property
    def features(self) -> tuple[str, ...]:
        return tuple(self.spec.features)

    def semantic_prob(self, target: StepStates, draft: StepStates, features: FloatArray) -> float:
        """The share of the target's steps that mean the same as this one; `features` float32 [k]."""
        pooled = target.pool(self.spec.window, self.spec.pooling)
        pooled_draft = draft.pool(self.draft_spec.window, self.draft_spec.pooling)
        return float(self.predict(pooled[None, :], pooled_draft[None, :], features[None, :])[0])

    def predict(self, target: FloatArray, draft: FloatArray, features: FloatArray) -> FloatArray:
        """Probabilities float32 [n] of pooled states [n, n_embd] of both models, and features [n, k]."""
        given = dict(zip(JOINT_INPUTS, (target, draft, features)))
        return self._probs({name: given[name] for name in self._widths})


def input_widths(spec: ProbeSpec) -> dict[str, int]:
    """A probe's inputs and their widths; a joint one that reads no features has no such input."""
    if spec.role != "joint":
        return {INPUT_NAME: spec.n_embd}
    widths = dict(zip(JOINT_INPUTS, (spec.n_embd, spec.draft_spec.n_embd, len(spec.features))))
    return {name: width for name, width in widths.items() if width}


def load_probe(path: Path | str, role: Role, info: ModelInfo) -> OnnxProbe:
    """Open a probe to read `info` as `role`; ProbeError (exit code 4) says in one line why that cannot be."""
    file = read_probe_file(path)
    return OnnxProbe(file, warnings=file.spec.check_model(info, role, str(path)))


def load_joint_probe(path: Path | str, infos: Mapping[Role, ModelInfo]) -> OnnxJointProbe:
    """Open a joint probe for a pair; ProbeError says in one line why that cannot be."""
    file = read_probe_file(path)
    if file.spec.role != "joint":
        raise ProbeError(f"{path} is a probe of the {file.spec.role} alone; wanted a joint one")
    warnings = file.spec.check_model(infos["target"], "target", str(path))
    warnings += file.spec.draft_spec.check_model(infos["draft"], "draft", str(path))
    return OnnxJointProbe(file, warnings=warnings)


def find_probe(pair_name: str, role: str) -> Path | None:
    """The probe of a pair that a run uses: the one that the user installed, else the shipped one, else None."""
    if not _PAIR_NAME.fullmatch(pair_name):
        return None
    return next(
        (path for path in (user_probe(pair_name, role), shipped_probe(pair_name, role)) if path.is_file()), None
    )


def user_probe(pair_name: str, role: str) -> Path:
    """Where the user's own probe of a pair would be. Raises ConfigError for a name that is no folder's."""
    if not _PAIR_NAME.fullmatch(pair_name):
        raise ConfigError(f"the pair's name is {pair_name!a}; wanted letters, digits, dots and dashes")
    return config_dir() / "probes" / pair_name / f"{role}.onnx"


def shipped_probe(pair_name: str, role: str) -> Path:
    """Where the shipped probe of a pair would be."""
    return shipped("probes") / pair_name / f"{role}.onnx"


def read_probe_file(path: Path | str) -> ProbeFile:
    """Read a probe's spec and header without running anything; ProbeError when it is no probe."""
    path = Path(path)
    data = read_probe_bytes(path)
    try:
        header = read_header(data)
    except ValueError as error:
        raise ProbeError(f"{path} is no ONNX file, or not a whole one ({error})") from None
    if METADATA_KEY not in header.metadata:
        raise ProbeError(f"{path} has no {METADATA_KEY!r} in its ONNX metadata, so nothing says which model it is for")
    spec = ProbeSpec.from_json(header.metadata[METADATA_KEY], str(path))
    refuse_operators(path, header)
    for name in header.external_files:
        check_external(path, name)
    return ProbeFile(path, spec, header, hashlib.sha256(data).hexdigest())


def refuse_operators(path: Path, header: OnnxHeader) -> None:
    """Raise ProbeError for a graph with operators that no probe needs and that could do harm."""
    if refused := sorted(header.operators & _REFUSED_OPERATORS):
        raise ProbeError(f"{path} uses the ONNX operator {refused[0]}; wanted a plain feed-forward net")


def open_session(path: Path, *, n_threads: int = 1) -> Any:
    """An onnxruntime session on the CPU that leaves the other cores to llama.cpp.

    Raises whatever onnxruntime raises. Left alone it would start a thread per core of the host, and let them spin.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = n_threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 4  # fatal only: errors come as exceptions
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def read_probe_bytes(path: Path) -> bytes:
    try:
        if not path.exists():
            raise ProbeError(f"{path} does not exist; wanted an ONNX probe")
        if not path.is_file():
            raise ProbeError(f"{path} is not a file; wanted an ONNX probe")
        size = path.stat().st_size
        with path.open("rb") as stream:
            _refuse_other_kinds(path, stream.read(512), size)
            stream.seek(0)
            return stream.read()
    except OSError as error:
        raise ProbeError(f"{path} cannot be read: {error.strerror or error}") from None


def _refuse_other_kinds(path: Path, head: bytes, size: int) -> None:
    if not head:
        raise ProbeError(f"{path} is empty; wanted an ONNX probe")
    if is_safetensors(head, size):  # it may begin like a pickle
        raise ProbeError(f"{path} is a safetensors file; {_CONVERT_FIRST}")
    for magic, what in _MAGICS:
        if head.startswith(magic):
            raise ProbeError(f"{path} {what}")
    if head.lstrip()[:1] in (b"<", b"{"):
        what = "a web page" if head.lstrip()[:1] == b"<" else "JSON text"
        raise ProbeError(f"{path} is {what}, perhaps an error message that was saved; {_FETCH_AGAIN}")
    if path.suffix.lower() in _OTHER_SUFFIXES:
        raise ProbeError(f"{path} is named {path.suffix}; {_CONVERT_FIRST}")
    if size > MAX_PROBE_BYTES:
        raise ProbeError(f"{path} has {size / 2**20:.0f} MiB; wanted at most {MAX_PROBE_BYTES // 2**20} for a probe")


def is_safetensors(head: bytes, size: int) -> bool:
    """Is a file with this beginning and this many bytes a safetensors file?"""
    return len(head) > 8 and head[8:9] == b"{" and struct.unpack("<Q", head[:8])[0] <= size


def check_external(path: Path, name: str) -> None:
    """Weights kept in another file must lie right beside the probe."""
    if not name or name in (".", "..") or not name.isprintable() or "/" in name or "\\" in name:
        raise ProbeError(f"{path} keeps weights in {name!a}; wanted a file beside it, or all in one file")
    if not (path.parent / name).is_file():
        raise ProbeError(f"{path} keeps weights in {name}, which is not beside it; wanted both, or all in one file")


def _open_probe(file: ProbeFile) -> Any:
    try:
        return open_session(file.path)
    except ImportError as error:
        raise ProbeError(f"probes need onnxruntime, which cannot be imported here ({one_line(error)})") from None
    except Exception as error:  # onnxruntime's errors share no base of their own
        reason = str(error)
    import onnxruntime as ort

    if re.search(r"\bIR version\b|\bopset\b", reason, re.IGNORECASE):
        opset = file.header.opsets.get("", 0)
        raise ProbeError(
            f"{file.path} has ONNX IR version {file.header.ir_version} and opset {opset}, too new for "
            f"onnxruntime {ort.__version__}; save it with older ones (8 and 17 will do) or update onnxruntime"
        )
    raise ProbeError(f"{file.path}: onnxruntime {ort.__version__} cannot load it: {one_line(reason)}")


def _check_signature(path: Path, widths: Mapping[str, int], session: Any) -> bool:
    """Whether rows must go in one by one, because the batch size was fixed at 1 when the file was exported."""
    inputs = {item.name: item for item in session.get_inputs()}
    if set(inputs) != set(widths):
        _refuse_signature(path, widths, f"its inputs are {one_line(list(inputs))}")
    one_by_one = False
    for name, width in widths.items():
        item = inputs[name]
        fixed = [size if isinstance(size, int) else None for size in item.shape]
        fits = len(fixed) == 2 and fixed[0] in (None, 1) and fixed[1] in (None, width)
        if item.type != "tensor(float)" or not fits:
            _refuse_signature(path, widths, f"its input is {item.type} {one_line(item.shape)}")
        one_by_one |= fixed[0] == 1
    if OUTPUT_NAME not in (names := [item.name for item in session.get_outputs()]):
        _refuse_signature(path, widths, f"its outputs are {one_line(names)}")
    return one_by_one


def _refuse_signature(path: Path, widths: Mapping[str, int], got: str) -> NoReturn:
    inputs = ", ".join(f"{name} float32 [n, {width}]" for name, width in widths.items())
    several = "s" if len(widths) > 1 else ""
    raise ProbeError(
        f"{path}: {got}; wanted the input{several} {inputs} and the output {OUTPUT_NAME} float32 [n] or [n, 1]"
    )


def one_line(value: object) -> str:
    """Text from onnxruntime or a stranger's file: one short line without control characters or C++ signatures."""
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : [A-Z_]+ : (?:Load model from .*? failed:)?", "", str(value))
    text = re.sub(r"\S+\.(?:cc|h):\d+ .*?\) (?=[A-Z])", "", text)
    text = on_one_line(text)
    return text if len(text) <= 300 else text[:297] + "..."
