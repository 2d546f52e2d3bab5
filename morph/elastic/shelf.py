"""Offers a member's data to others, as bytes, and sends it without the training thread."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from morph.contract.errors import GenerationAborted, PeerLost, WaitTimeout
from morph.contract.messages import DEFAULT_LIMIT_S
from morph.elastic.peers import FETCH, Address, Incoming, home_at
from morph.link.caller import Call
from morph.runtime.groups.interrupt import Interrupt


class Shelf:
    """Bytes by name, the newest version of each; they are never changed. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[Tensor, ...]] = {}
        self._changed = threading.Condition()

    def put(self, name: str, *parts: Tensor) -> None:
        """Offer flat CPU tensors, concatenated, under a name."""
        with self._changed:
            self._held[name] = tuple(part.view(torch.uint8) for part in parts)
            self._changed.notify_all()

    def drop(self, name: str) -> None:
        """Withdraw the data of a name."""
        with self._changed:
            self._held.pop(name, None)

    def serve(self, incoming: Incoming) -> None:
        """Answer one member until it hangs up. Raises OSError if the member has hung up."""
        while True:
            name, wait_s = json.loads(incoming.receive())
            with self._changed:
                self._changed.wait_for(lambda name=name: name in self._held, min(float(wait_s), DEFAULT_LIMIT_S))  # type: ignore[misc]
                value = self._held.get(name)
            incoming.tell(None if value is None else sum(map(len, value)))
            if value is not None:
                incoming.receive()
                for part in value:
                    incoming.pour(memoryview(part.numpy().data))


class Fetch:
    """A transfer of another member's data to this one."""

    def __init__(self, work: Callable[[], Tensor | None], interrupt: Interrupt) -> None:
        self._work, self._interrupt = work, interrupt
        self._is_done = False
        self._value: Tensor | None = None
        threading.Thread(target=self._run, name="morph-elastic-fetch", daemon=True).start()

    def _run(self) -> None:
        try:
            self._value = self._work()
        finally:
            self._is_done = True
            self._interrupt.notify()

    def wait(self) -> Tensor | None:
        """Return the bytes, uint8 [bytes]; None if the other member offers nothing or is lost, or this ring ended."""
        try:
            self._interrupt.wait_for(lambda: self._is_done, "another worker's model", DEFAULT_LIMIT_S)
        except (GenerationAborted, PeerLost, WaitTimeout):
            return None
        return self._value


class Fetcher:
    """Gets data from other members over one connection to each. A new fetch abandons the previous one."""

    def __init__(self, credential: str) -> None:
        self._credential = credential
        self._idle: dict[int, Call] = {}
        self._busy: Call | None = None

    def fetch(
        self, me: int, other: int, address: Address, name: str, interrupt: Interrupt, wait_s: float = 0.0
    ) -> Fetch:
        """Begin to get what another member offers under a name now, or will offer within ``wait_s`` seconds."""
        busy, self._busy = self._busy, None
        if busy is not None:
            busy.reset()

        def work() -> Tensor | None:
            call: Call | None = None
            try:
                call = self._idle.pop(other, None) or Call(home_at(address, str(me), self._credential), FETCH)
                self._busy = call
                value = _received(call, name, wait_s)
            except (OSError, ValueError, KeyError):
                if call is not None:
                    call.reset()
                return None
            self._busy, self._idle[other] = None, call
            return value

        return Fetch(work, interrupt)

    def close(self) -> None:
        """End all connections."""
        for call in [*self._idle.values(), *([self._busy] if self._busy is not None else [])]:
            call.reset()


def _received(call: Call, name: str, wait_s: float) -> Tensor | None:
    """Return the bytes that the called member offers under a name, as uint8 [bytes]; None: it offers nothing."""
    call.send(json.dumps([name, wait_s]).encode())
    num_bytes = json.loads(call.receive())
    if num_bytes is None:
        return None
    value = torch.empty(int(num_bytes), dtype=torch.uint8)
    call.send(b"go on")
    call.fill(memoryview(value.numpy().data))
    return value
