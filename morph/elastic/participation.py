"""A process's part in a job: it enters one ring after another, with that ring's state, and leaves properly.

A joiner gets the state while the others train: a copy, and the gradients of each later step, which it applies. The
member that lets joiners in keeps both for as long as a joiner needs them. While models differ there are no common
gradients to apply, so a joiner gets the state only when it enters the ring.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from morph.contract.errors import GenerationAborted, MorphError, PeerLost, TrainingStopped, WaitTimeout
from morph.contract.messages import DEFAULT_LIMIT_S
from morph.elastic.consensus.messages import Ballot
from morph.elastic.invitation import Invitation
from morph.elastic.membership import Membership, RingPlace
from morph.elastic.rendezvous import RENDEZVOUS_TIMEOUT_S, Sponsor, meet
from morph.elastic.shelf import Fetch, Fetcher, Shelf
from morph.elastic.state import TrainingState
from morph.runtime.groups.channels import Channel, GroupSet, GroupSpec, Ring, connect_store
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.groups.reaper import Reaper

FINISH_TIMEOUT_S = 60.0
CATCH_UP_EVERY_S = 0.02
NUM_TRIES_TO_JOIN = 20
SNAPSHOT, STEP = "snapshot", "step/"
"""Names on the shelf: the copy (empty if joiners enter without it); and, with a number of steps, the next step."""
MOST_STATES, LEAST_BOUND_BYTES = 2, 256 * 2**20
"""Limits of the kept steps: a multiple of the copy's size, or a number of bytes, whichever is more."""


class CatchUpLog:
    """The copy and the steps kept for joiners. Only the training thread of the member that lets joiners in uses it."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._names: list[str] = []
        self._num_bytes = self._most_bytes = self._num_steps = 0
        self._is_refused = False

    @property
    def is_open(self) -> bool:
        """Whether steps are being kept."""
        return self._most_bytes > 0

    def covers(self, num_steps: int) -> bool:
        """Whether a joiner can get from the copy to the state after this many steps."""
        return self.is_open and self._num_steps == num_steps

    def boundary(self, state: TrainingState, step: tuple[Tensor, ...], *, is_wanted: bool, is_apart: bool) -> None:
        """Keep a completed step, and start or stop keeping steps when joiners arrive or have entered.

        ``step``: the step as ``TrainingState`` packs it, if the log was open when the step was computed; else empty.
        """
        if not is_wanted:
            self.close()
            self._is_refused = False
        elif is_apart:
            self._refuse()
        elif self._is_refused:
            return
        elif not self.is_open:
            copy = state.pack(with_carried=False)  # it changes between steps, so joiners get it as they enter
            self._most_bytes = max(MOST_STATES * len(copy), LEAST_BOUND_BYTES)
            self._num_steps = state.num_steps
            self._put(SNAPSHOT, copy)
        elif step:
            self._put(f"{STEP}{state.num_steps - 1}", *step)
            self._num_bytes += sum(map(len, step))
            self._num_steps = state.num_steps
            if self._num_bytes > self._most_bytes:
                self._refuse()

    def _refuse(self) -> None:
        """Stop keeping steps: the joiners get the state when they enter."""
        if not self._is_refused:
            self.close()
            self._put(SNAPSHOT, torch.empty(0, dtype=torch.uint8))
        self._is_refused = True

    def close(self) -> None:
        """Discard everything that is kept."""
        for name in self._names:
            self._shelf.drop(name)
        self._names.clear()
        self._num_bytes = self._most_bytes = 0

    def _put(self, name: str, *parts: Tensor) -> None:
        self._shelf.put(name, *parts)
        self._names.append(name)


class Participation:
    """A member's place, state and connections. Only the training thread uses it.

    ``become_one``: makes the members' states equal at the end.
    """

    def __init__(self, state: TrainingState, invitation: Invitation, become_one: Callable[[], object]) -> None:
        self._state, self._invitation, self._become_one = state, invitation, become_one
        self._membership, self._store, self._sponsor = meet(invitation)
        self.catch_up_log = CatchUpLog(self._membership.shelf)
        self._fetcher = Fetcher(invitation.credential)
        self._reaper = Reaper()
        self._groups: GroupSet | None = None
        self._place: RingPlace | None = None
        self._left: Ballot | None = None
        self._held: str | None = None
        self._num_tries = 0
        self._has_abandoned = False
        self.ring: Ring | None = None
        """Reduces sums; None: this member is alone."""
        self.is_over = False
        self._code = 0
        """The exit code with which the process is about to end, if it is known."""
        atexit.register(self._at_exit)

    @property
    def membership(self) -> Membership:
        """The live member."""
        return self._membership

    @property
    def place(self) -> RingPlace:
        """This member's place now, or when the current step began."""
        return self._place if self._place is not None else self.settle()

    def settle(self) -> RingPlace:
        """Return the place in a ring, once this member has the ring's state; waits until the members agree on a ring.

        Raises TrainingStopped if this member no longer trains. Raises WaitTimeout if the others do not answer.
        """
        self._code = 0  # it continues to train
        while True:
            place = self._next_place()
            if place is self._place:
                return place
            try:
                self._enter(place)
            except (GenerationAborted, PeerLost):
                self.leave(place)
                continue
            self._place = place
            return place

    def leave(self, place: RingPlace) -> None:
        """Record that the ring of this place, or a connection of it, is gone: ``settle`` waits for another ring."""
        self._left = place.ring.ballot
        self._drop_groups()

    def cross_boundary(self, place: RingPlace) -> None:
        """Wait for the ring that lets a joiner in: every member calls this after the same step."""
        self._membership.admit()
        self.leave(place)

    def finish(self) -> None:
        """End properly after the last step: no member leaves before all members have every step."""
        if self.is_over:
            return
        with suppress(MorphError):
            while True:
                self._become_one()
                place = self.settle()
                if self._state.differs:
                    continue
                try:
                    if self.ring is not None:
                        done = torch.zeros(1)
                        self.ring.reduce(done, torch.distributed.ReduceOp.SUM).wait("the others' end", FINISH_TIMEOUT_S)
                    break
                except (GenerationAborted, PeerLost):
                    self.leave(place)
        self.close()

    def close(self) -> None:
        """Leave at once; the others continue without this member."""
        if self.is_over:
            return
        self.is_over = True
        groups, self._groups = self._groups, None
        if groups is not None and not groups.broken:
            groups.clear()
        elif groups is not None:
            self._abandon(groups)
        self._fetcher.close()
        self._membership.close()

    def fetch(self, other: int, name: str, interrupt: Interrupt, wait_s: float = 0.0) -> Fetch:
        """Begin to fetch data that another member offers under a name now, or will offer within ``wait_s`` seconds."""
        address = self._membership.address_of(other)
        return self._fetcher.fetch(self._membership.me, other, address, name, interrupt, wait_s)

    def _catch_up(self, sponsor: Sponsor) -> bool:
        """Get the sponsor's state and each later step before this member is let in; return whether that worked."""
        interrupt = Interrupt(0)
        packed = self.fetch(sponsor.number, SNAPSHOT, interrupt, RENDEZVOUS_TIMEOUT_S).wait()
        is_caught_up = packed is not None and len(packed) > 0
        if packed is not None and is_caught_up:
            self._state.unpack(packed)
            while self._take_step(sponsor.number, interrupt):
                pass
        sponsor.ready(is_caught_up=is_caught_up)
        return is_caught_up

    def _awaited(self, sponsor: Sponsor) -> RingPlace:
        """Wait to be let in, and catch up with the sponsor's steps meanwhile."""
        until_s, interrupt = time.monotonic() + RENDEZVOUS_TIMEOUT_S, Interrupt(0)
        while time.monotonic() < until_s:
            try:
                return self._membership.place(timeout_s=CATCH_UP_EVERY_S)
            except WaitTimeout:
                self._take_step(sponsor.number, interrupt)
        return self._membership.place(timeout_s=0.0)

    def _take_step(self, source: int, interrupt: Interrupt) -> bool:
        """Apply the step after this member's state, if another member holds that step; return whether it did."""
        packed = self.fetch(source, f"{STEP}{self._state.num_steps}", interrupt).wait()
        if packed is None:
            return False
        self._state.unpack_step(packed)
        return True

    def _next_place(self) -> RingPlace:
        """Wait for the next ring; if none of its members is lost, a broken ring is formed again."""
        while True:
            sponsor, self._sponsor = self._sponsor, None
            try:
                if sponsor is not None and self._catch_up(sponsor):
                    return self._awaited(sponsor)
                if self._left is None:
                    return self._membership.place(timeout_s=RENDEZVOUS_TIMEOUT_S)
                try:
                    return self._membership.place(self._left, 2 * self._invitation.silence_s)
                except WaitTimeout:
                    self._membership.reform()
                    return self._membership.place(self._left)
            except TrainingStopped as stopped:
                if isinstance(stopped, WaitTimeout) or not self._rejoin():
                    raise

    def _rejoin(self) -> bool:
        """Ask once more to be let in, unless this member has been in a ring; return whether it asked."""
        self._num_tries += 1
        if self._membership.was_in_a_ring or not self._invitation.join or self._num_tries > NUM_TRIES_TO_JOIN:
            return False
        self._membership.close()
        self._membership, self._store, self._sponsor = meet(self._invitation)
        self.catch_up_log = CatchUpLog(self._membership.shelf)
        return True

    def _enter(self, place: RingPlace) -> None:
        self._drop_groups()  # groups of a ring that ended between two steps
        if self._held is not None:
            self._membership.shelf.drop(self._held)
            self._held = None
        ballot, members = place.ring.ballot, tuple(str(number) for number in place.ring.members)
        me, source = str(self._membership.me), str(place.source)
        # Before the first step the founders' models may differ: all members take the source's model.
        behind = [str(one) for one in (place.behind if place.num_steps else place.ring.members) if one != place.source]
        name = f"elastic/{ballot.epoch}.{ballot.initiator}"
        fresh = place.fresh if place.num_steps else ()
        if self._membership.me == place.source and fresh:
            self._hold_for_fresh(fresh, name)
        ring = GroupSpec(f"{name}/ring", members)
        copying = GroupSpec(f"{name}/copy", (source, *behind))
        initiator = self._membership.address_of(ballot.initiator)
        groups = GroupSet(place.interrupt)
        self._groups = groups
        groups.form(
            [ring, copying],
            me,
            self._invitation.listen_host,
            lambda: connect_store(initiator.host, initiator.store_port, self._invitation.secret),
        )
        if me in copying.members and len(copying.members) > 1:
            packed = self._copied(groups.channel(copying.name, source), is_source=me == source)
            if me in behind:
                if not self._membership.copied(ballot):
                    raise GenerationAborted("the ring whose state was received has ended")
                self._state.unpack(packed)
        if self._membership.me in fresh:
            self._begin_fresh(place, name)
        self.ring = groups.ring(ring.name)

    def _hold_for_fresh(self, fresh: tuple[int, ...], name: str) -> None:
        """Offer the state with which new members of a ring begin: all of it, or the part that completes theirs."""
        is_caught_up = self.catch_up_log.covers(self._state.num_steps) and self._membership.all_caught_up(fresh)
        self._membership.shelf.put(name, self._state.pack_facts() if is_caught_up else self._state.pack())
        self._held = name

    def _begin_fresh(self, place: RingPlace, name: str) -> None:
        packed = self.fetch(place.source, name, place.interrupt, DEFAULT_LIMIT_S).wait()
        place.interrupt.check()
        if packed is None:
            raise PeerLost("no state to begin with was received")
        goal, is_whole = self._state.read(packed)
        while not is_whole and self._state.num_steps < goal:
            if not self._take_step(place.source, place.interrupt):
                place.interrupt.check()
                raise PeerLost("a step was not received")
        if not self._membership.copied(place.ring.ballot):
            raise GenerationAborted("the ring whose state was received has ended")
        if is_whole:
            self._state.unpack(packed)
        else:
            self._state.unpack_facts(packed)

    def _copied(self, channel: Channel, *, is_source: bool) -> Tensor:
        packed = self._state.pack() if is_source else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor([packed.numel()], dtype=torch.int64)
        channel.transfer(size).wait("the size of the state")
        if not is_source:
            packed = torch.empty(int(size), dtype=torch.uint8)
        channel.transfer(packed).wait("the state")
        return packed

    def _drop_groups(self) -> None:
        self._place = self.ring = None
        groups, self._groups = self._groups, None
        if groups is not None:
            self._abandon(groups)

    def _abandon(self, groups: GroupSet) -> None:
        self._has_abandoned = self._has_abandoned or groups.broken
        self._reaper.reap(groups)

    def will_exit(self, exit: SystemExit) -> None:
        """Keep the code of a ``SystemExit`` that was raised: Python forgets it before it calls exit handlers."""
        self._code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)

    def _at_exit(self) -> None:
        code = 1 if getattr(sys, "last_value", None) is not None else self._code
        if code == 0:
            self.finish()
        else:
            self.close()
        if self._has_abandoned:
            # An operation of a ring that was left may end now, while the interpreter is half torn down.
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()
            os._exit(code)
