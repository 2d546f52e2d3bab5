"""A checkpoint cannot be loaded: the run continues in place, from the same version or the newest undamaged one."""

from __future__ import annotations

import pytest
from controller_script import Script, formed, receivers
from simulated_job import FILES

from manager.controller.state.actions import Abort, Action, FindCheckpoint, Finish, SendReshape
from manager.controller.state.events import (
    CheckpointFound,
    CheckpointNotFound,
    StopRequested,
    Tick,
    WorkerAnswered,
    WorkerLost,
)
from manager.controller.state.state import Phase
from manager.controller.steps.recovery import PAUSES
from morph.contract.checkpoint import Manifest
from morph.contract.messages import Failed

DAMAGED = "v00000006/s0.safetensors: the file differs from its manifest (size or checksum)"


def manifest(version: int) -> Manifest:
    return Manifest(fingerprint="f", version=version, units=FILES)


@pytest.fixture
def script() -> Script:
    """Return a script: all VMs are lost after step 7, with a checkpoint of version 6, which two new workers load."""
    script = formed(2, num_steps=20, expected_nodes=2)
    for version in range(1, 7):
        script.prepared()
        if version in (3, 6):
            script.saved(version)
    script.prepared()
    for worker in ("n1", "n2"):
        script.tell(WorkerLost(worker=worker, cause="killed"))
    script.ready("n3", "n4")
    assert (script.state.phase, script.state.version, script.code) == (Phase.RESHAPING, 6, "set_back")
    return script


def fails(script: Script, worker: str, error: str = DAMAGED) -> tuple[Action, ...]:
    """Let a worker report that it cannot load the checkpoint."""
    answer = Failed(worker=worker, generation=script.state.generation, error=error, cause="checkpoint")
    return script.tell(WorkerAnswered(worker=worker, answer=answer))


def nobody_can_load(script: Script) -> tuple[Action, ...]:
    """Let both workers report this; after the last answer the controller searches storage."""
    assert fails(script, "n3") == (Abort(worker="n4", generation=script.state.generation),)
    return fails(script, "n4")


def test_a_damaged_version_is_skipped_by_the_same_workers(script: Script) -> None:
    assert nobody_can_load(script) == (FindCheckpoint(doubted=6),)
    assert script.state.phase is Phase.RESTING
    actions = script.tell(CheckpointFound(manifest=manifest(3), passed_over=(f"{DAMAGED}; version 6 is skipped",)))
    assert receivers(actions, SendReshape) == ["n3", "n4"]
    assert len(actions) == 2  # no worker is ended, and nothing is given back or requested
    assert script.code == "set_back"
    assert DAMAGED in script.sentence
    assert "back to version 3, the newest checkpoint, 3 steps are to be redone" in script.sentence
    script.reshaped()
    script.prepared()
    assert (script.state.version, script.state.saving.doubt) == (4, None)


def test_a_whole_version_is_loaded_again_after_growing_pauses(script: Script) -> None:
    nobody_can_load(script)
    pauses = []
    for _ in range(3):
        actions = script.tell(CheckpointFound(manifest=manifest(6)))
        assert receivers(actions, SendReshape) == ["n3", "n4"]
        assert script.state.version == 6
        assert nobody_can_load(script) == ()
        began_s = script.now_s
        assert script.wake() == (FindCheckpoint(doubted=6),)
        pauses.append(round(script.now_s - began_s, 6))
    assert pauses == [PAUSES.pause_s(tried) for tried in range(3)]


def test_silent_storage_is_not_damage_and_is_retried_until_the_limit(script: Script) -> None:
    actions = nobody_can_load(script)
    began_s, num_requested = script.now_s, 0
    while script.state.phase is not Phase.ENDED:
        assert actions == (FindCheckpoint(doubted=6),)
        num_requested += 1
        assert script.state.saving.checkpoint.version == 6
        actions = script.tell(CheckpointNotFound(error="storage took longer than 600 s", damaged=False))
        assert "whether version 6 is whole is not known" in script.sentence
        actions = actions or script.wake()
    assert num_requested > 10
    limit_s = script.state.config.policy.give_up_after_s
    assert limit_s <= script.now_s - began_s <= limit_s + PAUSES.most_s + 10
    (finish,) = actions
    assert finish.outcome == "failed"
    assert "policy.give_up_after_s" in finish.sentence


def read_by(actions: tuple[Action, ...]) -> dict[str, set[str | None]]:
    """Return who reads the units that each worker gets from the checkpoint; None: the worker itself."""
    orders = [action.order for action in actions if isinstance(action, SendReshape)]
    read: dict[str, set[str | None]] = {}
    for source in orders[0].sources:
        if source.kind == "checkpoint":
            read.setdefault(source.worker, set()).add(source.peer)
    return read


def test_a_worker_that_cannot_load_gets_units_that_another_reads(script: Script) -> None:
    fails(script, "n3", "v00000006/s0.safetensors: cannot be read: no route to the storage")
    assert script.aborted() == (FindCheckpoint(doubted=6),)
    actions = script.tell(CheckpointFound(manifest=manifest(6)))
    assert read_by(actions) == {"n3": {"n4"}, "n4": {None}}
    assert "others read what n3 could not" in script.sentence
    script.reshaped()
    script.prepared()
    assert (script.state.version, script.state.saving.doubt) == (7, None)


def test_if_no_worker_can_read_for_others_each_retries(script: Script) -> None:
    fails(script, "n3")
    script.aborted()
    script.tell(CheckpointFound(manifest=manifest(6)))
    fails(script, "n4", "v00000006/s0.safetensors: cannot be read: no route to the storage")
    script.aborted()
    script.wake()
    actions = script.tell(CheckpointFound(manifest=manifest(6)))
    assert read_by(actions) == {"n3": {None}, "n4": {None}}


def test_a_third_worker_reads_for_two_without_storage(script: Script) -> None:
    nobody_can_load(script)
    script.ready("n5")
    actions = script.tell(CheckpointFound(manifest=manifest(6)))
    read = read_by(actions)
    assert receivers(actions, SendReshape) == ["n3", "n4", "n5"]
    assert set().union(*read.values()) <= {"n5", None}
    assert {worker for worker, readers in read.items() if None in readers} <= {"n5"}


def test_without_an_undamaged_version_the_run_ends_and_says_so(script: Script) -> None:
    nobody_can_load(script)
    told = f"{DAMAGED}; no other checkpoint there is whole"
    (finish,) = script.tell(CheckpointNotFound(error=told, damaged=True))
    assert finish == Finish(outcome="failed", sentence=told)


def test_a_worker_waiting_for_storage_is_aborted_and_not_ended(script: Script) -> None:
    script.reshaped("n3")
    actions = script.wake()
    assert actions == (Abort(worker="n4", generation=script.state.generation),)
    assert "storage did not give n4" in script.sentence
    assert script.aborted() == (FindCheckpoint(doubted=6),)
    actions = script.tell(CheckpointFound(manifest=manifest(6)))
    kinds = {source.kind for action in actions for source in action.order.sources}  # type: ignore[union-attr]
    assert kinds == {"keep", "peer", "checkpoint"}  # one worker's units come from its memory, and the rest from storage


def test_storage_that_is_read_for_long_is_waited_for(script: Script) -> None:
    nobody_can_load(script)
    for _ in range(3):
        assert script.last.wake_at_s is not None
        assert script.tell(Tick(), at_s=script.last.wake_at_s) == ()
        assert script.state.phase is Phase.RESTING
    assert receivers(script.tell(CheckpointFound(manifest=manifest(6))), SendReshape) == ["n3", "n4"]


def test_a_stop_while_storage_is_read_ends_the_run_and_claims_nothing(script: Script) -> None:
    nobody_can_load(script)
    (finish,) = script.tell(StopRequested(reason="SIGINT"))
    assert finish.outcome == "stopped"
    assert finish.sentence == f"SIGINT; n3 could not load version 6: {DAMAGED}"
