"""Worker processes whose tensors go from one fake device to another: kills in each part of a message's way."""

from __future__ import annotations

from pathlib import Path

import pytest

from morph.contract.messages import Aborted, Slot
from tests.device.device_crew import (
    LOST,
    NAMES,
    NUM_STEPS,
    answers_without_the_last,
    goes_on_without_the_last,
    send_step,
    with_mailboxes,
)
from tests.device.fake_mailboxes import FakeMailRoom
from tests.runtime.footprints import check_that_morphs_leave_nothing
from tests.runtime.worker_crew import Crew
from tests.system.harness import JOB, TinyJob

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]


def slot_of_the_last(crew: Crew) -> Slot:
    return next(slot for slot in crew.slots if slot.worker == LOST)


def neighbour_of_the_last(crew: Crew) -> str:
    replica = slot_of_the_last(crew).replica
    return next(slot.worker for slot in crew.slots if slot.replica == replica and slot.stage == 0)


@pytest.mark.parametrize("place", ["share", "open"])
def test_workers_go_on_without_one_that_was_killed_while_mailboxes_are_formed(
    crew: Crew, job: TinyJob, reference: dict[str, str], tmp_path: Path, place: str
) -> None:
    with_mailboxes(crew, FakeMailRoom(kill_at=(place, 0)))
    crew.set_up(JOB, job.fingerprint, tmp_path, links="auto")
    order = crew.order("2x2", NAMES)
    for name in NAMES:
        crew.members[name].send("reshape", order)
    answers = answers_without_the_last(crew)
    assert isinstance(answers[neighbour_of_the_last(crew)], Aborted), "it was told of no mailbox"
    goes_on_without_the_last(crew, reference)


@pytest.mark.parametrize(
    "kill_at", [("fill", 0), ("fill", 5), ("told", 5), ("read", 1), ("read", 6), ("answer", 3)], ids=str
)
def test_workers_go_on_without_one_that_was_killed_in_the_way_of_a_message(
    crew: Crew, job: TinyJob, reference: dict[str, str], tmp_path: Path, kill_at: tuple[str, int]
) -> None:
    with_mailboxes(crew, FakeMailRoom(kill_at=kill_at))
    crew.set_up(JOB, job.fingerprint, tmp_path, links="auto")
    crew.reshape("2x2", NAMES)
    assert slot_of_the_last(crew).stage == 1, "it reads activations and sends gradients"
    send_step(crew)
    answers = answers_without_the_last(crew)
    assert isinstance(answers[neighbour_of_the_last(crew)], Aborted), "it needs the one that was killed"
    goes_on_without_the_last(crew, reference)


def test_neighbours_of_a_worker_that_can_open_nothing_send_to_it_through_the_host(
    crew: Crew, job: TinyJob, reference: dict[str, str], tmp_path: Path
) -> None:
    with_mailboxes(crew, FakeMailRoom(opens=False))
    crew.set_up(JOB, job.fingerprint, tmp_path, links="auto")
    crew.reshape("2x2", NAMES)
    ends = {slot.worker: crew.members[slot.worker].control("ends") for slot in crew.slots}
    neighbour = neighbour_of_the_last(crew)
    assert ends[LOST] == ["SendingEnd"]
    assert ends[neighbour] == ["ReceivingEnd"]
    assert all(len(found) == 2 for name, found in ends.items() if name not in (LOST, neighbour))
    crew.train(NUM_STEPS)
    assert crew.digests() == reference


def test_twenty_morphs_through_mailboxes_leave_no_threads_and_no_files_open(
    crew: Crew, job: TinyJob, tmp_path: Path
) -> None:
    with_mailboxes(crew)
    crew.set_up(JOB, job.fingerprint, tmp_path, links="ipc")
    check_that_morphs_leave_nothing(crew, NAMES)
