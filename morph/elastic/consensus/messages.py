"""What members say to one another, what happens to a member, and what it does. Values only.

A member is a number; a smaller one came earlier. A ring is the members that train together, in the order of their
numbers; it is named by the ballot that formed it.
"""

from __future__ import annotations

from typing import NamedTuple


class Ballot(NamedTuple):
    """One attempt to agree. Of two, the one with the higher epoch wins; of one epoch, that of the lowest initiator."""

    epoch: int
    initiator: int

    def beats(self, other: Ballot) -> bool:
        """Whether this attempt is joined rather than the other."""
        return (self.epoch, -self.initiator) > (other.epoch, -other.initiator)


class Ring(NamedTuple):
    """Members, ascending; ``ballot`` is the attempt that accepted them."""

    ballot: Ballot
    members: tuple[int, ...]


class Report(NamedTuple):
    """What one member knows.

    ``num_steps``: steps that its state has, -1 for a joiner. ``ring``: where it last trained, None for a joiner.
    ``accepted``: rings that it accepted since, of which it does not know whether all accepted them.
    """

    member: int
    num_steps: int
    ring: Ring | None
    accepted: tuple[Ring, ...]


class Reconcile(NamedTuple):
    """First round: who is lost, and what do the others know? Visits all ``members`` but the ``lost``."""

    ballot: Ballot
    members: tuple[int, ...]
    lost: tuple[int, ...]
    joiners: tuple[int, ...]
    reports: tuple[Report, ...]


class Accept(NamedTuple):
    """Second round: is everyone ready for this ring, which goes on with the state of ``source``?

    ``behind``: who has fewer steps than ``num_steps``, and gets that state. ``fresh``: joiners, who have none yet.
    """

    ring: Ring
    num_steps: int
    source: int
    behind: tuple[int, ...]
    fresh: tuple[int, ...] = ()


class Restart(NamedTuple):
    """Third round: all accepted the ring of this ballot."""

    ballot: Ballot


class Stop(NamedTuple):
    """In place of the second round: those who are left are too few, or have no state (``num_before`` is 0)."""

    ballot: Ballot
    num_left: int
    num_before: int


class Excluded(NamedTuple):
    """To a member that the ring of this ballot is without, though it may be alive."""

    ballot: Ballot


Message = Reconcile | Accept | Restart | Stop | Excluded


class Received(NamedTuple):
    """A message came."""

    sender: int
    message: Message


class Lost(NamedTuple):
    """A connection has ended, or was silent for too long: ``member`` is gone, or seems to be."""

    member: int


class Reduced(NamedTuple):
    """Every sum of the step under way is complete; all of them were formed in this ring."""

    ballot: Ballot


class Copied(NamedTuple):
    """The state that the ring of this ballot goes on from has come."""

    ballot: Ballot


class Admit(NamedTuple):
    """At a step boundary of the ring, let these come in; without any, form the ring anew."""

    joiners: tuple[int, ...]


Input = Received | Lost | Reduced | Copied | Admit


class Send(NamedTuple):
    """Send a message."""

    to: int
    message: Message


class Leave(NamedTuple):
    """End every operation of the ring at once: nothing of it may be applied any more."""


class Enter(NamedTuple):
    """Train in this ring, from the state after ``num_steps`` steps, which ``source`` gives to those who lack it."""

    ring: Ring
    num_steps: int
    source: int
    behind: tuple[int, ...]
    fresh: tuple[int, ...] = ()


class Apply(NamedTuple):
    """Apply the step that is reduced."""


class Halt(NamedTuple):
    """This member trains no more."""

    reason: str


Output = Send | Leave | Enter | Apply | Halt
