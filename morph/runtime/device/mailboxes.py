"""Links over mailboxes: slots in the sender's device memory, which the receiver, on the same machine, opens and reads.

The sender copies a piece of a message into a free slot, waits for that copy's event, and sends its number to the
receiver over the carrier. The receiver copies the piece to its destination, waits for that copy's event, and sends the
number back, which frees the slot. Host tensors of a message go over the carrier, before its first piece. So each end
waits only for its own device, and no device waits for another process: a killed peer leaves nothing on a stream. No
process writes into another process's memory, so late messages of an aborted generation cannot overwrite memory that is
used for something else.

The two directions share the carrier's group, so both ends begin the same transfers in one order: piece n, then the
answer to piece n - ``num_slots`` + 1. An idle link has no transfer under way.

A ring of slots belongs to its process for good (``MailRoom``), so that morphs neither allocate nor export memory. Each
generation's link takes the ring over from the previous link, whose later copies are refused.
"""

from __future__ import annotations

import threading
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import Generic, TypeVar

import torch
from torch import Tensor

from morph.contract.cluster import MAILBOX_SLOT_BYTES, MAILBOX_SLOTS
from morph.contract.errors import GenerationAborted
from morph.runtime.device.devices import Device, Event, SharingDevice
from morph.runtime.device.links import Arrival, Begun, TensorSpec, own_of
from morph.runtime.groups.channels import Carrier, Transfer, as_bytes
from morph.runtime.groups.interrupt import Interrupt

_LEFT: list[object] = []
"""Mailboxes that were opened on a device that has since been lost."""


class Mailbox:
    """A ring of slots of one process, for the life of the process; one link at a time fills it."""

    def __init__(self, device: SharingDevice, num_slots: int, slot_bytes: int) -> None:
        self.device, self.num_slots, self.slot_bytes = device, num_slots, slot_bytes
        memory, self.handle = device.shared(num_slots * slot_bytes)
        self._slots = memory.view(num_slots, slot_bytes)
        self._stream = device.stream()
        self._taken: tuple[int, object] = -1, None
        self._lock = threading.Lock()

    def take(self, generation: int, owner: object) -> None:
        """Let only ``owner`` fill the mailbox from now on, unless a later generation has taken it."""
        with self._lock:
            if generation >= self._taken[0]:
                self._taken = generation, owner

    def fill(self, owner: object, number: int, piece: Tensor, ready: Event) -> Event:
        """Enqueue the copy of piece ``number`` after ``ready``; return the event after. Raises GenerationAborted."""
        with self._lock:
            if owner is not self._taken[1]:
                raise GenerationAborted("a later generation has its mailbox")
            self._stream.wait(ready)
            self._stream.copy(self._slots[number % self.num_slots, : len(piece)], piece)
            return self._stream.record()


class MailRoom:
    """The mailboxes that one device of this process fills, and the stream on which it reads other mailboxes."""

    def __init__(
        self, device: SharingDevice, num_slots: int = MAILBOX_SLOTS, slot_bytes: int = MAILBOX_SLOT_BYTES
    ) -> None:
        self.device, self._size = device, (num_slots, slot_bytes)
        self.reading = device.stream()
        self._boxes: list[Mailbox] = []

    def box(self, index: int) -> Mailbox:
        """Return the mailbox for the n-th direction in which this worker sends. Raises RuntimeError as ``shared``."""
        while index >= len(self._boxes):
            self._boxes.append(Mailbox(self.device, *self._size))
        return self._boxes[index]


RequestT = TypeVar("RequestT", bound=Begun)


class LinkEnd(ABC, Generic[RequestT]):
    """See ``Link``: one end, which sends or receives; a thread of its own handles requests until ``close``.

    The thread waits for the device without a bound: if that hangs, the thread is left behind until the abort.
    """

    def __init__(self, forth: Carrier, back: Carrier, interrupt: Interrupt) -> None:
        self._forth, self._back, self._interrupt = forth, back, interrupt
        self._requests: SimpleQueue[RequestT | None] = SimpleQueue()
        self._number = 0
        """Number of the next piece."""
        interrupt.at_end(self.close)
        threading.Thread(target=self._work_off, name="morph-mailbox", daemon=True).start()

    def send(
        self,
        tensors: Sequence[Tensor],  # noqa: ARG002 (the other end's)
        *,
        lent: bool = False,  # noqa: ARG002
        beside: Sequence[Tensor] = (),  # noqa: ARG002
    ) -> Transfer:
        """See ``Link.send``; only for the end that sends."""
        raise AssertionError("this end receives")

    def receive(
        self,
        specs: Sequence[TensorSpec],  # noqa: ARG002 (the other end's)
        *,
        beside: Sequence[Tensor] = (),  # noqa: ARG002
    ) -> Arrival:
        """See ``Link.receive``; only for the end that receives."""
        raise AssertionError("this end sends")

    def close(self) -> None:
        """Let the thread end once earlier requests are done; returns at once."""
        self._requests.put(None)

    def _work_off(self) -> None:
        failure: Exception | None = None
        while (requested := self._requests.get()) is not None:
            try:
                if failure is None:
                    self._carry(requested)
            except Exception as error:  # the waiting thread gets the error
                failure = error
                traceback.clear_frames(error.__traceback__)  # they hold a peer's slots
            if failure is not None:
                requested.fail(failure)
            del requested
        self._let_go()
        del self._forth, self._back  # this releases the group, which nothing else may hold

    @abstractmethod
    def _carry(self, requested: RequestT) -> None:
        """Send or receive one message."""

    def _let_go(self) -> None:
        """Run at the end of the thread."""


def _number(number: int) -> Tensor:
    return torch.tensor([number], dtype=torch.int64)


def _pieces(tensors: Sequence[Tensor], slot_bytes: int) -> Iterator[Tensor]:
    for tensor in tensors:
        if tensor.numel():
            flat = as_bytes(tensor)
            yield from (flat[start : start + slot_bytes] for start in range(0, len(flat), slot_bytes))


class _Message(Begun):
    """A message to be sent: its tensors, once the device has reached ``ready``."""

    def __init__(self, tensors: Sequence[Tensor], beside: Sequence[Tensor], ready: Event, interrupt: Interrupt) -> None:
        super().__init__(interrupt)
        self.tensors, self.beside, self.ready = tensors, beside, ready


class SendingEnd(LinkEnd[_Message]):
    """See ``Link``: the end that fills its mailbox. ``forth``: channel to the receiver."""

    def __init__(self, box: Mailbox, forth: Carrier, back: Carrier, interrupt: Interrupt) -> None:
        self._box = box
        self._answer: tuple[Tensor, Transfer] | None = None
        box.take(interrupt.generation, self)
        super().__init__(forth, back, interrupt)

    def send(self, tensors: Sequence[Tensor], *, lent: bool = False, beside: Sequence[Tensor] = ()) -> Transfer:
        own = own_of(tensors, lent=lent)
        message = _Message(own, beside, self._box.device.current.record(), self._interrupt)
        self._requests.put(message)
        return message

    def _carry(self, requested: _Message) -> None:
        signals = [self._forth.transfer(tensor) for tensor in requested.beside]
        for piece in _pieces(requested.tensors, self._box.slot_bytes):
            self._await_slot()
            self._interrupt.check()
            self._box.fill(self, self._number, piece, requested.ready).wait()
            self._interrupt.check()
            signals.append(self._forth.transfer(_number(self._number)))
            self._number += 1
            if self._number >= self._box.num_slots:
                answer = torch.zeros(1, dtype=torch.int64)
                self._answer = answer, self._back.transfer(answer)
        requested.tensors = ()
        requested.begin(signals)

    def _await_slot(self) -> None:
        if self._answer is not None:
            answer, transfer = self._answer
            transfer.wait("a mailbox to be read")
            assert int(answer) == self._number - self._box.num_slots
            self._answer = None


class _Read(Begun):
    """See ``Arrival``: tensors that are read from a peer's mailbox."""

    def __init__(
        self, specs: Sequence[TensorSpec], beside: Sequence[Tensor], device: Device, interrupt: Interrupt
    ) -> None:
        super().__init__(interrupt)
        self.specs, self.beside, self._device = specs, beside, device
        self._read: tuple[tuple[Tensor, ...], Event] | None = None

    def arrive(self, tensors: tuple[Tensor, ...], event: Event, signals: Sequence[Transfer]) -> None:
        """Set the tensors, which are complete once the device has reached ``event``."""
        self._read = tensors, event
        self.begin(signals)

    def take(self) -> tuple[Tensor, ...]:
        assert self.done
        assert self._read is not None
        tensors, event = self._read
        current = self._device.current
        current.wait(event)
        for tensor in tensors:
            current.use(tensor)
        return tensors


class ReceivingEnd(LinkEnd[_Read]):
    """See ``Link``: the end that reads its peer's mailbox, ``slots`` in rows, which only its thread releases."""

    def __init__(self, slots: Tensor, room: MailRoom, forth: Carrier, back: Carrier, interrupt: Interrupt) -> None:
        self._slots: Tensor | None = slots
        self._num_slots, self._slot_bytes = slots.shape
        self._device, self._stream = room.device, room.reading
        self._unanswered: deque[tuple[Event, Tensor]] = deque()
        """The event after each copy out of a slot, and the slot."""
        super().__init__(forth, back, interrupt)

    def receive(self, specs: Sequence[TensorSpec], *, beside: Sequence[Tensor] = ()) -> Arrival:
        arrival = _Read(specs, beside, self._device, self._interrupt)
        self._requests.put(arrival)
        return arrival

    def _carry(self, requested: _Read) -> None:
        assert self._slots is not None
        tensors = tuple(self._stream.empty(spec.shape, spec.dtype) for spec in requested.specs)
        signals = [self._forth.transfer(tensor) for tensor in requested.beside]
        for piece in _pieces(tensors, self._slot_bytes):
            self._answer()
            number = torch.zeros(1, dtype=torch.int64)
            signals.append(self._forth.transfer(number))
            signals[-1].wait("a mailbox to be filled")
            assert int(number) == self._number
            slot = self._slots[self._number % self._num_slots, : len(piece)]
            self._stream.copy(piece, slot)
            self._unanswered.append((self._stream.record(), slot))
            self._number += 1
        requested.arrive(tensors, self._stream.record(), signals)
        self._answer()

    def _answer(self) -> None:
        if len(self._unanswered) == self._num_slots:
            self._unanswered[0][0].wait()
            self._unanswered.popleft()
            self._interrupt.check()
            self._back.transfer(_number(self._number - self._num_slots))

    def _let_go(self) -> None:
        """Release the mailbox once the device no longer reads it; this waits for the stream and ends the mapping."""
        try:
            if self._unanswered:
                self._unanswered[-1][0].wait()
        except Exception:  # the device is lost and must not be used
            _LEFT.append(self._slots)
        self._unanswered.clear()
        with self._stream.computing():
            self._slots = None
