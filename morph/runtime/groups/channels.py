"""Process groups of one generation: two-rank channels for tensors, rings for reductions (gloo).

A channel is a two-rank group whose messages are broadcasts: unlike gloo's send and receive, a
broadcast has a future with a completion callback, so nothing polls, and it can be left behind when
the generation is aborted (docs/decisions/0002).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions, PrefixStore, Store, TCPStore

from morph.contract.messages import DEFAULT_LIMIT_S
from morph.link.proof import proof
from morph.runtime.groups.interrupt import Interrupt

CHECK_S = 1.0
"""Seconds. An idle connection that does not answer for this long is replaced by a new one."""
Group = Any
"""A ``ProcessGroupGloo``; torch ships no types for its collectives."""

Device = Any
"""A gloo device; torch ships no types for it."""


@dataclass(frozen=True)
class GroupSpec:
    """A group by name; members in rank order. Every worker forms its groups in the same global order."""

    name: str
    members: tuple[str, ...]


def connect_store(host: str, port: int, secret: str = "", limit_s: float = DEFAULT_LIMIT_S) -> Store:
    """Open a connection to the rendezvous store for one thread; ``limit_s``: bound of each call.

    The store does not authenticate clients; the run's secret gives the keys a prefix, so that a worker of another run
    that uses this port by mistake meets no member.
    """
    return _of_run(_connection(host, port, limit_s), secret)


def _connection(host: str, port: int, limit_s: float) -> TCPStore:
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=limit_s))


def _of_run(store: TCPStore, secret: str) -> Store:
    return PrefixStore(proof(secret, "store"), store) if secret else store


class KeptConnections:
    """One worker's connections to the rendezvous store, opened in advance and reused by successive generations.

    Opening one asks name servers for the address, even of 127.0.0.1, and a lost query costs 5 s.
    """

    def __init__(self, host: str, port: int, secret: str = "") -> None:
        self._connect = partial(_connection, host, port)
        self._secret = secret
        self._idle: queue.SimpleQueue[TCPStore] = queue.SimpleQueue()

    def prepare(self) -> None:
        """Open a connection in a thread; returns at once."""

        def open_one() -> None:
            with suppress(RuntimeError):  # the next user of a connection tries again, and reports the error
                self._idle.put(self._connect(DEFAULT_LIMIT_S))

        threading.Thread(target=open_one, name="morph-store-connection", daemon=True).start()

    def lend(self, limit_s: float) -> LentConnections:
        """Return a function that opens connections for one generation. ``limit_s``: bound of each call on them."""
        return LentConnections(self, limit_s)

    @contextmanager
    def borrow(self, limit_s: float) -> Iterator[Store]:
        """Lend a connection while a block runs. It is not reused if the block fails: a call on it may still run."""
        lent = self.lend(limit_s)
        yield lent.open()
        lent.give_back()

    def take(self, limit_s: float) -> TCPStore:
        """Return a connection that answers."""
        while True:
            try:
                kept = self._idle.get_nowait()
            except queue.Empty:
                return self._connect(limit_s)
            if _answers(kept):
                kept.set_timeout(timedelta(seconds=limit_s))
                return kept

    def give_back(self, stores: Sequence[TCPStore]) -> None:
        """Let others use these connections."""
        for store in stores:
            self._idle.put(store)

    def named(self, store: TCPStore) -> Store:
        """Return the store with this run's prefix."""
        return _of_run(store, self._secret)


class LentConnections:
    """See ``KeptConnections.lend``. A connection on which a call may still block is left behind, not returned."""

    def __init__(self, kept: KeptConnections, limit_s: float) -> None:
        self._kept, self._limit_s = kept, limit_s
        self._lent: list[TCPStore] = []

    def open(self) -> Store:
        """Return a connection that is not otherwise used."""
        store = self._kept.take(self._limit_s)
        self._lent.append(store)
        return self._kept.named(store)

    def give_back(self) -> None:
        """Take connections back, after all calls on them have returned."""
        self._kept.give_back(self._lent)
        self._lent = []


def _answers(store: TCPStore) -> bool:
    answered = threading.Event()

    def ask() -> None:
        with suppress(RuntimeError):
            store.check(["anything"])
            answered.set()

    asking = threading.Thread(target=ask, name="morph-store-check", daemon=True)
    asking.start()
    asking.join(CHECK_S)
    return answered.is_set()


def open_device(listen_host: str) -> Device:
    """Return a listening socket with a thread for its connections; groups that share it form in half the time."""
    gloo: Any = dist.ProcessGroupGloo  # torch ships no types for it
    return gloo.create_device(hostname=listen_host)


def form_group(store: Store, spec: GroupSpec, worker: str, device: Device, limit_s: float) -> Group:
    """Meet the other members; blocks at most for the store's limit. ``limit_s``: bound of one collective."""
    gloo: Any = dist.ProcessGroupGloo  # torch ships no types for the following
    options = gloo._Options()  # the constructor's only way to bind one address
    options._timeout = timedelta(seconds=limit_s)
    options._threads = 1
    options._devices = [device]
    prefixed = PrefixStore(spec.name, store)
    return gloo(prefixed, spec.members.index(worker), len(spec.members), options)


def first_clause(error: BaseException) -> str:
    """Return the text of a gloo error before its advice, without the place in gloo's source."""
    text = str(error)
    if text.startswith("["):
        text = text.partition("] ")[2]
    return text.partition(". ")[0][:200]


class Transfer(Protocol):
    """A transfer under way; ``done_at_s`` is on the clock of ``time.perf_counter``."""

    @property
    def done(self) -> bool:
        """Whether the transfer is over."""

    @property
    def done_at_s(self) -> float:
        """When it was done."""

    def wait(self, what: str, timeout_s: float | None = None) -> float:
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
        interrupt.begun()
        work.get_future().add_done_callback(self._finished)

    def _finished(self, future: torch.futures.Future[object]) -> None:
        try:
            future.value()
            self.done_at_s = time.perf_counter()
            self.done = True
        except Exception as error:  # an error in gloo's thread, which reaches no other thread
            self._interrupt.lose(f"{self._label}: {first_clause(error)}")
        finally:
            self._interrupt.ended()

    def wait(self, what: str, timeout_s: float | None = None) -> float:
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
    """One direction between two workers: the root sends, in order; both directions may share a group."""

    def __init__(
        self, group: Group, sender_rank: int, interrupt: Interrupt, label: str = "channel", name: str = ""
    ) -> None:
        self.name = name
        """The group's name in its generation."""
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
            raise ValueError("an empty tensor cannot be sent")
        flat = as_bytes(tensor)
        return _start(
            self._label, lambda: self._group.broadcast([flat], self._options), (tensor, flat), self._interrupt
        )


class Ring(Protocol):
    """A reduction group. Every member begins the same operations in the same order."""

    @property
    def name(self) -> str:
        """The ring's name, with its members; unique in a generation."""

    @property
    def size(self) -> int:
        """The number of members."""

    @property
    def rank(self) -> int:
        """This member's number."""

    def exchange(self, received: Tensor, sent: Tensor) -> Transfer:
        """Send row i of a contiguous tensor to member i; row i of the received tensor comes from member i."""

    def gather(self, gathered: Tensor, own: Tensor) -> Transfer:
        """Send every member a flat tensor; ``gathered`` receives those of all members in order."""

    def reduce(self, tensor: Tensor, operation: Any) -> Transfer:
        """All-reduce one tensor in place."""


class DeviceRings(Protocol):
    """One worker's rings of a generation between devices; implemented in the higher layer ``morph.runtime.device``."""

    def ring(self, name: str) -> Ring | None:
        """Return the ring ``name``; None if it is not one of them."""

    def close(self) -> None:
        """Release the rings' resources on the device; blocks until that is done."""


class GlooRing:
    """A ``Ring`` for tensors in host memory."""

    def __init__(self, group: Group, interrupt: Interrupt, label: str = "ring") -> None:
        self.name = label
        self._group = group
        self._interrupt = interrupt

    @property
    def size(self) -> int:
        return int(self._group.size())

    @property
    def rank(self) -> int:
        return int(self._group.rank())

    def exchange(self, received: Tensor, sent: Tensor) -> Pending:
        into, out = as_bytes(received), as_bytes(sent)
        options = AllToAllOptions()
        options.asyncOp = True
        return self._start(lambda: self._group.alltoall_base(into, out, [], [], options), (received, into, sent, out))

    def gather(self, gathered: Tensor, own: Tensor) -> Pending:
        into, out = as_bytes(gathered), as_bytes(own)
        if self.size == 2:
            return self._swap(into, out)
        options = AllgatherOptions()
        options.asyncOp = True
        return self._start(lambda: self._group._allgather_base(into, out, options), (gathered, into, own, out))

    def _swap(self, into: Tensor, out: Tensor) -> Pending:
        """Gather for two members, as bytes: gloo's own receives into new memory and copies all of it once more."""
        mine, theirs = into.view(2, -1)[self.rank], into.view(2, -1)[1 - self.rank]
        if mine.data_ptr() != out.data_ptr():
            mine.copy_(out)
        lengths = [0, len(out)] if self.rank == 0 else [len(out), 0]
        options = AllToAllOptions()
        options.asyncOp = True
        return self._start(lambda: self._group.alltoall_base(theirs, out, lengths, lengths, options), (into, out))

    def reduce(self, tensor: Tensor, operation: Any) -> Pending:
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        options.asyncOp = True
        return self._start(lambda: self._group.allreduce([tensor], options), (tensor,))

    def _start(self, operation: Callable[[], dist.Work], tensors: Sequence[Tensor]) -> Pending:
        return _start(self.name, operation, tensors, self._interrupt)


def ring_label(spec: GroupSpec) -> str:
    """Return the name of a ring in errors."""
    return f"{spec.name} of {', '.join(spec.members)}"


class GroupSet:
    """The groups of one worker in one generation."""

    def __init__(self, interrupt: Interrupt) -> None:
        self._interrupt = interrupt
        self._groups: dict[str, tuple[GroupSpec, Group]] = {}
        self.device_rings: DeviceRings | None = None
        """Used in place of the gloo rings of the same names."""
        self.at_clear: list[Callable[[], None]] = []
        """Functions to call before the groups are closed, for all users but the training thread; they return at once.
        """

    def form(self, specs: Sequence[GroupSpec], worker: str, listen_host: str, open_store: Callable[[], Store]) -> None:
        """Form every group that ``worker`` belongs to, in the order given (the same on every worker).

        Raises GenerationAborted if aborted meanwhile, PeerLost if a member is not there within the generation's limit.
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
                groups[spec.name] = (spec, form_group(store, spec, worker, device, self._interrupt.limit_s))
            return groups

        def guarded() -> dict[str, tuple[GroupSpec, Group]]:
            try:
                return form_all()
            except RuntimeError as error:  # gloo and the store raise RuntimeError and subclasses
                self._interrupt.lose(f"forming its groups: {first_clause(error)}")
                return {}  # the caller gets PeerLost; raising would keep half-formed groups alive in a traceback

        self._groups = self._interrupt.call(guarded, "forming groups")

    @property
    def broken(self) -> bool:
        """Whether an operation that cannot be interrupted may still be under way in one of the groups."""
        return self._interrupt.over

    @property
    def is_idle(self) -> bool:
        """Whether no operation is under way in any group; this is never known for a device's groups."""
        return self._interrupt.is_idle and self.device_rings is None

    @property
    def limit_s(self) -> float:
        """The longest time that such an operation may still take."""
        return self._interrupt.limit_s

    def clear(self) -> None:
        """Close every group: blocks for 10-100 ms, or until a broken operation times out."""
        if self.device_rings is not None:
            self.device_rings.close()
        for end in self.at_clear:
            end()
        self.at_clear.clear()
        self._groups.clear()

    def channel(self, name: str, sender: str) -> Channel:
        """The channel over the two-member group ``name``."""
        spec, group = self._groups[name]
        label = f"{name} between {' and '.join(spec.members)}"
        return Channel(group, spec.members.index(sender), self._interrupt, label, name)

    def ring(self, name: str) -> Ring | None:
        """The ring ``name``; None when this worker is its only member."""
        on_device = None if self.device_rings is None else self.device_rings.ring(name)
        if on_device is not None:
            return on_device
        entry = self._groups.get(name)
        return GlooRing(entry[1], self._interrupt, ring_label(entry[0])) if entry else None
