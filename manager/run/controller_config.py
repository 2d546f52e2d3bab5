"""Prepares the controller's configuration, with plans and a checkpoint, from a profile and a cluster file."""

from __future__ import annotations

import os
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
    """Return the memory of one worker, for the planner: as set in the cluster file, else a share of this machine's.

    ``profile``: has the host memory of a provider's VMs. ``num_vms``: the largest number of VMs at one time; None: as
    set in the cluster file. ``devices``: lists this machine's CUDA devices, if local VMs use them; ConfigError if they
    are to use them, and there are none.
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
    timeline_step: int | None = None,
    num_beyond: int = 0,
    devices: Callable[[], Sequence[CudaDevice]] = cuda_devices,
    **more: Any,
) -> ControllerConfig:
    """Plan for every number of workers that the trace or ``vms.keep`` can bring, and gather what the controller needs.

    ``request``, with ``more`` of its fields, has: P of every shape (the run waits while there are fewer workers); the
    largest D (fewer workers form fewer pipelines, further ones stand by); m of all plans, which a resumed run keeps;
    schedule and recompute. ``num_beyond``: how many more workers may come if the last VM has several devices.
    ``timeline_step``: the step of which workers record a timeline. ``devices``: a function that lists CUDA devices, if
    local VMs use them. PlanError: not even the trace's largest number of VMs can run the job, or can form the requested
    shape.
    """
    max_nodes = max(trace.max_nodes, vms.keep or 0)
    memory = memory_of(vms, profile, num_vms=max_nodes, devices=devices)
    requested = replace(
        request,
        **more,
        memory_bytes=memory.device_bytes,
        host_memory_bytes=memory.host_bytes,
        redundancy=policy.redundancy,
        links=vms.links,
        rings=vms.rings,
    )
    most, request = requested.num_replicas, replace(requested, num_replicas=None)
    plans = plan_table(profile, max_nodes, request, most_replicas=most, unequal=True)
    if not plans or most is not None:
        # raises an error, which says what is allowed, if there is no such shape
        plan(profile, request, num_gpus=max_nodes, num_replicas=most)
    if not plans:
        raise PlanError("no plan fits", field="num_vms", value=max_nodes)
    if num_beyond:
        plans = plan_table(profile, max_nodes + num_beyond, request, most_replicas=most, unequal=True)
    micro_batch_size = next(iter(plans.values())).micro_batch_size
    return ControllerConfig(
        **_facts_of(profile),
        **_of_vms(vms, trace, memory),
        plans=plans,
        num_steps=num_steps,
        policy=policy,
        timeline_step=timeline_step,
        section_compute_s=section_compute_s(profile, micro_batch_size),
    )


def _of_vms(vms: Vms, trace: Trace, memory: VmMemory) -> dict[str, Any]:
    at_start = sum(event.event == "add" and event.time_s == 0 for event in trace.events)
    return {
        "expected_nodes": vms.keep or at_start or 1,
        "target_nodes": vms.keep or 0,
        "idle_vm_h": vms.limits.idle_vm_h,
        "device_memory_bytes": memory.device_bytes,
        "host_memory_bytes": memory.host_bytes,
        "num_cores": (os.cpu_count() or 1) if isinstance(vms, LocalVms) and vms.device == "cpu" else None,
    }


def mixed_config(
    profile: Profile,
    vms: Vms,
    policy: Policy,
    trace: Trace,
    num_steps: int,
    request: PlanRequest,
    offers: Sequence[Offer],
    *,
    timeline_step: int | None = None,
    num_beyond: int = 0,
) -> ControllerConfig:
    """Return the configuration, as ``controller_config`` does, for GPUs of several types: plan for every pool of them.

    Each type has the memory that the profile gives, if it gives it for all types; else that of the cluster file.
    PlanError: a type is not in the profile, or no pool can run the job. TraceError: a VM of the trace has none of the
    types.
    """
    names = [offer.node_type for offer in offers]
    profiles = {name: of_pool_type(profile, name) for name in names}
    most = most_of_types([trace], {name: name for name in names}, "vms.node_types")
    if vms.keep is not None:
        each = vms.keep + num_beyond
        most = Pool.of({offer.node_type: min(each, offer.most or each) for offer in offers})
    memory = memory_of(vms, profile, num_vms=most.num_gpus)
    limits: dict[str, Any] = {"memory_bytes": memory.device_bytes, "host_memory_bytes": memory.host_bytes}
    own = [of.environment.device_memory_bytes for of in profiles.values()]
    each_has_its_own = not isinstance(vms, LocalVms) and all(own)
    if each_has_its_own:
        memory = replace(memory, device_bytes=min(filter(None, own)))  # a follower may be on any of them
    request = replace(
        request,
        **({} if each_has_its_own else limits),
        redundancy=policy.redundancy,
        links=vms.links,
        rings=vms.rings,
    )
    most_replicas, request = request.num_replicas, replace(request, num_replicas=None)
    plans = by_need(pool_plan_table(profile, most, request, most_replicas=most_replicas).values())
    if not plans:
        raise PlanError("no plan fits", field="pool", value=str(most))
    micro_batch_size = next(iter(plans.values())).micro_batch_size
    return ControllerConfig(
        **_facts_of(profile),
        **_of_vms(vms, trace, memory),
        plans=plans,
        num_steps=num_steps,
        policy=policy,
        timeline_step=timeline_step,
        section_compute_s=section_compute_s(profile, micro_batch_size),
        type_compute_s={name: section_compute_s(of, micro_batch_size) for name, of in profiles.items()},
        offers=tuple(
            sorted(offers, key=lambda offer: offer.usd_per_h or 0.0)
        ),  # if none adds speed, the first is taken
    )


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

    ``expected_losses``: those of VMs, until the run has observed its own. CheckpointError: it is of another model.
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
    """Return how and why a run of this plan protects itself at first, with the losses expected of unknown VMs."""
    if redundancy == "off" or not profile.units:
        return "second holders: off"
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
    found = redundancy_of(initial_state(config), best, slots, {}, 0.0)
    return f"second holders, {redundancy}: {found.told or 'replicas are enough'}"


def section_compute_s(profile: Profile, micro_batch_size: int) -> tuple[float, ...]:
    """Return the measured seconds of forward and backward of one micro-batch on each section."""
    m = micro_batch_size
    return tuple(section.forward[m].median_s + section.backward[m].median_s for section in profile.sections)


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
