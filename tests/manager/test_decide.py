"""Every event in every phase."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
from controller_script import Script, changed, formed, script_in
from random_history import play, play_all
from simulated_job import MANIFEST, PLANS, UNITS

from manager.controller.decide import TRANSITIONS, ImpossibleEvent, decide
from manager.controller.shape import selection
from manager.controller.state.actions import AcknowledgeNotice, Action, Finish
from manager.controller.state.events import (
    EVENT_TYPES,
    MANIFEST_WRITER,
    AnsweredAlike,
    CheckpointFailed,
    CheckpointFound,
    CheckpointNotFound,
    ComputeTimesSeen,
    Event,
    ManagerResumed,
    ManifestWritten,
    NobodyHeard,
    NodeAppeared,
    NodesGranted,
    NodesStarted,
    NoticeGiven,
    NoticeWithdrawn,
    PreCopyReported,
    RequestRefused,
    Single,
    StopRequested,
    Tick,
    Together,
    UnitsWritten,
    WorkerAnswered,
    WorkerLost,
    WorkerProbed,
    WorkerTimes,
)
from manager.controller.state.nodes import NodeState
from manager.controller.state.state import ControllerState, Failing, KeptNotice, NodeRequest, Phase, PreCopy, Probation
from manager.controller.state.transition import Transition
from manager.controller.state.validate import INVARIANTS, BrokenState, validate
from morph.contract.decided import Decided
from morph.contract.messages import (
    Aborted,
    Answer,
    Committed,
    Failed,
    PreCopyMove,
    PreCopyReport,
    Prepared,
    Reshaped,
    UnitWritten,
    WorkerReady,
)
from morph.contract.timeline import ComputeTimes
from tests.grids import IS_LONG

GRID = list(itertools.product(Phase, EVENT_TYPES))
OF_CHECKPOINTS = (UnitsWritten, CheckpointFailed, ManifestWritten, CheckpointFound, CheckpointNotFound)
IMPOSSIBLE = {(Phase.STARTING, event_type) for event_type in OF_CHECKPOINTS}


def events_of(event_type: type[Event], script: Script) -> list[Event]:
    """Return events of one type: fitting ones, late ones, and such of strangers."""
    state = script.state
    everybody = [*state.workers, "stranger"]
    answers = [
        lambda worker, old: WorkerReady(worker=worker, pid=1, setup_s=0),
        lambda worker, old: Reshaped(
            worker=worker, generation=state.generation - old, groups_s=0, state_s=0, received_bytes=0
        ),
        lambda worker, old: script.prepared_answer(worker).model_copy(update={"generation": state.generation - old}),
        lambda worker, old: Committed(worker=worker, generation=state.generation - old, version=state.version),
        lambda worker, old: Aborted(worker=worker, generation=state.generation - old, peer_lost=True),
        lambda worker, old: Failed(worker=worker, generation=state.generation - old, error="broken"),
        lambda worker, old: Failed(
            worker=worker, generation=state.generation - old, error="damaged", cause="checkpoint"
        ),
    ]
    entry = UnitWritten(worker="n1", version=state.version, unit="s0", file="s0", size_bytes=1, sha256="0" * 64)
    reports = [PreCopyReport(number=1, following=("s0",)), PreCopyReport(number=99, error="broken")]
    times = [
        tuple(WorkerTimes(worker=name, generation=old, compute_s=(1.0,) * 9) for name in everybody)
        for old in (state.generation, state.generation - 1)
    ]
    events: dict[type[Event], Callable[[], list[Event]]] = {
        NodeAppeared: lambda: [NodeAppeared(node=worker) for worker in ("n1", "n9")],
        WorkerAnswered: lambda: [
            WorkerAnswered(worker=worker, answer=make(worker, old))
            for worker, old, make in itertools.product(everybody, (0, 1), answers)
        ],
        WorkerLost: lambda: [WorkerLost(worker=worker, cause="killed") for worker in everybody],
        UnitsWritten: lambda: [UnitsWritten(worker="n1", written=(entry,))],
        CheckpointFailed: lambda: [
            CheckpointFailed(worker=worker, error="disk full") for worker in (*everybody, MANIFEST_WRITER)
        ],
        ManifestWritten: lambda: [ManifestWritten(version=version) for version in (state.version, 99)],
        CheckpointFound: lambda: [
            CheckpointFound(manifest=MANIFEST.model_copy(update={"version": version})) for version in (1, 99)
        ],
        CheckpointNotFound: lambda: [CheckpointNotFound(error="silent", damaged=damaged) for damaged in (False, True)],
        PreCopyReported: lambda: [
            PreCopyReported(worker=worker, report=report) for worker in everybody for report in reports
        ],
        NodesGranted: lambda: [NodesGranted(request=request, nodes=("n8",)) for request in ("job-1", "job-9")],
        NodesStarted: lambda: [NodesStarted(request=request, nodes=("n8",)) for request in ("job-1", "job-9")],
        RequestRefused: lambda: [RequestRefused(request=request, cause="quota") for request in ("job-1", "job-9")],
        NoticeGiven: lambda: [NoticeGiven(worker=worker, lead_s=5.0, notice="first") for worker in everybody],
        NoticeWithdrawn: lambda: [NoticeWithdrawn(worker=worker) for worker in everybody],
        WorkerProbed: lambda: [
            WorkerProbed(worker=worker, probe=1, slowdown=slowdown) for worker in everybody for slowdown in (1, 2)
        ],
        ManagerResumed: lambda: [
            ManagerResumed(living=living) for living in ((), tuple(state.workers), ("stranger", "n1"))
        ],
        ComputeTimesSeen: lambda: [ComputeTimesSeen(times=one) for one in times],
        NobodyHeard: lambda: [NobodyHeard(lasted_s=lasted_s) for lasted_s in (0.0, 40.0)],
        StopRequested: lambda: [StopRequested(reason="asked to")],
        Tick: lambda: [Tick()],
    }
    return events[event_type]()


@pytest.mark.parametrize(("phase", "event_type"), [pair for pair in GRID if pair not in IMPOSSIBLE])
def test_every_event_in_every_phase_keeps_the_state_valid(phase: Phase, event_type: type[Event]) -> None:
    script = script_in(phase)
    for event, later_s in itertools.product(events_of(event_type, script), (0.1, 1000.0)):
        before = script.state.model_dump_json()
        decision = decide(script.state, event, script.now_s + later_s)
        validate(decision.state)
        assert decision.reason.sentence
        assert script.state.model_dump_json() == before, "the state given was changed"
        assert decision == decide(script.state, event, script.now_s + later_s)
        assert decision.wake_at_s is None or decision.state.phase is not Phase.ENDED


@pytest.mark.parametrize(("phase", "event_type"), sorted(IMPOSSIBLE, key=str))
def test_an_impossible_event_is_an_error_with_job_phase_event_and_history(
    phase: Phase, event_type: type[Event]
) -> None:
    script = script_in(phase)
    event = events_of(event_type, script)[0]
    with pytest.raises(ImpossibleEvent, match=rf"job job: {event.kind} cannot happen in phase starting") as caught:
        script.tell(event)
    assert "node_appeared n1 in starting: node_registered" in str(caught.value)
    assert event.model_dump_json() in str(caught.value)


def test_the_table_covers_the_grid_but_for_the_impossible_pairs() -> None:
    assert set(GRID) - set(TRANSITIONS) == IMPOSSIBLE


def test_ended_runs_take_any_event_without_an_action() -> None:
    script = script_in(Phase.ENDED)
    for event_type in EVENT_TYPES:
        for event in events_of(event_type, script):
            again = (script.state.finish,) if event_type is ManagerResumed else ()
            assert script.tell(event) == again
            assert script.state.phase is Phase.ENDED


def test_an_answer_of_every_kind_is_refused_from_a_stranger() -> None:
    script = script_in(Phase.TRAINING)
    for event in events_of(WorkerAnswered, script):
        if isinstance(event, WorkerAnswered) and event.worker == "stranger":
            assert script.tell(event) == ()
            assert script.code == "ignored"


def test_the_best_shape_is_chosen_once_when_a_planned_change_is_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    script = formed(2, plans={2: PLANS[2], 3: PLANS[3]}, expected_nodes=2)
    script.ready("n3")
    script.prepared("n1")
    chosen: list[Phase] = []
    steady = selection._steady
    monkeypatch.setattr(selection, "_steady", lambda state, now_s: chosen.append(state.phase) or steady(state, now_s))
    script.prepared("n2")
    assert script.state.generation == 2
    assert chosen == [Phase.TRAINING]


@pytest.mark.slow
def test_remembered_choices_equal_fresh_ones_in_every_history(monkeypatch: pytest.MonkeyPatch) -> None:
    once, num_kept = Transition.once, 0

    def checked(transition: Transition, question: Callable[..., Any], *depends_on: object) -> Any:
        nonlocal num_kept
        num_kept += question in transition._known
        kept = once(transition, question, *depends_on)
        assert kept == question(transition.state, transition.now_s)
        return kept

    monkeypatch.setattr(Transition, "once", checked)
    play_all(range(100 if IS_LONG else 15))
    assert num_kept > 100


def test_a_question_is_asked_again_once_what_it_depends_on_was_replaced() -> None:
    transition, asked = Transition(Script().state, 0.0), []

    def num_workers(state: Any, now_s: float) -> int:
        asked.append(now_s)
        return len(state.workers)

    for _ in range(3):
        assert transition.once(num_workers, transition.state.workers) == 0
    transition.change(workers={"n1": None})
    assert transition.once(num_workers, transition.state.workers) == 1
    assert len(asked) == 2


SEEDS = range(60 if IS_LONG else 40)
EVERY = 7 if IS_LONG else 47
"""After one of this many events of a history, the answers to the state are examined."""
played = cache(play)
TIMES = ComputeTimes(forward_s=0.1, recompute_s=0.0, backward_s=0.2, reduce_s=0.0, wait_s=0.0, step_s=0.3)


def one_by_one(state: ControllerState, events: Sequence[Single], now_s: float) -> tuple[ControllerState, list[Action]]:
    """Return the state after these events, each decided by itself at the same time, and all actions."""
    actions: list[Action] = []
    for event in events:
        decision = decide(state, event, now_s)
        state, actions = decision.state, actions + list(decision.actions)
    return state, actions


def check(
    state: ControllerState, events: Sequence[Single], now_s: float, *, alike: AnsweredAlike | None = None
) -> bool:
    """Decide the events together and one by one, and compare; return whether there were actions."""
    each, actions = one_by_one(state, events, now_s)
    both = decide(state, alike or Together(events=tuple(events)), now_s)
    told, before = both.state.model_dump(exclude={"recent"}), each.model_dump(exclude={"recent"})
    assert {name for name in told if told[name] != before[name]} == set()
    assert done(both.actions) == done(actions)
    return bool(actions)


def done(actions: Sequence[Action]) -> Counter[str]:
    """Return the actions; a VM's notices so far are acknowledged together."""
    return Counter(action.model_dump_json() for action in actions if not isinstance(action, AcknowledgeNotice))


def answers_to(state: ControllerState) -> list[Answer]:
    """Return possible answers to the present order, right and wrong ones."""
    generation, version = state.generation, state.version
    step = Prepared(worker="", generation=generation, step=version, attempt=state.step.attempt, times=TIMES)
    return [
        step,
        step.model_copy(update={"overflowed": True}),
        step.model_copy(update={"step": version + 1}),
        Reshaped(worker="", generation=generation, groups_s=0.1, state_s=0.0, received_bytes=0),
        Committed(worker="", generation=generation, version=version),
        Aborted(worker="", generation=generation, peer_lost=True),
    ]


@pytest.mark.slow
def test_equal_answers_together_change_the_same_as_one_by_one() -> None:
    acted: Counter[tuple[str, str]] = Counter()
    for seed in SEEDS:
        for _, state, _, _ in (entry for entry in played(seed).log[::EVERY] if not isinstance(entry, str)):
            for answer in answers_to(state):
                everybody = tuple(sorted(state.step.awaited)) or tuple(state.workers)
                for workers in (everybody, everybody[1:], (*everybody, "stranger")):
                    if not workers:
                        continue
                    events = [
                        WorkerAnswered(worker=worker, answer=answer.model_copy(update={"worker": worker}))
                        for worker in workers
                    ]
                    alike = AnsweredAlike(workers=workers, answer=answer)
                    acted[state.phase, answer.kind] += check(state, events, 10.0, alike=alike)
    assert acted["training", "prepared"] > 30
    assert acted["training", "aborted"] > 30
    assert acted["reshaping", "reshaped"] > 5
    assert acted["aborting", "aborted"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("length", [2, 3, 7])
def test_events_that_come_together_act_as_if_one_by_one(length: int) -> None:
    num_acted = 0
    for seed in SEEDS:
        cluster = played(seed)
        if cluster.state.config.target_nodes:  # what is requested is counted after each decision, not after each event
            continue
        history = [entry for entry in cluster.log if not isinstance(entry, str)]
        for first in range(0, len(history) - length, min(length, 4)):
            entries = history[first : first + length]
            try:
                num_acted += check(entries[0][1], [event for _, _, event, _ in entries], entries[-1][0])
            except ImpossibleEvent:  # it was possible only because of a worker's action in between
                continue
    assert num_acted > 200


Break = Callable[[ControllerState], ControllerState]


def having(**fields: Any) -> Break:
    return lambda state: changed(state, **fields)


def inside(name: str, **fields: Any) -> Break:
    """Replace fields of a part of the state."""

    def broken(state: ControllerState) -> ControllerState:
        part = next(getattr(slice_, name) for slice_ in (state, state.step, state.saving) if hasattr(slice_, name))
        return changed(state, **{name: part.model_copy(update=fields)})

    return broken


def worker(name: str, **fields: Any) -> Break:

    def broken(state: ControllerState) -> ControllerState:
        transition = Transition(state, 0.0)
        transition.change_worker(name, **fields)
        return transition.state

    return broken


def sent_ahead(sender: str, receiver: str, number: int = 0) -> Break:
    """Have a pre-copied unit that the first worker holds."""

    def broken(state: ControllerState) -> ControllerState:
        assert state.plan is not None, "no shape is formed"
        move = PreCopyMove(unit=min(state.member_units["n1"]), sender=sender, receiver=receiver)
        pre_copy = PreCopy(number=number, plan=state.plan, slots=state.slots, moves=(move,), until_s=9.0, limit_s=9.0)
        return having(pre_copy=pre_copy)(state)

    return broken


def nobody_holds_a_unit(state: ControllerState) -> ControllerState:
    for name, entry in state.workers.items():
        state = worker(name, holds=entry.holds - {"s0"})(state)
    return state


FINAL = Failing(version=0, generation=1, worker="n1", sentence="broken", final=True)
GRANTED = NodeRequest(count=0, requested_s=0.0, granted={"n1": 0.0})

BROKEN: dict[str, tuple[Phase, Break]] = {
    "there is an order exactly while some worker has not answered it": (Phase.TRAINING, having(order=None)),
    "only known workers have orders": (Phase.TRAINING, having(awaited=frozenset({"n1", "stranger"}))),
    "no worker has an order before the first shape, during a pause or after the end": (
        Phase.TRAINING,
        having(phase=Phase.HOLDING),
    ),
    "some worker has an order while a shape is formed, trains or is dissolved": (
        Phase.TRAINING,
        having(order=None, awaited=frozenset()),
    ),
    "an order belongs to the present generation": (Phase.TRAINING, inside("order", generation=7)),
    "the kind of an order is the one that belongs to the phase": (Phase.RESHAPING, having(phase=Phase.TRAINING)),
    "orders are aborted only while a generation is dissolved, and all of them are then": (
        Phase.ABORTING,
        inside("order", abort_sent_s=None),
    ),
    "during training each member, and no other worker, either has the step's order or has prepared the step": (
        Phase.TRAINING,
        having(awaited=frozenset({"n1"})),
    ),
    "while committing, a commit or a unit of the last checkpoint is missing": (
        Phase.COMMITTING,
        having(order=None, awaited=frozenset(), pending=None),
    ),
    "no partial sums are kept while a step runs": (Phase.TRAINING, having(kept={"n1": ()})),
    "the members are the workers of the slots, each once": (Phase.RESHAPING, having(member_units={})),
    "there is no shape before the first generation or during pauses": (
        Phase.SEALING,
        having(phase=Phase.WAITING),
    ),
    "no generation is formed during the start": (Phase.STARTING, having(generation=1)),
    "a shape that is formed or trains belongs to the present generation": (
        Phase.TRAINING,
        inside("reshape", generation=7),
    ),
    "every member of a shape that is formed or trains is a known worker": (
        Phase.RESHAPING,
        lambda state: having(
            workers={name: entry for name, entry in state.workers.items() if name != "n1"},
            awaited=state.step.awaited - {"n1"},
        )(state),
    ),
    "during training each unit has a holder": (Phase.TRAINING, nobody_holds_a_unit),
    "during training each member holds the units of its stage": (Phase.TRAINING, worker("n1", holds=frozenset())),
    "a wait for a node that is almost ready has a deadline": (Phase.HOLDING, having(hold_until_s=None)),
    "a wait for VMs has a start time": (Phase.WAITING, having(waiting_since_s=None)),
    "a rest has an end time": (Phase.RESTING, having(rest_until_s=None)),
    "a run has an outcome exactly when it has ended": (
        Phase.TRAINING,
        having(finish=Finish(outcome="stopped", sentence="asked to")),
    ),
    "the last decision is about the present version": (Phase.TRAINING, having(decided=Decided(version=7))),
    "a final error stops the run": (Phase.TRAINING, having(failing=FINAL)),
    "a checkpoint under way is of a decided version, and each unit is written by its one writer": (
        Phase.COMMITTING,
        inside("pending", writers={"s0": "n1"}),
    ),
    "while sealing, a manifest is being written": (Phase.SEALING, having(sealing=())),
    "a start time is recorded exactly while a manifest is being written": (Phase.TRAINING, having(sealing=(MANIFEST,))),
    "the node of a worker is warming, ready, suspect or draining": (
        Phase.TRAINING,
        worker("n1", node=NodeState.BOOTING),
    ),
    "a worker whose node is warming is not set up": (Phase.TRAINING, worker("n1", node=NodeState.WARMING)),
    "a worker whose node is ready or suspect is set up": (Phase.TRAINING, worker("n1", ready_s=None)),
    "a worker that is not set up holds no units": (Phase.HOLDING, worker("n5", holds=frozenset(UNITS))),
    "a worker has a drain deadline exactly while its node drains": (Phase.TRAINING, worker("n1", drain_until_s=9.0)),
    "a probed worker is suspect and not a member": (Phase.TRAINING, worker("n1", probation=Probation(due_s=9.0))),
    "a worker whose notice is still to be acknowledged drains": (Phase.TRAINING, having(leaving=frozenset({"n1"}))),
    "each open request still awaits a grant or a VM": (
        Phase.TRAINING,
        having(requests={"job-1": NodeRequest(count=0, requested_s=0.0)}),
    ),
    "a granted node belongs to one request and is not up yet": (Phase.TRAINING, having(requests={"job-1": GRANTED})),
    "a node that waits in a queue was granted": (
        Phase.TRAINING,
        having(requests={"job-1": NodeRequest(count=1, requested_s=0.0, waiting=frozenset({"n8"}))}),
    ),
    "notices are kept only for nodes that are not up yet": (
        Phase.TRAINING,
        having(kept_notices={"n1": KeptNotice(notice="first", taken_s=9.0)}),
    ),
    "a pre-copy has an issued number and known workers, and exists only during training or the end": (
        Phase.TRAINING,
        sent_ahead("n1", "stranger"),
    ),
    "units are pre-copied from workers that hold them to workers that lack them": (
        Phase.TRAINING,
        sent_ahead("n1", "n1"),
    ),
}


@pytest.mark.parametrize("sentence", INVARIANTS)
def test_each_broken_invariant_is_named_by_its_sentence(sentence: str) -> None:
    phase, broken = BROKEN[sentence]
    state = script_in(phase).state
    validate(state)
    with pytest.raises(
        BrokenState, match=rf"job job, \w+: broken invariant: {re.escape(sentence)} \(last events: .*n1"
    ):
        validate(broken(state))


def test_a_script_validates_each_state_that_is_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(INVARIANTS, "nothing is ever decided", lambda state: not state.recent)
    with pytest.raises(BrokenState, match="nothing is ever decided"):
        Script().ready("n1")
