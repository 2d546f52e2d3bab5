"""Several events in one decision come to what they come to one by one."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import pytest
from random_history import play

from manager.controller.decide import ImpossibleEvent, decide
from manager.controller.state.actions import AcknowledgeNotice, Action
from manager.controller.state.events import Single, Together, WorkerAnswered
from manager.controller.state.state import ControllerState

SEEDS = range(60)


def one_by_one(state: ControllerState, events: Sequence[Single], now_s: float) -> tuple[ControllerState, list[Action]]:
    """The state after these events, each decided by itself at the same time, and all that is to be done."""
    actions: list[Action] = []
    for event in events:
        decision = decide(state, event, now_s)
        state, actions = decision.state, actions + list(decision.actions)
    return state, actions


def check(state: ControllerState, events: Sequence[Single], now_s: float) -> bool:
    """Decide both ways; returns whether anything was to be done."""
    each, actions = one_by_one(state, events, now_s)
    both = decide(state, Together(events=tuple(events)), now_s)
    told, before = both.state.model_dump(exclude={"recent"}), each.model_dump(exclude={"recent"})
    assert {name for name in told if told[name] != before[name]} == set()
    assert done(both.actions) == done(actions)
    return bool(actions)


def done(actions: Sequence[Action]) -> Counter[str]:
    """What is to be done; that a VM may go is told once for all notices that it has by then."""
    return Counter(action.model_dump_json() for action in actions if not isinstance(action, AcknowledgeNotice))


def test_answers_that_come_together_change_what_they_change_one_by_one() -> None:
    num_acted = num_long = 0
    for seed in SEEDS:
        history = [entry for entry in play(seed).log if not isinstance(entry, str)]
        for are_answers, group in itertools.groupby(history, lambda entry: isinstance(entry[2], WorkerAnswered)):
            entries = list(group)
            if are_answers:
                num_long += len(entries) > 3
                num_acted += check(entries[0][1], [event for _, _, event, _ in entries], entries[-1][0])
    assert num_acted > 300
    assert num_long > 50


@pytest.mark.parametrize("length", [2, 3, 7])
def test_events_of_all_kinds_that_come_together_change_what_they_change_one_by_one(length: int) -> None:
    num_acted = 0
    for seed in SEEDS:
        cluster = play(seed)
        if cluster.state.config.target_nodes:  # what is asked for is counted after each decision, not after each event
            continue
        history = [entry for entry in cluster.log if not isinstance(entry, str)]
        for first in range(0, len(history) - length, length):
            entries = history[first : first + length]
            try:
                num_acted += check(entries[0][1], [event for _, _, event, _ in entries], entries[-1][0])
            except ImpossibleEvent:  # it was possible only by what a worker did in between
                continue
    assert num_acted > 200
