"""A worker on a slow device is detected by its compute times, left out at a boundary, probed, and taken back."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from manager.controller.state.actions import ReasonCode
from manager.controller.state.events import ComputeTimesSeen, NoticeGiven
from manager.controller.state.nodes import NodeState
from manager.controller.state.state import Phase
from manager.engine.local_vms.vm_fleet import VmFleet
from manager.engine.loop import driver
from manager.engine.loop.driver import Observed, Observer
from morph.contract.faults import SlowSpell
from morph.contract.rules import StutterRules
from tests.system.harness import TinyJob, constant_vms, managed, uninterrupted

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]


@dataclass
class Told:
    """A run's decisions about slow workers."""

    slow: list[str] = field(default_factory=list)
    well: list[str] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    windows_s: dict[str, tuple[float, ...]] = field(default_factory=dict)

    def __call__(self, observed: Observed) -> None:
        state, reason = observed.decision.state, observed.decision.reason
        self.versions.append(state.version)
        if isinstance(observed.event, ComputeTimesSeen):
            self.windows_s = {worker: entry.pace.past_s for worker, entry in state.workers.items()}
        if reason.code is ReasonCode.WORKER_SLOW:
            self.slow.append(reason.sentence)
        if reason.code is ReasonCode.WORKER_WELL:
            self.well.append(reason.sentence)


class Slowness:
    """Watches a slow worker being found, left out and taken back; then announces that its successor will be taken."""

    def __init__(self, fleet: VmFleet, victim: str, spare: str, spell: SlowSpell) -> None:
        self._fleet, self._victim, self._spare, self._spell = fleet, victim, spare, spell
        self.slow_since_s: float | None = None
        self.found_after_s: float | None = None
        self.num_micro_batches = 0
        self.left_out_at: int | None = None
        self.noticed = False
        self.end_at: int | None = None

    def __call__(self, observed: Observed) -> None:
        state = observed.decision.state
        members = {slot.worker for slot in state.slots}
        entry = state.workers.get(self._victim)
        if state.version >= self._spell.first_step and self.slow_since_s is None:
            self.slow_since_s = observed.time_s
        if isinstance(observed.event, ComputeTimesSeen) and self.slow_since_s and self.found_after_s is None:
            mine = [times for times in observed.event.times if times.worker == self._victim]
            self.num_micro_batches += sum(len(times.compute_s) for times in mine)
        if entry is not None and entry.node is NodeState.SUSPECT and self.found_after_s is None:
            assert self.slow_since_s is not None
            self.found_after_s = observed.time_s - self.slow_since_s
        if self.found_after_s is not None and self.left_out_at is None and self._victim not in members:
            self.left_out_at = state.version
        well = self.left_out_at is not None and entry is not None and entry.node is NodeState.READY
        if well and not self.noticed and state.phase is Phase.TRAINING:
            self.noticed = True
            self._fleet._event_queue.put(NoticeGiven(worker=self._spare, lead_s=60.0))
        if self.noticed and self._victim in members and state.phase is Phase.TRAINING:
            self.end_at = self.end_at or state.version + 3
        if self.end_at is not None and state.version >= self.end_at and state.stop_reason is None:
            observed.request_stop("it trains again")
        patience = 0 if self.found_after_s is None else 1_000
        if self.end_at is None and state.version >= self._spell.end_step + patience and state.stop_reason is None:
            observed.request_stop("it was not found, or is not taken back")


def test_leaving_out_and_taking_back_a_slow_worker_changes_no_bit(
    tiny_job: TinyJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cores are shared here: times of one worker's micro-batches differ by half and more.

    So the worker is much slower, and the rules require a greater ratio and fewer deviations. It becomes slow late,
    because a stage has only two replicas, whose first windows must have shown how much times vary by chance. It stays
    slow for long, and is probed often.
    """
    monkeypatch.setattr(driver, "TIMES_EVERY_S", 0.1)  # a window closes as soon as it is full: in 6 steps
    told, watched = Told(), []
    spell = SlowSpell(worker="vm1", factor=20.0, first_step=40, end_step=100)

    def attend(fleet: VmFleet) -> Observer:
        watched.append(Slowness(fleet, "vm1", "vm4", spell))
        return watched[0]

    result = managed(
        tiny_job,
        tmp_path / "run",
        shapes={4: "2x2"},
        trace=constant_vms(5),
        num_steps=100_000,
        checkpoint_every=50_000,
        observe=told,
        attend=attend,
        slow_spells=(spell,),
        stutter=StutterRules(
            samples=16, ratio=2.0, deviations=2.0, probe_every_s=0.5, probe_every_max_s=1.0, max_probes=1000
        ),
    )
    (slowness,) = watched
    assert slowness.found_after_s is not None, f"at version {result.manifest.version}: {told.windows_s}"
    print(f"found after {slowness.num_micro_batches} micro-batches, {slowness.found_after_s:.1f} s; {told.slow}")
    assert result.outcome == "stopped"
    assert len(told.slow) == 1
    assert "vm1 takes" in told.slow[0]
    assert "2 tests in a row" in told.well[0]
    assert told.versions == sorted(told.versions)  # no step was lost
    assert slowness.end_at is not None
    assert result.digests() == uninterrupted(result.manifest.version, tmp_path / "reference")
