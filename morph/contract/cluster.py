"""Cluster configuration: what a user writes in ``configs/clusters/*.yaml`` (parsed by the command line)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from morph.contract.base import Value
from morph.contract.rules import Rules

Positive = Annotated[float, Field(gt=0)]


class Limits(Value):
    """What asking for VMs stops at. The dollars are those of the VMs' price."""

    max_vms: Annotated[int, Field(ge=1)] | None = Field(default=None, description="so many at once, at most")
    usd_per_h: Positive | None = Field(default=None, description="so many dollars an hour for all VMs, at most")
    budget_usd: Positive | None = Field(default=None, description="once so much is spent, no further VM is asked for")


class LocalVms(Value):
    """VMs played by Ray nodes on this machine, one worker each."""

    kind: Literal["local"] = "local"
    num_vms: Annotated[int, Field(ge=1, le=64)] = Field(
        default=6, description="VMs at the start when no trace is given"
    )
    memory_bytes: Annotated[int, Field(gt=0)] | None = Field(
        default=None,
        description="memory of one VM's device as the planner sees it; absent: this machine's memory / num_vms",
    )
    device: Literal["cpu", "cuda"] = "cpu"
    keep: Annotated[int, Field(ge=1, le=64)] | None = Field(
        default=None, description="ask for so many VMs, and again for each that is lost; absent: num_vms, once"
    )
    usd_per_h: Annotated[float, Field(ge=0)] | None = Field(default=None, description="what one VM is taken to cost")
    on_demand_usd_per_h: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="what the same VM costs on demand, to compare with"
    )
    limits: Limits = Limits()


class Policy(Value):
    """When the controller acts. Times in seconds."""

    checkpoint_every_steps: Annotated[int, Field(ge=1)] = 20
    start_patience_s: Positive = Field(default=60.0, description="how long to wait at the start for VMs still booting")
    heartbeat_timeout_s: Positive = Field(default=5.0, description="a silent worker is given up after this")
    order_timeout_s: Positive = Field(default=300.0, description="bound on one step or reshape")
    max_fruitless_generations: Annotated[int, Field(ge=1)] = Field(
        default=10, description="generations in a row without a committed step before the run stops"
    )
    min_join_gain: Annotated[float, Field(ge=0)] = Field(
        default=0.02, description="a newcomer is taken in when the better shape is faster by this share"
    )
    takeover_patience_s: Annotated[float, Field(ge=0)] = Field(
        default=60.0,
        description="how long VMs and workers outlive a manager that is killed, for the next one; 0: not at all",
    )
    rules: Rules = Rules()


class ClusterConfig(Value):
    """Root of a cluster file."""

    vms: LocalVms = LocalVms()
    policy: Policy = Policy()
