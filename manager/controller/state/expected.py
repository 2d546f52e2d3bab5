"""What is taken to be so of VMs' ends and beginnings until a run has seen its own."""

from __future__ import annotations

from pydantic import Field

from morph.contract.base import Value


class ExpectedLosses(Value):
    """How often VMs of a run's kind are lost, and what a new one takes. Of earlier runs, or of published traces.

    ``per_vm_h``: losses of one VM in an hour; ``weight_vm_h``: it counts as if it had been observed for so many
    VM-hours, against what this run sees (a Gamma prior of a Poisson rate). ``bulk_share``: of all losses, those that
    come together with others; ``bulk_fraction``: of the VMs that are there, how many such an event takes.
    """

    per_vm_h: float = Field(default=0.1, ge=0)
    weight_vm_h: float = Field(default=10.0, gt=0)
    bulk_share: float = Field(default=0.5, ge=0, le=1)
    bulk_fraction: float = Field(default=0.2, ge=0, le=1)
    cluster_h: float = Field(default=168.0, gt=0, description="mean hours until all VMs are gone at once")
    allocation_s: float = Field(default=132.0, ge=0, description="from a request to a VM that is up")
    preparation_s: float = Field(default=60.0, ge=0, description="from a VM that is up to a ready worker")
    source: str = Field(default="published traces", description="where this is from, for whoever reads it")
