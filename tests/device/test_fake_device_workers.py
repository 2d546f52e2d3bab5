"""Worker processes that train the tiny job on fake devices: equal bits, also after a kill in any phase.

Activations and gradients go through the host, or by mailboxes from device to device; reductions go through the host or
stay on devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from morph.contract.cluster import LinkSetting
from morph.contract.faults import Fault
from morph.contract.messages import Aborted, ReshapeOrder, Slot
from tests.crew import Crew, check_that_morphs_leave_nothing
from tests.device.fake_mailboxes import FakeMailRoom
from tests.grids import cells
from tests.runtime.test_salvage import await_copies, follow, give_up, in_step, keeping, train_followed
from tests.system.harness import JOB, TinyJob
from tests.waiting import PATIENCE

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

NAMES = ("w0", "w1", "w2", "w3")
LOST, REST = NAMES[-1], NAMES[:-1]
NUM_STEPS = 3
NUM_FOLLOWED, GIVEN_UP = 8, 6
END_S = 100.0 * PATIENCE


@pytest.fixture(scope="module")
def references(job: TinyJob, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, str]]:
    """Return the weights, by steps, of one worker on such a device, whose kernels differ from the processor's."""
    crew = Crew(job, NAMES[:1])
    try:
        _give_device(crew, NAMES[0])
        crew.set_up(JOB, job.fingerprint, tmp_path_factory.mktemp("reference"))
        crew.reshape("1x1", NAMES[:1])
        found = {}
        for num_steps in (NUM_STEPS, NUM_FOLLOWED):
            crew.train(num_steps)
            found[num_steps] = crew.digests()
        return found
    finally:
        crew.close()


@pytest.fixture(scope="module")
def reference(references: dict[int, dict[str, str]]) -> dict[str, str]:
    return references[NUM_STEPS]


@pytest.fixture
def crew(job: TinyJob) -> Iterator[Crew]:
    made = Crew(job, NAMES)
    yield made
    made.close()


def with_mailboxes(crew: Crew, of_last: FakeMailRoom | None = None) -> None:
    """Give each worker a device with mailboxes; those of the last one can differ (``of_last``)."""
    for name in NAMES:
        _give_device(crew, name, None, None, of_last if of_last and name == LOST else FakeMailRoom())


def with_rings(crew: Crew, kill_at: tuple[str, int] | None = None, *, shared: bool = False) -> None:
    """Give workers devices with rings, in which the last one dies; ``shared``: all claim the same device."""
    for name in NAMES:
        _give_device(crew, name, "GPU" if shared else f"GPU-{name}", kill_at if name == LOST else None)


def _give_device(crew: Crew, name: str, *arguments: object) -> None:
    crew.members[name].send("fake_device", *arguments)
    crew.members[name].answer()


def send_step(crew: Crew) -> None:
    for name in NAMES:
        crew.members[name].send("step", crew.step_order())


def answers_without_the_last(crew: Crew) -> dict[str, object]:
    """Wait until the last worker has died, abort the others, and return their answers."""
    crew.members[LOST].process.join(END_S)
    assert crew.members[LOST].process.exitcode is not None
    for name in REST:
        crew.members[name].control("abort", crew.generation)
    crew.held.pop(LOST, None)
    return {name: crew.members[name].answer() for name in REST}


def goes_on_without_the_last(crew: Crew, reference: dict[str, str]) -> None:
    """Check that the others end with the weights of a single worker."""
    crew.reshape("3x1", REST)
    crew.train(NUM_STEPS)
    assert crew.digests() == reference


@pytest.mark.parametrize("links", ["staged", "ipc"])
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


@pytest.mark.parametrize(
    ("phase", "links"), cells(("forward", "backward", "reduce", "before_commit"), ("staged", "ipc"))
)
def test_workers_on_a_fake_device_continue_after_a_kill(
    crew: Crew,
    job: TinyJob,
    reference: dict[str, str],
    tmp_path: Path,
    phase: Literal["forward", "backward", "reduce", "before_commit"],
    links: LinkSetting,
) -> None:
    with_mailboxes(crew)
    crew.set_up(JOB, job.fingerprint, tmp_path, faults=(Fault(worker=LOST, phase=phase, step=1),), links=links)
    crew.reshape("2x2", NAMES)
    crew.train(1)
    send_step(crew)
    for answer in answers_without_the_last(crew).values():
        # a worker that did its part before the loss has prepared the step, which is not decided
        assert isinstance(answer, Aborted) or phase in ("before_commit", "reduce"), answer
    goes_on_without_the_last(crew, reference)


def test_sums_on_devices_have_the_same_bits_in_every_shape(
    crew: Crew, job: TinyJob, reference: dict[str, str], tmp_path: Path
) -> None:
    with_rings(crew)
    crew.set_up(JOB, job.fingerprint, tmp_path, rings="auto")
    crew.reshape("1x4", NAMES)
    crew.train(1)
    crew.reshape("2x2", NAMES)
    crew.train(NUM_STEPS)
    assert crew.digests() == reference
    # once when each shape is formed, and once when the units of the first shape are freed
    for member in crew.members.values():
        _, whole, half = member.control("live_at_release")
        assert half < 0.75 * whole
    launches = {slot.worker: crew.members[slot.worker].control("launches") for slot in crew.slots}
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


@pytest.mark.parametrize("kill_at", [("reduce", 0), ("exchange", 1), ("gather", 2)])
def test_workers_survive_a_kill_during_a_reduction_on_devices(
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


@pytest.mark.parametrize("in_host", [False, True], ids=["on the device", "in host memory"])
def test_a_stage_lost_on_devices_continues_from_its_follower(
    crew: Crew, job: TinyJob, references: dict[int, dict[str, str]], tmp_path: Path, in_host: bool
) -> None:
    """States, gradients, partial sums and the rest of a step leave devices and come back to them."""
    for name in NAMES:
        _give_device(crew, name)
    faults = (Fault(worker=LOST, phase="backward", step=GIVEN_UP, nth=2, kind="out_of_memory"),)
    crew.set_up(JOB, job.fingerprint, tmp_path, faults=faults)
    await_copies(crew)

    def followed(order: ReshapeOrder) -> ReshapeOrder:
        return follow(crew, order, every=2).model_copy(update={"follow_in_host": in_host})

    order = followed(crew.order("4x1", NAMES))
    crew.form(order)
    train_followed(crew, order, GIVEN_UP)
    assert in_step(crew, order)
    follower = next(entry.follower for entry in order.follows if entry.worker == LOST)
    kept = give_up(crew, LOST, copied=follower, num_copied=2, done=2)
    again = followed(keeping(crew.order("3x1", REST), kept, job))
    assert again.salvage is not None, "its follower has a copy of what it had summed"
    assert not [source for source in again.sources if source.kind == "initial"]
    crew.form(again)
    train_followed(crew, again, NUM_FOLLOWED)
    assert crew.digests() == references[NUM_FOLLOWED]


def slot_of_the_last(crew: Crew) -> Slot:
    return next(slot for slot in crew.slots if slot.worker == LOST)


def neighbour_of_the_last(crew: Crew) -> str:
    replica = slot_of_the_last(crew).replica
    return next(slot.worker for slot in crew.slots if slot.replica == replica and slot.stage == 0)


@pytest.mark.parametrize("place", ["share", "open"])
def test_workers_continue_after_a_kill_while_mailboxes_are_formed(
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


@pytest.mark.parametrize("kill_at", [("fill", 5), ("told", 5), ("read", 1), ("answer", 3)], ids=str)
def test_workers_survive_a_kill_while_a_message_is_on_its_way(
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


def test_a_worker_that_can_open_nothing_is_reached_through_the_host(
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


def test_many_morphs_through_mailboxes_leave_no_threads_and_no_files_open(
    crew: Crew, job: TinyJob, tmp_path: Path
) -> None:
    with_mailboxes(crew)
    crew.set_up(JOB, job.fingerprint, tmp_path, links="ipc")
    check_that_morphs_leave_nothing(crew, NAMES)
