"""The table of a node's states."""

from __future__ import annotations

import itertools

import pytest

from manager.controller.state.nodes import NODE_TRANSITIONS, ImpossibleNodeChange, NodeEvent, NodeState, after


def test_every_state_can_be_reached_and_every_state_but_gone_can_be_lost() -> None:
    reached = {NodeState.REQUESTED, *NODE_TRANSITIONS.values()}
    assert reached == set(NodeState)
    for state in set(NodeState) - {NodeState.GONE}:
        assert after(state, NodeEvent.LOST) is NodeState.GONE


def test_nothing_leads_out_of_gone_and_nothing_but_a_setup_makes_a_warming_node_ready() -> None:
    assert not [pair for pair in NODE_TRANSITIONS if pair[0] is NodeState.GONE]
    leading = {pair for pair, following in NODE_TRANSITIONS.items() if following is NodeState.READY}
    assert {event for state, event in leading if state is NodeState.WARMING} == {NodeEvent.SET_UP}


def test_only_a_withdrawn_or_void_notice_leads_out_of_draining_alive() -> None:
    out = {
        event
        for (state, event), following in NODE_TRANSITIONS.items()
        if state is NodeState.DRAINING and following not in (NodeState.DRAINING, NodeState.GONE)
    }
    assert out == {NodeEvent.SPARED, NodeEvent.SPARED_UNREADY}


@pytest.mark.parametrize(
    ("state", "event"), [pair for pair in itertools.product(NodeState, NodeEvent) if pair not in NODE_TRANSITIONS]
)
def test_a_change_that_is_not_in_the_table_is_an_error_that_names_both(state: NodeState, event: NodeEvent) -> None:
    with pytest.raises(ImpossibleNodeChange, match=f"a node that is {state} cannot be {event}"):
        after(state, event)
