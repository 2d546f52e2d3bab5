"""A worker's answers to orders in all circumstances, and its control lane."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import pytest

from manager.rehearsal.device import EmulationOptions, emulated_device
from morph.contract.errors import CheckpointError, GenerationAborted, PeerLost, WaitTimeout
from morph.contract.messages import Aborted, CommitOrder, Failed, StepOrder, WorkerReady, WorkerSetup
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.process.worker import Worker, set_up
from simulator import synthetic_profile
from tests.forked_modules import run_python
from tests.runtime.conftest import CutJob
from tests.system.harness import JOB, MICRO_BATCH_SIZE, NUM_SECTIONS
from tests.waiting import BOUND_S

PROFILE = synthetic_profile(num_sections=2, forward_s=0.0002, batch_size=8, micro_batch_size=4)
EMULATED = {
    "fingerprint": PROFILE.job.fingerprint,
    "num_sections": PROFILE.num_sections,
    "micro_batch_size": 4,
    "emulation": emulated_device(PROFILE, 4, range(2, 3), EmulationOptions()),
}


def make_setup(tmp_path: Path, **fields: object) -> WorkerSetup:
    values: dict[str, object] = {
        "worker": "w0",
        "job_path": JOB,
        "fingerprint": "none",
        "num_sections": NUM_SECTIONS,
        "micro_batch_size": MICRO_BATCH_SIZE,
        "checkpoint_url": str(tmp_path),
        "store_host": "127.0.0.1",
        "store_port": 1,
        "listen_host": "127.0.0.1",
    }
    return WorkerSetup.model_validate(values | fields)


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    """A worker of an emulated device, in no generation."""
    made = set_up(make_setup(tmp_path, **EMULATED))
    assert isinstance(made, Worker)
    return made


def raising(error: Exception) -> object:
    def work() -> object:
        raise error

    return work


def answer_to(worker: Worker, error: Exception, generation: int = 4) -> Aborted | Failed:
    worker._interrupt = Interrupt(generation)
    answer = worker._carry_out(generation, raising(error))  # type: ignore[arg-type, var-annotated]
    assert isinstance(answer, Aborted | Failed)
    assert (answer.worker, answer.generation) == ("w0", generation)
    return answer


def test_an_aborted_order_is_answered_without_blaming_a_peer(worker: Worker) -> None:
    answer = answer_to(worker, GenerationAborted("generation 4 was aborted"))
    assert isinstance(answer, Aborted)
    assert not answer.peer_lost


@pytest.mark.parametrize("error", [PeerLost("reset"), WaitTimeout("waited 120 s for the gradient all-reduce")])
def test_a_lost_peer_and_a_wait_that_ran_out_leave_broken_groups(worker: Worker, error: Exception) -> None:
    answer = answer_to(worker, error)
    assert isinstance(answer, Aborted)
    assert answer.peer_lost
    assert answer.detail == str(error)
    assert worker._interrupt.over  # an awaited operation may still be under way: the groups must not be closed at once


@pytest.mark.parametrize(
    ("error", "text"),
    [(CheckpointError("v1: the file is missing"), "v1: the file is missing"), (KeyError("s3"), "KeyError: 's3'")],
)
def test_any_other_error_fails_the_order_and_is_logged(
    worker: Worker, caplog: pytest.LogCaptureFixture, error: Exception, text: str
) -> None:
    with caplog.at_level(logging.ERROR):
        answer = answer_to(worker, error)
    assert isinstance(answer, Failed)
    assert answer.error == text
    assert answer.detail == type(error).__name__
    assert "order failed" in caplog.text


def test_an_order_of_an_aborted_generation_is_not_begun(worker: Worker) -> None:
    worker.abort(4)
    for generation in (3, 4):
        answer = worker._carry_out(generation, lambda: pytest.fail("was begun"))  # type: ignore[var-annotated]
        assert isinstance(answer, Aborted)
    assert worker._carry_out(5, lambda: "done") == "done"


def test_an_abort_reaches_the_running_generation_and_not_a_later_one(worker: Worker) -> None:
    worker._interrupt = Interrupt(6)
    worker.abort(5)
    assert not worker._interrupt.aborted
    worker.abort(6)
    assert worker._interrupt.aborted


@pytest.mark.slow
def test_setting_up_ends_in_a_ready_worker(tiny: CutJob, tmp_path: Path) -> None:
    worker = set_up(make_setup(tmp_path, fingerprint=tiny.model.fingerprint))
    assert isinstance(worker, Worker)
    assert worker.ready.worker == "w0"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "detail", "parts"),
    [
        ({}, "ProfileError", ["fingerprint", "belongs to another model", "calibrate again"]),
        ({"job_path": "none.py:job"}, "JobError", ["none.py", "no such file"]),
        ({"num_sections": 500}, "JobError", ["500"]),
    ],
)
def test_a_setup_that_cannot_be_fails_and_names_the_mistake(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fields: dict[str, object], detail: str, parts: list[str]
) -> None:
    with caplog.at_level(logging.CRITICAL, logger="morph.runtime.process.worker"):
        answer = set_up(make_setup(tmp_path, **fields))
    assert isinstance(answer, Failed)
    assert answer.detail == detail
    for part in parts:
        assert part in answer.error


def test_a_heartbeat_waits_beside_a_running_order(worker: Worker) -> None:
    """The control lane is never blocked by the order lane."""
    begun, release = threading.Event(), threading.Event()

    def work() -> str:
        begun.set()
        assert release.wait(BOUND_S)
        return "done"

    results: list[object] = []
    lane = threading.Thread(target=lambda: results.append(worker._carry_out(1, work)))
    lane.start()
    assert begun.wait(BOUND_S)
    assert worker.heartbeat(0.001) is not None
    worker.abort(0)
    release.set()
    lane.join(BOUND_S)
    assert results == ["done"]


def test_an_order_that_comes_again_is_answered_again_and_not_carried_out_twice(worker: Worker) -> None:
    carried_out: list[str] = []
    order = StepOrder(generation=2, step=5)

    def once(order: StepOrder | CommitOrder, name: str) -> object:
        return worker._once(order, lambda: carried_out.append(name) or name)

    assert once(order, "step") == once(order.model_copy(), "the same again") == "step"
    assert once(order.model_copy(update={"attempt": 1}), "attempt") == "attempt"
    assert once(order.model_copy(update={"step": 6}), "next") == "next"
    assert once(CommitOrder(generation=2, version=7), "commit") == "commit"
    assert carried_out == ["step", "attempt", "next", "commit"]


def test_an_order_that_a_later_one_overtook_is_not_carried_out(worker: Worker) -> None:
    worker._once(StepOrder(generation=2, step=5), lambda: "done")
    for late in (StepOrder(generation=2, step=4), StepOrder(generation=1, step=9)):
        answer = worker._once(late, lambda: pytest.fail("was begun"))  # type: ignore[var-annotated]
        assert isinstance(answer, Aborted)
        assert not answer.peer_lost
        assert "a later order" in answer.detail


def test_an_order_that_was_given_up_is_given_up_when_it_comes_again(worker: Worker) -> None:
    worker.abort(2)
    order = StepOrder(generation=2, step=5)
    assert worker._once(order, lambda: "done") == worker._once(order, lambda: "done")
    assert isinstance(worker._once(order, lambda: "done"), Aborted)


def test_a_worker_that_is_set_up_again_is_ready_as_before(worker: Worker, tmp_path: Path) -> None:
    again = worker.setup(make_setup(tmp_path, **EMULATED))
    assert isinstance(again, WorkerReady)
    assert again == worker.ready


def test_a_worker_has_the_users_variables_and_keeps_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAMED_BY_THE_USER", "before")
    setup = make_setup(tmp_path, variables={"NAMED_BY_THE_USER": "s3cret"}, **EMULATED)
    worker = set_up(setup)
    assert isinstance(worker, Worker)
    assert os.environ["NAMED_BY_THE_USER"] == "s3cret"
    assert worker._setup.variables == {}
    assert "s3cret" not in repr(setup)


_THREADS = """
import threading
from morph.runtime.process.serving import end_with_threads

def fail():
    raise TypeError("nobody thought of this")

end_with_threads()
for name in ({names}):
    one = threading.Thread(target=fail, name=name)
    one.start()
    one.join({bound_s})
print("went on")
"""


@pytest.mark.parametrize(
    ("names", "code", "said"),
    [(("a-jobs-own",), 0, "went on"), (("a-jobs-own", "morph-follow"), 1, "thread morph-follow failed")],
)
def test_a_worker_ends_when_morphs_own_thread_fails_but_not_a_jobs(
    names: tuple[str, ...], code: int, said: str
) -> None:
    ended, output, errors = run_python("-c", _THREADS.format(names=repr(names), bound_s=BOUND_S))
    assert ended == code, errors
    assert said in output + errors
    assert errors.count("nobody thought of this") == len(names)
