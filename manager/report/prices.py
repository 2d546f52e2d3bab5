"""What nodes cost."""

from __future__ import annotations

from pydantic import Field

from morph.contract.base import Value


class Prices(Value):
    """Dollars per node and hour: what is paid, and what the same node costs on demand (None: not known)."""

    paid_usd_per_h: float = Field(ge=0)
    on_demand_usd_per_h: float | None = Field(default=None, ge=0)
