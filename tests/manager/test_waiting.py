"""When a change waits for a node that is almost ready, and for how long at most."""

from __future__ import annotations

import json

import pytest
from controller_script import Script, changed, formed, receivers, script_in
from pydantic import ValidationError
from simulated_job import MIXED, PLANS, RULES, make_config, make_plan

from manager.controller.shape.selection import hold_s, record_flap
from manager.controller.state.actions import Abort, EndWorker, SendReshape, SendStep
from manager.controller.state.config import ControllerConfig
from manager.controller.state.events import NobodyHeard, NodeAppeared, StopRequested, Tick, WorkerAnswered, WorkerLost
from manager.controller.state.state import Flaps, Phase
from manager.controller.state.transition import Transition
from morph.contract.messages import Aborted, WorkerReady
from morph.contract.pool import Pool
from morph.contract.rules import Rules
from morph.contract.salvage import LOSSES, KeptSums, partial_sum

LONG = {2: make_plan(2, 1, num_micro_batches=100), 4: make_plan(2, 2, num_micro_batches=100)}
STEP_S = LONG[2].expected.mini_batch_s


def is_ready(script: Script, worker: str) -> tuple[object, ...]:
    return script.tell(WorkerAnswered(worker=worker, answer=WorkerReady(worker=worker, pid=1, setup_s=1)))


def test_after_a_loss_training_waits_for_an_almost_ready_node() -> None:
    script = script_in(Phase.HOLDING)
    assert script.code == "holding"
    assert receivers(is_ready(script, "n5"), SendReshape) == ["n2", "n3", "n4", "n5"]  # type: ignore[arg-type]


def test_a_pause_for_a_node_is_no_longer_than_a_later_change() -> None:
    script = script_in(Phase.HOLDING)
    until_s = script.state.waits.hold_until_s
    now, then = PLANS[3].expected.examples_per_s, PLANS[4].expected.examples_per_s
    assert until_s == pytest.approx(script.now_s + 1.0 * then / now)
    assert script.last.wake_at_s is not None
    assert script.last.wake_at_s <= until_s
    assert receivers(script.tell(Tick(), at_s=until_s), SendReshape) == ["n2", "n3", "n4"]


def test_the_awaited_node_that_dies_ends_the_wait() -> None:
    script = script_in(Phase.HOLDING)
    actions = script.tell(WorkerLost(worker="n5", cause="killed"))
    assert receivers(actions, SendReshape) == ["n2", "n3", "n4"]


def test_a_join_waits_for_a_second_newcomer_while_training_continues() -> None:
    script = formed(2, plans={2: PLANS[2], 3: PLANS[3], 4: PLANS[4]}, expected_nodes=2)
    script.ready("n3")
    script.tell(NodeAppeared(node="n4"))
    assert receivers(script.prepared(), SendStep) == ["n1", "n2"]
    is_ready(script, "n4")
    assert receivers(script.prepared(), SendReshape) == ["n1", "n2", "n3", "n4"]


def test_a_join_waits_no_longer_than_a_second_change_would_cost() -> None:
    script = formed(2, plans={2: PLANS[2], 3: PLANS[3], 4: PLANS[4]}, expected_nodes=2)
    script.ready("n3")
    script.tell(NodeAppeared(node="n4"))
    script.state = changed(script.state, setup_s=1.5)
    script.prepared()
    gain = PLANS[3].expected.examples_per_s / PLANS[2].expected.examples_per_s - 1
    assert script.state.waits.join_since_s is not None
    script.now_s = script.state.waits.join_since_s + 1.0 / gain - 0.5
    assert receivers(script.prepared(), SendStep) == ["n1", "n2"]
    script.now_s = script.state.waits.join_since_s + 1.0 / gain
    assert receivers(script.prepared(), SendReshape) == ["n1", "n2", "n3"]


def test_answers_to_small_changes_were_computed_beforehand() -> None:
    config = Script().state.config
    for count in range(2, 8):
        best = config.best_plan(count)
        assert best in config.plans.values()
        assert best.num_workers <= count
        assert all(
            plan.expected.examples_per_s <= best.expected.examples_per_s
            for number, plan in config.plans.items()
            if number <= count
        )
    assert config.best_plan(1) is None


@pytest.mark.parametrize(
    ("there", "shape"),
    [
        ("fast=1,slow=1", "1x1 + 1x1"),
        ("fast=9", "2x2"),
        ("fast=2,slow=1", "2x1 + 1x1"),
        ("slow=3,fast=9", "2x2 + 2x1 + 1x1"),
        ("other=4,fast=2", "2x1"),
        ("other=4", None),
    ],
)
def test_of_a_table_of_pools_the_fastest_that_fits_is_taken(there: str, shape: str | None) -> None:
    config = make_config(plans=MIXED)
    kept = ControllerConfig.model_validate_json(config.model_dump_json())
    for each in (config, kept):
        best = each.best_plan(Pool.parse(there))
        assert (best.shape if best is not None else None) == shape


def test_keys_of_a_table_of_one_type_are_numbers_in_a_journal() -> None:
    config = make_config()
    assert set(json.loads(config.model_dump_json())["plans"]) == {"2", "3", "4", "5", "6"}
    assert ControllerConfig.model_validate_json(config.model_dump_json()) == config
    with pytest.raises(ValidationError, match=r"plans\[fast=1\] needs fast=2 workers"):
        make_config(plans={"fast=1": MIXED[Pool.of({"fast": 2})]})


def test_a_pause_for_vms_ends_one_day() -> None:
    script = script_in(Phase.WAITING)
    (finish,) = script.wake()
    assert finish.outcome == "stopped"
    assert "there were never 2 ready workers within 500 s" in finish.sentence
    early = script_in(Phase.WAITING)
    assert early.tell(Tick(), at_s=early.now_s + 400.0) == ()


def test_time_in_which_no_worker_could_be_heard_is_not_waiting() -> None:
    script = formed(2, expected_nodes=2)
    script.tell(WorkerLost(worker="n2", cause="killed"))
    assert script.state.phase is Phase.ABORTING
    late_s = script.now_s + 40.0 + script.state.step.order.give_up_s
    script.tell(NobodyHeard(lasted_s=40.0), at_s=script.now_s + 40.0)
    assert script.tell(Tick(), at_s=late_s - 0.1) == ()
    assert EndWorker(worker="n1") in script.tell(Tick(), at_s=late_s + 0.1)


def with_morph_s(morph_s: float) -> Rules:
    """Return rules by which a planned change costs this many seconds."""
    return RULES.model_copy(update={"wait": RULES.wait.model_copy(update={"morph_s": morph_s})})


def script_of_long_steps(**policy: object) -> Script:
    """Return a script in which two workers began a long step, and a third waits for a fourth to be of use."""
    script = formed(2, plans=LONG, expected_nodes=2, policy=make_config().policy.model_copy(update=policy))
    script.ready("n3")
    assert script.state.phase is Phase.TRAINING
    script.tell(NodeAppeared(node="n4"))
    return script


def test_a_long_step_is_interrupted_for_newcomers_and_keeps_its_sums() -> None:
    script = script_of_long_steps()
    script.now_s = 5.0
    assert [type(action) for action in is_ready(script, "n4")] == [Abort, Abort]
    assert "100.0% faster" in script.sentence
    assert script.state.waits.num_fruitless == 0
    for worker, stage in (("n1", range(3)), ("n2", range(3, 6))):
        sums = [partial_sum(f"s{section}", {section: 0b1111}) for section in stage]
        sums.append(partial_sum("s0+s5", {stage[0] and 5: 0b1111}))
        sums += [partial_sum(LOSSES, {5: 0b1111})] if stage[0] else []
        kept = KeptSums(step=0, sums=tuple(sums))
        answer = Aborted(worker=worker, generation=script.state.generation, peer_lost=False, kept=kept)
        actions = script.tell(WorkerAnswered(worker=worker, answer=answer))
    assert receivers(actions, SendReshape) == ["n1", "n2", "n3", "n4"]
    assert script.state.reshape.salvage.remaining == ((4, 100),)


@pytest.mark.parametrize(
    ("policy", "at_s", "before"),
    [
        ({}, STEP_S - 4.0, ()),  # little of the step is left
        ({"redundancy": "state"}, 5.0, ()),  # nothing would be kept
        ({}, 5.0, (StopRequested(reason="asked to"),)),
        ({"rules": with_morph_s(4.0)}, 5.0, (NodeAppeared(node="n5"),)),  # and will soon be ready too
        ({"min_join_gain": 1.5}, 5.0, ()),
        ({"rules": with_morph_s(20.0)}, 5.0, ()),
    ],
)
def test_a_step_is_not_given_up_if_that_costs_more(
    policy: dict[str, object], at_s: float, before: tuple[StopRequested | NodeAppeared, ...]
) -> None:
    script = script_of_long_steps(**policy)
    script.now_s = at_s
    for event in before:
        script.tell(event)
    assert is_ready(script, "n4") == ()
    assert script.state.phase is Phase.TRAINING


FLAPS = RULES.flaps


def test_each_return_after_the_first_costs_twice_as_much() -> None:
    transition = Transition(Script().state, 0.0)
    holds_s = []
    for number in range(6):
        transition.now_s = float(number)
        record_flap(transition, "m")
        holds_s.append(hold_s(transition, "m"))
    assert holds_s == pytest.approx([0.0, 2.0, 4.0, 8.0, 8.0, 8.0])
    assert hold_s(transition, "other") == 0.0


def test_old_flapping_is_forgotten() -> None:
    transition = Transition(Script().state, 1.0)
    for _ in range(2):
        record_flap(transition, "m")
    assert hold_s(transition, "m") > 0.0
    transition.now_s += FLAPS.memory_s
    assert hold_s(transition, "m") == 0.0
    record_flap(transition, "other")
    assert set(transition.state.provisioning.flaps) == {"other"}
    transition.change_provisioning(flaps={"m": Flaps(num=10**6, last_s=transition.now_s)})
    assert hold_s(transition, "m") == FLAPS.hold_max_s


def flapped_twice(script: Script) -> None:
    """Return a script in which a machine has just gone away for the second time."""
    transition = Transition(script.state, script.now_s)
    record_flap(transition, "m")
    record_flap(transition, "m")
    script.state = transition.state


def comes(script: Script, node: str, host: str) -> None:
    """Bring up a machine, and let its worker get ready."""
    script.tell(NodeAppeared(node=node, host=host))
    script.tell(WorkerAnswered(worker=node, answer=WorkerReady(worker=node, pid=1, setup_s=0)))


def morphs_in(seconds: float) -> int:
    """Count generations while one machine is there for 1 s, away for 1 s, and so on; steps take 0.4 s."""
    script = formed(2, plans={2: PLANS[2], 3: PLANS[3]}, expected_nodes=2, num_steps=10**6)
    number, there = 0, False
    next_s = script.now_s
    while script.now_s < seconds:
        if script.now_s >= next_s:
            next_s, number = script.now_s + 1.0, number + (not there)
            if there:
                script.tell(WorkerLost(worker=f"m{number}", cause="revoked"))
            else:
                comes(script, f"m{number}", "m")
            there = not there
        if script.state.phase is Phase.ABORTING:
            script.aborted()
        elif script.state.phase is Phase.RESHAPING:
            script.reshaped()
        elif script.state.phase is Phase.TRAINING:
            script.prepared()
        else:
            script.tell(Tick())
    return script.state.generation


def test_a_flapping_machine_is_taken_in_a_few_times_only() -> None:
    assert morphs_in(10.0) == morphs_in(40.0)
    assert morphs_in(40.0) <= 7


def test_a_machine_that_stays_long_enough_is_taken_in_again() -> None:
    script = formed(2, plans={2: PLANS[2], 3: PLANS[3]}, expected_nodes=2, num_steps=10**6)
    flapped_twice(script)
    comes(script, "m3", "m")
    ready_s = script.now_s
    script.prepared()
    assert script.state.phase is Phase.TRAINING
    script.now_s = ready_s + FLAPS.hold_s
    script.prepared()
    assert "m3" in {slot.worker for slot in script.state.slots}


def test_below_the_minimum_a_flapping_machine_is_better_than_none() -> None:
    script = Script(expected_nodes=2)
    flapped_twice(script)
    script.ready("n1")
    comes(script, "m3", "m")
    assert {slot.worker for slot in script.state.slots} == {"n1", "m3"}
