"""Probes at run time: ONNX files that read a pooled hidden state.

onnxruntime is loaded when a probe is opened, not when this package is imported; torch never is.
"""

from .runtime import (
    OnnxJointProbe,
    OnnxProbe,
    find_probe,
    load_joint_probe,
    load_probe,
    native_calls,
    read_probe_file,
    shipped_probe,
    user_probe,
)
from .spec import ProbeSpec

__all__ = [
    "OnnxJointProbe",
    "OnnxProbe",
    "ProbeSpec",
    "find_probe",
    "load_joint_probe",
    "load_probe",
    "native_calls",
    "read_probe_file",
    "shipped_probe",
    "user_probe",
]
