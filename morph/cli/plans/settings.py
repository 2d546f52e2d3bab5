"""Settings of ``--set KEY=VALUE`` for planning, simulating, rehearsing and replaying: what is rarely changed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Literal, TypeVar

from pydantic import Field

from morph.contract.base import Value

CommandT = TypeVar("CommandT", bound=Callable[..., None])


class Conditions(Value):
    """Conditions of a simulated mini-batch, named as in ``simulator.PlanRequest``."""

    compute_slots: int | None = Field(None, description="tasks at once, where workers share one machine's cores")
    share_links: bool = Field(True, description="messages share the bandwidth of a node's link")
    host_memory_gib: float | None = Field(None, description="host memory for each GPU; absent: the profile's")
    links: Literal["staged", "ipc", "auto"] = Field("staged", description="as vms.links of the run")
    rings: Literal["gloo", "nccl", "auto"] = Field("gloo", description="as vms.rings of the run")
    num_draws: int = Field(20, description="mini-batches to draw for each shape, with --jitter-seed")


class PlanSettings(Conditions):
    """Of ``morph plan``."""

    revocations_per_hour: float | None = Field(None, description="how often one node is revoked, for progress")
    pause_s: float = Field(1.0, description="for which a change of shape stops training, for progress")
    replacement_s: float = Field(120.0, description="until a revoked node is replaced, for progress")
    revoked_together: int = Field(1, description="nodes lost in one revocation, for progress")


class SimulateSettings(Conditions):
    """Of ``morph simulate``."""

    window_slope: int | None = Field(None, description="micro-batches in flight: slope * (P - 1 - stage) + 1")
    all_reduce: Literal["overlapped", "late"] = Field("overlapped", description="each unit when it is ready, or late")
    redundant_computation: Literal["off", "lflb", "eflb", "efeb"] = Field(
        "off", description="Bamboo's: off, lflb, eflb or efeb (eager forwards, backwards)"
    )
    overlap: Literal["full", "none"] = Field("full", description="none: workers compute nothing while they send")


class RehearseSettings(Value):
    """Of ``morph rehearse``, named as in ``manager.rehearsal.RehearsalSpec``."""

    workers_per_host: int = Field(1, ge=1, description="workers that share a host")
    window_slope: int | None = Field(None, description="micro-batches in flight: slope * (P - 1 - stage) + 1")
    time_scale: float | None = Field(None, description="multiply every time by this; absent: as the cores need")
    message_scale: float | None = Field(None, description="real size of messages over the profile's")
    state_scale: float | None = Field(None, description="real size of parameters over the profile's")
    network: Literal["loopback", "namespaces"] = Field("loopback", description="namespaces: wants Linux and root")


class DrawnTrace(Value):
    """How a trace is drawn, for ``morph trace generate`` and ``morph replay``."""

    losses_per_vm_h: float = Field(0.39, ge=0, le=100, description="how often one VM is taken, with --vms")
    bulk_share: float = Field(0.5, ge=0, le=1, description="share of losses that take several, with --vms")
    replacement_s: float = Field(300.0, ge=1, le=1e6, description="mean time until a VM is replaced, with --vms")
    zones: int | None = Field(None, ge=1, le=100, description="spread the VMs over so many zones that are alike")
    notice: str | float | None = Field(None, description="seconds of notice, for a share of losses: 120 or 30:0.8")


class ReplaySettings(DrawnTrace):
    """Of ``morph replay``."""

    setup_s: float = Field(30.0, ge=0, le=1e5, description="from a VM that is up to a ready worker")
    restart_s: float = Field(60.0, ge=0, le=1e5, description="in which a policy that restarts starts its processes")


def with_settings(kind: type[Value]) -> Callable[[CommandT], CommandT]:
    """Decorate a command that takes ``--set``: its help lists every key."""
    width = max(map(len, kind.model_fields)) + 2
    rows = [f"  {name:<{width}}{field.description}" for name, field in kind.model_fields.items()]

    def listed(command: CommandT) -> CommandT:
        command.__doc__ = "\n".join([inspect.getdoc(command) or "", "", "\b", "Settings of --set:", *rows])
        return command

    return listed
