"""A simulated history that is journalled as the live shell does it."""

from __future__ import annotations

from pathlib import Path

from simulated_cluster import Faults, SimulatedCluster
from simulated_job import make_config

from manager.controller.state.events import Event
from manager.controller.state.state import ControllerState, Decision
from manager.journal.journal import Journal
from manager.journal.records import VM_KILLED, Fact
from manager.run_dir import JOURNAL


class JournalledCluster(SimulatedCluster):
    """Notes each kill, each event and each decision before acting."""

    def __init__(self, seed: int, run_dir: Path, faults: Faults, start_s: float = 0.0, **fields: object) -> None:
        config = make_config(**fields)
        super().__init__(seed, config, faults, observers=(self.write_down,))
        self.journal = Journal.open(run_dir / JOURNAL)
        self.now_s = start_s
        self.journal.append_config(start_s, config)
        self.killed_s: dict[str, float] = {}

    def write_down(self, cluster: SimulatedCluster, before: ControllerState, event: Event, decision: Decision) -> None:
        """Journal a decision."""
        self.journal.append_decision(self.now_s, event, decision)

    def kill(self, name: str) -> None:
        """Journal a kill."""
        if self.workers[name].alive:
            self.killed_s[name] = self.now_s
            self.journal.append_fact(self.now_s, Fact(name=VM_KILLED, worker=name))
        super().kill(name)
