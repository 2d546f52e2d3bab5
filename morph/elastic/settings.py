"""Compares settings of a loop that must be the same at all workers: digests, summed over a ring, show differences."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from morph.contract.errors import InputError, JobError
from morph.runtime.groups.channels import Ring
from morph.runtime.state.optimizer_state import MakeScheduler, build_scheduler

Settings = dict[str, Any]
"""Settings as ``TrainingState.settings`` returns them."""
DIGEST_BYTES = 8


class SettingsDiffer(Exception):
    """Raised by all members of a ring in the same step: not all of them have the same settings."""


class Digest:
    """A digest of settings, as numbers whose sum over the members of a ring shows whether all settings are equal."""

    def __init__(self, text: str) -> None:
        digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest(), "little")
        bits = [digest >> place & 1 for place in range(8 * DIGEST_BYTES)]
        self.numbers = torch.tensor(bits, dtype=torch.float64) - 0.5

    def check(self, total: Tensor, num_members: int) -> None:
        """Compare with the sum of all members' numbers, which has the full magnitude only if all are equal."""
        if float(total.abs().min()) < 0.5 * num_members - 0.25:
            raise SettingsDiffer


def exchanged(ring: Ring | None, mine: Any) -> list[Any]:
    """Return the values of all members of a ring, by rank, exchanged as JSON.

    Raises GenerationAborted or PeerLost if the ring has ended.
    """
    text = json.dumps(mine).encode()
    if ring is None:
        return [json.loads(text)]
    size = torch.tensor([len(text)], dtype=torch.int64)
    ring.reduce(size, torch.distributed.ReduceOp.MAX).wait("the size of the other workers' settings")
    own = torch.frombuffer(bytearray(text.ljust(int(size))), dtype=torch.uint8)
    gathered = torch.empty(ring.size * len(own), dtype=torch.uint8)
    ring.gather(gathered, own).wait("the other workers' settings")
    return [json.loads(one.numpy().tobytes()) for one in gathered.view(ring.size, -1)]


def schedule_of(optimizer: torch.optim.Optimizer, given: LRScheduler | MakeScheduler) -> LRScheduler:
    """Return the given schedule, or the one that a given function makes.

    Raises InputError if the schedule is for another optimizer, cannot be saved, or cannot be stepped without a value.
    """
    try:
        scheduler = build_scheduler((lambda _: given) if isinstance(given, LRScheduler) else given, optimizer)
    except JobError as error:
        raise InputError(error.message, field=error.field, value=error.value, allowed=error.allowed) from error
    if scheduler.optimizer is not optimizer:
        allowed = "a schedule of the same optimizer"
        raise InputError("schedules another optimizer", field="lr_scheduler", allowed=allowed)
    return scheduler


def difference(mine: Settings, oldest: Settings, names: list[str], num_steps: int) -> InputError:
    """Return the error that names the first setting that differs from the oldest worker's."""
    message = f"differs from the oldest worker's in step {num_steps}"
    for name, here, there in zip(names, mine["trained"], oldest["trained"], strict=True):
        if here != there:
            allowed = f"{there == '1'}, as there; set it by optimizer.num_steps before each step, at all workers"
            return InputError(message, field=f"{name}.requires_grad", value=here == "1", allowed=allowed)
    for index, (here, there) in enumerate(zip(mine["groups"], oldest["groups"], strict=False)):
        for key, value in there["values"].items():
            if here["values"].get(key) != value:
                allowed = (
                    f"{value!r}, as there; give the scheduler to morph.elastic.Optimizer(lr_scheduler=...), so that "
                    "joiners get its state, or set the value by optimizer.num_steps before each step"
                )
                return InputError(
                    message, field=f"param_groups[{index}][{key!r}]", value=here["values"].get(key), allowed=allowed
                )
    allowed = "the same groups of the same parameters, and the same schedule, at all workers"
    return InputError(
        f"has parameter groups or a schedule that differs from the oldest worker's in step {num_steps}",
        field="optimizer",
        allowed=allowed,
    )
