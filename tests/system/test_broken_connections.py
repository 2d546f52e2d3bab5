"""Every TCP connection of a living worker is reset: it stays, with all that it holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from manager.controller.state.events import WorkerAnswered, WorkerLost
from manager.controller.state.state import Phase
from manager.engine.loop.driver import Observed
from morph.contract.cluster import LocalVms
from morph.contract.messages import WorkerReady
from tests.system.broken_connections import break_connections, permitted
from tests.system.conftest import REFERENCE_STEPS
from tests.system.harness import TinyJob, constant_vms, managed

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not permitted(), reason="breaking connections of others needs root and a kernel that allows it"),
]


class Breaking:
    """Breaks the connections of a worker when some steps are about to run, and sees who is lost."""

    def __init__(self, worker: str, steps: set[int]) -> None:
        self._worker, self._steps = worker, steps
        self.pid = 0
        self.num_broken: list[int] = []
        self.lost: list[str] = []
        self.versions: list[int] = []

    def __call__(self, observed: Observed) -> None:
        event, state = observed.event, observed.decision.state
        self.versions.append(state.version)
        if isinstance(event, WorkerAnswered) and isinstance(event.answer, WorkerReady) and event.worker == self._worker:
            self.pid = event.answer.pid
        if isinstance(event, WorkerLost):
            self.lost.append(f"{event.worker}: {event.cause}")
        if state.phase is Phase.TRAINING and state.version in self._steps:
            self._steps.remove(state.version)
            self.num_broken.append(break_connections(self.pid))


def test_a_ray_worker_whose_connections_break_keeps_its_state_and_goes_on(
    tiny_job: TinyJob, reference: dict[str, str], tmp_path: Path
) -> None:
    breaking = Breaking("vm1", {3, 7})
    result = managed(
        tiny_job,
        tmp_path / "run",
        shapes={2: "2x1"},  # nobody else holds its stage
        trace=constant_vms(2),
        num_steps=REFERENCE_STEPS,
        checkpoint_every=1000,
        observe=breaking,
        vms=LocalVms(launcher="ray"),
    )
    assert len(breaking.num_broken) == 2
    assert min(breaking.num_broken) > 0
    assert breaking.lost == []
    assert breaking.versions == sorted(breaking.versions), "a step was lost"
    assert result.digests() == reference
