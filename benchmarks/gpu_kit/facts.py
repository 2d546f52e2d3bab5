"""What the machine is, and whether what the project needs can be imported there."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time

import torch

print("python", sys.version.split()[0], sys.executable, "| cores", len(os.sched_getaffinity(0)))
print(
    subprocess.run(
        "nvidia-smi --query-gpu=name,uuid,memory.total,driver_version,mig.mode.current --format=csv,noheader; "
        "nvidia-smi topo -m | head -4; grep -E 'Mem(Total|Avail)' /proc/meminfo; df -h /dev/shm | tail -1; uname -r",
        shell=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
)
print(
    "C compiler for Triton:",
    shutil.which("gcc") or shutil.which("cc") or shutil.which("clang"),
    "| ptxas",
    shutil.which("ptxas"),
)
for name in (
    "torch",
    "triton",
    "numpy",
    "numba",
    "llvmlite",
    "pandas",
    "transformers",
    "accelerate",
    "safetensors",
    "fsspec",
    "psutil",
    "pydantic",
    "simpy",
    "tornado",
    "typer",
    "rich",
    "xxhash",
    "prometheus_client",
    "jinja2",
    "yaml",
    "matplotlib",
    "pytest",
    "pytest_timeout",
    "hypothesis",
    "filelock",
    "ray",
    "jsonschema",
    "cryptography",
    "cloudpickle",
):
    begun = time.perf_counter()
    try:
        module = importlib.import_module(name)
        print(f"{name} {getattr(module, '__version__', '?')} ({time.perf_counter() - begun:.1f} s)", end="; ")
    except Exception as error:
        print(f"{name} FAILS: {type(error).__name__}: {str(error)[:90]}", end="; ")
print()
try:
    import numba

    print("numba compiles:", numba.njit(lambda a: a + 1)(1) == 2)
except Exception as error:
    print("numba cannot compile:", repr(error)[:200])

print(
    "cuda",
    torch.cuda.is_available(),
    torch.version.cuda,
    "nccl",
    torch.cuda.is_available() and torch.cuda.nccl.version(),
    "arch list",
    torch.cuda.get_arch_list() if torch.cuda.is_available() else "",
)
if torch.cuda.is_available():
    begun = time.perf_counter()
    free, total = torch.cuda.mem_get_info()
    print(f"context: {time.perf_counter() - begun:.1f} s; {(total - free) / 2**20:.0f} MiB in use with this one")
    print(torch.cuda.get_device_properties(0))
    second = (
        "import time, torch; begun = time.time(); free, total = torch.cuda.mem_get_info(); "
        "print(f'{time.time() - begun:.1f} s; {(total - free) >> 20} MiB')"
    )
    done = subprocess.run([sys.executable, "-c", second], capture_output=True, text=True)
    print(f"second process: {done.stdout.strip()} in use with both")
