"""What a save keeps from training, and how long it takes to be durable: Morph beside torch's asynchronous save.

One process trains the same tensors (Adam) in three ways that alternate: without saves, with Morph's writer, and with
``torch.distributed.checkpoint.async_save`` (its default: a thread). Blocked: for how long the training thread stands,
while state is handed over and before it is changed. Processor: what a block with a save takes more of it, all threads
together, than the block without beside it. Run:
python benchmarks/checkpoint_stall.py [--mib 64 256 1024] [--rounds 7] [--steps 4] [--step-s 1.5]
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from morph.cutting import ParameterUnit
from morph.runtime.groups.faults import FaultPlan
from morph.runtime.state.accumulators import Reduced
from morph.runtime.state.checkpoint_writer import CheckpointWriter
from morph.runtime.state.optimizer_state import optimizer_state
from morph.runtime.state.unit_state import UnitState

NUM_UNITS = 8
WAIT_S = 600.0


class Training:
    """Units of a state of so many bytes, and steps that compute for about so long."""

    def __init__(self, size_bytes: int, step_s: float) -> None:
        width = max(64, int((size_bytes / 12 / NUM_UNITS / 4) ** 0.5))  # a weight and two moments, four matrices a unit
        self.units = [_unit(f"s{index}", width) for index in range(NUM_UNITS)]
        self.gradients = [{name: torch.randn_like(p) for name, p in unit.parameters.items()} for unit in self.units]
        self._left, self._right = torch.randn(512, 512), torch.randn(512, 512)
        self._compute(20)
        start_s = time.perf_counter()
        self._compute(20)
        self._num_products = max(1, round(step_s / (time.perf_counter() - start_s) * 20))
        self.step()

    def _compute(self, num_products: int) -> None:
        for _ in range(num_products):
            torch.mm(self._left, self._right)

    def step(self) -> None:
        """Compute, then update every unit."""
        self._compute(self._num_products)
        for unit, gradients in zip(self.units, self.gradients, strict=True):
            unit.reduced = Reduced(gradients=gradients, exponents={}, overflowed=False)
            unit.apply()

    def tensors(self) -> dict[str, torch.Tensor]:
        """The state as it is, for torch's own save."""
        found: dict[str, torch.Tensor] = {}
        for unit in self.units:
            found |= {f"{unit.unit.id}/{name}": parameter.detach() for name, parameter in unit.parameters.items()}
            state, _ = optimizer_state(unit.optimizer, unit.parameters)
            found |= {f"{unit.unit.id}/{name}/{key}": value for (name, key), value in state.items()}
        return found


def _unit(name: str, width: int) -> UnitState:
    names = tuple(f"{name}.w{index}" for index in range(4))
    unit = ParameterUnit(id=name, parameters=names, buffers=(), sections=(0,))
    tensors = {name: torch.randn(width, width) for name in names}
    return UnitState(unit, tensors, _adam, num_micro_batches=1, exact=False)


def _adam(parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.Adam([parameter for _, parameter in parameters])


Begun = tuple[Callable[[], float], Callable[[], None]]
"""Of a save: how long it has blocked training so far, and waiting for its end."""


def block(training: Training, num_steps: int, save: Callable[[], Begun] | None) -> tuple[float, float, float]:
    """Take so many steps, a save being begun before the first; returns seconds: in all, of the processor, blocked."""
    cpu_s, start_s = time.process_time(), time.perf_counter()
    begun = save() if save is not None else None
    for _ in range(num_steps):
        training.step()
    took_s = time.perf_counter() - start_s
    if begun is None:
        return took_s, time.process_time() - cpu_s, 0.0
    blocked, wait = begun
    wait()
    return took_s, time.process_time() - cpu_s, blocked()


def morph_save(training: Training, writer: CheckpointWriter, done_s: list[float]) -> Callable[[], Begun]:
    """Return what begins a save with Morph's writer."""
    version = 0

    def save() -> Begun:
        nonlocal version
        version += 1
        start_s = time.perf_counter()
        copies = [unit.copy_later() for unit in training.units]
        for unit, copy in zip(training.units, copies, strict=True):
            writer.hand_over(version, unit.unit.id, copy)
        handed_s = time.perf_counter() - start_s

        def collect() -> None:
            num_left = NUM_UNITS
            while num_left:
                beat = writer.collect(WAIT_S)
                assert beat.checkpoint_error is None, beat.checkpoint_error
                num_left -= len(beat.written)
            done_s.append(time.perf_counter() - start_s)

        collecting = threading.Thread(target=collect)
        collecting.start()
        return lambda: handed_s + sum(copy.waited_s for copy in copies), lambda: collecting.join(WAIT_S)

    return save


def torch_save(training: Training, folder: Path, done_s: list[float]) -> Callable[[], Begun]:
    """Return what begins an asynchronous save of torch's."""
    number = 0

    def save() -> Begun:
        nonlocal number
        number += 1
        start_s = time.perf_counter()
        future: Any = dcp.async_save(training.tensors(), checkpoint_id=str(folder / f"{number}"), no_dist=True)
        handed_s = time.perf_counter() - start_s
        assert isinstance(future, Future)
        future.add_done_callback(lambda _: done_s.append(time.perf_counter() - start_s))
        return lambda: handed_s, lambda: future.result(WAIT_S)

    return save


def _spread(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def main() -> None:
    """Print the stall of a save and the time until it is durable, of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--step-s", type=float, default=1.5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for mib in options.mib:
        training = Training(mib << 20, options.step_s)
        folder = Path(tempfile.mkdtemp(prefix="morph-stall-"))
        try:
            writer = CheckpointWriter("w", str(folder / "morph"), FaultPlan([]), on_processor=True)
            ended: dict[str, list[float]] = {"morph": [], "torch": []}
            saves = {
                "none": None,
                "morph": morph_save(training, writer, ended["morph"]),
                "torch": torch_save(training, folder / "torch", ended["torch"]),
            }
            found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in saves}
            for _ in range(options.rounds):
                for name, save in saves.items():
                    found[name].append(block(training, options.steps, save))
                shutil.rmtree(folder / "torch", ignore_errors=True)
                shutil.rmtree(folder / "morph", ignore_errors=True)
            size = sum(tensor.nbytes for tensor in training.tensors().values())
            step_s = statistics.median(took_s for took_s, _, _ in found["none"]) / options.steps
            print(f"{size / 2**20:.0f} MiB, steps of {step_s:.2f} s, a save in {options.steps}:")
            for name in ("morph", "torch"):
                blocked_ms = [entry[2] * 1e3 for entry in found[name]]
                cpu_s = [entry[1] - plain[1] for entry, plain in zip(found[name], found["none"], strict=True)]
                print(
                    f"  {name}: blocked {_spread(blocked_ms, 1)} ms, processor {_spread(cpu_s, 2)} s, "
                    f"complete after {statistics.median(ended[name]):.2f} s",
                    flush=True,
                )
        finally:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
