"""From no VM to the first generation."""

from __future__ import annotations

import pytest
from controller_script import Script, receivers, script_in
from simulated_job import FILES, MANIFEST, PLANS, make_config

from manager.controller.shape.forming import GATHER_S
from manager.controller.state.actions import (
    EndWorker,
    Finish,
    SendReshape,
    StartWorker,
)
from manager.controller.state.events import (
    NodeAppeared,
    Tick,
    WorkerAnswered,
    WorkerLost,
)
from manager.controller.state.state import Phase
from morph.contract.messages import (
    Failed,
)


def test_a_node_gets_a_worker_once() -> None:
    script = Script()
    assert script.tell(NodeAppeared(node="n1")) == (StartWorker(worker="n1"),)
    assert script.tell(NodeAppeared(node="n1")) == ()


def test_the_start_waits_for_every_expected_node() -> None:
    script = Script(expected_nodes=3)
    assert script.ready("n1", "n2") == ()
    assert script.code == "start_wait"
    actions = script.ready("n3")
    assert receivers(actions, SendReshape) == ["n1", "n2", "n3"]
    order = next(action.order for action in actions if isinstance(action, SendReshape))
    assert (order.generation, order.version, order.plan.shape) == (1, 0, "3x1")
    assert {source.kind for source in order.sources} == {"initial"}


def test_the_start_waits_no_longer_than_its_patience_once_a_plan_fits() -> None:
    script = Script(expected_nodes=6)
    script.ready("n1", "n2")
    assert script.last is not None
    wake_at_s = script.last.wake_at_s
    assert wake_at_s == pytest.approx(script.now_s + 5.0)
    assert script.tell(Tick(), at_s=wake_at_s - 0.01) == ()
    assert receivers(script.tell(Tick(), at_s=wake_at_s), SendReshape) == ["n1", "n2"]


def test_a_run_starts_from_the_checkpoint_it_is_given() -> None:
    script = Script(initial_version=5, initial_checkpoint=MANIFEST, expected_nodes=2)
    order = next(action.order for action in script.ready("n1", "n2") if isinstance(action, SendReshape))
    assert order.version == 5
    assert {source.kind for source in order.sources} == {"checkpoint"}


def test_a_run_that_has_all_its_steps_already_finishes_at_once() -> None:
    script = Script(initial_version=5, initial_checkpoint=MANIFEST, num_steps=5)
    script.tell(NodeAppeared(node="n1"))
    (finish,) = script.tell(Tick())
    assert isinstance(finish, Finish)
    assert finish.outcome == "finished"


def test_a_setup_that_fails_ends_the_run_before_the_start_and_only_the_worker_later() -> None:
    failed = Failed(worker="n1", generation=0, error="no such job")
    script = Script()
    script.tell(NodeAppeared(node="n1"))
    (finish,) = script.tell(WorkerAnswered(worker="n1", answer=failed))
    assert finish == Finish(outcome="failed", sentence="n1 could not be set up: no such job")
    script = script_in(Phase.TRAINING)
    script.tell(NodeAppeared(node="n9"))
    assert script.tell(WorkerAnswered(worker="n9", answer=failed)) == (EndWorker(worker="n9"),)
    assert script.state.phase is Phase.TRAINING


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"unit_bytes": {"s0": 1}}, "do not name the same units"),
        ({"plans": {1: PLANS[2]}}, r"plans\[1\] needs 2 workers"),
        ({"fingerprint": "g"}, "made for another model"),
        ({"initial_version": 3}, "no checkpoint to start from"),
        ({"initial_version": 4, "initial_checkpoint": MANIFEST}, "initial_version is 4, the checkpoint's is 5"),
        (
            {"initial_version": 5, "initial_checkpoint": MANIFEST.model_copy(update={"units": FILES[:2]})},
            "do not name the same units",
        ),
    ],
)
def test_contradictions_in_the_configuration_are_refused(fields: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        make_config(**fields)


def test_patience_that_runs_out_while_workers_may_follow_one_that_is_lost_does_not_spin() -> None:
    script = Script(expected_nodes=9)
    script.ready("n1.d0", "n1.d1", "n2.d0", "n2.d1")
    first_s = script.state.waits.first_feasible_s
    assert first_s is not None
    patience_s = first_s + script.state.config.policy.start_patience_s
    script.tell(WorkerLost(worker="n1.d0", cause="killed"), at_s=patience_s - 0.1)
    assert script.last is not None
    assert script.last.wake_at_s == patience_s - 0.1 + GATHER_S
