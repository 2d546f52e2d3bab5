"""Measures how fast state leaves a worker: device to host memory, host to disk, disk to the checkpoint storage."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import fsspec
import torch

from morph.checkpoint.manifest import write_atomically
from morph.checkpoint.unit_files import write_unit
from morph.contract.errors import ConfigError

_NUM_FILES = 3
_MIN_BYTES = 8 << 20
_MAX_BYTES = 64 << 20
_BUDGET_S = 6.0
_COPIES = 7
_GUARD = "import shutil, sys; sys.stdin.read(); shutil.rmtree(sys.argv[1], ignore_errors=True)"
_END_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class StorageSpeeds:
    """Speeds as in the profile; None: not measured."""

    write_bytes_per_s: float
    upload_bytes_per_s: float | None
    host_copy_bytes_per_s: float


def measure_checkpoint_speed(state_bytes: int) -> float:
    """Return bytes per second of writing a file of ``state_bytes`` (8 to 64 MiB), serialising and flushing included."""
    with temporary_folder() as folder:
        return _write_speed(folder.as_uri(), state_bytes)


def measure_upload_speed(url: str, state_bytes: int) -> float:
    """Return bytes per second of writing such a file below a URL, and remove it; ConfigError: it cannot be written."""
    with _below(url) as below:
        return _write_speed(below, state_bytes)


def check_upload_url(url: str) -> None:
    """Write a few bytes below a URL and remove them, before anything is measured; a ConfigError names the URL."""
    with _below(url) as below:
        write_atomically(f"{below}/probe", b"probe")


def measure_host_copy(device: torch.device, state_bytes: int) -> float:
    """Return bytes per second of copying state (8 to 64 MiB) into host memory, as a checkpoint does."""
    state = torch.ones(_clamped(state_bytes) // 4, device=device)

    def copy() -> int:
        state.to("cpu", copy=True)
        return state.numel() * state.element_size()

    copy()
    return _speed(copy, _COPIES)


def _write_speed(url: str, state_bytes: int) -> float:
    tensors = {"state": torch.randn(_clamped(state_bytes) // 4)}
    versions = iter(range(_NUM_FILES))
    return _speed(lambda: write_unit(url, next(versions), "calibration", "calibration", tensors).size_bytes, _NUM_FILES)


def _speed(move: Callable[[], int], most: int) -> float:
    """Return the median speed of ``move``, which returns how many bytes it moved and is repeated for a few seconds."""
    speeds: list[float] = []
    end_s = time.perf_counter() + _BUDGET_S
    while len(speeds) < most and (not speeds or time.perf_counter() < end_s):
        start_s = time.perf_counter()
        num_bytes = move()
        speeds.append(num_bytes / (time.perf_counter() - start_s))
    return median(speeds)


def _clamped(state_bytes: int) -> int:
    return min(max(state_bytes, _MIN_BYTES), _MAX_BYTES)


@contextmanager
def _below(url: str) -> Iterator[str]:
    """Yield a new place below a URL, and remove it; whatever the file system raises meanwhile becomes one error."""
    place = f"{url.rstrip('/')}/morph-calibration-{uuid.uuid4().hex[:12]}"
    try:
        yield place
    except Exception as error:  # each file system has errors of its own
        raise ConfigError(
            f"cannot be written: {error or type(error).__name__}",
            field="checkpoint_url",
            value=url,
            allowed="a place that can be written, such as s3://bucket/folder or /mnt/shared",
        ) from error
    finally:
        with contextlib.suppress(Exception):  # the measurement counts, or the error that ended it
            filesystem, path = fsspec.core.url_to_fs(place)
            filesystem.rm(path, recursive=True)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a folder and remove it afterwards; if this process is killed, a guard process removes it."""
    with tempfile.TemporaryDirectory(prefix="morph-calibrate-") as folder:
        guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD, folder], stdin=subprocess.PIPE, start_new_session=True
        )
        assert guard.stdin is not None
        try:
            yield Path(folder)
        finally:
            guard.stdin.close()
            guard.wait(timeout=_END_TIMEOUT_S)
