"""Errors inside a worker."""

from __future__ import annotations

import pytest
from controller_script import Script, receivers, script_in

from manager.controller.state.actions import Action, EndWorker, Finish, RequestNodes, SendCommit, SendReshape, SendStep
from manager.controller.state.events import ManifestWritten, NodeAppeared, Tick, WorkerAnswered
from manager.controller.state.state import Phase
from morph.contract.messages import Failed, FailureCause

TRACE = 'Traceback (most recent call last):\n  File "job.py", line 7, in __getitem__\nValueError: bad sample\n'


def fail(script: Script, worker: str, cause: FailureCause) -> tuple[Action, ...]:
    failed = Failed(
        worker=worker, generation=script.state.generation, error="ValueError: bad sample", cause=cause, traceback=TRACE
    )
    return script.tell(WorkerAnswered(worker=worker, answer=failed))


def save(script: Script) -> Finish:
    """What is held is saved, after which the run is over."""
    version = script.state.version
    assert receivers(script.reshaped(), SendCommit)
    script.committed()
    script.written(version)
    (finish,) = (action for action in script.tell(ManifestWritten(version=version)) if isinstance(action, Finish))
    return finish


@pytest.mark.parametrize("cause", ["device", "memory"])
def test_a_device_that_is_lost_or_full_takes_its_worker_along(cause: FailureCause) -> None:
    script = script_in(Phase.TRAINING)
    assert EndWorker(worker="n2") in fail(script, "n2", cause)
    assert "n2" not in script.state.workers
    assert receivers(script.aborted(), SendReshape) == ["n1", "n3", "n4"]
    assert receivers(script.reshaped(), SendStep)
    assert script.state.version == 0


def test_an_error_of_the_job_is_tried_again_without_its_worker_which_gives_what_it_holds() -> None:
    script = script_in(Phase.TRAINING)
    script.prepared()  # version 1, of which nothing is saved
    fail(script, "n2", "job")
    actions = script.aborted()
    assert EndWorker(worker="n2") not in actions
    assert set(script.members) == {"n1", "n3", "n4"}
    assert script.state.version == 1
    script.reshaped()
    script.prepared()
    assert script.state.version == 2
    assert script.state.failing is None


def test_where_nobody_else_suffices_the_same_worker_tries_again() -> None:
    script = Script(expected_nodes=2)
    script.ready("n1", "n2")
    script.reshaped()
    fail(script, "n2", "job")
    script.aborted()
    assert script.state.phase is Phase.RESHAPING
    assert "n2" in script.state.workers


def test_an_error_that_comes_again_at_the_same_step_ends_the_run_saved_and_with_its_traceback() -> None:
    script = script_in(Phase.TRAINING)
    script.prepared()
    fail(script, "n2", "job")
    script.aborted()
    script.reshaped()
    fail(script, "n3", "job")
    script.aborted()
    finish = save(script)
    assert finish.outcome == "failed"
    assert finish.traceback == TRACE
    wanted = "n3 failed at step 1: ValueError: bad sample (as before on n2); version 1 is saved"
    assert finish.sentence == wanted


def test_an_error_on_several_workers_at_once_came_only_once() -> None:
    script = script_in(Phase.TRAINING)
    for worker in ("n2", "n1", "n3", "n4"):
        fail(script, worker, "job")
    assert script.state.phase is Phase.RESHAPING
    assert script.state.failing is not None
    assert not script.state.failing.final


def test_what_nothing_would_mend_ends_the_run_saved_whoever_else_says_so() -> None:
    script = script_in(Phase.TRAINING)
    script.prepared()
    for worker in ("n2", "n1", "n3", "n4"):
        fail(script, worker, "run")
    finish = save(script)
    assert (finish.outcome, finish.sentence) == (
        "failed",
        "n2 failed at step 1: ValueError: bad sample; version 1 is saved",
    )


def test_an_error_while_what_is_held_is_saved_ends_the_run_at_once() -> None:
    script = script_in(Phase.TRAINING)
    fail(script, "n2", "run")
    script.aborted()
    finish = fail(script, "n1", "job")[-1]
    assert isinstance(finish, Finish)
    assert finish.outcome == "failed"
    assert "is not saved" in finish.sentence


def test_memory_that_runs_out_again_at_the_same_step_ends_the_run_with_advice() -> None:
    script = script_in(Phase.TRAINING)
    fail(script, "n2", "memory")
    script.aborted()
    script.reshaped()
    fail(script, "n3", "memory")
    assert "n3" in script.state.workers  # which gives what it holds
    script.aborted()
    finish = save(script)
    assert finish.outcome == "failed"
    assert "lower vms.memory_bytes" in finish.sentence


def test_memory_that_runs_out_where_nobody_can_take_the_place_ends_the_run_saved() -> None:
    script = Script(expected_nodes=2)
    script.ready("n1", "n2")
    script.reshaped()
    fail(script, "n2", "memory")
    script.aborted()
    assert save(script).outcome == "failed"


def test_a_device_that_fails_in_a_setup_costs_its_worker_and_the_second_time_a_pause() -> None:
    script = Script(target_nodes=2, expected_nodes=2)
    script.tell(Tick())
    failed = Failed(worker="n1", generation=0, error="CUDA error", cause="device")
    for number, num_asked in ((1, 1), (2, 0)):
        script.tell(NodeAppeared(node=f"n{number}", request="job-1"))
        answer = failed.model_copy(update={"worker": f"n{number}"})
        actions = script.tell(WorkerAnswered(worker=f"n{number}", answer=answer))
        assert EndWorker(worker=f"n{number}") in actions
        assert sum(isinstance(action, RequestNodes) for action in actions) == num_asked
    assert script.state.phase is Phase.STARTING
