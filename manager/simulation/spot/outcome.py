"""The outcome of a simulated job on spot VMs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from manager.accounting.account import TimeUse


class Moment(NamedTuple):
    """The state from ``time_s`` on: the number of VMs, the shape that trains (or "") and its examples/s."""

    time_s: float
    num_vms: int
    shape: str
    examples_per_s: float


@dataclass(frozen=True)
class PolicyOutcome:
    """One job under one policy on one trace.

    ``steps``: the steps whose result counts at the end. ``examples``: the samples in them; fewer than steps times the
    batch if a policy drops samples. ``lost_steps``: steps that were run and undone. ``parts_s``: node-seconds by use;
    they add up to ``vm_s``. ``usd``: None without prices. ``finished``: whether all requested steps are done.
    ``gave_up``: when and why the controller ended the run early, in words; its time goes on without VMs.
    """

    policy: str
    trace: str
    seed: int
    hours: float
    steps: int
    examples: float
    lost_steps: int
    num_losses: int
    num_fatal: int
    num_changes: int
    vm_s: float
    parts_s: dict[TimeUse, float]
    usd: float | None
    finished: bool
    gave_up: str = ""
    moments: tuple[Moment, ...] = field(default=(), repr=False)

    @property
    def examples_per_s(self) -> float:
        """The average speed over the whole time."""
        return self.examples / (self.hours * 3600) if self.hours else 0.0

    @property
    def examples_per_usd(self) -> float | None:
        """The value of the training, as defined by Bamboo; None without prices."""
        return self.examples / self.usd if self.usd else None
