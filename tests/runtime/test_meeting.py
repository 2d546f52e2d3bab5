"""Units are pre-copied only between workers of one run and for one order."""

from __future__ import annotations

import pytest

from morph.runtime.attendants.wire import Rendezvous

OURS = Rendezvous(7, "b", "of the run")


def test_sender_and_receiver_of_one_run_meet() -> None:
    told = OURS.told("127.0.0.1", 4711)
    assert OURS.address(told) == ("127.0.0.1", 4711)
    assert OURS.greeted(told, OURS.hello(told, "a")) == "a"


@pytest.mark.parametrize(
    "other",
    [Rendezvous(7, "b", "of another run"), Rendezvous(6, "b", "of the run"), Rendezvous(8, "b", "of the run")],
    ids=["another run", "an older order", "a later order"],
)
def test_another_run_or_order_is_a_stranger_on_both_sides(other: Rendezvous) -> None:
    told, theirs = OURS.told("127.0.0.1", 4711), other.told("127.0.0.1", 4711)
    assert OURS.greeted(told, other.hello(told, "a")) is None
    with pytest.raises(ConnectionError, match="someone else"):
        OURS.address(theirs)


def test_a_changed_address_a_changed_name_and_an_earlier_hello_are_refused() -> None:
    told, again = OURS.told("127.0.0.1", 4711), OURS.told("127.0.0.1", 4711)
    with pytest.raises(ConnectionError, match="someone else"):
        OURS.address(told.replace("4711", "4712"))
    with pytest.raises(ConnectionError, match="not valid"):
        OURS.address("nonsense")
    assert OURS.greeted(told, {**OURS.hello(told, "a"), "worker": "c"}) is None
    assert OURS.greeted(again, OURS.hello(told, "a")) is None
    assert OURS.greeted(told, {}) is None


def test_messages_of_a_meeting_do_not_contain_the_secret() -> None:
    told = OURS.told("127.0.0.1", 4711)
    assert "of the run" not in told + str(OURS.hello(told, "a"))
