"""What nodes cost."""

from __future__ import annotations

from pydantic import Field

from morph.contract.base import Value


class Prices(Value):
    """Dollars per VM and hour as the user gives them: what is paid, and what the same VM costs on demand.

    None: not given. What is paid counts for VMs whose provider says no price, or, ``for_all``, for every one.
    """

    paid_usd_per_h: float | None = Field(default=None, ge=0)
    on_demand_usd_per_h: float | None = Field(default=None, ge=0)
    for_all: bool = False
