"""Scheduled faults, for tests: a worker dies or fails when it reaches a phase of a step, or is slow for some steps."""

from __future__ import annotations

import math
import os
import signal
from collections import Counter
from collections.abc import Sequence

import torch

from morph.contract.faults import Fault, SlowSpell


class FaultPlan:
    """The faults of one worker, each of which occurs once; with none, ``reach`` does nothing."""

    def __init__(self, faults: Sequence[Fault], spells: Sequence[SlowSpell] = ()) -> None:
        self._faults = tuple(faults)
        self._spells = tuple(spells)
        self._step = 0
        self._reached: Counter[str] = Counter()

    def begin(self, step: int) -> None:
        """Begin a step (or the reshape before it); arrivals are counted from here."""
        self._step = step
        self._reached.clear()

    def reach(self, phase: str, step: int | None = None) -> None:
        """Die here if a fault says so; ``step`` overrides the step under way (for background work)."""
        if not self._faults:
            return
        nth = self._reached[phase]
        self._reached[phase] += 1
        step = self._step if step is None else step
        for fault in self._faults:
            if fault.phase == phase and fault.step == step and fault.nth == nth:
                _meet(fault)

    @property
    def slowness(self) -> float:
        """Factor of compute times in the current step."""
        return math.prod(
            spell.factor
            for spell in self._spells
            if spell.first_step <= self._step and (spell.end_step is None or self._step < spell.end_step)
        )


def _meet(fault: Fault) -> None:
    match fault.kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "out_of_memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        case "lost_device":
            raise torch.AcceleratorError("CUDA error: unspecified launch failure")
