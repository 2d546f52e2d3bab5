"""The checked YAML file of ``morph spot-run``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from morph.contract.base import Value
from morph.contract.lives import InOrder, Lifetimes


class Preemptions(Value):
    """VMs that are taken on purpose, to test a job: after exponential times, each with a notice."""

    mttp_s: float = Field(gt=0, description="mean time until a VM is taken")
    notice_s: float = Field(default=0.0, ge=0, description="notice before the loss; 0: none")
    seed: int = 0


def lives_of(given: Preemptions) -> Lifetimes:
    """Return the lives of VMs that are taken on purpose."""
    return Lifetimes(InOrder(given.seed, given.mttp_s), notice_s=given.notice_s)


class SpotJob(Value):
    """One script on one spot VM at a time, or on one group of them."""

    name: str = Field(default="spot", pattern=r"^[a-z0-9-]{1,24}$", description="prefix of the VMs' names")
    storage: str = Field(min_length=1, description="place of backups: a URL or a path")
    vms: str = Field(
        default="local",
        min_length=1,
        description="local: VMs are process groups of this machine, with disks of their own. here: this machine is the "
        "spot VM; run the same command on the next one. Else a cluster file, whose VMs a provider brings",
    )
    num_vms: Annotated[int, Field(ge=1, le=64)] = Field(
        default=1, description="size of a group of local VMs; with a cluster file, vms.keep sets it"
    )
    code: str = Field(default=".", description="folder copied to each VM, relative to the file")
    notices: Literal["", "azure", "aws", "gcp"] = Field(default="", description="the cloud of this machine's notices")
    preemptions: Preemptions | None = None
