"""Worker processes whose activations and gradients go by a fake device: equal bits, also after a kill in any phase.

Both ways of a device's tensors are taken: staged, and from device to device by mailboxes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from morph.contract.cluster import LinkSetting
from morph.contract.faults import Fault
from morph.contract.messages import Aborted
from tests.device.device_crew import (
    LOST,
    NAMES,
    NUM_STEPS,
    answers_without_the_last,
    goes_on_without_the_last,
    send_step,
    with_mailboxes,
)
from tests.runtime.worker_crew import Crew
from tests.system.harness import JOB, TinyJob

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

Phase = Literal["forward", "backward", "reduce", "before_commit"]


@pytest.fixture(params=["staged", "ipc"])
def links(request: pytest.FixtureRequest) -> LinkSetting:
    found: LinkSetting = request.param
    return found


def test_shapes_and_morphs_over_a_fake_device_end_with_the_same_bits(
    crew: Crew, job: TinyJob, reference: dict[str, str], tmp_path: Path, links: LinkSetting
) -> None:
    with_mailboxes(crew)
    crew.set_up(JOB, job.fingerprint, tmp_path, links=links)
    for shape in ("4x1", "2x2"):
        crew.begin()
        crew.reshape(shape, NAMES)
        for slot in crew.slots:
            num_neighbours = (slot.stage > 0) + (slot.stage + 1 < int(shape[0]))
            ends = ["ReceivingEnd", "SendingEnd"] * num_neighbours if links == "ipc" else []
            assert sorted(crew.members[slot.worker].control("ends")) == sorted(ends)
        crew.train(NUM_STEPS)
        assert crew.digests() == reference
    assert all(member.control("staged_bytes") for member in crew.members.values())


@pytest.mark.parametrize("phase", ["forward", "backward", "reduce", "before_commit"])
def test_workers_on_a_fake_device_go_on_without_one_that_was_killed(
    crew: Crew, job: TinyJob, reference: dict[str, str], tmp_path: Path, phase: Phase, links: LinkSetting
) -> None:
    with_mailboxes(crew)
    crew.set_up(JOB, job.fingerprint, tmp_path, (Fault(worker=LOST, phase=phase, step=1),), links=links)
    crew.reshape("2x2", NAMES)
    crew.train(1)
    send_step(crew)
    for answer in answers_without_the_last(crew).values():
        # who was through with its part of the step before the loss has prepared it, and nobody decides it
        assert isinstance(answer, Aborted) or phase in ("before_commit", "reduce"), answer
    goes_on_without_the_last(crew, reference)
