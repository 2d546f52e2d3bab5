"""Chooses, by the cluster file, the parts that open VMs, request them and watch them join."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from manager.controller.state.state import ControllerState
from manager.engine.joining.certificates import Tls
from manager.engine.joining.joiner import Joiner
from manager.engine.local_vms.vm_fleet import VmFleet
from manager.engine.loop.event_queue import EventQueue
from manager.engine.machines.attachment import OrphanedRun
from manager.engine.machines.machines import Machines, OpenMachines, Processes, Provided
from manager.engine.machines.provider_machines import Providing, open_provided
from manager.engine.machines.ray_machines import open_ray
from manager.engine.on_ray.ray_environment import adopt, prepare
from manager.engine.vms.budget import Spending
from manager.engine.vms.provisioning import Provisioner
from manager.engine.vms.vm_registry import Inherited, inherited
from manager.journal.journal import Journal
from manager.journal.records import SESSION_OVER, Fact
from manager.providers.local import LocalProvider
from manager.run_dir import WORKERS_LOG
from morph.contract.cluster import LocalVms, Vms
from morph.contract.errors import RunDirError

MAX_LOCAL_VMS = 64
PROVIDER_LOOK_S = 60.0
PROVIDER_CLOSE_S = 90.0


def machines_of(
    vms: Vms, providing: Providing | None, orphan: OrphanedRun | None, run_dir: Path, job_path: str
) -> OpenMachines:
    """Return a function that opens VMs of this kind. ``providing``: how to open their provider, if one brings them.

    The job's imports are made in advance only if the job gets no variables of its own: these would come after the
    imports. ClusterError: Ray was imported too early, or the run to be taken over is gone.
    """
    if isinstance(vms, LocalVms) and not vms.under_ray:
        return Processes(run_dir / WORKERS_LOG, job_path="" if vms.pass_variables else job_path)
    tls = _tls(vms)
    directory = adopt(orphan.attachment.control_socket.parent / "ray", tls) if orphan else prepare(tls)
    if isinstance(vms, LocalVms):
        return open_ray(directory)
    assert providing is not None, "no way to open the provider is given"
    return open_provided(directory, vms, providing)


def _tls(vms: Vms) -> Tls | None:
    if not vms.tls:
        return None
    return Tls() if isinstance(vms, LocalVms) else Tls(vms.address, enrols=True)


def provisioning_of(
    vms: Vms, machines: Machines, fleet: VmFleet, events: EventQueue, spending: Spending, orphan: OrphanedRun | None
) -> Provisioner:
    """Open the part that requests VMs, in a run that keeps a number of them."""
    if machines.provided is not None:
        return Provisioner(
            machines.provided.provider,
            events,
            spending,
            nodes=orphan.state.workers if orphan else (),
            look_every_s=PROVIDER_LOOK_S,
            close_timeout_s=PROVIDER_CLOSE_S,
        )
    left = inherited(orphan.state, orphan.vms) if orphan else Inherited()
    provider = LocalProvider(fleet, max_vms=MAX_LOCAL_VMS, usd_per_h=vms.usd_per_h, inherited=left.vms)
    return Provisioner(provider, events, spending, nodes=left.nodes)


def watch_joining(
    provided: Provided,
    provisioning: Provisioner,
    event_queue: EventQueue,
    state: ControllerState,
    appeared: Collection[str],
) -> Joiner:
    """Watch VMs join, continue with known ones, end those given up; ``appeared``: reported by an earlier manager."""
    booting = {worker for request in state.provisioning.requests.values() for worker in request.granted}
    provisioning.begin(
        {*state.workers, *booting}, [name for name, request in state.provisioning.requests.items() if request.count]
    )
    joiner = Joiner(provided.joined, provisioning.request_of, event_queue, appeared, provisioning.known_of)
    joiner.start()
    return joiner


def write_last_facts(event_queue: EventQueue, journal: Journal) -> None:
    """Journal the facts after the driver's end, such as VMs that could not be ended, and the end itself."""
    with suppress(RunDirError):  # the disk is still full; the run's end is reported even so
        while (stamped := event_queue.get(0.0)) is not None:
            if isinstance(stamped.item, Fact):
                journal.append_fact(stamped.time_s, stamped.item)
        journal.append_fact(event_queue.now_s(), Fact(name=SESSION_OVER))
