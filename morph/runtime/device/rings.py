"""Rings whose tensors stay on the device: each has a communicator, whose operations run on one stream of the device.

An operation's future shows only that it was enqueued, so an event after it shows that it is done. An operation whose
peer never comes stays on the device, and threads that wait for the device hang, until the communicator is aborted: all
communicators of a generation are aborted together as soon as the generation is over.

Operations are enqueued on one stream in the order in which they are begun. Members of a ring begin its operations in
the same order, all operations of one ring before those of the next (``Reduction``), and all members share the order of
rings; so no two devices wait for each other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions, PrefixStore, Store

from morph.contract.base import Value
from morph.contract.cluster import RingSetting
from morph.contract.errors import ConfigError
from morph.runtime.device.devices import Device, Event, Stream
from morph.runtime.device.links import Begun
from morph.runtime.device.staging import EventThread
from morph.runtime.groups.channels import GroupSpec, as_bytes, first_clause, ring_label
from morph.runtime.groups.interrupt import Interrupt

# The choice of reductions from device to device, from facts about each worker's device. Pure.

MEET_S = 0.01
"""Seconds between two checks whether the members are present to form a communicator."""
FactsT = TypeVar("FactsT", bound=Value)
Communicator = Any
"""A ``ProcessGroupNCCL`` or a substitute; torch ships no types for its collectives."""


class DeviceFacts(Value):
    """Facts about a worker's device: its unique ``uuid``, and the version of its NCCL."""

    uuid: str
    nccl: str


def rings_over_nccl(
    setting: RingSetting, rings: Sequence[GroupSpec], facts: Mapping[str, DeviceFacts]
) -> tuple[GroupSpec, ...]:
    """Return the rings that NCCL reduces, in their order; each member gets the same answer.

    With ``auto``, these are rings whose members have one device each (NCCL hangs with two ranks on one device) and the
    same version of NCCL. ``setting``: the setting in the cluster file. ``rings``: rings of at least two members.
    """
    if setting == "gloo":
        return ()
    chosen = []
    for ring in rings:
        members = [facts[member] for member in ring.members]
        if len({worker.uuid for worker in members}) < len(members):
            why = "two workers of a reduction share a device"
        elif len({worker.nccl for worker in members}) > 1:
            why = "the workers of a reduction have different versions of NCCL"
        else:
            chosen.append(ring)
            continue
        if setting == "nccl":
            raise ConfigError(f"cannot be used: {why}", field="vms.rings", value="nccl", allowed="auto or gloo")
    return tuple(chosen)


class Library(Protocol):
    """A library that forms communicators: NCCL, or its substitute in tests."""

    @property
    def device(self) -> Device:
        """The device of its communicators."""

    @property
    def facts(self) -> DeviceFacts:
        """Facts that other members must know."""

    def form(self, store: Store, rank: int, size: int, limit_s: float) -> Communicator:
        """Meet the other members; blocks until all are present. Raises RuntimeError."""

    def abort(self, communicators: Sequence[Communicator]) -> None:
        """End all communicators with their operations; blocks until the device has none of these operations."""


class RingStream:
    """The stream on which rings of a device work, and the thread that waits for it, for the life of the process."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.stream: Stream = device.stream()
        self.events = EventThread("morph-rings")


class OnDevice(Begun):
    """An operation under way on the device, which holds its tensors until it is done."""

    def __init__(self, event: Event, events: EventThread, tensors: tuple[Tensor, ...], interrupt: Interrupt) -> None:
        super().__init__(interrupt)
        self._event, self._done_at_s = event, 0.0
        events.after(event, self._finished, self.fail, tensors)

    def _finished(self) -> None:
        self._done_at_s = time.perf_counter()
        self.begin(())

    @property
    def done_at_s(self) -> float:
        return self._done_at_s


class DeviceRing:
    """See ``Ring``: for tensors on a device. Operations wait until the communicator is formed."""

    def __init__(
        self, spec: GroupSpec, worker: str, formed: Callable[[], Communicator | None], over: RingStream, end: Interrupt
    ) -> None:
        self.name = ring_label(spec)
        self.size, self.rank = len(spec.members), spec.members.index(worker)
        self._formed, self._over, self._interrupt = formed, over, end

    def catch_up(self) -> None:
        """Let later operations wait for the work that the calling thread has given its device."""
        self._over.stream.wait(self._over.device.current.record())

    def computing(self) -> AbstractContextManager[object]:
        """Compute in order with the ring's operations."""
        return self._over.stream.computing()

    def run(self, work: Callable[[], object]) -> None:
        """Let the device do some work after the ring's operations so far."""
        self._over.stream.run(work)

    def hand_over(self, tensors: Sequence[Tensor]) -> None:
        """Let the calling thread's stream use results of the ring's stream, once they are complete."""
        current = self._over.device.current
        current.wait(self._over.stream.record())
        for tensor in tensors:
            current.use(tensor)

    def exchange(self, received: Tensor, sent: Tensor) -> OnDevice:
        into, out = as_bytes(received), as_bytes(sent)
        options = AllToAllOptions()
        options.asyncOp = False
        return self._begin(lambda group: group.alltoall_base(into, out, [], [], options), (received, sent))

    def gather(self, gathered: Tensor, own: Tensor) -> OnDevice:
        into, out = as_bytes(gathered), as_bytes(own)
        options = AllgatherOptions()
        options.asyncOp = False
        return self._begin(lambda group: group._allgather_base(into, out, options), (gathered, own))

    def reduce(self, tensor: Tensor, operation: Any) -> OnDevice:
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        options.asyncOp = False
        return self._begin(lambda group: group.allreduce([tensor], options), (tensor,))

    def _begin(self, operation: Callable[[Communicator], object], tensors: tuple[Tensor, ...]) -> OnDevice:
        """Enqueue an operation on the ring's stream: without ``asyncOp`` it goes to the current stream."""
        formed: list[Communicator] = []

        def is_formed() -> bool:
            formed[:] = [self._formed()]
            return formed[0] is not None

        self._interrupt.wait_for(is_formed, "the communicator of a reduction")
        try:
            with self._over.stream.computing():
                operation(formed[0])
        except RuntimeError as error:  # the communicator is aborted, or its peer is known to be gone
            self._interrupt.lose(f"{self.name}: {first_clause(error)}")
            self._interrupt.check()
            raise
        return OnDevice(self._over.stream.record(), self._over.events, tensors, self._interrupt)


class CommunicatorSet:
    """See ``DeviceRings``: the communicators of one worker in one generation, formed in a thread in the first step.

    ``specs``: the rings that this worker belongs to, in an order that all members share. ``over``: their stream.
    """

    def __init__(
        self,
        specs: Sequence[GroupSpec],
        worker: str,
        library: Library,
        over: RingStream,
        interrupt: Interrupt,
        open_store: Callable[[], Store],
    ) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._worker, self._library, self._over, self._interrupt = worker, library, over, interrupt
        self._open_store = open_store
        self._formed: dict[str, Communicator] = {}
        self._closed = threading.Event()
        self._lock = threading.Lock()
        interrupt.at_end(self.close)
        threading.Thread(target=self._form, name="morph-communicators", daemon=True).start()

    def ring(self, name: str) -> DeviceRing | None:
        spec = self._specs.get(name)
        if spec is None:
            return None
        return DeviceRing(spec, self._worker, lambda: self._formed.get(name), self._over, self._interrupt)

    def close(self) -> None:
        """See ``DeviceRings.close``. They are aborted together, because one alone would wait for another that hangs."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            formed = list(self._formed.values())
            self._formed.clear()
        self._library.abort(formed)

    def _form(self) -> None:
        try:
            store = self._open_store()
            for spec in self._specs.values():
                if not self._meet(spec, own := PrefixStore(f"{spec.name}/device", store)):
                    return
                self._form_one(spec, own)
        except Exception as error:  # any error is passed to the threads that wait for a communicator
            self._interrupt.lose(f"forming the communicators of reductions: {first_clause(error)}")

    def _meet(self, spec: GroupSpec, store: Store) -> bool:
        """Poll the store until the members are present; return whether they came. No wait in it can be interrupted."""
        store.set(self._worker, "")
        start_s = time.monotonic()
        while not store.check(list(spec.members)):
            if time.monotonic() - start_s > self._interrupt.limit_s:
                self._interrupt.lose(f"{ring_label(spec)}: not all came to form its communicator")
            if self._closed.wait(MEET_S):
                return False
        return not self._closed.is_set()

    def _form_one(self, spec: GroupSpec, store: Store) -> None:
        made = self._library.form(store, spec.members.index(self._worker), len(spec.members), self._interrupt.limit_s)
        with self._lock:
            if not self._closed.is_set():
                self._formed[spec.name] = made
                self._interrupt.notify()
                return
        self._library.abort([made])


def told_facts(store: Store, groups: Sequence[GroupSpec], worker: str, facts: FactsT) -> dict[str, FactsT]:
    """Send a worker's facts to the other members of its groups, and return theirs; blocks until all are present."""
    store.set(worker, facts.model_dump_json())
    members = sorted({member for group in groups for member in group.members})
    return {member: type(facts).model_validate_json(store.get(member)) for member in members}
