"""Lets a sender find the receiver of pre-copied units, and both prove that they belong to the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from torch._C._distributed_c10d import Store

from morph.contract.messages import DEFAULT_LIMIT_S
from morph.link.proof import is_proven, new_secret, proof
from morph.runtime.groups.faults import FaultPlan


class Rendezvous:
    """The rendezvous of one receiver and its senders, for one order or generation: ``occasion``, unique in this run.

    The receiver writes its address and a nonce into the rendezvous store with a proof by the run's secret, because
    anyone could write there; a sender's hello proves its name for that nonce.
    """

    def __init__(self, occasion: str, receiver: str, secret: str) -> None:
        self.key = f"ahead/{occasion}/{receiver}"
        self._secret = secret

    def told(self, host: str, port: int) -> str:
        """Return the text that the receiver writes under ``key``, with a new nonce each time."""
        nonce = new_secret()
        return f"{host} {port} {nonce} {proof(self._secret, 'receiver', self.key, host, str(port), nonce)}"

    def address(self, invitation: str) -> tuple[str, int]:
        """Return the receiver's address. Raises ConnectionError if the text is not from the receiver."""
        host, port, nonce, given = _parts(invitation)
        if not is_proven(given, self._secret, "receiver", self.key, host, port, nonce):
            raise ConnectionError("the receiver's address was written by someone else")
        return host, int(port)

    def hello(self, invitation: str, sender: str) -> dict[str, str]:
        """Return the facts of a sender's first frame."""
        _, _, nonce, _ = _parts(invitation)
        return {"kind": "hello", "worker": sender, "proof": proof(self._secret, "sender", self.key, nonce, sender)}

    def greeted(self, invitation: str, facts: Mapping[str, Any]) -> str | None:
        """Return the sender of a hello; None if it is not from a sender."""
        _, _, nonce, _ = _parts(invitation)
        sender, given = str(facts.get("worker")), str(facts.get("proof"))
        return sender if is_proven(given, self._secret, "sender", self.key, nonce, sender) else None


@dataclass(frozen=True, kw_only=True)
class StreamContext:
    """The context of all streams from and to one worker, for one order or generation: see ``on``.

    ``open_store``: lends a connection to the store. ``limit_s``: how long the other end may be absent; a sender may be
    silent for twice as long.
    """

    worker: str
    secret: str
    listen_host: str
    open_store: Callable[[], AbstractContextManager[Store]]
    faults: FaultPlan
    occasion: str = ""
    limit_s: float = DEFAULT_LIMIT_S

    def on(self, occasion: str, limit_s: float) -> StreamContext:
        """Return the context for one order or generation."""
        return replace(self, occasion=occasion, limit_s=limit_s)

    def rendezvous(self, receiver: str) -> Rendezvous:
        """Return the rendezvous at which these streams' senders find a receiver."""
        return Rendezvous(self.occasion, receiver, self.secret)


def _parts(invitation: str) -> tuple[str, str, str, str]:
    parts = invitation.rsplit(" ", 3)
    if len(parts) < 4:
        raise ConnectionError("the receiver's address is not valid")
    host, port, nonce, given = parts
    return host, port, nonce, given
