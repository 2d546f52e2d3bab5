"""Every schedule gives the same bits on real workers, and no stage holds more than its plan says."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from morph.contract.messages import Prepared, StepOrder
from morph.contract.plan import Plan, Schedule
from morph.contract.timeline import SpanKind, StepTimeline
from morph.runtime.step.links import POSTED_AHEAD
from morph.runtime.step.timeline import trace
from simulator import plan, synthetic_profile
from tests.grids import cells
from tests.runtime.trace_checks import check_trace, complete
from tests.runtime.worker_crew import Crew
from tests.system.harness import JOB, MICRO_BATCH_SIZE, NUM_SECTIONS, TinyJob, load_tiny_job, uninterrupted

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

NAMES = ("w0", "w1", "w2", "w3")
NUM_STEPS = 2
SCHEDULES: tuple[Schedule, ...] = ("varuna", "gpipe", "1f1b")
SHAPES = ("2x1", "3x1", "2x2")
LETTERS: dict[SpanKind, str] = {"forward": "F", "recompute": "R", "backward": "B"}


@dataclass(frozen=True, kw_only=True)
class ScheduledJob(TinyJob):
    """The tiny job, planned with one schedule."""

    schedule: Schedule
    recompute: bool

    def plan(self, shape: str) -> Plan:
        depth, replicas = map(int, shape.split("x"))
        profile = synthetic_profile(
            num_sections=NUM_SECTIONS, batch_size=self.batch_size, micro_batch_sizes=(1, MICRO_BATCH_SIZE)
        )
        best = plan(
            profile,
            num_gpus=depth * replicas,
            pipeline_depth=depth,
            num_replicas=replicas,
            micro_batch_size=MICRO_BATCH_SIZE,
            schedule=self.schedule,
            recompute=self.recompute,
        ).best
        return best.model_copy(update={"fingerprint": self.fingerprint})


@pytest.fixture(scope="module")
def job() -> TinyJob:
    return load_tiny_job()


@pytest.fixture(scope="module")
def processes(job: TinyJob, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    crew = Crew(job, NAMES)
    try:
        crew.set_up(JOB, job.fingerprint, tmp_path_factory.mktemp("checkpoints"))
        yield crew
    finally:
        crew.close()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return uninterrupted(NUM_STEPS, tmp_path_factory.mktemp("reference"))


def begin(crew: Crew, job: TinyJob, schedule: Schedule, recompute: bool = True) -> None:
    crew.job = ScheduledJob(job.fingerprint, job.batch_size, job.units, schedule=schedule, recompute=recompute)
    crew.begin()


def workers_of(shape: str) -> tuple[str, ...]:
    depth, replicas = map(int, shape.split("x"))
    return NAMES[: depth * replicas]


def recorded_step(crew: Crew) -> list[StepTimeline]:
    """Run the next step, and decide it; returns the workers' timelines."""
    answers = crew.ask(
        crew.present, "step", StepOrder(generation=crew.generation, step=crew.version, record_timeline=True)
    )
    for answer in answers:
        assert isinstance(answer, Prepared)
        assert not answer.overflowed
    crew.version += 1
    return [answer.timeline for answer in answers]


def check_bounds(planned: Plan, timelines: list[StepTimeline]) -> None:
    assert len(timelines) == planned.num_workers
    for timeline in timelines:
        stage, peaks = planned.stages[timeline.stage], timeline.peaks
        count = len(planned.micro_batches_of(timeline.replica))
        most = min(stage.window, count)
        if planned.schedule == "varuna":
            assert 1 <= peaks.in_flight <= most
        else:  # a fixed order fills its window whatever comes when
            assert peaks.in_flight == most
        assert peaks.live_graphs == (1 if stage.recompute else peaks.in_flight)
        assert peaks.untaken_activations <= POSTED_AHEAD
        assert peaks.untaken_gradients <= POSTED_AHEAD
        # when a sender hears that something has left is up to a thread: test_executor holds what may be unsent


@pytest.mark.parametrize(
    ("played", "recompute"), cells(list(itertools.product(SHAPES, SCHEDULES)), [True, False]), ids=str
)
def test_every_schedule_gives_the_same_bits_within_its_window(
    processes: Crew, job: TinyJob, reference: dict[str, str], played: tuple[str, Schedule], recompute: bool
) -> None:
    shape, schedule = played
    begin(processes, job, schedule, recompute)
    processes.reshape(shape, workers_of(shape))
    assert processes.plan is not None
    assert processes.plan.schedule == schedule
    assert any(stage.recompute for stage in processes.plan.stages) == recompute
    for _ in range(NUM_STEPS):
        check_bounds(processes.plan, recorded_step(processes))
    assert processes.digests() == reference


def test_the_schedule_may_change_in_the_middle_of_a_run(
    processes: Crew, job: TinyJob, reference: dict[str, str]
) -> None:
    begin(processes, job, "gpipe")
    processes.reshape("2x2", NAMES)
    processes.train(1)
    processes.job = ScheduledJob(job.fingerprint, job.batch_size, job.units, schedule="1f1b", recompute=False)
    processes.reshape("3x1", NAMES[:3])
    processes.train(NUM_STEPS)
    assert processes.digests() == reference


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_recorded_step_is_a_trace_of_every_task_and_transfer(
    processes: Crew, job: TinyJob, schedule: Schedule
) -> None:
    begin(processes, job, schedule)
    processes.reshape("2x2", NAMES)
    timelines = recorded_step(processes)
    traced = trace(timelines)
    check_trace(traced)
    assert processes.plan is not None
    events = complete(traced)
    crossing = processes.plan.num_micro_batches
    assert len({event["pid"] for event in events}) == len(NAMES)
    kinds = [event["cat"] for event in events]
    for kind in ("send_activation", "receive_activation", "send_gradient", "receive_gradient"):
        assert kinds.count(kind) == crossing
    assert kinds.count("forward") == kinds.count("backward") == crossing * processes.plan.pipeline_depth
    assert kinds.count("reduce") == len(NAMES)
    forwards = {
        (event["args"]["stage"], event["args"]["micro_batch"]): event for event in events if event["cat"] == "forward"
    }
    for micro_batch in range(crossing):
        first, second = forwards[0, micro_batch], forwards[1, micro_batch]
        assert first["ts"] < second["ts"], "a stage cannot begin before the one that feeds it"
    if schedule != "varuna":
        for timeline in timelines:
            tasks = [one for one in timeline.spans if one.kind in LETTERS]
            count = len(processes.plan.micro_batches_of(timeline.replica))
            assert "".join(LETTERS[one.kind] for one in tasks) == processes.plan.orders[count][timeline.stage]


def test_nothing_is_recorded_unless_it_is_asked_for(processes: Crew, job: TinyJob) -> None:
    begin(processes, job, "varuna")
    processes.reshape("1x1", NAMES[:1])
    (answer,) = processes.ask(NAMES[:1], "step", StepOrder(generation=processes.generation, step=0))
    assert isinstance(answer, Prepared)
    assert answer.timeline is None
