"""Prepares the controller's configuration, with plans and a checkpoint, from a profile and a cluster file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil

from manager.controller.shape.followers import redundancy_of
from manager.controller.state.config import ControllerConfig, ExpectedLosses, Offer
from manager.controller.state.state import initial_state
from manager.host.devices import CudaDevice, cuda_devices, device_share_bytes
from morph.contract import ranges
from morph.contract.checkpoint import Manifest
from morph.contract.cluster import LocalVms, Policy, Vms
from morph.contract.errors import CheckpointError, PlanError, TraceError
from morph.contract.messages import Slot
from morph.contract.plan import Plan, by_need
from morph.contract.pool import Pool
from morph.contract.profile import Profile
from morph.contract.trace import UNKNOWN, Trace, TraceEvent
from morph.contract.vm_names import workers_of
from morph.machine import num_cores
from simulator import PlanRequest, plan, plan_table, pool_plan_table
from simulator.inputs.node_types import of_pool_type
from simulator.inputs.request import RedundancyName
from simulator.inputs.transfer import bandwidth_bytes_per_s

_ANY_BYTES = int(ranges.MEMORY_BYTES.high)
"""The memory, in bytes, of a host about which nothing is known."""


def constant_trace(vms: Vms) -> Trace:
    """Return a trace in which the cluster file's VMs come at the start and stay; an empty one if VMs are requested."""
    if not isinstance(vms, LocalVms) or vms.keep is not None:
        return Trace(events=())
    types = [name for name, count in vms.node_types.items() for _ in range(count)] or [UNKNOWN] * vms.num_vms
    return Trace(
        events=tuple(
            TraceEvent(time_s=0, event="add", node_id=f"vm{index}", instance_type=name)
            for index, name in enumerate(types)
        )
    )


@dataclass(frozen=True)
class VmMemory:
    """The memory that one worker may use: of its device, and of the host if devices have their own memory."""

    device_bytes: int
    host_bytes: int | None = None


def memory_of(
    vms: Vms,
    profile: Profile | None = None,
    *,
    num_vms: int | None = None,
    devices: Callable[[], Sequence[CudaDevice]] = cuda_devices,
) -> VmMemory:
    """Return one worker's memory, for the planner: as the cluster file sets it, else a share of this machine's.

    ``profile``: has the host memory of a provider's VMs. ``num_vms``: the largest number of VMs at one time; None: as
    the cluster file sets it. ``devices``: lists this machine's CUDA devices. ConfigError: local VMs are to use CUDA,
    and this machine has no such device.
    """
    known_host = None if profile is None else profile.environment.host_memory_bytes
    if not isinstance(vms, LocalVms):
        return VmMemory(vms.memory_bytes, (known_host or _ANY_BYTES) if vms.device == "cuda" else None)
    num_vms = max(num_vms or 0, vms.keep or vms.num_vms)
    host_bytes = psutil.virtual_memory().total // num_vms
    if vms.device == "cpu":
        return VmMemory(vms.memory_bytes or host_bytes)
    return VmMemory(vms.memory_bytes or device_share_bytes(devices(), num_vms), host_bytes)


def controller_config(
    profile: Profile,
    vms: Vms,
    policy: Policy,
    trace: Trace,
    num_steps: int,
    request: PlanRequest = PlanRequest(),  # noqa: B008 (frozen)
    *,
    offers: Sequence[Offer] = (),
    num_beyond: int = 0,
    devices: Callable[[], Sequence[CudaDevice]] = cuda_devices,
) -> ControllerConfig:
    """Plan for all workers that the trace or ``vms.keep`` can bring, and gather what the controller needs.

    ``request``: P of every shape (the run waits while there are fewer workers); the largest D (fewer workers form
    fewer pipelines, and further workers stand by); m of all plans, which a resumed run keeps; schedule and recompute.
    ``offers``: the types of GPU, if the cluster file names any. With several types there is a plan for every pool of
    them, with each type's memory from the profile if it has all of them, else from the cluster file.
    ``num_beyond``: how many more workers may come if the last VM has several devices. ``devices``: lists CUDA devices.
    PlanError: all VMs together cannot run the job or form the requested shape, or the profile lacks a type. TraceError:
    a VM of the trace has none of the types.
    """
    profiles = {offer.node_type: of_pool_type(profile, offer.node_type) for offer in offers}
    if len(offers) == 1:
        (profile,) = profiles.values()
    most_vms = _most_vms(vms, trace, offers, num_beyond)
    num_vms = most_vms if isinstance(most_vms, int) else most_vms.num_gpus
    memory = memory_of(vms, profile, num_vms=num_vms, devices=devices)
    limits: dict[str, Any] = {"memory_bytes": memory.device_bytes, "host_memory_bytes": memory.host_bytes}
    own = [of.environment.device_memory_bytes for of in profiles.values()]
    if len(offers) > 1 and not isinstance(vms, LocalVms) and all(own):
        memory, limits = replace(memory, device_bytes=min(filter(None, own))), {}  # a follower may be on any of them
    requested = replace(request, **limits, redundancy=policy.redundancy, links=vms.links, rings=vms.rings)
    plans = _plans(profile, most_vms, num_beyond, requested)
    m = next(iter(plans.values())).micro_batch_size
    at_start = sum(event.event == "add" and event.time_s == 0 for event in trace.events)
    more: dict[str, Any] = {}
    if len(offers) == 1:
        more = {"node_type": offers[0].node_type}
    elif offers:  # if none adds speed, the first is requested
        by_price = sorted(offers, key=lambda offer: offer.usd_per_h or 0.0)
        times_s = {name: of.section_compute_s(m) for name, of in profiles.items()}
        more = {"offers": tuple(by_price), "type_compute_s": times_s}
    return ControllerConfig(
        **_facts_of(profile),
        **more,
        plans=plans,
        num_steps=num_steps,
        policy=policy,
        expected_nodes=vms.keep or at_start or 1,
        target_nodes=vms.keep or 0,
        idle_vm_h=vms.limits.idle_vm_h,
        device_memory_bytes=memory.device_bytes,
        host_memory_bytes=memory.host_bytes,
        num_cores=num_cores() if isinstance(vms, LocalVms) and vms.device == "cpu" else None,
        section_compute_s=profile.section_compute_s(m),
    )


def _most_vms(vms: Vms, trace: Trace, offers: Sequence[Offer], num_beyond: int) -> int | Pool:
    """Return the largest number of VMs at one time; with several types, of each, with ``num_beyond`` above ``keep``."""
    if len(offers) < 2:
        return max(trace.max_nodes, vms.keep or 0)
    names = [offer.node_type for offer in offers]
    from_trace = most_of_types([trace], dict(zip(names, names, strict=True)), "vms.node_types")
    if vms.keep is None:
        return from_trace
    each = vms.keep + num_beyond
    return Pool.of({offer.node_type: min(each, offer.most or each) for offer in offers})


def _plans(profile: Profile, most_vms: int | Pool, num_beyond: int, request: PlanRequest) -> dict[Any, Plan]:
    """Return plans by number of GPUs, or by pool if there are several types."""
    most, request = request.num_replicas, replace(request, num_replicas=None)
    if isinstance(most_vms, Pool):
        by_pool = by_need(pool_plan_table(profile, most_vms, request, most_replicas=most).values())
        if not by_pool:
            raise PlanError("no plan fits", field="pool", value=str(most_vms))
        return by_pool
    plans = plan_table(profile, most_vms, request, most_replicas=most, unequal=True)
    if not plans or most is not None:
        # if there is no such shape, this raises an error that says what is allowed
        plan(profile, request, num_gpus=most_vms, num_replicas=most)
    if not plans:
        raise PlanError("no plan fits", field="num_vms", value=most_vms)
    if num_beyond:
        plans = plan_table(profile, most_vms + num_beyond, request, most_replicas=most, unequal=True)
    return plans


def most_of_types(traces: Iterable[Trace], node_types: Mapping[str, str], field: str) -> Pool:
    """Return the largest number of VMs of each GPU type that traces have at one time.

    ``node_types``: types by instance type, set by ``field``. TraceError: a trace has VMs of another instance type.
    """
    most = Counter[str]()
    for trace in traces:
        living = Counter[str]()
        for event in trace.events:
            if event.instance_type not in node_types:
                message, allowed = f"has no type in {field}", ", ".join(node_types)
                raise TraceError(message, field="instance_type", value=event.instance_type, allowed=allowed)
            living[node_types[event.instance_type]] += 1 if event.event == "add" else -1
            most |= living
    return Pool.of(most)


def starting_from(
    config: ControllerConfig, checkpoint: Manifest | None, expected_losses: ExpectedLosses
) -> ControllerConfig:
    """Return the same configuration, without planning again, for a session that may start from a checkpoint.

    ``expected_losses``: of VMs, until the run has observed losses itself. CheckpointError: another model's checkpoint.
    """
    if checkpoint is not None:
        _check_fits(checkpoint, config)
    version = checkpoint.version if checkpoint else 0
    return config.model_copy(
        update={"initial_version": version, "initial_checkpoint": checkpoint, "expected_losses": expected_losses}
    )


def _facts_of(profile: Profile) -> dict[str, Any]:
    copies = 3 if any(section.optimizer_bytes for section in profile.sections) else 1
    return {
        "job": profile.job.name,
        "fingerprint": profile.job.fingerprint,
        "units": {unit.id: unit.sections for unit in profile.units},
        "unit_bytes": {unit.id: unit.parameter_bytes * copies for unit in profile.units},
        "state_copies": copies,
        "constant_bytes": tuple(section.constant_bytes for section in profile.sections),
        "link_bytes_per_s": bandwidth_bytes_per_s(profile.inter_node),
    }


def redundancy_line(
    profile: Profile,
    best: Plan,
    redundancy: RedundancyName,
    memory_bytes: int | None,
    host_memory_bytes: int | None = None,
) -> str:
    """Return whether a run of this plan begins with followers, and why, as long as its VMs' losses are unknown."""
    if redundancy == "off" or not profile.units:
        return "followers: off"
    config = ControllerConfig(
        **_facts_of(profile),
        plans={best.num_workers: best},
        num_steps=1,
        policy=Policy(redundancy=redundancy),
        expected_nodes=best.num_workers,
        device_memory_bytes=memory_bytes,
        host_memory_bytes=host_memory_bytes,
    )
    planned = (best.node_at(stage, replica) for stage, replica in best.places)
    nodes = [number if node is None else node for number, node in enumerate(planned)]
    names = {node: iter(workers_of(f"vm{node}", nodes.count(node))) for node in nodes}
    slots = [
        Slot(worker=next(names[node]), stage=stage, replica=replica)
        for node, (stage, replica) in zip(nodes, best.places, strict=True)
    ]
    chosen = redundancy_of(initial_state(config), best, slots, {}, 0.0)
    return f"followers, {redundancy}: {chosen.told or 'replicas are enough'}"


def _check_fits(checkpoint: Manifest, config: ControllerConfig) -> None:
    where = f"the checkpoint of version {checkpoint.version}"
    if checkpoint.fingerprint != config.fingerprint:
        raise CheckpointError(
            f"{where} belongs to another model: its fingerprint is {checkpoint.fingerprint}, "
            f"the profile's is {config.fingerprint}"
        )
    saved, wanted = {entry.unit for entry in checkpoint.units}, set(config.units)
    if saved != wanted:
        raise CheckpointError(f"{where} has units {sorted(saved)}, the profile {sorted(wanted)}")
