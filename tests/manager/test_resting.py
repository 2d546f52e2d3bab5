"""Generation after generation comes to nothing: what is held is saved, then it is tried again, ever more rarely."""

from __future__ import annotations

from controller_script import Script, receivers, script_in

from manager.controller.state.actions import Finish, SendCommit, SendReshape, WriteManifest
from manager.controller.state.events import ManifestWritten, StopRequested, WorkerLost
from manager.controller.state.state import Phase
from manager.controller.steps.resting import PAUSES


def saved(script: Script) -> None:
    """The workers write what they hold."""
    script.committed()
    actions = script.written(script.state.version)
    assert any(isinstance(action, WriteManifest) for action in actions)
    script.tell(ManifestWritten(version=script.state.version))


def test_after_so_many_generations_the_holders_write_what_they_hold_and_the_same_workers_try_again() -> None:
    script = script_in(Phase.RESTING)
    assert script.last is not None
    orders = [action for action in script.last.actions if isinstance(action, SendCommit)]
    assert {(action.order.version, action.order.held) for action in orders} == {(1, True)}
    written = [unit for action in orders for unit in action.order.checkpoint_units]
    assert sorted(written) == sorted(script.state.config.units)
    assert "10 generations in a row" in script.sentence
    saved(script)
    assert script.state.saving.checkpoint is not None
    assert (script.state.phase, script.state.saving.checkpoint.version) == (Phase.RESTING, 1)
    began_s = script.now_s
    actions = script.wake()
    assert script.now_s - began_s <= PAUSES.first_s
    assert receivers(actions, SendReshape) == ["n1", "n2", "n3", "n4"]
    assert script.state.version == 1
    script.reshaped()
    script.prepared()
    assert (script.state.version, script.state.waits.num_fruitless, script.state.waits.resting_since_s) == (2, 0, None)


def test_each_further_generation_that_comes_to_nothing_is_followed_by_a_longer_pause_and_saves_nothing_anew() -> None:
    script = script_in(Phase.RESTING)
    saved(script)
    pauses = []
    for _ in range(3):
        script.wake()
        script.aborted()
        assert script.state.waits.rest_until_s is not None
        assert script.state.step.order is None
        pauses.append(round(script.state.waits.rest_until_s - script.now_s, 6))
    assert pauses == [2 * PAUSES.first_s, 4 * PAUSES.first_s, 8 * PAUSES.first_s]
    assert PAUSES.pause_s(10**6) == PAUSES.most_s


def test_the_run_ends_when_the_users_limit_is_reached() -> None:
    script = script_in(Phase.RESTING)
    saved(script)
    limit_s = script.state.config.policy.give_up_after_s
    began_s = script.state.waits.resting_since_s
    assert began_s is not None
    while script.state.phase is not Phase.ENDED:
        script.wake()
        actions = script.aborted()
    assert 0 <= script.now_s - began_s - limit_s <= PAUSES.most_s + 1
    (finish,) = actions
    assert isinstance(finish, Finish)
    assert finish.outcome == "failed"
    assert "policy.give_up_after_s" in finish.sentence
    assert finish.sentence.endswith("version 1 is saved")


def test_a_stop_while_resting_ends_the_run_once_what_is_held_is_saved() -> None:
    script = script_in(Phase.RESTING)
    assert script.tell(StopRequested(reason="SIGINT")) == ()
    script.committed()
    script.written(1)
    ended = Finish(outcome="stopped", sentence="SIGINT; version 1 is saved")
    assert script.tell(ManifestWritten(version=1)) == (ended,)
    at_once = script_in(Phase.RESTING)
    saved(at_once)
    assert at_once.tell(StopRequested(reason="SIGINT"))[-1] == ended


def test_what_has_no_holder_is_not_written_and_goes_back_to_the_checkpoint_after_the_pause() -> None:
    script = script_in(Phase.TRAINING)
    script.prepared()
    for _ in range(script.state.config.policy.max_fruitless_generations - 1):
        script.aborted()
    for worker in ("n1", "n2", "n3"):
        script.tell(WorkerLost(worker=worker, cause="killed"))
    script.ready("n5", "n6")
    script.aborted()
    assert script.state.phase is Phase.RESTING
    assert script.state.step.order is None
    script.wake()
    assert (script.state.version, script.code) == (0, "set_back")
