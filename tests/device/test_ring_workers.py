"""Worker processes whose reductions stay on fake devices: equal bits, also after a kill in any phase of a reduction."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from morph.contract.messages import Aborted, StepOrder
from tests.runtime.worker_crew import Crew
from tests.system.harness import JOB, TinyJob, load_tiny_job, uninterrupted

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

NAMES = ("w0", "w1", "w2", "w3")
NUM_STEPS = 2
END_S = 100.0


@pytest.fixture(scope="module")
def job() -> TinyJob:
    return load_tiny_job()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return uninterrupted(NUM_STEPS, tmp_path_factory.mktemp("reference"))


@pytest.fixture
def crew(job: TinyJob) -> Iterator[Crew]:
    made = Crew(job, NAMES)
    yield made
    made.close()


def on_devices(crew: Crew, kill_at: tuple[str, int] | None = None, *, shared: bool = False) -> None:
    """Give each worker a device, of which the last one dies at a place; ``shared``: all are said to be one."""
    for name, member in crew.members.items():
        member.send("fake_device", "GPU" if shared else f"GPU-{name}", kill_at if name == NAMES[-1] else None)
        member.answer()


def member_launches(crew: Crew, name: str) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = crew.members[name].control("launches")
    return found


def test_sums_that_stay_on_devices_end_with_the_same_bits_in_every_shape(
    crew: Crew, job: TinyJob, reference: dict[str, str], tmp_path: Path
) -> None:
    on_devices(crew)
    crew.set_up(JOB, job.fingerprint, tmp_path, rings="auto")
    crew.reshape("1x4", NAMES)
    crew.train(1)
    crew.reshape("2x2", NAMES)
    crew.train(NUM_STEPS)
    assert crew.digests() == reference
    launches = {slot.worker: member_launches(crew, slot.worker) for slot in crew.slots}
    assert all(launches.values())
    for stage in range(2):
        one, other = (launches[slot.worker] for slot in crew.slots if slot.stage == stage)
        assert one == other, "replicas of a stage launch in one order, whatever the communicator"


def test_workers_that_share_a_device_reduce_through_the_host(
    crew: Crew, job: TinyJob, reference: dict[str, str], tmp_path: Path
) -> None:
    on_devices(crew, shared=True)
    crew.set_up(JOB, job.fingerprint, tmp_path, rings="auto")
    crew.reshape("2x2", NAMES)
    crew.train(NUM_STEPS)
    assert crew.digests() == reference
    assert not any(member.control("launches") for member in crew.members.values())


@pytest.mark.parametrize("kill_at", [("reduce", 0), ("exchange", 1), ("gather", 0), ("gather", 2)])
def test_workers_go_on_without_one_that_was_killed_in_a_reduction_on_devices(
    crew: Crew, job: TinyJob, reference: dict[str, str], tmp_path: Path, kill_at: tuple[str, int]
) -> None:
    on_devices(crew, kill_at)
    crew.set_up(JOB, job.fingerprint, tmp_path, rings="auto")
    crew.reshape("2x2", NAMES)
    order = StepOrder(generation=crew.generation, step=0)
    for name in NAMES:
        crew.members[name].send("step", order)
    lost, rest = NAMES[-1], NAMES[:-1]
    crew.members[lost].process.join(END_S)
    assert crew.members[lost].process.exitcode is not None
    for name in rest:
        crew.members[name].control("abort", crew.generation)
    answers = {name: crew.members[name].answer() for name in rest}
    partner = next(slot.worker for slot in crew.slots if slot.stage == 1 and slot.worker != lost)
    assert isinstance(answers[partner], Aborted), "its reduction needs the one that was killed"
    del crew.held[lost]
    crew.reshape("3x1", rest)
    crew.train(NUM_STEPS)
    assert crew.digests() == reference
