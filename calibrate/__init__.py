"""Measure a job once, section by section, on a real device; the result is a profile (docs/calibration.md)."""

from __future__ import annotations

from calibrate.compute import Progress
from calibrate.measure import calibrate
from calibrate.node_type import add_node_type
from calibrate.output import write_profile

__all__ = ["Progress", "add_node_type", "calibrate", "write_profile"]
