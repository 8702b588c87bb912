"""The two models of a pair, by role."""

from __future__ import annotations

from typing import Literal

Role = Literal["target", "draft"]

ROLES: tuple[Role, ...] = ("target", "draft")
"""Both roles, the target first: the order in which they are loaded, listed and seeded."""

ProbeRole = Literal["target", "draft", "joint"]

PROBE_ROLES: tuple[ProbeRole, ...] = ("target", "draft", "joint")
"""What a probe reads: one of the models, or both."""
