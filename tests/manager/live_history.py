"""A run gathered live from a simulated history in which a VM is killed."""

from __future__ import annotations

from simulated_cluster import Faults, SimulatedCluster
from simulated_job import make_config

from manager.accounting.spent import Prices
from manager.controller.state.events import Event
from manager.controller.state.state import ControllerState, Decision
from manager.report.live import LiveRun


def played(stop_at: int | None = None) -> LiveRun:
    """Return it at its end, or as it stood when ``stop_at`` was decided."""
    run = LiveRun("gpt2-stdlib", 12, 8, Prices(paid_usd_per_h=1.0, on_demand_usd_per_h=3.0), start_s=0.0)

    def observe(cluster: SimulatedCluster, _before: ControllerState, event: Event, decision: Decision) -> None:
        if stop_at is None or run.version < stop_at:
            run.take(cluster.now_s, event, decision)

    faults = Faults(deaths_after_s=((6.0, 1),))
    cluster = SimulatedCluster(0, make_config(expected_nodes=6), faults, observers=(observe,))
    assert cluster.run(6).outcome == "finished"
    return run
