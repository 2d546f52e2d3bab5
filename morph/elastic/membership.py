"""A live member: it receives messages and losses, steps the consensus, and performs the resulting actions.

Events are processed one at a time, under one lock, by the thread that brings them. The training thread asks for the
current ring, and waits on that ring's ``Interrupt``, which fires as soon as the member leaves the ring.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from morph.contract.errors import TrainingStopped, WaitTimeout
from morph.elastic.consensus import member
from morph.elastic.consensus.member import MemberState
from morph.elastic.consensus.messages import (
    Admit,
    Ballot,
    Copied,
    Enter,
    Halt,
    Input,
    Leave,
    Lost,
    Received,
    Reduced,
    Ring,
    Send,
)
from morph.elastic.peers import FETCH, MEMBER, PING, PONG, Address, Book, Incoming, Outgoing, decode, encode, home_at
from morph.elastic.shelf import Shelf
from morph.link.listener import Caller, Listener
from morph.runtime.groups.interrupt import Interrupt

log = logging.getLogger("morph.elastic")

NUM_SUCCESSORS = 3
"""The number of connections that a member holds in advance; it makes new ones only if more members are lost at once."""
CONSENSUS_TIMEOUT_S = 60.0
MOST_FOUNDERS = 1024


@dataclass(frozen=True)
class RingPlace:
    """A member's place in one ring. ``interrupt`` ends every wait as soon as the member leaves the ring."""

    ring: Ring
    num_steps: int
    source: int
    behind: tuple[int, ...]
    fresh: tuple[int, ...]
    interrupt: Interrupt


@dataclass
class Door:
    """The joiners that the rendezvous waits for or has let in.

    ``coming``: numbers of the joiners that are on the way in. ``ready``: the joiners that may be let in now, with their
    connections. ``caught_up``: the joiners that have this member's steps, and need only the newest ones.
    """

    num_founders: int = 0
    callers: dict[int, Address] = field(default_factory=dict)
    coming: set[int] = field(default_factory=set)
    ready: dict[int, Incoming] = field(default_factory=dict)
    caught_up: set[int] = field(default_factory=set)
    num_numbers: int = 0


class Membership:
    """One member of the rings of a job. All methods except ``found`` and ``begin`` may be called from any thread.

    The ``listening`` socket is closed with this object. The others reach this member at ``host``; ``store_port`` is of
    this process's rendezvous store. A member that does not answer for ``silence_s`` seconds counts as lost.
    """

    def __init__(self, listening: socket.socket, host: str, store_port: int, credential: str, silence_s: float) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._credential, self._silence_s = credential, silence_s
        self._state: MemberState | None = None
        self._place: RingPlace | None = None
        self._halted: str | None = None
        self._book: Book = {}
        self._links: dict[int, Outgoing] = {}
        self._gone: set[int] = set()
        self._door = Door()
        self._over = threading.Event()
        self.shelf = Shelf()
        self._listener = Listener(listening, self._serve, "morph-elastic")
        self.address = Address(host, self._listener.address[1], store_port)
        self.num_sent = 0
        threading.Thread(target=self._ping, name="morph-elastic-ping", daemon=True).start()

    # -- beginning and end

    def found(self, num_founders: int, timeout_s: float) -> None:
        """Wait for the other founders, and begin with them. Raises WaitTimeout if not all founders arrive in time."""
        with self._changed:
            self._door.num_founders = num_founders
            if not self._changed.wait_for(lambda: len(self._door.callers) == num_founders - 1, timeout_s):
                come = len(self._door.callers) + 1
                raise WaitTimeout(f"only {come} of {num_founders} workers arrived within {timeout_s:g} s")
            self.begin(member.founder(0, tuple(range(num_founders))), {0: self.address, **self._door.callers})

    def begin(self, state: MemberState, book: Book) -> None:
        """Take part, as a founder or as a joiner that waits to be let in."""
        with self._changed:
            self._book.update(book)
            self._state = state
            if state.ring is not None:
                self._enter(Enter(state.ring, state.num_steps, state.source, ()))
            self._tend()
            self._changed.notify_all()

    def close(self) -> None:
        """Leave the job: the others notice at once."""
        with self._changed:
            if self._halted is None:
                self._halted = "this worker has ended"
            if self._place is not None:
                self._place.interrupt.abort()
            links = list(self._links.values())
            self._over.set()
            self._changed.notify_all()
        self._listener.close(join_timeout_s=0.5)
        for link in links:
            link.close()

    # -- for the training thread

    @property
    def me(self) -> int:
        """This member's number."""
        assert self._state is not None, "the member has not begun"
        return self._state.me

    def place(self, after: Ballot | None = None, timeout_s: float = CONSENSUS_TIMEOUT_S) -> RingPlace:
        """Return this member's place in a ring other than that of the ballot ``after``; waits for it.

        Raises TrainingStopped if this member no longer trains; the message says why. Raises WaitTimeout if the members
        do not agree in time.
        """

        def is_there() -> bool:
            return self._halted is not None or (self._place is not None and self._place.ring.ballot != after)

        with self._changed:
            if not self._changed.wait_for(is_there, timeout_s):
                raise WaitTimeout(f"waited {timeout_s:g} s for the other workers to agree on who continues")
            if self._halted is not None:
                raise TrainingStopped(self._halted)
            assert self._place is not None
            return self._place

    def address_of(self, number: int) -> Address:
        """Return the addresses of a member."""
        with self._changed:
            return self._book[number]

    def reduced(self, ballot: Ballot) -> bool:
        """Whether the step whose sums are complete may be applied; if so, it counts as applied from now on."""
        with self._changed:
            assert self._state is not None
            before = self._state.num_steps
            self._happen(Reduced(ballot))
            return self._state.num_steps > before

    def copied(self, ballot: Ballot) -> bool:
        """Whether this member may adopt the state that came in a ring; if so, it counts as its own from now on."""
        with self._changed:
            self._happen(Copied(ballot))
            return self._place is not None and self._place.ring.ballot == ballot

    def admit(self) -> None:
        """Let in the joiners that are ready, at a boundary. Does nothing unless this is the ring's lowest member."""
        with self._changed:
            if self._state is not None and member.may_admit(self._state):
                self._happen(Admit(tuple(sorted(self._door.ready))))

    def reform(self) -> None:
        """Form the ring anew with its members, after a connection for tensors failed although both ends are alive."""
        self._happen(Admit(()))

    @property
    def has_ready_joiners(self) -> bool:
        """Whether a joiner is ready to be let in by this member."""
        with self._changed:
            return bool(self._door.ready) and self._state is not None and member.may_admit(self._state)

    @property
    def has_joiners(self) -> bool:
        """Whether a joiner is on its way in at this member."""
        return bool(self._door.coming)

    def all_caught_up(self, numbers: Iterable[int]) -> bool:
        """Whether all these joiners have caught up with this member's steps."""
        with self._changed:
            return self._door.caught_up.issuperset(numbers)

    def sponsor_left(self) -> None:
        """Halt because the member that was to let this one in is gone; this has no effect once this one is in."""
        with self._changed:
            if self._state is not None and self._state.ring is None and self._halted is None:
                self._halted = "the worker that was to let this one in is gone"
                self._changed.notify_all()

    @property
    def was_in_a_ring(self) -> bool:
        """Whether this member has trained with others, or could have."""
        return self._state is not None and self._state.ring is not None

    # -- events

    def _happen(self, happened: Input) -> None:
        with self._changed:
            if self._state is None or self._halted is not None:
                return
            self._state, outputs = member.step(self._state, happened)
            for output in outputs:
                match output:
                    case Send(to, message):
                        self.num_sent += 1
                        self._link(to).send(encode(message, self._book))
                    case Leave():
                        assert self._place is not None
                        self._place.interrupt.abort()
                        self._place = None
                    case Enter() as enter:
                        self._enter(enter)
                    case Halt(reason):
                        log.info("worker %d stops: %s", self._state.me, reason)
                        self._halted = reason
            self._tend()
            self._changed.notify_all()

    def _enter(self, enter: Enter) -> None:
        interrupt = Interrupt(enter.ring.ballot.epoch)
        self._place = RingPlace(enter.ring, enter.num_steps, enter.source, enter.behind, enter.fresh, interrupt)
        for number in enter.ring.members:
            self._door.ready.pop(number, None)
            self._door.coming.discard(number)
        log.info(
            "ring %d of %d workers, from step %d", enter.ring.ballot.epoch, len(enter.ring.members), enter.num_steps
        )

    def _tend(self) -> None:
        """Hold connections to the next members, and notice the loss of the member that this one must watch."""
        assert self._state is not None
        around = self._state.around
        if self._halted is None and self._state.phase in ("running", "agreeing") and len(around) > 1:
            place = around.index(self._state.me)
            following = [around[(place + offset) % len(around)] for offset in range(1, NUM_SUCCESSORS + 1)]
            for to in dict.fromkeys(following):
                if to != self._state.me and to not in self._gone:
                    self._link(to)
            watched = member.watched(self._state)
            if watched in self._gone:
                assert watched is not None
                self._happen(Lost(watched))

    def _link(self, to: int) -> Outgoing:
        link = self._links.get(to)
        if link is None:
            assert self._state is not None
            link = Outgoing(to, home_at(self._book[to], str(self._state.me), self._credential), self._ended)
            self._links[to] = link
        return link

    def _ended(self, to: int) -> None:
        with self._changed:
            self._gone.add(to)
            if self._state is not None and self._halted is None:
                self._tend()

    def _ping(self) -> None:
        pause_s = self._silence_s / 4
        looked_s = time.monotonic()
        while not self._over.wait(pause_s):
            now_s = time.monotonic()
            was_away = now_s - looked_s > self._silence_s / 2  # this process was stopped, and has read no answers
            looked_s = now_s
            with self._changed:
                links = [link for link in self._links.values() if link.to not in self._gone]
            for link in links:
                if was_away:
                    link.heard_s = now_s
                elif now_s - link.heard_s > self._silence_s:
                    self._ended(link.to)
                    continue
                link.send(PING)

    # -- callers

    def _serve(self, caller: Caller) -> None:
        incoming = Incoming(caller, self._credential)
        if incoming.role == FETCH:
            self.shelf.serve(incoming)
        if incoming.role != MEMBER:
            self._meet(incoming)
            return
        sender = int(incoming.name)
        while True:
            body = incoming.receive()
            if body == PING:
                incoming.send(PONG)
                continue
            message, book = decode(body)
            with self._changed:
                if self._changed.wait_for(lambda: self._state is not None or self._over.is_set(), CONSENSUS_TIMEOUT_S):
                    self._book.update(book)
                    self._happen(Received(sender, message))

    def _meet(self, incoming: Incoming) -> None:
        """Receive a process that wants to become a member."""
        host, port, store_port = json.loads(incoming.receive())
        address = Address(str(host), int(port), int(store_port))
        with self._changed:
            is_founder = self._state is None
            if is_founder:
                number = len(self._door.callers) + 1
                self._door.callers[number] = address
                self._changed.notify_all()
            if not self._changed.wait_for(
                lambda: self._place is not None or self._halted is not None, CONSENSUS_TIMEOUT_S
            ):
                raise ConnectionError("there is no ring yet")
            if self._place is None or self._state is None:
                raise ConnectionError("this worker has stopped")
            members = self._place.ring.members
            if is_founder:
                incoming.tell({"number": number, "founders": len(members), "book": self._told_book()})
                return
            if members[0] != self._state.me:
                incoming.tell({"redirect": self._book[members[0]]})
                return
            self._door.num_numbers += 1
            epoch = self._place.ring.ballot.epoch
            number = max(epoch * MOST_FOUNDERS, len(members)) + self._door.num_numbers
            self._book[number] = address
            incoming.tell({"number": number, "founders": 0, "book": self._told_book(), "sponsor": self._state.me})
            self._door.coming.add(number)
        try:
            is_caught_up = bool(json.loads(incoming.receive()))
            with self._changed:
                self._door.ready[number] = incoming
                if is_caught_up:
                    self._door.caught_up.add(number)
            incoming.receive()  # the joiner sends nothing: the call returns when the joiner is gone
        finally:
            with self._changed:
                self._door.ready.pop(number, None)
                self._door.coming.discard(number)
                self._door.caught_up.discard(number)

    def _told_book(self) -> dict[str, Address]:
        assert self._place is not None
        wanted = {*self._place.ring.members, *self._door.coming}
        return {str(number): address for number, address in self._book.items() if number in wanted}
