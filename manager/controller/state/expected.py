"""What is taken to be so of VMs' ends and beginnings until a run has seen its own."""

from __future__ import annotations

from pydantic import Field

from morph.contract.base import Value


class ExpectedLosses(Value):
    """How often VMs of a run's kind are lost, and what a new one takes. Of earlier runs, or of published traces.

    ``per_vm_h``: losses of one VM in an hour; ``weight_vm_h``: it counts as if it had been observed for so many
    VM-hours, against what this run sees (a Gamma prior of a Poisson rate). ``bulk_share``: of all losses, those that
    come together with others; ``bulk_fraction``: of the VMs that are there, how many such an event takes.

    The defaults of these four are what ``benchmarks/trace_statistics.py`` finds in the four traces published with
    Bamboo (AWS p3 and g4dn, Google V100 and A100, 11 to 27 hours each; losses in Google's are counts of VMs that fell,
    a lower bound). The two times are those of GPT-117M in the thesis on Spotify, inferred from its table 6.2.
    """

    per_vm_h: float = Field(default=0.39, ge=0)
    weight_vm_h: float = Field(default=7.2, gt=0)
    bulk_share: float = Field(default=0.81, ge=0, le=1)
    bulk_fraction: float = Field(default=0.15, ge=0, le=1)
    cluster_h: float = Field(default=168.0, gt=0, description="mean hours until all VMs are gone at once")
    allocation_s: float = Field(default=132.0, ge=0, description="from a request to a VM that is up")
    preparation_s: float = Field(default=153.0, ge=0, description="from a VM that is up to a ready worker")
    source: str = Field(default="published traces", description="where this is from, for whoever reads it")
