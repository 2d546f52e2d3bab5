"""Restoring a checkpoint into other shapes, compared with a plain parallel read of the same files.

The state is stored in 24 files. P processes load its units as workers do: each reads, checks and loads those of its
stage. The plain reader has as many processes and threads, which only read the same files into memory. Both alternate.
Files of a local disk are dropped from the page cache before each turn, unless ``--warm`` is given.

    python -m benchmarks checkpoint_restore --mib 1024 --rounds 3
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated

import fsspec
import torch

from benchmarks.harness import cpu_s, head, in_turns, machine, option, row, spread, wall_s
from benchmarks.remote import Remote, call_all, end_all
from morph.checkpoint.manifest import read_manifest, version_url, write_manifest
from morph.checkpoint.unit_files import write_unit
from morph.contract.checkpoint import Manifest, UnitFile
from morph.contract.messages import StateSource
from morph.cutting import ParameterUnit
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.reshape.moves import NUM_PREFETCHED, MoveContext, take_units
from morph.runtime.state.unit_state import UnitState

NUM_UNITS = 24
VERSION = 40
SHAPES = (1, 2, 4)
Work = Callable[[str, int, list[str]], None]


def unit_of(name: str, width: int, *, empty: bool = False) -> UnitState:
    """Return a unit of four square matrices with Adam; ``empty``: with memory to load into."""
    names = tuple(f"{name}.w{index}" for index in range(4))
    unit = ParameterUnit(id=name, parameters=names, buffers=(), sections=(0,))
    tensors = {name: (torch.empty if empty else torch.zeros)(width, width) for name in names}
    return UnitState(unit, tensors, _adam, num_micro_batches=1, exact=False, for_good=empty)


def _adam(parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.Adam([parameter for _, parameter in parameters])


def save(url: str, width: int) -> int:
    """Write the checkpoint; returns its bytes."""
    files = []
    for index in range(NUM_UNITS):
        unit = unit_of(f"s{index}", width)
        for parameter in unit.parameters.values():
            parameter.grad = torch.randn_like(parameter)
        unit.optimizer.step()
        unit.version = VERSION
        written = write_unit(url, VERSION, unit.unit.id, "w", unit.tensors())
        files.append(UnitFile(**written.model_dump(exclude={"worker", "version", "stall_s"})))
    manifest = Manifest(fingerprint="f", version=VERSION, units=tuple(files))
    write_manifest(url, manifest)
    return manifest.size_bytes


def _restore(url: str, width: int, units: list[str]) -> None:
    states = {name: unit_of(name, width, empty=True) for name in units}

    def none(*_: object) -> UnitState:
        raise AssertionError("nothing comes from peers")

    context = MoveContext(
        worker="w",
        version=VERSION,
        checkpoint_url=url,
        held={},
        make_unit=lambda name, _: states[name],
        channel=none,  # type: ignore[arg-type]
        adopt=none,
        interrupt=Interrupt(1),
    )
    take_units([StateSource(worker="w", unit=name, kind="checkpoint") for name in units], context)


def _read(url: str, width: int, units: list[str]) -> None:
    del width
    manifest = read_manifest(url, VERSION)
    names = [entry.file for entry in manifest.units if entry.unit in units]
    filesystem, folder = fsspec.core.url_to_fs(version_url(url, VERSION))
    with ThreadPoolExecutor(NUM_PREFETCHED) as pool:
        data = list(pool.map(lambda name: filesystem.cat_file(f"{folder}/{name}"), names))
    assert all(data)


def forget(folder: str) -> None:
    """Drop all files below a folder from the page cache."""
    for path in Path(folder).rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Reader:
    """One of the processes; when it is constructed, its imports are done."""

    def __init__(self, url: str, width: int) -> None:
        torch.set_num_threads(1)
        self._url, self._width = url, width
        fsspec.core.url_to_fs(url)
        unit_of("warm", 8)

    def ready(self) -> None:
        """Return when the process is ready."""

    def run(self, work: Work, units: list[str]) -> float:
        """Do some work; return the processor seconds that it took."""
        return cpu_s(lambda: work(self._url, self._width, units))


def timed(work: Work, url: str, width: int, depth: int) -> tuple[float, float]:
    """Return the seconds from when all processes are ready until the last one is done, and their processor seconds.

    The processor seconds of a stand-in are not included.
    """
    readers = [Remote(partial(Reader, url, width)) for _ in range(depth)]
    call_all(readers, "ready")
    busy_s: list[float] = []

    def run() -> None:
        for stage, reader in enumerate(readers):
            reader.send("run", work, [f"s{index}" for index in range(stage, NUM_UNITS, depth)])
        busy_s.extend(reader.answer() for reader in readers)

    took_s = wall_s(run)
    end_all(readers)
    return took_s, sum(busy_s)


def main(
    mib: int = 1024,
    rounds: int = 3,
    warm: bool = False,
    url: Annotated[str | None, option("any fsspec URL; default: a temporary folder")] = None,
) -> None:
    print(machine())
    if url:
        return compare(url, mib, rounds)
    folder = tempfile.mkdtemp(prefix="morph-restore-")
    try:
        return compare(folder, mib, rounds, None if warm else folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def compare(url: str, mib: int, rounds: int, forgotten: str | None = None) -> None:
    """Print the times of both ways for each shape; ``forgotten``: a folder to drop from the page cache before each."""
    width = int((mib * 2**20 / 12 / NUM_UNITS / 4) ** 0.5) // 16 * 16  # a multiple of 16, as in models
    print(f"{save(url, width) / 2**20:.0f} MiB")

    def turn(work: Work, depth: int) -> tuple[float, float]:
        if forgotten:
            forget(forgotten)
        return timed(work, url, width, depth)

    head("into | restored | plain read | of its speed | processor, restored and plain")
    for depth in SHAPES:
        found = in_turns({"read": partial(turn, _read, depth), "restore": partial(turn, _restore, depth)}, rounds)
        times, busy = ({name: [one[index] for one in found[name]] for name in found} for index in (0, 1))
        middle = {name: statistics.median(times[name]) for name in times}
        cells = (spread(times["restore"]), spread(times["read"]), f"{middle['read'] / middle['restore']:.0%}")
        processor = (f"{statistics.median(busy[name]):.2f} s" for name in ("restore", "read"))
        row(f"P={depth}", *cells, ", ".join(processor))
