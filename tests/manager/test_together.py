"""Several events in one decision, and answers alike of many workers, come to what they come to one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache

import pytest
from random_history import play

from manager.controller.decide import ImpossibleEvent, decide
from manager.controller.state.actions import AcknowledgeNotice, Action
from manager.controller.state.events import AnsweredAlike, Single, Together, WorkerAnswered
from manager.controller.state.state import ControllerState
from morph.contract.messages import Aborted, Answer, Committed, Prepared, Reshaped
from morph.contract.timeline import ComputeTimes
from tests.grids import IS_LONG

SEEDS = range(60 if IS_LONG else 40)
EVERY = 7 if IS_LONG else 19
"""Of so many events of a history, the state after one is answered."""
played = cache(play)
TIMES = ComputeTimes(forward_s=0.1, recompute_s=0.0, backward_s=0.2, reduce_s=0.0, wait_s=0.0, step_s=0.3)


def one_by_one(state: ControllerState, events: Sequence[Single], now_s: float) -> tuple[ControllerState, list[Action]]:
    """The state after these events, each decided by itself at the same time, and all that is to be done."""
    actions: list[Action] = []
    for event in events:
        decision = decide(state, event, now_s)
        state, actions = decision.state, actions + list(decision.actions)
    return state, actions


def check(
    state: ControllerState, events: Sequence[Single], now_s: float, *, alike: AnsweredAlike | None = None
) -> bool:
    """Decide both ways; returns whether anything was to be done."""
    each, actions = one_by_one(state, events, now_s)
    both = decide(state, alike or Together(events=tuple(events)), now_s)
    told, before = both.state.model_dump(exclude={"recent"}), each.model_dump(exclude={"recent"})
    assert {name for name in told if told[name] != before[name]} == set()
    assert done(both.actions) == done(actions)
    return bool(actions)


def done(actions: Sequence[Action]) -> Counter[str]:
    """What is to be done; that a VM may go is told once for all notices that it has by then."""
    return Counter(action.model_dump_json() for action in actions if not isinstance(action, AcknowledgeNotice))


def answers_to(state: ControllerState) -> list[Answer]:
    """What may be answered to the present order, right and wrong."""
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
def test_what_many_workers_answer_alike_changes_what_it_changes_one_by_one() -> None:
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
    assert acted["training", "prepared"] > 100
    assert acted["training", "aborted"] > 100
    assert acted["reshaping", "reshaped"] > 50
    assert acted["aborting", "aborted"] > 10


@pytest.mark.slow
@pytest.mark.parametrize("length", [2, 3, 7])
def test_events_of_all_kinds_that_come_together_change_what_they_change_one_by_one(length: int) -> None:
    num_acted = 0
    for seed in SEEDS:
        cluster = played(seed)
        if cluster.state.config.target_nodes:  # what is asked for is counted after each decision, not after each event
            continue
        history = [entry for entry in cluster.log if not isinstance(entry, str)]
        for first in range(0, len(history) - length, min(length, 4)):
            entries = history[first : first + length]
            try:
                num_acted += check(entries[0][1], [event for _, _, event, _ in entries], entries[-1][0])
            except ImpossibleEvent:  # it was possible only by what a worker did in between
                continue
    assert num_acted > 200
