"""Connections between members: each calls its successors in the ring, and both ends prove that they know the secret.

A member learns of a loss when a connection that it made ends, or is silent for too long. Messages are
JSON, with the addresses that the receiver may lack.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from morph.elastic.consensus.messages import Accept, Ballot, Excluded, Message, Reconcile, Report, Restart, Ring, Stop
from morph.link.caller import Call, bounded
from morph.link.home import Home
from morph.link.listener import Caller
from morph.link.session import LinkSession
from morph.link.wire import Wire

PING, PONG = b"ping", b"pong"
MEMBER, JOINER, FETCH = "member", "joiner", "fetch"
"""A caller's purpose: to send messages as a member, to become a member, or to get what this member offers."""


class Outgoing:
    """A connection to one member, made in the background. All methods may be called from any thread.

    ``home``: the called member's address, and the calling member's credential. ``gone``: called once, in the
    connection's own thread, when the connection has ended or could not be made.
    """

    def __init__(self, to: int, home: Home, gone: Callable[[int], object]) -> None:
        self.to = to
        self.heard_s = time.monotonic()
        """The time at which the other member last answered, or was called."""
        self._home, self._gone = home, gone
        self._call: Call | None = None
        self._waiting: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False
        threading.Thread(target=self._run, name=f"morph-elastic-to-{to}", daemon=True).start()

    def send(self, body: bytes) -> None:
        """Send a message now, or as soon as there is a connection; the reader notices a connection that is lost."""
        with self._lock:
            if self._call is None:
                self._waiting.put(body)
                return
            call = self._call
        with suppress(OSError):
            call.send(body)

    def close(self) -> None:
        """End the connection without calling ``gone``."""
        with self._lock:
            self._is_closed, call = True, self._call
        if call is not None:
            call.reset()

    def _run(self) -> None:
        try:
            with suppress(OSError, ValueError):
                self._hear()
        finally:  # whatever ended the connection
            if not self._is_closed:
                self._gone(self.to)
            self.close()

    def _hear(self) -> None:
        call = Call(self._home, MEMBER)
        with self._lock:
            self._call = call
            while not self._waiting.empty():
                call.send(self._waiting.get())
        self.heard_s = time.monotonic()
        while not self._is_closed:
            call.receive()
            self.heard_s = time.monotonic()


class Incoming(LinkSession):
    """The called end of a connection, once the caller has proven that it knows the secret.

    Raises OSError if the caller does not know the secret, or is gone.
    """

    def __init__(self, caller: Caller, credential: str) -> None:
        bounded(caller.connection)
        super().__init__(caller.connection, Wire(credential, listens=True))
        self.name, self.role = self.welcome(2)
        caller.known()
        self.let_in()


def home_at(address: Address, me: str, credential: str) -> Home:
    """Return the address and the credential for a call to a member, under the name ``me``."""
    return Home(worker=me, host=address.host, port=address.port, secret=credential)


class Address(NamedTuple):
    """The addresses at which a member and its rendezvous store listen."""

    host: str
    port: int
    store_port: int


Book = dict[int, Address]


def encode(message: Message, book: Mapping[int, Address]) -> bytes:
    """Return a message as bytes; a message of an attempt includes the addresses of the attempt's joiners."""
    joiners = message.joiners if isinstance(message, Reconcile) else ()
    addresses = {str(one): book[one] for one in joiners if one in book}
    return json.dumps([type(message).__name__, message, addresses], separators=(",", ":")).encode()


def decode(body: bytes) -> tuple[Message, Book]:
    """Return the message and the addresses that came with it. Raises ValueError if these bytes are not a message."""
    try:
        name, parts, addresses = json.loads(body)
        return _READERS[name](*parts), book_of(addresses)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a message of a member: {error}") from error


def book_of(addresses: Mapping[str, Any]) -> Book:
    """Return addresses by member, read from JSON. Raises ValueError or TypeError if these are not addresses."""
    return {int(number): Address(str(host), int(port), int(store)) for number, (host, port, store) in addresses.items()}


def _ballot(parts: Any) -> Ballot:
    epoch, initiator = parts
    return Ballot(int(epoch), int(initiator))


def _numbers(parts: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in parts)


def _ring(parts: Any) -> Ring:
    ballot, members = parts
    return Ring(_ballot(ballot), _numbers(members))


def _report(parts: Any) -> Report:
    who, num_steps, ring, accepted = parts
    known = None if ring is None else _ring(ring)
    return Report(int(who), int(num_steps), known, tuple(_ring(one) for one in accepted))


def _reconcile(ballot: Any, members: Any, lost: Any, joiners: Any, reports: Any) -> Reconcile:
    told = tuple(_report(one) for one in reports)
    return Reconcile(_ballot(ballot), _numbers(members), _numbers(lost), _numbers(joiners), told)


def _accept(ring: Any, num_steps: Any, source: Any, behind: Any, fresh: Any) -> Accept:
    return Accept(_ring(ring), int(num_steps), int(source), _numbers(behind), _numbers(fresh))


_READERS: dict[str, Any] = {
    "Reconcile": _reconcile,
    "Accept": _accept,
    "Restart": lambda ballot: Restart(_ballot(ballot)),
    "Stop": lambda ballot, left, before: Stop(_ballot(ballot), int(left), int(before)),
    "Excluded": lambda ballot: Excluded(_ballot(ballot)),
}
