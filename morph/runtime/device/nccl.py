"""Forms communicators of NCCL by torch's ``ProcessGroupNCCL``. It has not run on a device yet
(docs/how-it-works/gpu.md).

It relies on these facts of torch's source: an operation without ``asyncOp`` is enqueued on the current stream; the
watchdog ends the process when an operation fails or takes long, unless told not to; ``abort`` works in a thread of
its own, so a group call around several of them has no effect, and they are aborted in parallel instead;
non-blocking calls wait while they hold the lock that an abort needs, so communicators are formed by calls that block.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from morph.contract.cluster import RingSetting
from morph.contract.errors import ConfigError
from morph.runtime.device.devices import CudaDevice
from morph.runtime.device.rings import (
    Communicator,
    CommunicatorSet,
    DeviceFacts,
    Library,
    RingStream,
    rings_over_nccl,
    told_facts,
)
from morph.runtime.groups.channels import GroupSpec
from morph.runtime.groups.interrupt import Interrupt

_WATCHDOG = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
}
"""Settings that keep the watchdog from ending live workers: the abort of a generation wakes waiting threads."""


class Nccl:
    """See ``Library``."""

    def __init__(self, device: torch.device) -> None:
        self.device = CudaDevice(device)
        uuid = torch.cuda.get_device_properties(self.device.kind).uuid
        version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        self.facts = DeviceFacts(uuid=str(uuid), nccl=".".join(map(str, version)))

    def form(self, store: Store, rank: int, size: int, limit_s: float) -> Communicator:
        os.environ.update(_WATCHDOG)
        group: Any = dist.ProcessGroupNCCL  # torch ships no types for the following
        options = group.Options()
        options.config.blocking = 1
        options._timeout = timedelta(seconds=limit_s)
        made = group(store, rank, size, options)
        made.eager_connect_single_device(self.device.kind)
        return made

    def abort(self, communicators: Sequence[Communicator]) -> None:
        if communicators:
            with ThreadPoolExecutor(len(communicators), "morph-abort") as pool:
                list(pool.map(lambda made: made.abort(), communicators))


def library_for(setting: RingSetting, device: torch.device) -> tuple[Library, RingStream] | None:
    """Return the library that reduces on a device; None if reductions go through the host."""
    if setting == "gloo" or device.type == "cpu":
        return None
    if not dist.is_nccl_available():
        if setting == "nccl":
            raise ConfigError("is not in this torch", field="vms.rings", value="nccl", allowed="auto or gloo")
        return None
    return _library(device)


def communicators(
    setting: RingSetting,
    device: torch.device,
    rings: Sequence[GroupSpec],
    worker: str,
    interrupt: Interrupt,
    open_store: Callable[[], Store],
) -> CommunicatorSet | None:
    """Begin to form the device rings of a worker in one generation; None: no rings. Raises as ``Interrupt.call``."""
    mine = [spec for spec in rings if worker in spec.members and len(spec.members) > 1]
    chosen = library_for(setting, device) if mine else None
    if chosen is None:
        return None
    library, stream = chosen

    def told() -> dict[str, DeviceFacts]:
        store = PrefixStore(f"g{interrupt.generation}/device", open_store())
        return told_facts(store, mine, worker, library.facts)

    over_nccl = rings_over_nccl(setting, mine, interrupt.call(told, "the devices of a reduction"))
    return CommunicatorSet(over_nccl, worker, library, stream, interrupt, open_store)


@cache
def _library(device: torch.device) -> tuple[Library, RingStream]:
    made = Nccl(device)
    return made, RingStream(made.device)
