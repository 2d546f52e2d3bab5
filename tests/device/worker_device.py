"""The fake device of a worker's process."""

from __future__ import annotations

from dataclasses import dataclass

from tests.device.fake_device import FakeDevice, Ticking
from tests.device.fake_mailboxes import FakeMailRoom
from tests.device.fake_nccl import FakeNccl


@dataclass
class WorkerDevice:
    device: FakeDevice | None = None
    nccl: FakeNccl | None = None


HERE = WorkerDevice()


def use_fake_device(
    nccl: str | None = None, kill_at: tuple[str, int] | None = None, boxes: FakeMailRoom | None = None
) -> None:
    """From now on, let this process send, receive and reduce with a fake device, which completes copies by itself.

    ``nccl``: the device's uuid; given where reductions stay on the device. ``kill_at``: see ``FakeNccl``. ``boxes``:
    the device's mailboxes; given where tensors between stages stay on devices.
    """
    from morph.runtime.device import link_choice, staging
    from morph.runtime.device.task_clock import HostClock
    from morph.runtime.workloads import job_workload

    HERE.device = device = FakeDevice()
    Ticking(device)
    staging.device_for = link_choice.device_for = lambda _kind: device
    job_workload.clock_of = lambda _kind: HostClock()
    if boxes is not None:
        room = boxes.opened_on(device)
        link_choice.room_for = lambda setting, _device: None if setting == "staged" else room
    if nccl is not None:
        from morph.runtime.device import nccl as by_nccl
        from morph.runtime.device.rings import RingStream

        HERE.nccl = FakeNccl(device, nccl, kill_at)
        chosen = HERE.nccl, RingStream(device)
        by_nccl.library_for = lambda _setting, _device: chosen
