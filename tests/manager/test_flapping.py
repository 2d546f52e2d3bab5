"""Machines that come and go do not make the shape come and go."""

from __future__ import annotations

import pytest
from controller_script import Script
from simulated_job import PLANS, RULES

from manager.controller.shape.flapping import flapped, hold_s
from manager.controller.state.draft import Draft
from manager.controller.state.events import NodeAppeared, Tick, WorkerAnswered, WorkerLost
from manager.controller.state.state import Flaps, Phase
from morph.contract.messages import WorkerReady

FLAPS = RULES.flaps


def test_the_first_return_is_free_and_each_further_one_costs_twice_as_much_up_to_a_bound() -> None:
    draft = Draft(Script().state, 0.0)
    holds_s = []
    for number in range(6):
        draft.now_s = float(number)
        flapped(draft, "m")
        holds_s.append(hold_s(draft, "m"))
    assert holds_s == pytest.approx([0.0, 2.0, 4.0, 8.0, 8.0, 8.0])
    assert hold_s(draft, "other") == 0.0


def test_what_was_long_ago_is_forgotten() -> None:
    draft = Draft(Script().state, 1.0)
    for _ in range(2):
        flapped(draft, "m")
    assert hold_s(draft, "m") > 0.0
    draft.now_s += FLAPS.memory_s
    assert hold_s(draft, "m") == 0.0
    flapped(draft, "other")
    assert set(draft.state.provisioning.flaps) == {"other"}
    draft.change_provisioning(flaps={"m": Flaps(num=10**6, last_s=draft.now_s)})
    assert hold_s(draft, "m") == FLAPS.hold_max_s


def flapped_twice(script: Script) -> None:
    """A machine went away twice just now."""
    draft = Draft(script.state, script.now_s)
    flapped(draft, "m")
    flapped(draft, "m")
    script.state = draft.state


def comes(script: Script, node: str, host: str) -> None:
    """A machine comes up and its worker gets ready."""
    script.tell(NodeAppeared(node=node, host=host))
    script.tell(WorkerAnswered(worker=node, answer=WorkerReady(worker=node, pid=1, setup_s=0)))


def morphs_in(seconds: float) -> int:
    """Count generations while one machine is there for 1 s, away for 1 s, and so on; steps take 0.4 s."""
    script = Script(plans={2: PLANS[2], 3: PLANS[3]}, expected_nodes=2, num_steps=10**6)
    script.ready("n1", "n2")
    script.reshaped()
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


def test_a_machine_that_comes_and_goes_is_taken_in_a_few_times_and_then_left_alone() -> None:
    assert morphs_in(10.0) == morphs_in(40.0)
    assert morphs_in(40.0) <= 7


def test_a_machine_that_stays_long_enough_is_taken_in_again() -> None:
    script = Script(plans={2: PLANS[2], 3: PLANS[3]}, expected_nodes=2, num_steps=10**6)
    script.ready("n1", "n2")
    script.reshaped()
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
