"""ONNX Runtime and probe files, tried out without a model; for `doctor`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..modelinfo import ModelInfo
from ..roles import ProbeRole, Role
from .runtime import OnnxJointProbe, OnnxProbe, load_joint_probe, load_probe, read_probe_file


def runtime_facts(path: Path) -> dict[str, Any]:
    """The version of ONNX Runtime, where it can run, and what it was tried on: the probe at `path`.

    Raises ImportError, or ProbeError when the probe does not run.
    """
    import onnxruntime

    file = read_probe_file(path)
    OnnxProbe(file)
    return {
        "version": str(onnxruntime.__version__),
        "providers": list(onnxruntime.get_available_providers()),
        "ir_version": file.header.ir_version,
        "opset": file.header.opsets.get("", 0),
    }


def probe_facts(path: Path, role: ProbeRole, infos: Mapping[Role, ModelInfo]) -> dict[str, Any]:
    """What a probe is, after one trial row, and its `warnings`; without `infos` no model is compared.

    Raises ProbeError when it is no probe, or none for these models.
    """
    file = read_probe_file(path)
    probe: OnnxProbe | OnnxJointProbe
    if not infos:
        probe = OnnxJointProbe(file) if file.spec.role == "joint" else OnnxProbe(file)
    elif role == "joint":
        probe = load_joint_probe(path, infos)
    else:
        probe = load_probe(path, role, infos[role])
    spec = probe.spec
    return {
        "warnings": list(probe.warnings),
        "layer": spec.layer,
        "made_for": f"{spec.model_name} {spec.quantization}",
        "calibrated": len(spec.calibrations),
    }
