"""Settings of ``--set KEY=VALUE`` for planning, simulating, rehearsing and replaying; they rarely change."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Literal, TypeVar

from pydantic import Field

from morph.contract.base import Value

CommandT = TypeVar("CommandT", bound=Callable[..., None])


class Conditions(Value):
    """Conditions of a simulated mini-batch, named as in ``simulator.PlanRequest``."""

    compute_slots: int | None = Field(None, description="tasks at once, if workers share one machine's cores")
    share_links: bool = Field(True, description="messages share the bandwidth of a node's link")
    host_memory_gib: float | None = Field(None, description="host memory for each GPU; default: the profile's")
    links: Literal["staged", "ipc", "auto"] = Field("staged", description="links: the run's vms.links")
    rings: Literal["gloo", "nccl", "auto"] = Field("gloo", description="rings: the run's vms.rings")
    num_draws: int = Field(20, description="mini-batches drawn per shape, with --jitter-seed")
    zone_gbit_per_s: float | None = Field(None, description="bandwidth between zones; default: the profile's")
    zone_latency_ms: float = Field(1.0, description="latency between zones, with zone_gbit_per_s")


class PlanSettings(Conditions):
    """The settings of ``morph plan``."""

    zone_usd_per_gb: float = Field(0.0, description="dollars for 10^9 bytes from one zone to another")
    revocations_per_hour: float | None = Field(None, description="revocations of one node, for progress")
    pause_s: float = Field(1.0, description="pause of a change of shape, for progress")
    replacement_s: float = Field(120.0, description="time to replace a revoked node, for progress")
    revoked_together: int = Field(1, description="nodes lost in one revocation, for progress")


class SimulateSettings(Conditions):
    """The settings of ``morph simulate``."""

    window_slope: int | None = Field(None, description="micro-batches in flight: slope * (P - 1 - stage) + 1")
    all_reduce: Literal["overlapped", "late"] = Field(
        "overlapped", description="overlapped, or late: after all backwards"
    )
    redundant_computation: Literal["off", "lflb", "eflb", "efeb"] = Field(
        "off", description="as in Bamboo: off, lflb, eflb or efeb"
    )
    overlap: Literal["full", "none"] = Field("full", description="none: workers compute nothing while they send")


class RehearseSettings(Value):
    """The settings of ``morph rehearse``, named as in ``manager.rehearsal.RehearsalSpec``."""

    workers_per_host: int = Field(1, ge=1, description="workers that share a host")
    window_slope: int | None = Field(None, description="micro-batches in flight: slope * (P - 1 - stage) + 1")
    time_scale: float | None = Field(None, description="factor of all times; default: as the cores need")
    message_scale: float | None = Field(None, description="size of messages, relative to the profile's")
    state_scale: float | None = Field(None, description="size of parameters, relative to the profile's")
    network: Literal["loopback", "namespaces"] = Field(
        "loopback", description="loopback, or namespaces: needs Linux and root"
    )


class DrawnTrace(Value):
    """How a trace is drawn, for ``morph trace generate`` and ``morph replay``."""

    losses_per_vm_h: float = Field(0.39, ge=0, le=100, description="how often one VM is taken, with --vms")
    bulk_share: float = Field(0.5, ge=0, le=1, description="share of losses that take several VMs, with --vms")
    replacement_s: float = Field(300.0, ge=1, le=1e6, description="mean time until a VM is replaced, with --vms")
    zones: int | None = Field(None, ge=1, le=100, description="number of zones, all alike")
    notice: str | float | None = Field(None, description="seconds of notice, for a share of losses: 120 or 30:0.8")


class ReplaySettings(DrawnTrace):
    """The settings of ``morph replay``."""

    setup_s: float = Field(30.0, ge=0, le=1e5, description="from a VM's boot to a ready worker")
    restart_s: float = Field(60.0, ge=0, le=1e5, description="start of the processes, if the policy restarts them")


def with_settings(kind: type[Value]) -> Callable[[CommandT], CommandT]:
    """Decorate a command that takes ``--set``: its help lists every key."""
    width = max(map(len, kind.model_fields)) + 2
    rows = [f"  {name:<{width}}{field.description}" for name, field in kind.model_fields.items()]

    def listed(command: CommandT) -> CommandT:
        command.__doc__ = "\n".join([inspect.getdoc(command) or "", "", "\b", "Settings of --set:", *rows])
        return command

    return listed
