"""Worker processes whose tensors go from one fake device to another: kills in each part of a message's way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from morph.contract.messages import Aborted, Slot, StepOrder
from tests.device.fake_mailboxes import FakeMailRoom
from tests.runtime.footprints import check_that_morphs_leave_nothing
from tests.runtime.worker_crew import Crew
from tests.system.harness import JOB, TinyJob, load_tiny_job, uninterrupted

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

NAMES = ("w0", "w1", "w2", "w3")
LOST, REST = NAMES[-1], NAMES[:-1]
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


def on_devices(crew: Crew, last: FakeMailRoom) -> None:
    """Give each worker a device with mailboxes; ``last``: those of the last one."""
    for name, member in crew.members.items():
        member.send("fake_device", None, None, last if name == LOST else FakeMailRoom())
        member.answer()


def gone(crew: Crew) -> dict[str, object]:
    """Wait until the last worker has died, abort the others, and return their answers."""
    crew.members[LOST].process.join(END_S)
    assert crew.members[LOST].process.exitcode is not None
    for name in REST:
        crew.members[name].control("abort", crew.generation)
    return {name: crew.members[name].answer() for name in REST}


@pytest.mark.parametrize("place", ["share", "open"])
def test_workers_go_on_without_one_that_was_killed_while_mailboxes_are_formed(
    crew: Crew, job: TinyJob, reference: dict[str, str], tmp_path: Path, place: str
) -> None:
    on_devices(crew, FakeMailRoom(kill_at=(place, 0)))
    crew.set_up(JOB, job.fingerprint, tmp_path, links="auto")
    order = crew.order("2x2", NAMES)
    for name in NAMES:
        crew.members[name].send("reshape", order)
    neighbour = next(slot.worker for slot in crew.slots if slot.replica == _slot(crew).replica and slot.stage == 0)
    assert isinstance(gone(crew)[neighbour], Aborted), "it was told of no mailbox"
    crew.reshape("3x1", REST)
    crew.train(NUM_STEPS)
    assert crew.digests() == reference


@pytest.mark.parametrize(
    "kill_at", [("fill", 0), ("fill", 5), ("told", 5), ("read", 1), ("read", 6), ("answer", 3)], ids=str
)
def test_workers_go_on_without_one_that_was_killed_in_the_way_of_a_message(
    crew: Crew, job: TinyJob, reference: dict[str, str], tmp_path: Path, kill_at: tuple[str, int]
) -> None:
    on_devices(crew, FakeMailRoom(kill_at=kill_at))
    crew.set_up(JOB, job.fingerprint, tmp_path, links="auto")
    crew.reshape("2x2", NAMES)
    assert _slot(crew).stage == 1, "it reads activations and sends gradients"
    for name in NAMES:
        crew.members[name].send("step", StepOrder(generation=crew.generation, step=0))
    neighbour = next(slot.worker for slot in crew.slots if slot.replica == _slot(crew).replica and slot.stage == 0)
    assert isinstance(gone(crew)[neighbour], Aborted), "it needs the one that was killed"
    del crew.held[LOST]
    crew.reshape("3x1", REST)
    crew.train(NUM_STEPS)
    assert crew.digests() == reference


def test_neighbours_of_a_worker_that_can_open_nothing_send_to_it_through_the_host(
    crew: Crew, job: TinyJob, reference: dict[str, str], tmp_path: Path
) -> None:
    on_devices(crew, FakeMailRoom(opens=False))
    crew.set_up(JOB, job.fingerprint, tmp_path, links="auto")
    crew.reshape("2x2", NAMES)
    ends = {slot.worker: crew.members[slot.worker].control("ends") for slot in crew.slots}
    neighbour = next(slot.worker for slot in crew.slots if slot.replica == _slot(crew).replica and slot.stage == 0)
    assert ends[LOST] == ["SendingEnd"]
    assert ends[neighbour] == ["ReceivingEnd"]
    assert all(len(found) == 2 for name, found in ends.items() if name not in (LOST, neighbour))
    crew.train(NUM_STEPS)
    assert crew.digests() == reference


def test_twenty_morphs_through_mailboxes_leave_no_threads_and_no_files_open(
    crew: Crew, job: TinyJob, tmp_path: Path
) -> None:
    on_devices(crew, FakeMailRoom())
    crew.set_up(JOB, job.fingerprint, tmp_path, links="ipc")
    check_that_morphs_leave_nothing(crew, NAMES)


def _slot(crew: Crew) -> Slot:
    return next(slot for slot in crew.slots if slot.worker == LOST)
