"""Worker processes whose activations and gradients go by a fake device: equal bits, also after a kill in any phase.

Both ways of a device's tensors are taken: staged, and from device to device by mailboxes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from morph.contract.cluster import LinkSetting
from morph.contract.faults import Fault
from morph.contract.messages import Aborted, StepOrder
from tests.device.fake_mailboxes import FakeMailRoom
from tests.runtime.worker_crew import Crew
from tests.system.harness import JOB, TinyJob, load_tiny_job, uninterrupted

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

NAMES = ("w0", "w1", "w2", "w3")
NUM_STEPS = 3
END_S = 100.0
Phase = Literal["forward", "backward", "reduce", "before_commit"]


@pytest.fixture(scope="module")
def job() -> TinyJob:
    return load_tiny_job()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return uninterrupted(NUM_STEPS, tmp_path_factory.mktemp("reference"))


@pytest.fixture(params=["staged", "ipc"])
def links(request: pytest.FixtureRequest) -> LinkSetting:
    found: LinkSetting = request.param
    return found


@pytest.fixture
def crew(job: TinyJob) -> Iterator[Crew]:
    made = Crew(job, NAMES)
    for member in made.members.values():
        member.send("fake_device", None, None, FakeMailRoom())
        member.answer()
    yield made
    made.close()


def test_shapes_and_morphs_over_a_fake_device_end_with_the_same_bits(
    crew: Crew, job: TinyJob, reference: dict[str, str], tmp_path: Path, links: LinkSetting
) -> None:
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
    lost = "w3"
    crew.set_up(JOB, job.fingerprint, tmp_path, (Fault(worker=lost, phase=phase, step=1),), links=links)
    crew.reshape("2x2", NAMES)
    crew.train(1)
    order = StepOrder(generation=crew.generation, step=1)
    for name in NAMES:
        crew.members[name].send("step", order)
    crew.members[lost].process.join(END_S)
    assert crew.members[lost].process.exitcode is not None
    rest = [name for name in NAMES if name != lost]
    for name in rest:
        crew.members[name].control("abort", crew.generation)
    for name in rest:
        answer = crew.members[name].answer()
        # who was through with its part of the step before the loss has prepared it, and nobody decides it
        assert isinstance(answer, Aborted) or phase in ("before_commit", "reduce"), answer
    del crew.held[lost]
    crew.reshape("3x1", rest)
    crew.train(NUM_STEPS)
    assert crew.digests() == reference
