"""Where a profile is measured."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path

import torch

from morph.contract.profile import Environment


def describe_environment(device: torch.device) -> Environment:
    """Return versions, what computes, and the cores that this process may use."""
    return Environment(
        python=platform.python_version(),
        torch=torch.__version__,
        platform=platform.platform(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        num_cores=num_cores(),
        threads_per_worker=torch.get_num_threads(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processor() -> str:
    facts = Path("/proc/cpuinfo")
    if facts.is_file():
        for line in facts.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
