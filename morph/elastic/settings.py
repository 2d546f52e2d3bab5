"""Settings of a loop that must be alike at all workers: compared by digests that a ring sums, and told apart."""

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
"""As ``TrainingState.settings`` returns them."""
DIGEST_BYTES = 8


class SettingsDiffer(Exception):
    """Found by all members of a ring in the same step: not all of them have the same settings."""


class Digest:
    """Of settings, as numbers whose sum over the members of a ring says whether all have the same."""

    def __init__(self, text: str) -> None:
        digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest(), "little")
        bits = [digest >> place & 1 for place in range(8 * DIGEST_BYTES)]
        self.numbers = torch.tensor(bits, dtype=torch.float64) - 0.5

    def check(self, total: Tensor, num_members: int) -> None:
        """Compare with the sum of all members' numbers, which has this magnitude only if all are equal.

        Raises:
            SettingsDiffer: they are not equal.
        """
        if float(total.abs().min()) < 0.5 * num_members - 0.25:
            raise SettingsDiffer


def exchanged(ring: Ring | None, told: Any) -> list[Any]:
    """Return what each member of a ring tells, by rank, through JSON.

    Raises:
        GenerationAborted, PeerLost: the ring is no more.
    """
    text = json.dumps(told).encode()
    if ring is None:
        return [json.loads(text)]
    size = torch.tensor([len(text)], dtype=torch.int64)
    ring.reduce(size, torch.distributed.ReduceOp.MAX).wait("the size of what others tell")
    own = torch.frombuffer(bytearray(text.ljust(int(size))), dtype=torch.uint8)
    gathered = torch.empty(ring.size * len(own), dtype=torch.uint8)
    ring.gather(gathered, own).wait("what others tell")
    return [json.loads(one.numpy().tobytes()) for one in gathered.view(ring.size, -1)]


def schedule_of(optimizer: torch.optim.Optimizer, given: LRScheduler | MakeScheduler) -> LRScheduler:
    """Return the schedule that was given, or that a function makes.

    Raises:
        InputError: it is of another optimizer, or cannot be saved, or stepped without a value.
    """
    try:
        scheduler = build_scheduler((lambda _: given) if isinstance(given, LRScheduler) else given, optimizer)
    except JobError as error:
        raise InputError(error.message, field=error.field, value=error.value, allowed=error.allowed) from error
    if scheduler.optimizer is not optimizer:
        allowed = "a schedule of the optimizer that is given with it"
        raise InputError("is of another optimizer", field="lr_scheduler", allowed=allowed)
    return scheduler


def difference(mine: Settings, oldest: Settings, names: list[str], num_steps: int) -> InputError:
    """Say where a worker's settings first differ from the oldest worker's."""
    message = f"is not the oldest worker's in step {num_steps}"
    for name, here, there in zip(names, mine["trained"], oldest["trained"], strict=True):
        if here != there:
            allowed = f"{there == '1'}, as there; set it by optimizer.num_steps before each step, alike at all workers"
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
        f"has parameter groups or a schedule that are not the oldest worker's in step {num_steps}",
        field="optimizer",
        allowed=allowed,
    )
