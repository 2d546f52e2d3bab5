"""Describes the machine on which a profile is measured."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from pathlib import Path

import torch

from morph.contract.profile import Environment
from morph.machine import machine_memory_bytes, num_cores

CONTEXT_BYTES = 768 << 20
"""Part of a CUDA device's memory: its context with torch's kernels and cuBLAS workspaces. Assumed, not measured."""
ALLOCATOR_PERMILLE = 60
"""Memory that CUDA's caching allocator reserves beyond tensors, by rounding and gaps. Assumed, not measured."""
RING_BYTES = 256 << 20
"""Part of a device's memory, for each ring of NCCL: 4 MiB (NCCL_BUFFSIZE) both ways on each of 32 channels. Measured
with ``--rings nccl``.
"""
PROCESS_BYTES = 3 << 30
"""Host memory of a process that has loaded torch and CUDA's libraries. Assumed, not measured."""


def describe_environment(device: torch.device) -> Environment:
    """Return the versions, the computing device, and the cores that this process may use."""
    apart = device.type == "cuda"
    return Environment(
        python=platform.python_version(),
        torch=torch.__version__,
        platform=platform.platform(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        num_cores=num_cores(),
        threads_per_worker=torch.get_num_threads(),
        device_memory_bytes=device_memory_bytes(device),
        host_memory_bytes=machine_memory_bytes() // max(1, torch.cuda.device_count()) if apart else None,
        context_bytes=CONTEXT_BYTES if apart else 0,
        allocator_permille=ALLOCATOR_PERMILLE if apart else 0,
        ring_bytes=RING_BYTES if apart else 0,
        process_bytes=PROCESS_BYTES if apart else 0,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def device_memory_bytes(device: torch.device) -> int:
    """Return a device's memory; for a CPU, a worker's share of this machine's memory if every core has a worker."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return machine_memory_bytes() // num_cores()


def _processor() -> str:
    facts = Path("/proc/cpuinfo")
    if facts.is_file():
        for line in facts.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
