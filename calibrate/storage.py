"""Measure how fast checkpoints are written: the worker's own writer, to a temporary folder."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from morph.checkpoint.unit_files import write_unit

_NUM_FILES = 3
_MIN_BYTES = 8 << 20
_MAX_BYTES = 64 << 20


def measure_checkpoint_speed(state_bytes: int) -> float:
    """Return bytes per second of writing a file of ``state_bytes`` (8 to 64 MiB), serialising and flushing included."""
    size = min(max(state_bytes, _MIN_BYTES), _MAX_BYTES)
    tensors = {"state": torch.randn(size // 4)}
    speeds: list[float] = []
    with tempfile.TemporaryDirectory(prefix="morph-calibrate-") as folder:
        for version in range(_NUM_FILES):
            start_s = time.perf_counter()
            written = write_unit(Path(folder).as_uri(), version, "calibration", "calibration", tensors)
            speeds.append(written.size_bytes / (time.perf_counter() - start_s))
    return median(speeds)
