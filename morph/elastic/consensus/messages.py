"""The messages between members, the events at a member, and its actions. Values only.

A member is a number; members that came earlier have smaller numbers. A ring is the members that train together, in the
order of their numbers; its name is the ballot that formed it.
"""

from __future__ import annotations

from typing import NamedTuple


class Ballot(NamedTuple):
    """One attempt to agree. The higher of two epochs wins; within one epoch, the lower initiator wins."""

    epoch: int
    initiator: int

    def beats(self, other: Ballot) -> bool:
        """Whether members join this attempt rather than the other."""
        return (self.epoch, -self.initiator) > (other.epoch, -other.initiator)


class Ring(NamedTuple):
    """Members in ascending order; ``ballot`` is the attempt that accepted them."""

    ballot: Ballot
    members: tuple[int, ...]


class Report(NamedTuple):
    """The knowledge of one member.

    ``num_steps``: how many steps its state has, -1 for a joiner. ``ring``: the ring where it last trained, None for a
    joiner. ``accepted``: rings that it has accepted since, without knowing whether all other members accepted them.
    """

    member: int
    num_steps: int
    ring: Ring | None
    accepted: tuple[Ring, ...]


class Reconcile(NamedTuple):
    """First round: asks which members are lost and what others know. It visits all ``members`` except the ``lost``."""

    ballot: Ballot
    members: tuple[int, ...]
    lost: tuple[int, ...]
    joiners: tuple[int, ...]
    reports: tuple[Report, ...]


class Accept(NamedTuple):
    """Second round: asks whether all are ready for this ring, which continues from the state of ``source``.

    ``behind``: members that have fewer steps than ``num_steps``, and get its state. ``fresh``: joiners without a state.
    """

    ring: Ring
    num_steps: int
    source: int
    behind: tuple[int, ...]
    fresh: tuple[int, ...] = ()


class Restart(NamedTuple):
    """Third round: all members have accepted the ring of this ballot."""

    ballot: Ballot


class Stop(NamedTuple):
    """Replaces the second round: too few members are left, or none of them has a state (``num_before`` is 0)."""

    ballot: Ballot
    num_left: int
    num_before: int


class Excluded(NamedTuple):
    """Tells a member, which may be alive, that it is not in the ring of this ballot."""

    ballot: Ballot


Message = Reconcile | Accept | Restart | Stop | Excluded


class Received(NamedTuple):
    """A message has arrived."""

    sender: int
    message: Message


class Lost(NamedTuple):
    """A connection has ended or was silent for too long: ``member`` is gone, or seems to be."""

    member: int


class Reduced(NamedTuple):
    """Every sum of the current step is complete; all of them were formed in this ring."""

    ballot: Ballot


class Copied(NamedTuple):
    """The state from which the ring of this ballot continues has arrived."""

    ballot: Ballot


class Admit(NamedTuple):
    """Let these joiners in at a step boundary of the ring; without joiners, form the ring anew."""

    joiners: tuple[int, ...]


Input = Received | Lost | Reduced | Copied | Admit


class Send(NamedTuple):
    """Send a message."""

    to: int
    message: Message


class Leave(NamedTuple):
    """End all operations of the ring at once: none of their results may be applied."""


class Enter(NamedTuple):
    """Train in this ring from the state after ``num_steps`` steps, which ``source`` gives to members that lack it."""

    ring: Ring
    num_steps: int
    source: int
    behind: tuple[int, ...]
    fresh: tuple[int, ...] = ()


class Apply(NamedTuple):
    """Apply the step that has been reduced."""


class Halt(NamedTuple):
    """Stop training at this member."""

    reason: str


Output = Send | Leave | Enter | Apply | Halt
