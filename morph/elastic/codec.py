"""Encodes messages between members as JSON, with the addresses that the receiver may lack."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from morph.elastic.consensus.messages import Accept, Ballot, Excluded, Message, Reconcile, Report, Restart, Ring, Stop


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
