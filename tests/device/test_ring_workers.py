"""Worker processes whose reductions stay on fake devices: equal bits, also after a kill in any phase of a reduction."""

from __future__ import annotations

from pathlib import Path

import pytest

from morph.contract.messages import Aborted
from tests.device.device_crew import (
    LOST,
    NAMES,
    NUM_STEPS,
    answers_without_the_last,
    goes_on_without_the_last,
    send_step,
    with_rings,
)
from tests.runtime.worker_crew import Crew
from tests.system.harness import JOB, TinyJob

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]


def member_launches(crew: Crew, name: str) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = crew.members[name].control("launches")
    return found


def test_sums_that_stay_on_devices_end_with_the_same_bits_in_every_shape(
    crew: Crew, job: TinyJob, reference: dict[str, str], tmp_path: Path
) -> None:
    with_rings(crew)
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
    with_rings(crew, shared=True)
    crew.set_up(JOB, job.fingerprint, tmp_path, rings="auto")
    crew.reshape("2x2", NAMES)
    crew.train(NUM_STEPS)
    assert crew.digests() == reference
    assert not any(member.control("launches") for member in crew.members.values())


@pytest.mark.parametrize("kill_at", [("reduce", 0), ("exchange", 1), ("gather", 0), ("gather", 2)])
def test_workers_go_on_without_one_that_was_killed_in_a_reduction_on_devices(
    crew: Crew, job: TinyJob, reference: dict[str, str], tmp_path: Path, kill_at: tuple[str, int]
) -> None:
    with_rings(crew, kill_at)
    crew.set_up(JOB, job.fingerprint, tmp_path, rings="auto")
    crew.reshape("2x2", NAMES)
    send_step(crew)
    answers = answers_without_the_last(crew)
    partner = next(slot.worker for slot in crew.slots if slot.stage == 1 and slot.worker != LOST)
    assert isinstance(answers[partner], Aborted), "its reduction needs the one that was killed"
    goes_on_without_the_last(crew, reference)
