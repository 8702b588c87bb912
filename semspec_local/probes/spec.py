"""What a probe is made for, and the check that a model is that.

This file knows nothing of ONNX; the spec travels as one JSON text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NoReturn, get_args

from ..errors import ProbeError
from ..modelinfo import ModelInfo
from ..protocols import FEATURES, Norm, Pooling, TapPoint, Window
from ..roles import ProbeRole, Role

SPEC_VERSION = 1
METADATA_KEY = "semspec.probe"
"""The key in the ONNX file's metadata under which the spec stands."""

_CHOICES: dict[str, tuple[str, ...]] = {
    "role": get_args(ProbeRole),
    "norm": get_args(Norm),
    "pooling": get_args(Pooling),
    "window": get_args(Window),
}
USUAL_ACCEPT_ERROR = 0.01
"""Errors among accepted steps that a run puts up with when nobody says how many: an answer has many steps, and a wrong
one takes those behind it along."""

_OPTIONAL = ("calibrations", "features", "draft")
_READS = (
    *("layer", "norm", "pooling", "window", "n_embd", "n_layer"),
    *("architecture", "model_name", "fingerprint", "quantization"),
)
_LOWEST = {"layer": 0, "n_embd": 1, "n_layer": 1}
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class ProbeSpec:
    """Everything a probe assumes about its model and about the states it is given.

    `layer` is the N of llama.cpp's `l_out-N` (for a joint probe: the target's). `norm` says whether the state is read
    before or after the final norm; `pooling` and `window` are those of `protocols.StepStates`. `fingerprint` is the
    sha256 in hex of the GGUF whose states the probe was trained on. `training` (data, label recipe, clusterer,
    split, seed, counts, sampling) and `evaluation` (numbers on held-out problems, None for unknown) are for people.
    A joint probe reads the target so, the draft as `draft` says (the fields from `layer` to `quantization`), and
    `features`, numbers of the step by name.
    `calibrations` are those of `lab.calibrate`, as JSON: which threshold keeps which policy's errors below what.
    Raises ProbeError, with what was given and what was wanted, for any value outside these.
    """

    role: ProbeRole
    layer: int
    norm: Norm
    pooling: Pooling
    window: Window
    n_embd: int
    n_layer: int
    architecture: str
    model_name: str
    fingerprint: str
    quantization: str
    training: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Mapping[str, float | None] = field(default_factory=dict)
    calibrations: Sequence[Mapping[str, Any]] = ()
    features: Sequence[str] = ()
    draft: Mapping[str, Any] | None = None
    spec_version: int = SPEC_VERSION

    def __post_init__(self) -> None:
        if not _is_int(self.spec_version) or self.spec_version != SPEC_VERSION:
            _refuse("spec_version", self.spec_version, f"{SPEC_VERSION}, the version that this program reads")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                _refuse(name, getattr(self, name), " or ".join(choices))
        for name, lowest in _LOWEST.items():
            value = getattr(self, name)
            if not _is_int(value) or value < lowest:
                _refuse(name, value, f"a whole number from {lowest} on")
        for name in ("architecture", "model_name", "fingerprint", "quantization"):
            if not isinstance(getattr(self, name), str):
                _refuse(name, getattr(self, name), "text")
        if not _FINGERPRINT.fullmatch(self.fingerprint):
            _refuse("fingerprint", self.fingerprint, "a sha256 as 64 small hex digits")
        if self.layer >= self.n_layer:
            _refuse("layer", self.layer, f"a layer below n_layer, which is {self.n_layer}")
        if self.norm == "post" and self.layer != self.n_layer - 1:
            _refuse(
                "norm", self.norm, f"pre: only the last layer ({self.n_layer - 1}) has a state after the final norm"
            )
        self._check_facts()
        self._check_joint()

    @property
    def tap(self) -> TapPoint:
        """Where the model's states are read."""
        return TapPoint(self.layer, self.norm)

    def _check_facts(self) -> None:
        for name in ("training", "evaluation"):
            facts = getattr(self, name)
            if not isinstance(facts, Mapping) or not all(isinstance(key, str) for key in facts):
                _refuse(name, facts, "an object with text keys")
        if not isinstance(self.calibrations, (list, tuple)):
            _refuse("calibrations", self.calibrations, "a list")
        object.__setattr__(self, "calibrations", tuple(self.calibrations))  # JSON has lists only
        for number, facts in enumerate(self.calibrations):
            wanted = isinstance(facts, Mapping) and isinstance(facts.get("policy"), str)
            if not wanted or not _is_share(facts.get("alpha")) or not _is_number_or_none(facts.get("threshold")):
                _refuse(f"calibrations.{number}", facts, "an object with policy, alpha and threshold")
        for key, value in self.evaluation.items():
            if not _is_number_or_none(value):
                _refuse(f"evaluation.{key}", value, "a finite number or null")

    def _check_joint(self) -> None:
        if not isinstance(self.features, (list, tuple)):
            _refuse("features", self.features, "a list")
        object.__setattr__(self, "features", tuple(self.features))  # JSON has lists only
        if self.role != "joint":
            for name in ("features", "draft"):
                if getattr(self, name):
                    _refuse(name, getattr(self, name), "nothing: only a joint probe has that")
            return
        if not isinstance(self.draft, Mapping) or set(self.draft) != set(_READS):
            _refuse("draft", self.draft, f"an object with {', '.join(_READS)}")
        _ = self.draft_spec
        if not set(self.features) <= set(FEATURES) or len(set(self.features)) < len(self.features):
            _refuse("features", self.features, f"each once, of {', '.join(FEATURES)}")

    @property
    def draft_spec(self) -> ProbeSpec:
        """How a joint probe reads the draft, as the spec of a probe of the draft alone."""
        assert self.role == "joint" and self.draft is not None, "only a joint probe reads a draft beside"
        return ProbeSpec(role="draft", **self.draft)

    def reads(self) -> dict[str, Any]:
        """The fields that say what is read, and of which model: what `draft` of a joint probe is made of."""
        return {name: getattr(self, name) for name in _READS}

    def calibrated_threshold(self, policy: str) -> float | None:
        """The threshold to use for a policy when nobody names one; None where no calibration found any.

        That of the least share of errors from `USUAL_ACCEPT_ERROR` on; below it, of the largest.
        """
        known = [found for found in self.calibrations if found["policy"] == policy and found["threshold"] is not None]
        if not known:
            return None
        best = min(
            known, key=lambda found: (found["alpha"] < USUAL_ACCEPT_ERROR, abs(found["alpha"] - USUAL_ACCEPT_ERROR))
        )
        return float(best["threshold"])

    def calibrated_acceptance(self, policy: str, threshold: float | None) -> float | None:
        """The share of drafted steps that a policy accepted when it was calibrated to this threshold; else None."""
        for found in self.calibrations:
            if found["policy"] == policy and found["threshold"] is not None and found["threshold"] == threshold:
                acceptance = found.get("acceptance")
                return acceptance if isinstance(acceptance, float) and 0 <= acceptance <= 1 else None
        return None

    def to_json(self) -> str:
        """One line of JSON that `from_json` reads back to an equal spec."""
        return json.dumps(asdict(self), sort_keys=True, allow_nan=False)

    @classmethod
    def from_json(cls, text: str, source: str = "probe") -> ProbeSpec:
        """Read a spec; every field must be there and no other. `source` names the file in errors (ProbeError)."""
        try:
            values = json.loads(text, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise ProbeError(f"{source}: its probe spec is no JSON ({error})") from None
        if not isinstance(values, dict):
            raise ProbeError(f"{source}: its probe spec is {_show(values)}; wanted a JSON object")
        version = values.get("spec_version")
        known = [item.name for item in fields(cls)]
        # A later version may have other fields, so its number is the thing to say.
        if version == SPEC_VERSION:
            for name in known:
                if name not in values and name not in _OPTIONAL:
                    raise ProbeError(f"{source}: its probe spec has no {name}; wanted {', '.join(known)}")
            if unknown := sorted(set(values) - set(known)):
                raise ProbeError(f"{source}: its probe spec has an unknown field {_show(unknown[0])}")
        elif "spec_version" in values:
            raise ProbeError(f"{source}: probe spec version is {_show(version)}; wanted {SPEC_VERSION}")
        else:
            raise ProbeError(f"{source}: its probe spec has no spec_version; wanted {SPEC_VERSION}")
        try:
            return cls(**values)
        except ProbeError as error:
            raise ProbeError(f"{source}: {error}") from None

    def check_model(self, info: ModelInfo, role: Role, source: str = "probe") -> tuple[str, ...]:
        """Raise ProbeError unless this probe can read `info` as `role`; return warnings about lesser differences.

        Of a joint probe this is its target; its draft is checked by `draft_spec`.
        Another file or quantization of a model of the same shape runs, but the probe's numbers may not hold there.
        """
        shape = (
            ("role", "target" if self.role == "joint" else self.role, role),
            ("architecture", self.architecture, info.architecture),
            ("n_embd", self.n_embd, info.n_embd),
            ("n_layer", self.n_layer, info.n_layer),
        )
        for name, made_for, wanted in shape:
            if made_for != wanted:
                what = f"the {role} model {_show(info.name)}" if name != "role" else "this place"
                raise ProbeError(f"{source}: the probe's {name} is {_show(made_for)}; {what} wants {_show(wanted)}")
        return tuple(self._differences(info))

    def _differences(self, info: ModelInfo) -> list[str]:
        made_for = f"{_show(self.model_name)} {self.quantization}"
        if self.quantization != info.quantization:
            return [f"the {self.role} probe was trained on {made_for}; this model is {info.quantization}"]
        if info.fingerprint is not None and info.fingerprint != self.fingerprint:
            return [
                f"the {self.role} probe was trained on {made_for}, sha256 {self.fingerprint[:12]}...; "
                f"this file is {_show(info.name)}, sha256 {info.fingerprint[:12]}..."
            ]
        return []


def _is_share(value: object) -> bool:
    return isinstance(value, float) and 0 < value < 1


def _is_number_or_none(value: object) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _show(value: object) -> str:
    """A value from a stranger's file, on one short line: ascii() leaves no control characters."""
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _refuse(name: str, got: object, wanted: str) -> NoReturn:
    raise ProbeError(f"probe spec: {name} is {_show(got)}; wanted {wanted}")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
