"""Members agree in every history of the explorer's bounds, and a protocol with a defect does not.

MORPH_EXPLORE=long goes to six members and three losses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, permutations

import pytest

from morph.elastic.consensus import member
from morph.elastic.consensus import member as quorum
from morph.elastic.consensus.messages import Accept, Admit, Ballot, Halt, Lost, Received, Restart, Ring, Send
from tests.elastic.explorer import BrokenError, Explorer, Scenario
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
def test_joiners_come_in_or_are_told(num_members: int, num_killed: int, num_doubts: int, num_joiners: int) -> None:
    for scenario in scenarios(num_members, num_killed, num_doubts, num_joiners):
        Explorer(scenario).run()


@pytest.mark.parametrize("scenario", [Scenario(4, (2,)), Scenario(3, (0, 1)), Scenario(3, (1,), (), 1)])
def test_the_reduction_hides_no_history(scenario: Scenario) -> None:
    full, reduced = Explorer(scenario, reduced=False), Explorer(scenario)
    most, most_reduced = full.run(), reduced.run()
    assert most[1] == most_reduced[1]
    assert full.ends == reduced.ends


Patch = Callable[[pytest.MonkeyPatch], None]


def goes_on_applying(patch: pytest.MonkeyPatch) -> None:
    def may_apply(state: member.MemberState, ballot: Ballot) -> bool:
        return state.ring is not None and state.ring.ballot == ballot and state.num_steps == state.goal

    patch.setattr(member, "may_apply", may_apply)


def follows_whatever_comes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ballot, "beats", lambda self, other: self != other)


def goes_back_to_the_oldest_state(patch: pytest.MonkeyPatch) -> None:
    whole = member._accepted

    def accepted(state: member.MemberState, token: Accept) -> object:
        return whole(state, token._replace(num_steps=0))

    patch.setattr(member, "_accepted", accepted)


def any_number_goes_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(member, "outvoting", lambda left, reports: None)


def half_goes_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(quorum, "is_majority", lambda left, of: 2 * sum(one in left for one in of) >= len(of))


def counts_only_rings_that_it_formed(patch: pytest.MonkeyPatch) -> None:
    whole = quorum.voters
    patch.setattr(quorum, "voters", lambda reports: whole(reports)[:1])


def accepts_what_is_beaten(patch: pytest.MonkeyPatch) -> None:
    whole = member._on_later_round

    def on_later_round(state: member.MemberState, sender: int, token: object) -> object:
        if isinstance(token, Accept) and state.phase == "agreeing" and state.me in token.ring.members:
            state = replace(state, promised=token.ring.ballot)
        return whole(state, sender, token)  # type: ignore[arg-type]

    patch.setattr(member, "_on_later_round", on_later_round)


def restarts_before_all_accepted(patch: pytest.MonkeyPatch) -> None:
    whole = member._conclude

    def conclude(state: member.MemberState, token: member.Reconcile) -> object:
        state, outputs = whole(state, token)
        if not state.accepted:
            return state, outputs
        state, more = member._entered(state)
        return state, (*outputs, *more)

    patch.setattr(member, "_conclude", conclude)


def passes_restart_on_to_nobody(patch: pytest.MonkeyPatch) -> None:
    whole = member.step

    def step(state: member.MemberState, happened: object) -> object:
        following, outputs = whole(state, happened)  # type: ignore[arg-type]
        is_initiator = following.promised.initiator == state.me
        kept = [
            one for one in outputs if is_initiator or not (isinstance(one, Send) and isinstance(one.message, Restart))
        ]
        return following, tuple(kept)

    patch.setattr(member, "step", step)


def lets_its_own_loss_go_unsaid(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(member, "initiate", lambda state, joiners=(), above=0: (state, ()))


DEFECTS: list[tuple[Patch, Scenario, str]] = [
    (goes_on_applying, Scenario(3, (1,)), "applied a step|has more steps|states differ|outside of a ring"),
    (follows_whatever_comes, Scenario(4, (0, 2)), "does not end|train, in"),
    (goes_back_to_the_oldest_state, Scenario(3, (1,)), "applied a step|has more steps|states differ"),
    (any_number_goes_on, Scenario(2, (), ((0, 1), (1, 0))), "side by side|train, in"),
    (half_goes_on, Scenario(2, (), ((0, 1), (1, 0))), "side by side|train, in"),
    (counts_only_rings_that_it_formed, Scenario(3, (), ((0, 1), (2, 0), (0, 2))), "side by side|train, in"),
    (accepts_what_is_beaten, Scenario(4, (1, 2)), "does not end|train, in|applied|differ|side by side"),
    (restarts_before_all_accepted, Scenario(3, (), ((0, 1), (2, 0), (0, 2))), "side by side|train, in|does not end"),
    (passes_restart_on_to_nobody, Scenario(4, (1,)), "does not end"),
    (lets_its_own_loss_go_unsaid, Scenario(3, (1,)), "train, in|does not end"),
]


@pytest.mark.parametrize(("plant", "scenario", "said"), DEFECTS, ids=[plant.__name__ for plant, _, _ in DEFECTS])
def test_a_planted_defect_is_found(
    plant: Patch, scenario: Scenario, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Explorer(scenario).run()
    plant(monkeypatch)
    with pytest.raises(BrokenError, match=said):
        Explorer(scenario).run()


def test_of_two_attempts_the_later_wins_and_of_one_epoch_that_of_the_lowest() -> None:
    assert Ballot(2, 5).beats(Ballot(1, 0))
    assert Ballot(2, 1).beats(Ballot(2, 5))
    assert not Ballot(2, 5).beats(Ballot(2, 5))


def test_more_than_half_goes_on_and_half_with_the_lowest() -> None:
    assert quorum.is_majority({0, 1}, (0, 1, 2, 3))
    assert not quorum.is_majority({2, 3}, (0, 1, 2, 3))
    assert quorum.is_majority({1, 2, 3}, (0, 1, 2, 3))


def test_joiners_that_are_left_alone_do_not_go_on_with_no_state() -> None:
    """Two joiners of three are a majority, but the member that should send them the state is gone."""
    states = {0: member.founder(0, (0,)), 1: member.joiner(1), 2: member.joiner(2)}
    states[0], outputs = member.step(states[0], Admit((1, 2)))
    waiting = [(0, one) for one in outputs if isinstance(one, Send)]
    while waiting:  # they enter; the state has not come
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
