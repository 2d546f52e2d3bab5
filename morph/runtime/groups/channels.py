"""Process groups of one generation: two-rank channels for tensors, rings for reductions (gloo).

A channel is a two-rank group whose messages are broadcasts: unlike gloo's send and receive, a
broadcast has a future with a completion callback, so nothing polls, and it can be left behind when
the generation is aborted (docs/decisions/0002).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from morph.contract.proof import proof
from morph.runtime.groups.interrupt import Interrupt

Group = Any
"""A ``ProcessGroupGloo``; torch ships no types for its collectives."""

Device = Any
"""A gloo device; likewise."""

GROUP_TIMEOUT_S = 120.0
"""Bound on one collective; an abort ends waits long before it."""

FORM_TIMEOUT_S = 30.0
"""Bound on meeting the other members of one group."""


@dataclass(frozen=True)
class GroupSpec:
    """A group by name; members in rank order. Every worker forms its groups in the same global order."""

    name: str
    members: tuple[str, ...]


def connect_store(host: str, port: int, secret: str = "") -> Store:
    """Open a connection of its own to the rendezvous store; a blocked call on it blocks nobody else.

    The store asks nobody who he is. With the run's secret its keys stand under a name that nobody else can make, so
    that a worker of another run, which came to this port by mistake, meets nobody.
    """
    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=FORM_TIMEOUT_S))
    return PrefixStore(proof(secret, "store"), store) if secret else store


def open_device(listen_host: str) -> Device:
    """A listening socket and the thread that serves its connections; groups that share it form in half the time."""
    gloo: Any = dist.ProcessGroupGloo  # torch ships no types for it
    return gloo.create_device(hostname=listen_host)


def form_group(store: Store, spec: GroupSpec, worker: str, device: Device) -> Group:
    """Meet the other members; blocks until all are there or the store's time-out."""
    gloo: Any = dist.ProcessGroupGloo  # torch ships no types for what follows
    options = gloo._Options()  # the constructor's only way to bind one address
    options._timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    options._threads = 1
    options._devices = [device]
    prefixed = PrefixStore(spec.name, store)
    return gloo(prefixed, spec.members.index(worker), len(spec.members), options)


def first_clause(error: BaseException) -> str:
    """What a gloo error says before its advice, without the place in gloo's source."""
    text = str(error)
    if text.startswith("["):
        text = text.partition("] ")[2]
    return text.partition(". ")[0][:200]


class Transfer(Protocol):
    """A transfer under way; ``done_at_s`` is on the clock of ``time.perf_counter``."""

    @property
    def done(self) -> bool:
        """Whether it is over."""

    @property
    def done_at_s(self) -> float:
        """When it was done."""

    def wait(self, what: str, timeout_s: float = GROUP_TIMEOUT_S) -> float:
        """Block until done; return the seconds waited. Raises as ``Interrupt.wait_for``."""


class Carrier(Protocol):
    """One direction between two workers."""

    def transfer(self, tensor: Tensor) -> Transfer:
        """Send or receive into one contiguous CPU tensor; returns at once."""


class Pending:
    """An operation under way; holds its tensors until it is done."""

    def __init__(self, label: str, work: dist.Work, tensors: Sequence[Tensor], interrupt: Interrupt) -> None:
        self._label = label
        self._tensors = tensors
        self._interrupt = interrupt
        self.done = False
        self.done_at_s = 0.0
        """When it was done, on the clock of ``time.perf_counter``."""
        work.get_future().add_done_callback(self._finished)

    def _finished(self, future: torch.futures.Future[object]) -> None:
        try:
            future.value()
        except RuntimeError as error:
            self._interrupt.lose(f"{self._label}: {first_clause(error)}")
            return
        self.done_at_s = time.perf_counter()
        self.done = True
        self._interrupt.notify()

    def wait(self, what: str, timeout_s: float = GROUP_TIMEOUT_S) -> float:
        """Block until done; return the seconds waited. Raises as ``Interrupt.wait_for``."""
        return self._interrupt.wait_for(lambda: self.done, what, timeout_s)


def _start(label: str, operation: Callable[[], dist.Work], tensors: Sequence[Tensor], interrupt: Interrupt) -> Pending:
    try:
        work = operation()
    except RuntimeError as error:  # a connection that is known to be broken refuses at once
        interrupt.lose(f"{label}: {first_clause(error)}")
        interrupt.check()
        raise
    return Pending(label, work, tensors, interrupt)


def as_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as flat bytes, so that every dtype can travel."""
    return tensor.reshape(-1).view(torch.uint8)


class Channel:
    """One direction between two workers: the root sends, the other receives, in order."""

    def __init__(self, group: Group, sender_rank: int, interrupt: Interrupt, label: str = "channel") -> None:
        self._label = label
        self._group = group
        self._interrupt = interrupt
        self._options = dist.BroadcastOptions()
        self._options.rootRank = sender_rank
        self._options.rootTensor = 0
        self._options.asyncOp = True

    def transfer(self, tensor: Tensor) -> Pending:
        """Send (on the sender) or receive into (on the receiver) one contiguous CPU tensor."""
        if tensor.numel() == 0:
            raise ValueError("an empty tensor cannot travel")
        flat = as_bytes(tensor)
        return _start(
            self._label, lambda: self._group.broadcast([flat], self._options), (tensor, flat), self._interrupt
        )


class Ring:
    """A reduction group."""

    def __init__(self, group: Group, interrupt: Interrupt, label: str = "ring") -> None:
        self._label = label
        self._group = group
        self._interrupt = interrupt

    def reduce(self, tensor: Tensor, operation: Any) -> Pending:
        """All-reduce one CPU tensor in place."""
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        options.asyncOp = True
        return _start(self._label, lambda: self._group.allreduce([tensor], options), (tensor,), self._interrupt)


class GroupSet:
    """The groups of one worker in one generation."""

    def __init__(self, interrupt: Interrupt) -> None:
        self._interrupt = interrupt
        self._groups: dict[str, tuple[GroupSpec, Group]] = {}

    def form(self, specs: Sequence[GroupSpec], worker: str, listen_host: str, open_store: Callable[[], Store]) -> None:
        """Form every group that ``worker`` belongs to, in the order given (the same on every worker).

        Raises:
            GenerationAborted: aborted meanwhile; the half-formed groups are left behind.
            PeerLost: a member went away or did not come within ``FORM_TIMEOUT_S``.
        """
        mine = [spec for spec in specs if worker in spec.members and len(spec.members) > 1]
        if not mine:
            return

        def form_all() -> dict[str, tuple[GroupSpec, Group]]:
            store, device = open_store(), open_device(listen_host)
            groups = {}
            for spec in mine:
                if self._interrupt.aborted:
                    break
                groups[spec.name] = (spec, form_group(store, spec, worker, device))
            return groups

        def guarded() -> dict[str, tuple[GroupSpec, Group]]:
            try:
                return form_all()
            except RuntimeError as error:  # gloo and the store raise RuntimeError and subclasses
                self._interrupt.lose(f"forming its groups: {first_clause(error)}")
                return {}  # the caller gets PeerLost; raising would keep half-formed groups alive in a traceback

        self._groups = self._interrupt.call(guarded, "forming groups", FORM_TIMEOUT_S * (1 + len(mine)))

    @property
    def broken(self) -> bool:
        """Whether an operation that nobody can end may still be under way in one of the groups."""
        return self._interrupt.over

    def clear(self) -> None:
        """Close every group: blocks for 10-100 ms, or until a broken operation times out."""
        self._groups.clear()

    def channel(self, name: str, sender: str) -> Channel:
        """The channel over the two-member group ``name``."""
        spec, group = self._groups[name]
        return Channel(
            group, spec.members.index(sender), self._interrupt, f"{name} between {' and '.join(spec.members)}"
        )

    def ring(self, name: str) -> Ring | None:
        """The ring ``name``; None when this worker is its only member."""
        entry = self._groups.get(name)
        return Ring(entry[1], self._interrupt, f"{name} of {', '.join(entry[0].members)}") if entry else None
