"""Measure a job once, section by section, on a real device; the result is a profile (docs/calibration.md)."""

from __future__ import annotations

from calibrate.measure import Progress, calibrate
from calibrate.output import write_profile

__all__ = ["Progress", "calibrate", "write_profile"]
