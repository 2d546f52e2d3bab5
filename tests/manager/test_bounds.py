"""No bound is fixed: they suit steps of twenty minutes, and units of several GB on links of 10 Gb/s."""

from __future__ import annotations

import pytest
from controller_script import Script, formed, receivers
from simulated_job import PLANS, RULES, SIZES, UNITS

from manager.controller.state.actions import Action, EndWorker, SendReshape, SendStep
from manager.controller.state.bounds import FLOOR_S, HEADROOM, MOST_DOUBLINGS
from manager.controller.state.events import NodeAppeared, Tick, WorkerAnswered, WorkerLost
from manager.controller.state.state import Phase
from manager.simulation.spot.cluster import SpotCluster
from manager.simulation.spot.job import Durations, SpotJob
from morph.contract.cluster import Policy
from morph.contract.messages import EvaluationSize, WorkerReady
from morph.contract.plan import Plan
from morph.contract.rules import CheckpointRules

GB = 10**9
STEP_S = 1200.0
LINK_BYTES_PER_S = 10e9 / 8
UNIT_BYTES = dict.fromkeys(UNITS, 12 * GB)
POLICY = Policy(checkpoint_every_steps=3, heartbeat_timeout_s=2.0, start_patience_s=5.0)


def slow(plan: Plan, step_s: float = STEP_S) -> Plan:
    """Return the same plan with steps of twenty minutes."""
    expected = plan.expected.model_copy(update={"mini_batch_s": step_s * 4 / plan.num_workers})
    return plan.model_copy(update={"expected": expected})


def large(**fields: object) -> Script:
    """Return the controller's state for such a job, without workers."""
    plans = {count: slow(plan) for count, plan in PLANS.items()}
    return Script(**{"plans": plans, "unit_bytes": UNIT_BYTES, "state_copies": 3, "policy": POLICY} | fields)


def training(**fields: object) -> Script:
    """Return a script in which four workers of such a job run their first step."""
    script = large(**fields)
    script.ready("n1", "n2", "n3", "n4")
    script.reshaped()
    assert script.state.phase is Phase.TRAINING
    return script


def passes(script: Script, took_s: float) -> list[Action]:
    """Let time pass with every tick that is due; return the controller's actions."""
    assert script.last is not None
    until_s, actions = script.now_s + took_s, []
    while script.last.wake_at_s is not None and script.last.wake_at_s <= until_s:
        actions += script.tell(Tick(), at_s=script.last.wake_at_s)
    script.now_s = until_s
    return actions


def until_ended(script: Script) -> float:
    """Let time pass until a worker is ended; return the seconds."""
    begun_s = script.now_s
    for _ in range(20):
        assert script.last.wake_at_s is not None
        if any(isinstance(action, EndWorker) for action in script.tell(Tick(), at_s=script.last.wake_at_s)):
            return script.now_s - begun_s
    raise AssertionError("nobody is ended")


def test_a_shape_may_move_all_its_state_over_a_slow_link() -> None:
    script = training()
    script.ready("n5")
    passes(script, STEP_S)
    script.prepared()
    script.tell(WorkerLost(worker="n4", cause="killed"))
    script.aborted()
    assert script.state.phase is Phase.RESHAPING
    lacked = script.state.reshape.lacked["n5"]
    assert {source.kind for source in lacked} == {"peer"}
    slowly_s = len(lacked) * 12 * GB / (LINK_BYTES_PER_S / 10)
    assert slowly_s > 300
    assert passes(script, slowly_s) == []
    assert receivers(script.reshaped(), SendStep) == script.members


def test_a_shape_may_read_frozen_weights_from_slow_storage() -> None:
    small = dict.fromkeys(UNITS, 1000)
    for size, healthy in ((50 * GB, True), (0, False)):
        num_sections = PLANS[4].stages[-1].end_section
        script = large(unit_bytes=small, constant_bytes=(size,) * num_sections)
        script.ready("n1", "n2", "n3", "n4")
        assert script.state.phase is Phase.RESHAPING
        assert (passes(script, 50 * GB / 1e8) == []) is healthy


def test_a_worker_in_a_long_task_may_finish_before_it_aborts() -> None:
    script = training()
    passes(script, 10)
    script.tell(WorkerLost(worker="n4", cause="killed"))
    assert script.state.phase is Phase.ABORTING
    micro_batch_s = STEP_S / 4
    assert passes(script, 1.5 * micro_batch_s) == []
    script.aborted()
    assert {"n1", "n2", "n3"} <= set(script.state.workers)


def test_a_hung_worker_is_found_within_a_known_multiple_of_its_step() -> None:
    script = training()
    script.prepared("n1", "n2", "n3")
    took_s = until_ended(script)
    assert HEADROOM * STEP_S < took_s <= 2 * HEADROOM * STEP_S
    assert "n4" not in script.state.workers


def test_small_jobs_get_the_floor_and_set_values_win() -> None:
    for limit_s, expected_s in ((None, FLOOR_S), (20.0, 20.0)):
        policy = POLICY.model_copy(update={"order_timeout_s": limit_s, "rules": RULES})
        script = formed(4, policy=policy)
        script.prepared("n1", "n2", "n3")
        assert script.state.step.order.limit_s == expected_s
        assert script.state.reshape.limit_s == expected_s
        assert until_ended(script) == pytest.approx(expected_s, abs=1.0)


def test_only_a_step_with_an_evaluation_has_time_for_it() -> None:
    script = large(num_steps=9)
    for worker in ("n1", "n2"):
        script.tell(NodeAppeared(node=worker))
    for worker in ("n1", "n2"):
        size = EvaluationSize(every_steps=2, num_micro_batches=80)
        ready = WorkerReady(worker=worker, pid=1, setup_s=1, evaluation=size)
        script.tell(WorkerAnswered(worker=worker, answer=ready))
    script.tell(Tick(), at_s=10.0)
    script.reshaped()
    limits_s = []
    for _ in range(4):
        limits_s.append(script.state.step.order.limit_s)
        script.prepared()
    assert limits_s[0] == limits_s[1] == limits_s[3]
    assert limits_s[2] == pytest.approx(limits_s[0] + HEADROOM * 10 * 2 * STEP_S)
    assert script.state.reshape.limit_s >= max(limits_s)  # workers wait for one another as long as before


def test_slower_shapes_are_learned_and_failing_ones_get_more_time() -> None:
    script = training()
    limits_s = []
    for _ in range(MOST_DOUBLINGS + 2):
        limits_s.append(script.state.step.order.limit_s)
        script.aborted()
        script.reshaped()
    assert limits_s == [limits_s[0] * 2 ** min(index, MOST_DOUBLINGS) for index in range(MOST_DOUBLINGS + 2)]
    passes(script, 5 * STEP_S)
    script.prepared()
    assert script.state.step.order is not None
    assert script.state.waits.num_fruitless == 0
    assert script.state.step.order.limit_s > HEADROOM * 5 * STEP_S


@pytest.mark.parametrize("unit_bytes", [SIZES, UNIT_BYTES])
def test_a_file_may_take_as_long_as_slow_storage_needs(unit_bytes: dict[str, int]) -> None:
    rules, most_bytes = CheckpointRules(), max(unit_bytes.values())
    assert rules.file_limit_s(most_bytes) == max(600.0, most_bytes / 5e6)
    assert CheckpointRules(file_timeout_s=7.0).file_limit_s(most_bytes) == 7.0


def test_shapes_that_fail_are_tried_again_for_longer_than_one_step_takes() -> None:
    policy = POLICY.model_copy(update={"give_up_after_s": 600.0, "max_fruitless_generations": 1})
    script = training(policy=policy)
    script.aborted()
    assert script.state.phase is Phase.RESTING
    for _ in range(2):
        passes(script, 300.0)
        script.reshaped()
        assert script.state.phase is Phase.TRAINING
        passes(script, STEP_S)
        script.aborted()
    assert script.state.phase is Phase.RESTING
    assert script.state.finish is None


def test_such_a_job_survives_losses_without_ending_a_healthy_worker() -> None:
    actions: list[Action] = []
    job = SpotJob(
        name="large",
        batch_size=8,
        plans={count: slow(plan) for count, plan in PLANS.items()},
        units=UNITS,
        unit_bytes=UNIT_BYTES,
        durations=Durations(link_bytes_per_s=LINK_BYTES_PER_S / 5, storage_bytes_per_s=4e7, spread=0.3),
        policy=POLICY.model_copy(update={"redundancy": "off"}),
    )
    cluster = SpotCluster(
        job,
        num_steps=10**6,
        num_expected=4,
        watcher=lambda _now_s, _event, decision: actions.extend(decision.actions),
    )
    vms = [cluster.vm_came() for _ in range(5)]

    def taken(*gone: str) -> tuple[()]:
        for vm in gone:
            cluster.vm_taken(vm)
        return ()

    def came() -> tuple[()]:
        for _ in range(4):
            cluster.vm_came()
        return ()

    cluster.after(3 * 3600.0, lambda: taken(vms[0]))
    cluster.after(10 * 3600.0, lambda: taken(*vms[1:]))
    cluster.after(10 * 3600.0 + 60.0, came)
    cluster.play(20 * 3600.0)
    restored = [action.order for action in actions if isinstance(action, SendReshape)]
    assert any(source.kind == "checkpoint" for order in restored for source in order.sources)
    assert cluster.state.version >= 2 * 3 * 10
    assert not any(isinstance(action, EndWorker) for action in actions)
    assert cluster.state.generation == 3
