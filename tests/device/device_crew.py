"""Four workers that train the tiny job on fake devices, and what the others do once the last one has died."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from morph.contract.messages import StepOrder
from tests.device.fake_mailboxes import FakeMailRoom
from tests.runtime.worker_crew import Crew
from tests.system.harness import TinyJob, load_tiny_job, uninterrupted

NAMES = ("w0", "w1", "w2", "w3")
LOST, REST = NAMES[-1], NAMES[:-1]
NUM_STEPS = 3
END_S = 100.0


@pytest.fixture(scope="session")
def job() -> TinyJob:
    return load_tiny_job()


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The weights of a worker that trains alone, after ``NUM_STEPS``."""
    return uninterrupted(NUM_STEPS, tmp_path_factory.mktemp("reference"))


@pytest.fixture
def crew(job: TinyJob) -> Iterator[Crew]:
    made = Crew(job, NAMES)
    yield made
    made.close()


def with_mailboxes(crew: Crew, of_last: FakeMailRoom | None = None) -> None:
    """Give each worker a device with mailboxes; ``of_last``: those of the last one."""
    for name in NAMES:
        _give_device(crew, name, None, None, of_last if of_last and name == LOST else FakeMailRoom())


def with_rings(crew: Crew, kill_at: tuple[str, int] | None = None, *, shared: bool = False) -> None:
    """Give each worker a device with rings, in which the last one dies; ``shared``: all are said to be one device."""
    for name in NAMES:
        _give_device(crew, name, "GPU" if shared else f"GPU-{name}", kill_at if name == LOST else None)


def _give_device(crew: Crew, name: str, *arguments: object) -> None:
    crew.members[name].send("fake_device", *arguments)
    crew.members[name].answer()


def send_step(crew: Crew) -> None:
    """Have every worker begin the next step."""
    for name in NAMES:
        crew.members[name].send("step", StepOrder(generation=crew.generation, step=crew.version))


def answers_without_the_last(crew: Crew) -> dict[str, object]:
    """Wait until the last worker has died, abort the others, and return their answers."""
    crew.members[LOST].process.join(END_S)
    assert crew.members[LOST].process.exitcode is not None
    for name in REST:
        crew.members[name].control("abort", crew.generation)
    crew.held.pop(LOST, None)
    return {name: crew.members[name].answer() for name in REST}


def goes_on_without_the_last(crew: Crew, reference: dict[str, str]) -> None:
    """The others end with the weights of a worker that trains alone."""
    crew.reshape("3x1", REST)
    crew.train(NUM_STEPS)
    assert crew.digests() == reference
