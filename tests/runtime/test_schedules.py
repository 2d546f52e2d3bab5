"""Every schedule gives the same bits on real workers, and no stage holds more than its plan says."""

from __future__ import annotations

import itertools

import pytest

from morph.contract.plan import Plan, Schedule
from morph.contract.timeline import SpanKind, StepTimeline
from morph.runtime.device.links import NUM_POSTED
from morph.runtime.step.timeline import trace
from tests.crew import Crew, workers_of
from tests.grids import cells
from tests.runtime.trace_checks import check_trace, complete
from tests.system.harness import TinyJob

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

NAMES = ("w0", "w1", "w2", "w3")
NUM_STEPS = 2
SCHEDULES: tuple[Schedule, ...] = ("varuna", "gpipe", "1f1b")
SHAPES = ("2x1", "3x1", "2x2")
LETTERS: dict[SpanKind, str] = {"forward": "F", "recompute": "R", "backward": "B"}


def recorded_step(crew: Crew) -> list[StepTimeline]:
    """Run and decide the next step; return the workers' timelines."""
    assert crew.prepare(record_timeline=True) == 1
    crew.decide()
    return [answer.timeline for answer in crew.answers if answer.timeline is not None]


def check_bounds(planned: Plan, timelines: list[StepTimeline]) -> None:
    assert len(timelines) == planned.num_workers
    for timeline in timelines:
        stage, peaks = planned.stages[timeline.stage], timeline.peaks
        count = planned.micro_batches_per_replica[timeline.replica]
        most = min(stage.window, count)
        if planned.schedule == "varuna":
            assert 1 <= peaks.in_flight <= most
        else:  # a fixed order fills its window, whatever comes when
            assert peaks.in_flight == most
        assert peaks.live_graphs == (1 if stage.recompute else peaks.in_flight)
        assert peaks.untaken_activations <= NUM_POSTED
        assert peaks.untaken_gradients <= NUM_POSTED
        # a thread decides when a sender learns that a message has left: test_executor limits what may be unsent


@pytest.mark.parametrize(
    ("played", "recompute"), cells(list(itertools.product(SHAPES, SCHEDULES)), [True, False]), ids=str
)
def test_every_schedule_gives_the_same_bits_within_its_window(
    crew: Crew, job: TinyJob, reference: dict[str, str], played: tuple[str, Schedule], recompute: bool
) -> None:
    shape, schedule = played
    crew.reshape(job.plan(shape, schedule, recompute=recompute), workers_of(shape, NAMES))
    assert crew.plan.schedule == schedule
    assert any(stage.recompute for stage in crew.plan.stages) == recompute
    for _ in range(NUM_STEPS):
        check_bounds(crew.plan, recorded_step(crew))
    assert crew.digests() == reference


def test_the_schedule_may_change_in_the_middle_of_a_run(crew: Crew, job: TinyJob, reference: dict[str, str]) -> None:
    crew.reshape(job.plan("2x2", "gpipe"), NAMES)
    crew.train(1)
    crew.reshape(job.plan("3x1", "1f1b", recompute=False), NAMES[:3])
    crew.train(NUM_STEPS)
    assert crew.digests() == reference


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_recorded_step_is_a_trace_of_every_task_and_transfer(crew: Crew, job: TinyJob, schedule: Schedule) -> None:
    crew.reshape(job.plan("2x2", schedule), NAMES)
    timelines = recorded_step(crew)
    traced = trace(timelines)
    check_trace(traced)
    assert crew.plan is not None
    events = complete(traced)
    crossing = crew.plan.num_micro_batches
    assert len({event["pid"] for event in events}) == len(NAMES)
    kinds = [event["cat"] for event in events]
    for kind in ("send_activation", "receive_activation", "send_gradient", "receive_gradient"):
        assert kinds.count(kind) == crossing
    assert kinds.count("forward") == kinds.count("backward") == crossing * crew.plan.pipeline_depth
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
            count = crew.plan.micro_batches_per_replica[timeline.replica]
            assert "".join(LETTERS[one.kind] for one in tasks) == crew.plan.orders[count][timeline.stage]


def test_nothing_is_recorded_unless_it_is_asked_for(crew: Crew, job: TinyJob) -> None:
    crew.reshape("1x1", NAMES[:1])
    crew.prepare()
    assert [answer.timeline for answer in crew.answers] == [None]
