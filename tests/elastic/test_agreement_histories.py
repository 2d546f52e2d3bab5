"""Members agree in every history within the explorer's bounds; MORPH_EXPLORE=long has six members and three losses."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import combinations, permutations

import pytest

from morph.elastic.consensus import member
from morph.elastic.consensus import member as quorum
from morph.elastic.consensus.messages import Admit, Ballot, Halt, Lost, Received, Ring, Send
from tests.elastic.explorer import Explorer, Scenario
from tests.grids import IS_LONG

pytestmark = pytest.mark.timeout(3600 if IS_LONG else 300)
MOST_MESSAGES_OF_A_LOSS = 5
"""Three rounds, a message to each member left out, and the messages of an attempt that is superseded."""


@pytest.fixture(autouse=True)
def _deep_recursion() -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(10_000)
    yield
    sys.setrecursionlimit(before)


def scenarios(num_members: int, num_killed: int, num_doubts: int = 0, num_joiners: int = 0) -> Iterator[Scenario]:
    everyone = range(num_members + num_joiners)
    for killed in combinations(everyone, num_killed):
        for doubts in combinations(permutations(everyone, 2), num_doubts):
            yield Scenario(num_members, killed, doubts, num_joiners)


LOSSES = [(2, 1), (3, 1), (3, 2), (4, 1), (4, 2), (5, 1), (6, 1)]
LOSSES += [(4, 3), (5, 2), (5, 3), (6, 2), (6, 3)] if IS_LONG else [(4, 3)]


@pytest.mark.slow
@pytest.mark.parametrize(("num_members", "num_killed"), LOSSES)
def test_after_losses_one_ring_is_left_with_equal_states(num_members: int, num_killed: int) -> None:
    for scenario in scenarios(num_members, num_killed):
        _, most_messages = Explorer(scenario).run()
        assert most_messages <= MOST_MESSAGES_OF_A_LOSS * num_killed, scenario


DOUBTS = [(2, 0, 1), (3, 0, 1), (3, 0, 2), (3, 1, 1), (4, 0, 1), (5, 0, 1)]
DOUBTS += [(3, 0, 3), (3, 1, 2), (3, 2, 1), (4, 0, 2), (4, 1, 1), (5, 1, 1)] if IS_LONG else []


@pytest.mark.parametrize(("num_members", "num_killed", "num_doubts"), DOUBTS)
def test_living_members_that_are_taken_for_lost_split_no_ring(
    num_members: int, num_killed: int, num_doubts: int
) -> None:
    for scenario in scenarios(num_members, num_killed, num_doubts):
        _, most_messages = Explorer(scenario).run()
        assert most_messages <= 5 * (num_killed + num_doubts), scenario


JOINS = [(1, 0, 0, 1), (2, 1, 0, 1), (3, 1, 0, 1), (2, 0, 0, 2), (2, 1, 0, 2), (2, 0, 1, 1)]
JOINS += [(3, 2, 0, 1), (4, 2, 0, 1), (3, 1, 0, 2), (3, 0, 1, 1), (3, 1, 1, 1)] if IS_LONG else []


@pytest.mark.parametrize(("num_members", "num_killed", "num_doubts", "num_joiners"), JOINS)
def test_joiners_are_let_in_or_refused(num_members: int, num_killed: int, num_doubts: int, num_joiners: int) -> None:
    for scenario in scenarios(num_members, num_killed, num_doubts, num_joiners):
        Explorer(scenario).run()


def test_the_later_attempt_wins_and_ties_go_to_the_lowest_member() -> None:
    assert Ballot(2, 5).beats(Ballot(1, 0))
    assert Ballot(2, 1).beats(Ballot(2, 5))
    assert not Ballot(2, 5).beats(Ballot(2, 5))


def test_a_majority_continues_as_does_half_with_the_lowest_member() -> None:
    assert quorum.is_majority({0, 1}, (0, 1, 2, 3))
    assert not quorum.is_majority({2, 3}, (0, 1, 2, 3))
    assert quorum.is_majority({1, 2, 3}, (0, 1, 2, 3))


def test_joiners_that_are_left_alone_do_not_train_without_a_state() -> None:
    """Two joiners of three members are a majority, but the member that should send them the state is lost."""
    states = {0: member.founder(0, (0,)), 1: member.joiner(1), 2: member.joiner(2)}
    states[0], outputs = member.step(states[0], Admit((1, 2)))
    waiting = [(0, one) for one in outputs if isinstance(one, Send)]
    while waiting:  # the joiners enter; the state has not come
        sender, sent = waiting.pop(0)
        states[sent.to], outputs = member.step(states[sent.to], Received(sender, sent.message))
        waiting += [(sent.to, one) for one in outputs if isinstance(one, Send)]
    assert states[1].fresh == (1, 2)
    states[2], outputs = member.step(states[2], Lost(0))
    (sent,) = [one for one in outputs if isinstance(one, Send)]
    states[1], outputs = member.step(states[1], Received(2, sent.message))
    (sent,) = [one for one in outputs if isinstance(one, Send)]
    states[2], outputs = member.step(states[2], Received(1, sent.message))
    assert Halt("all workers that had the model are gone") in outputs


def test_a_ring_whose_connections_failed_is_formed_again_by_any_of_its_members() -> None:
    states = {me: member.founder(me, (0, 1, 2)) for me in range(3)}
    states[1], outputs = member.step(states[1], Admit(()))
    waiting = [(1, one) for one in outputs if isinstance(one, Send)]
    while waiting:
        sender, sent = waiting.pop(0)
        states[sent.to], outputs = member.step(states[sent.to], Received(sender, sent.message))
        waiting += [(sent.to, one) for one in outputs if isinstance(one, Send)]
    assert {state.ring for state in states.values()} == {Ring(Ballot(1, 1), (0, 1, 2))}
    assert {state.phase for state in states.values()} == {"running"}
