"""Units sent ahead of a planned change in managed runs: joins, drains and kills meanwhile change no bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from manager.controller.actions import SendAhead
from manager.controller.config import ControllerConfig
from manager.controller.state import Phase
from manager.engine.driver import Observed, Observer
from manager.engine.machines import OpenMachines, Processes
from manager.engine.session import RunSpec, run_session
from manager.engine.vm_fleet import VmFleet
from manager.rehearsal.device import EmulationOptions, emulated_device, known_units
from manager.report.reading import read_report
from manager.report.values import RunReport
from manager.run_dir import RunDir, RunFacts
from morph.checkpoint.manifest import complete_versions, read_manifest
from morph.contract.cluster import ClusterConfig, Policy
from morph.contract.messages import Fault
from morph.contract.rules import AheadRules, Rules
from morph.contract.trace import Trace, TraceEvent
from simulator import plan, synthetic_profile
from tests.system.harness import JOB, MICRO_BATCH_SIZE, NUM_SECTIONS, load_tiny_job, uninterrupted

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

M = 4
PROFILE = synthetic_profile(
    num_sections=4, forward_s=0.001, batch_size=32, micro_batch_size=M, parameter_bytes=400_000, tied=True
)
SHAPES = {2: "2x1", 4: "2x2"}
JOIN_AT = 2
RULES = Rules(ahead=AheadRules(when="always", patience_s=20.0))


@dataclass
class Joining:
    """Asks for two VMs at a version, and remembers every turn. With ``stops``, the run ends soon after they joined."""

    fleet: VmFleet
    stops: bool
    turns: list[Observed] = field(default_factory=list)
    asked: bool = False

    def __call__(self, observed: Observed) -> None:
        self.turns.append(observed)
        state = observed.decision.state
        if not self.asked and state.phase is Phase.TRAINING and state.version >= JOIN_AT:
            self.asked = True
            for name in ("vm2", "vm3"):
                self.fleet.request(name)
        joined = state.reshape is not None and len(state.slots) == 4 and state.version >= state.reshape.version + 2
        if self.stops and joined and state.phase is Phase.TRAINING and state.stop_reason is None:
            observed.request_stop("they have joined")


@dataclass(frozen=True)
class Ran:
    """What a run came to."""

    weights: dict[str, str]
    version: int
    report: RunReport
    turns: list[Observed]

    def kinds(self) -> list[set[str]]:
        """Of every generation formed: where units came from."""
        orders = {
            turn.decision.state.generation: turn.decision.state.reshape
            for turn in self.turns
            if turn.decision.state.reshape is not None
        }
        return [{source.kind for source in order.sources} for order in orders.values()]

    def sent_ahead(self) -> int:
        """How many orders to send ahead were given."""
        actions = [action for turn in self.turns for action in turn.decision.actions]
        return sum(isinstance(action, SendAhead) and bool(action.order.moves) for action in actions)


def emulated(steps: int, faults: tuple[Fault, ...], machines: OpenMachines) -> tuple[RunSpec, RunFacts]:
    units = known_units(PROFILE)
    config = ControllerConfig(
        fingerprint=PROFILE.job.fingerprint,
        plans={
            count: plan(PROFILE, num_gpus=count, pipeline_depth=2, num_replicas=int(shape[2]), micro_batch_size=M).best
            for count, shape in SHAPES.items()
        },
        units={unit.id: unit.sections for unit in units},
        unit_bytes={unit.id: unit.parameter_bytes for unit in units},
        num_steps=steps,
        policy=Policy(checkpoint_every_steps=1000, rules=RULES),
        expected_nodes=2,
    )
    device = emulated_device(PROFILE, M, range(2, 9), EmulationOptions())
    return spec_of(config, "emulated", PROFILE.num_sections, M, faults, machines, device), facts_of(
        "emulated", PROFILE.job.fingerprint, PROFILE.num_sections, M, PROFILE.job.batch_size
    )


def real(steps: int, faults: tuple[Fault, ...], machines: OpenMachines) -> tuple[RunSpec, RunFacts]:
    job = load_tiny_job()
    config = ControllerConfig(
        fingerprint=job.fingerprint,
        plans={count: job.plan(shape) for count, shape in SHAPES.items()},
        units=job.units,
        unit_bytes=dict.fromkeys(job.units, 1),
        num_steps=steps,
        policy=Policy(checkpoint_every_steps=1000, rules=RULES),
        expected_nodes=2,
    )
    return spec_of(config, JOB, NUM_SECTIONS, MICRO_BATCH_SIZE, faults, machines, None), facts_of(
        JOB, job.fingerprint, NUM_SECTIONS, MICRO_BATCH_SIZE, job.batch_size
    )


def spec_of(
    config: ControllerConfig,
    job_path: str,
    num_sections: int,
    micro_batch_size: int,
    faults: tuple[Fault, ...],
    machines: OpenMachines,
    emulation: object,
) -> RunSpec:
    return RunSpec(
        job_path=job_path,
        config=config,
        cluster=ClusterConfig(policy=config.policy),
        trace=Trace(events=tuple(TraceEvent(time_s=0, event="add", node_id=f"vm{index}") for index in range(2))),
        num_sections=num_sections,
        micro_batch_size=micro_batch_size,
        faults=faults,
        emulation=emulation,  # type: ignore[arg-type]
        machines=machines,
    )


def facts_of(job: str, fingerprint: str, num_sections: int, micro_batch_size: int, batch_size: int) -> RunFacts:
    return RunFacts(
        job=job,
        fingerprint=fingerprint,
        micro_batch_size=micro_batch_size,
        batch_size=batch_size,
        num_sections=num_sections,
    )


def run(
    directory: Path,
    make: Callable[[int, tuple[Fault, ...], OpenMachines], tuple[RunSpec, RunFacts]],
    steps: int,
    *faults: Fault,
    joins: bool = True,
    stops: bool = False,
) -> Ran:
    """Run to the end; the journal is printed when the test fails."""
    directory.mkdir(exist_ok=True)
    spec, facts = make(steps, faults, Processes(directory / "workers.log"))
    made: list[Joining] = []

    def attend(fleet: VmFleet) -> Observer:
        made.append(Joining(fleet, stops, asked=not joins))
        return made[-1]

    with RunDir(directory / "run", facts) as opened:
        finish = run_session(spec, opened, lambda _: None, attend)
        for turn in made[0].turns:
            print(f"{turn.time_s:.3f} {turn.event.kind} -> {turn.decision.reason.sentence}")
        assert finish.outcome == ("stopped" if stops else "finished"), finish.sentence
        manifest = read_manifest(opened.checkpoint_url, complete_versions(opened.checkpoint_url)[-1])
        report = read_report(opened.path)
    assert stops or manifest.version == steps
    return Ran({entry.unit: entry.sha256 for entry in manifest.units}, manifest.version, report, made[0].turns)


STEPS = 30


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run(tmp_path_factory.mktemp("undisturbed"), emulated, STEPS, joins=False).weights


def test_workers_join_with_units_that_were_sent_ahead_and_no_bit_changes(
    undisturbed: dict[str, str], tmp_path: Path
) -> None:
    ran = run(tmp_path, emulated, STEPS)
    assert ran.weights == undisturbed
    assert ran.kinds()[-1] == {"keep", "ahead"}
    (morph,) = [morph for morph in ran.report.morphs if morph.to_shape == "2x2"]
    assert morph.planned
    assert morph.steps_redone == 0
    assert morph.sources["ahead"].count == 6  # both newcomers: two units of the stage's own, and the tied one


def test_a_sender_that_is_killed_while_it_sends_ahead_costs_no_more_than_any_member(
    undisturbed: dict[str, str], tmp_path: Path
) -> None:
    worker = "vm1"
    fault = [Fault(worker=worker, phase="send_ahead", step=step) for step in range(JOIN_AT, STEPS - 4)]
    ran = run(tmp_path, emulated, STEPS, *fault)
    assert ran.weights == undisturbed
    assert ran.sent_ahead() > 0
    assert any(morph.lost_workers == (worker,) for morph in ran.report.morphs)


def test_a_newcomer_that_is_killed_while_it_receives_disturbs_no_step(
    undisturbed: dict[str, str], tmp_path: Path
) -> None:
    worker = "vm2"
    fault = [Fault(worker=worker, phase="receive_ahead", step=step) for step in range(JOIN_AT, STEPS)]
    ran = run(tmp_path, emulated, STEPS, *fault)
    assert ran.weights == undisturbed
    assert ran.sent_ahead() > 0
    assert ran.report.morphs == ()  # nobody stopped for it


def test_a_real_job_joined_ahead_equals_one_that_ran_alone(tmp_path: Path) -> None:
    ran = run(tmp_path / "joined", real, 100_000, stops=True)
    assert ran.kinds()[-1] == {"keep", "ahead"}
    assert ran.weights == uninterrupted(ran.version, tmp_path / "alone")
