"""Every sentence of ``validate`` can be broken: a state for each that it names, and nothing before it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from controller_script import Script, changed, script_in
from simulated_job import MANIFEST, UNITS

from manager.controller.state.actions import Finish
from manager.controller.state.draft import Draft
from manager.controller.state.nodes import NodeState
from manager.controller.state.state import ControllerState, Failing, KeptNotice, NodeRequest, Phase, PreCopy, Probation
from manager.controller.state.validate import INVARIANTS, BrokenState, validate
from morph.contract.decided import Decided
from morph.contract.messages import PreCopyMove

Break = Callable[[ControllerState], ControllerState]


def having(**fields: Any) -> Break:
    """Replace fields of the state."""
    return lambda state: changed(state, **fields)


def inside(name: str, **fields: Any) -> Break:
    """Replace fields of a part of the state."""

    def broken(state: ControllerState) -> ControllerState:
        part = next(getattr(slice_, name) for slice_ in (state, state.step, state.saving) if hasattr(slice_, name))
        return changed(state, **{name: part.model_copy(update=fields)})

    return broken


def worker(name: str, **fields: Any) -> Break:
    """Replace fields of a worker."""

    def broken(state: ControllerState) -> ControllerState:
        draft = Draft(state, 0.0)
        draft.change_worker(name, **fields)
        return draft.state

    return broken


def sent_ahead(sender: str, receiver: str, number: int = 0) -> Break:
    """Have a unit sent ahead that the first worker holds."""

    def broken(state: ControllerState) -> ControllerState:
        assert state.plan is not None, "no shape is formed"
        move = PreCopyMove(unit=min(state.member_units["n1"]), sender=sender, receiver=receiver)
        ahead = PreCopy(number=number, plan=state.plan, slots=state.slots, moves=(move,), until_s=9.0, limit_s=9.0)
        return having(ahead=ahead)(state)

    return broken


def nobody_holds_a_unit(state: ControllerState) -> ControllerState:
    """Take a unit from everybody."""
    for name, entry in state.workers.items():
        state = worker(name, holds=entry.holds - {"s0"})(state)
    return state


FINAL = Failing(version=0, generation=1, worker="n1", sentence="broken", final=True)
GRANTED = NodeRequest(count=0, asked_s=0.0, granted={"n1": 0.0})

BROKEN: dict[str, tuple[Phase, Break]] = {
    "there is an order while somebody has it": (Phase.TRAINING, having(order=None)),
    "only known workers have orders": (Phase.TRAINING, having(awaited=frozenset({"n1", "stranger"}))),
    "no worker has an order before a shape, in a pause or at the end": (
        Phase.TRAINING,
        having(phase=Phase.HOLDING),
    ),
    "somebody has an order while a shape is formed, trains or is dissolved": (
        Phase.TRAINING,
        having(order=None, awaited=frozenset()),
    ),
    "an order is of the present generation": (Phase.TRAINING, inside("order", generation=7)),
    "an order is of its phase's kind": (Phase.RESHAPING, having(phase=Phase.TRAINING)),
    "orders are told to abort while a generation is dissolved, and never else": (
        Phase.ABORTING,
        inside("order", abort_sent_s=None),
    ),
    "in training a member has the step's order or has prepared it, and nobody else": (
        Phase.TRAINING,
        having(awaited=frozenset({"n1"})),
    ),
    "while committing, a commit or a unit of the last checkpoint is missing": (
        Phase.COMMITTING,
        having(order=None, awaited=frozenset(), pending=None),
    ),
    "no partial sums are kept while a step is run": (Phase.TRAINING, having(kept={"n1": ()})),
    "the members are those of the slots, each once": (Phase.RESHAPING, having(member_units={})),
    "there is no shape before the first generation and in pauses": (
        Phase.SEALING,
        having(phase=Phase.WAITING),
    ),
    "no generation is formed at the start": (Phase.STARTING, having(generation=1)),
    "the shape is the present generation's while it is formed and trains": (
        Phase.TRAINING,
        inside("reshape", generation=7),
    ),
    "no member of a shape that is formed or trains is lost": (
        Phase.RESHAPING,
        lambda state: having(
            workers={name: entry for name, entry in state.workers.items() if name != "n1"},
            awaited=state.step.awaited - {"n1"},
        )(state),
    ),
    "in training somebody holds each unit": (Phase.TRAINING, nobody_holds_a_unit),
    "in training a member holds its stage's units": (Phase.TRAINING, worker("n1", holds=frozenset())),
    "a wait for a node that is about to be ready has an end": (Phase.HOLDING, having(hold_until_s=None)),
    "a wait for VMs has a beginning": (Phase.WAITING, having(waiting_since_s=None)),
    "a rest has an end": (Phase.RESTING, having(rest_until_s=None)),
    "a run that is over has an outcome, and no other has": (
        Phase.TRAINING,
        having(finish=Finish(outcome="stopped", sentence="asked to")),
    ),
    "what is decided is of the present version": (Phase.TRAINING, having(decided=Decided(version=7))),
    "an error that is final stops the run": (Phase.TRAINING, having(failing=FINAL)),
    "a checkpoint under way is of all units, of a version that is decided, written by its writers": (
        Phase.COMMITTING,
        inside("pending", writers={"s0": "n1"}),
    ),
    "while sealing, a manifest is being written": (Phase.SEALING, having(sealing=())),
    "manifests are being written since a time": (Phase.TRAINING, having(sealing=(MANIFEST,))),
    "a worker is warming, ready, suspect or draining": (Phase.TRAINING, worker("n1", node=NodeState.BOOTING)),
    "who is warming is not set up": (Phase.TRAINING, worker("n1", node=NodeState.WARMING)),
    "who is ready or suspect is set up": (Phase.TRAINING, worker("n1", ready_s=None)),
    "who is not set up holds nothing": (Phase.HOLDING, worker("n5", holds=frozenset(UNITS))),
    "who drains does so until a time, and nobody else": (Phase.TRAINING, worker("n1", drain_until_s=9.0)),
    "who is probed is suspect and no member": (Phase.TRAINING, worker("n1", probation=Probation(due_s=9.0))),
    "whose notice is to be acknowledged drains": (Phase.TRAINING, having(leaving=frozenset({"n1"}))),
    "something of each request is awaited": (
        Phase.TRAINING,
        having(requests={"job-1": NodeRequest(count=0, asked_s=0.0)}),
    ),
    "a node boots for one request, and is not up": (Phase.TRAINING, having(requests={"job-1": GRANTED})),
    "a notice is kept of nodes that are not up": (
        Phase.TRAINING,
        having(kept_notices={"n1": KeptNotice(notice="first", taken_s=9.0)}),
    ),
    "units are sent ahead while training, under their number, by known workers": (
        Phase.TRAINING,
        sent_ahead("n1", "stranger"),
    ),
    "units are sent ahead by who holds them to who lacks them": (Phase.TRAINING, sent_ahead("n1", "n1")),
}


@pytest.mark.parametrize("sentence", INVARIANTS)
def test_a_state_that_cannot_be_is_named_by_its_sentence(sentence: str) -> None:
    phase, broken = BROKEN[sentence]
    state = script_in(phase).state
    validate(state)
    with pytest.raises(BrokenState, match=rf"job job, \w+: not so: {re.escape(sentence)} \(last events: .*n1"):
        validate(broken(state))


def test_a_script_validates_each_state_that_is_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(INVARIANTS, "nothing is ever decided", lambda state: not state.recent)
    with pytest.raises(BrokenState, match="nothing is ever decided"):
        Script().ready("n1")
