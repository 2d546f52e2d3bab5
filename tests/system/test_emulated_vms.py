"""Emulated workers on VMs that are revoked and join, as processes: the same weights as undisturbed.

``test_silent_loss`` takes a Ray node of such a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from manager.controller.state.config import ControllerConfig
from manager.controller.state.state import Phase
from manager.engine.local_vms.vm_fleet import VmFleet
from manager.engine.loop.driver import Observed, Observer
from manager.engine.machines.machines import OpenMachines, Processes
from manager.rehearsal.device import EmulationOptions, emulated_device, known_units
from manager.run.session import RunSpec, run_session
from manager.run_dir import RunDir, RunFacts
from morph.checkpoint.manifest import complete_versions, read_manifest
from morph.contract.cluster import ClusterConfig, Policy
from morph.contract.trace import Trace, TraceEvent
from simulator import plan_table, synthetic_profile

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

STEPS = 8
PROFILE = synthetic_profile(
    num_sections=4, forward_s=0.0005, batch_size=32, micro_batch_size=4, parameter_bytes=40_000, tied=True
)
M = 4


class Revoke:
    """Takes one VM while version 3 is trained from, and asks for another in its place."""

    def __init__(self, fleet: VmFleet) -> None:
        self._fleet = fleet
        self._left = 1

    def __call__(self, observed: Observed) -> None:
        state = observed.decision.state
        if self._left and state.phase is Phase.TRAINING and state.version == 3:
            self._left = 0
            self._fleet.revoke("vm1")
            self._fleet.request("vm1")


def run(directory: Path, machines: OpenMachines, *, revoked: bool, num_vms: int = 4) -> tuple[dict[str, str], int]:
    """sha256 of every unit's final state, and how many generations were formed."""
    units = known_units(PROFILE)
    policy = Policy(checkpoint_every_steps=1000)
    config = ControllerConfig(
        fingerprint=PROFILE.job.fingerprint,
        plans=plan_table(PROFILE, num_vms),
        units={unit.id: unit.sections for unit in units},
        unit_bytes={unit.id: unit.parameter_bytes for unit in units},
        num_steps=STEPS,
        policy=policy,
        expected_nodes=num_vms,
    )
    trace = Trace(events=tuple(TraceEvent(time_s=0, event="add", node_id=f"vm{index}") for index in range(num_vms)))
    device = emulated_device(PROFILE, M, range(2, 9), EmulationOptions())
    spec = RunSpec(
        job_path="emulated",
        config=config,
        cluster=ClusterConfig(policy=policy),
        trace=trace,
        num_sections=PROFILE.num_sections,
        micro_batch_size=M,
        emulation=device,
        machines=machines,
    )
    facts = RunFacts(
        job="emulated",
        fingerprint=PROFILE.job.fingerprint,
        micro_batch_size=M,
        batch_size=PROFILE.job.batch_size,
        num_sections=PROFILE.num_sections,
    )
    generations: set[int] = set()

    def remember(observed: Observed) -> None:
        generations.add(observed.decision.state.generation)

    def attend(fleet: VmFleet) -> Observer:
        return Revoke(fleet) if revoked else lambda _: None

    with RunDir(directory, facts) as opened:
        finish = run_session(spec, opened, remember, attend)
        assert finish.outcome == "finished", finish.sentence
        manifest = read_manifest(opened.checkpoint_url, complete_versions(opened.checkpoint_url)[-1])
    assert manifest.version == STEPS
    return {entry.unit: entry.sha256 for entry in manifest.units}, max(generations)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("undisturbed")
    weights, generations = run(directory / "run", Processes(directory / "workers.log"), revoked=False, num_vms=1)
    assert generations == 1
    return weights


def test_a_revoked_process_and_its_successor_change_no_bit(undisturbed: dict[str, str], tmp_path: Path) -> None:
    weights, generations = run(tmp_path / "run", Processes(tmp_path / "workers.log"), revoked=True)
    assert weights == undisturbed
    assert generations > 1
