"""A new manager takes over from the journal."""

from __future__ import annotations

import pytest
from controller_script import Script, script_in

from manager.controller.state.actions import Abort, EndWorker, Finish, SendCommit, SendReshape, SendStep, StartWorker
from manager.controller.state.events import ManagerResumed, NodeAppeared
from manager.controller.state.state import Phase

ALL = ("n1", "n2", "n3", "n4")


def taken_over(script: Script, *living: str) -> list[tuple[str, str]]:
    """Tell of a new manager; return the kind and worker of each action."""
    actions = script.tell(ManagerResumed(living=living or ALL))
    return [(action.kind, getattr(action, "worker", "")) for action in actions]


@pytest.mark.parametrize(
    ("phase", "kind"), [(Phase.RESHAPING, SendReshape), (Phase.TRAINING, SendStep), (Phase.COMMITTING, SendCommit)]
)
def test_orders_that_are_not_answered_go_out_again_as_they_were(phase: Phase, kind: type) -> None:
    script = Script(num_steps=2)
    sent = script.ready(*ALL)
    if phase is not Phase.RESHAPING:
        sent = script.reshaped()
    if phase is Phase.COMMITTING:
        script.prepared()
        sent = script.prepared()
    before = {action.worker: action for action in sent if isinstance(action, kind)}
    again = {action.worker: action for action in script.tell(ManagerResumed(living=ALL)) if isinstance(action, kind)}
    assert again == before
    assert script.state.phase is phase


def test_only_those_that_have_not_answered_get_their_order_again() -> None:
    script = script_in(Phase.TRAINING)
    script.prepared("n1", "n3")
    assert taken_over(script) == [("send_step", "n2"), ("send_step", "n4")]


def test_orders_that_were_aborted_go_out_again_with_their_abort() -> None:
    script = script_in(Phase.ABORTING)
    actions = script.tell(ManagerResumed(living=ALL))
    assert {action.worker for action in actions if isinstance(action, SendStep)} == {"n2", "n3", "n4"}
    assert {action.worker for action in actions if isinstance(action, Abort)} == {"n2", "n3", "n4"}


def test_workers_that_died_meanwhile_are_lost_and_strangers_are_ended() -> None:
    script = script_in(Phase.TRAINING)
    actions = script.tell(ManagerResumed(living=("n1", "n2", "n3", "old")))
    assert EndWorker(worker="old") in actions
    assert "n4" not in script.state.workers
    assert script.state.phase is Phase.ABORTING
    assert not [action for action in actions if getattr(action, "worker", "") == "n4"]


def test_a_setup_that_was_under_way_is_asked_for_again_with_all_its_time() -> None:
    script = script_in(Phase.TRAINING)
    script.tell(NodeAppeared(node="n9"))
    script.now_s += 15.0
    actions = script.tell(ManagerResumed(living=ALL))
    assert StartWorker(worker="n9") in actions
    assert script.state.workers["n9"].appeared_s == script.now_s


def test_the_last_checkpoint_is_asked_for_again_from_whoever_still_owes_units() -> None:
    script = script_in(Phase.COMMITTING)
    script.committed()
    assert script.state.saving.pending is not None
    owing = set(script.state.saving.pending.writers.values())
    actions = script.tell(ManagerResumed(living=ALL))
    assert {action.worker for action in actions if isinstance(action, SendCommit)} == owing
    script.committed()
    (finish,) = script.saved(2)
    assert isinstance(finish, Finish)


def test_a_manifest_that_was_being_written_is_written_again() -> None:
    script = script_in(Phase.SEALING)
    assert [kind for kind, _ in taken_over(script)] == ["write_manifest"]


def test_a_run_that_was_over_is_over() -> None:
    script = script_in(Phase.ENDED)
    assert [kind for kind, _ in taken_over(script)] == ["finish"]
