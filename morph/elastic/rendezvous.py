"""Makes a process a member: it founds the first ring, or asks a member to let it in."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from contextlib import suppress
from itertools import cycle

from morph.contract.errors import WaitTimeout
from morph.elastic.consensus import member
from morph.elastic.invitation import Invitation
from morph.elastic.membership import Membership
from morph.elastic.peers import JOINER, Address, book_of, home_at
from morph.link.caller import Call
from morph.runtime.groups.store import StoreHost

RENDEZVOUS_TIMEOUT_S = 120.0
RETRY_S = 0.05


class Sponsor:
    """The member that lets this one in, and the connection to it."""

    def __init__(self, number: int, call: Call, membership: Membership) -> None:
        self.number, self._call, self._membership = number, call, membership
        threading.Thread(target=self._hold, name="morph-elastic-joiner", daemon=True).start()

    def ready(self, *, is_caught_up: bool) -> None:
        """Report that this member may be let in; ``is_caught_up``: the sponsor's newest steps complete its state."""
        with suppress(OSError):
            self._call.send(json.dumps(is_caught_up).encode())

    def _hold(self) -> None:
        """Give up the attempt to join if the sponsor is gone before this member is in."""
        try:
            with suppress(OSError):
                self._call.receive()
        finally:  # whatever ended the connection
            self._membership.sponsor_left()


def meet(invitation: Invitation) -> tuple[Membership, StoreHost, Sponsor | None]:
    """Become a member, or a joiner that a sponsor will let in.

    Raises WaitTimeout if the others do not arrive in time, or no worker answers.
    """
    if invitation.listen_fd is not None:
        listening = socket.socket(fileno=os.dup(invitation.listen_fd))
    else:
        listening = socket.create_server((invitation.listen_host, 0))
    store = StoreHost(invitation.listen_host)
    credential = invitation.credential
    membership = Membership(listening, invitation.listen_host, store.port(), credential, invitation.silence_s)
    sponsor = None
    try:
        if not invitation.join:
            membership.found(invitation.num_founders, RENDEZVOUS_TIMEOUT_S)
        else:
            sponsor = _ask(membership, invitation.join, credential)
    except BaseException:
        membership.close()
        raise
    return membership, store, sponsor


def _ask(membership: Membership, where: tuple[tuple[str, int], ...], credential: str) -> Sponsor | None:
    """Ask the workers at these addresses in turn, and the worker that one of them names, until one answers."""
    until_s = time.monotonic() + RENDEZVOUS_TIMEOUT_S
    places = cycle(where)
    host, port = next(places)
    problem: Exception | None = None
    while time.monotonic() < until_s:
        try:
            call = Call(home_at(Address(host, port, 0), "", credential), JOINER)
        except (OSError, ValueError) as error:
            problem, (host, port) = error, next(places)  # this worker may be gone
            time.sleep(RETRY_S)
            continue
        try:
            call.send(json.dumps(membership.address).encode())
            answer = json.loads(call.receive(max(RETRY_S, until_s - time.monotonic())))
            if "redirect" in answer:
                host, port, _ = answer["redirect"]
                call.reset()
                continue
            number, num_founders = int(answer["number"]), int(answer["founders"])
            state = member.founder(number, tuple(range(num_founders))) if num_founders else member.joiner(number)
            membership.begin(state, book_of(answer["book"]))
            return None if num_founders else Sponsor(int(answer["sponsor"]), call, membership)
        except (OSError, ValueError, KeyError) as error:
            problem, (host, port) = error, next(places)
        call.reset()
        time.sleep(RETRY_S)
    named = " or ".join(f"{host}:{port}" for host, port in where)
    raise WaitTimeout(f"no worker answered at {named} within {RENDEZVOUS_TIMEOUT_S:g} s ({problem})")
