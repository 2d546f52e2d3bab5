"""How long a save stalls training, and how long it takes to be durable: Morph compared with torch's asynchronous save.

One process trains the same tensors (Adam) in three alternating ways: without saves, with Morph's writer, and with
``torch.distributed.checkpoint.async_save`` (by default in a thread). Blocked: how long the training thread waits, while
state is handed over and before it is changed. Processor: the additional processor time, over all threads, of a block of
steps with a save compared with the neighbouring block without one.

    python -m benchmarks checkpoint_stall --mib 64,256,1024 --rounds 7 --steps 4 --step-s 1.5
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_saver import async_save

from benchmarks.harness import head, in_turns, machine, numbers, row, spread
from morph.cutting import ParameterUnit
from morph.runtime.attendants.checkpoint_writer import CheckpointWriter
from morph.runtime.groups.faults import FaultPlan
from morph.runtime.state.accumulators import Reduced
from morph.runtime.state.optimizer_state import optimizer_state
from morph.runtime.state.unit_state import UnitState

NUM_UNITS = 8
WAIT_S = 600.0


class Training:
    """Units with a state of ``size_bytes``, and steps that compute for about ``step_s``."""

    def __init__(self, size_bytes: int, step_s: float) -> None:
        width = max(64, int((size_bytes / 12 / NUM_UNITS / 4) ** 0.5))  # weight and two moments, four matrices a unit
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
        """Return the present state, for torch's own save."""
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
"""A save that was begun: how long it has blocked training so far, and a function that waits for its end."""


def block(training: Training, num_steps: int, save: Callable[[], Begun] | None) -> tuple[float, float, float]:
    """Take so many steps, with a save begun before the first; return seconds: total, of the processor, blocked."""
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
    """Return a function that begins a save with Morph's writer."""
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
    """Return a function that begins torch's asynchronous save."""
    number = 0

    def save() -> Begun:
        nonlocal number
        number += 1
        start_s = time.perf_counter()
        future: Any = async_save(training.tensors(), checkpoint_id=str(folder / f"{number}"), no_dist=True)
        handed_s = time.perf_counter() - start_s
        assert isinstance(future, Future)
        future.add_done_callback(lambda _: done_s.append(time.perf_counter() - start_s))
        return lambda: handed_s, lambda: future.result(WAIT_S)

    return save


def main(mib: str = "64,256,1024", rounds: int = 7, steps: int = 4, step_s: float = 1.5) -> None:
    torch.set_num_threads(1)
    print(f"{machine()}; a save in {steps} steps")
    head("state | step | | blocked | processor | complete after")
    for size in numbers(mib):
        training = Training(size << 20, step_s)
        with tempfile.TemporaryDirectory(prefix="morph-stall-") as name:
            folder = Path(name)
            writer = CheckpointWriter("w", str(folder / "morph"), FaultPlan([]), on_processor=True)
            ended: dict[str, list[float]] = {"morph": [], "torch": []}
            saves = {
                "none": None,
                "morph": morph_save(training, writer, ended["morph"]),
                "torch": torch_save(training, folder / "torch", ended["torch"]),
            }

            def turn(save: Callable[[], Begun] | None) -> tuple[float, float, float]:
                for each in ("torch", "morph"):
                    shutil.rmtree(folder / each, ignore_errors=True)  # noqa: B023 # called here
                return block(training, steps, save)  # noqa: B023 # called here

            found = in_turns({name: partial(turn, save) for name, save in saves.items()}, rounds)
            state = sum(tensor.nbytes for tensor in training.tensors().values())
        plain_s = statistics.median(took_s for took_s, _, _ in found["none"]) / steps
        for way in ("morph", "torch"):
            blocked_s = [blocked for _, _, blocked in found[way]]
            cpu_s = [one[1] - plain[1] for one, plain in zip(found[way], found["none"], strict=True)]
            cells = (spread(blocked_s, "ms", 1, 1e3), spread(cpu_s), f"{statistics.median(ended[way]):.2f} s")
            row(f"{state / 2**20:.0f} MiB", f"{plain_s:.2f} s", way, *cells)
