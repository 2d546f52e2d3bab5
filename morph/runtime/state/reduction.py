"""Reduces sums over the workers that share them, while these still compute.

Each worker turns its share of a part into means: it gets 8 bytes for each parameter of exact sums, and sends 4, where
an all-reduce of sums would send 16. The sums do not change, so that a worker has its own if the step is abandoned. In a
ring of devices, they stay on the device.
"""

from __future__ import annotations

import math
import threading
import traceback
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch.distributed as dist
from torch import Tensor

from morph.contract.cluster import RING_PIECE_BYTES
from morph.runtime.device.devices import Event
from morph.runtime.device.rings import DeviceRing
from morph.runtime.device.staging import Staging, staging_for
from morph.runtime.groups.channels import Ring, Transfer
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.state.accumulators import Accumulator
from morph.runtime.state.parts import Memory, UnitPart

_WHAT = "the gradients' reduction"


PIECE_BYTES = 16 * 1024 * 1024
"""Bytes of a part's sums under way at once: few, because receiving takes as much memory again."""
PIECES_ON_THE_WAY = 3
"""The number of pieces of a device's sums that are copied to the host, are there, or are sent and not received yet."""
SHARE_BYTES = 256 * 1024
"""The least bytes of a piece for each member: smaller messages take as long."""


@dataclass(eq=False)
class _Unit:
    """One accumulator that is reduced over one ring; ``staging``: if its sums are copied from a device."""

    accumulator: Accumulator
    ring: Ring
    staging: Staging | None
    ready: Event | None = None
    largest: Tensor | None = None
    means: dict[UnitPart, Tensor] = field(default_factory=dict)
    sums_of_means: dict[UnitPart, float] = field(default_factory=dict)

    @property
    def parts(self) -> list[UnitPart]:
        return [part for part in self.accumulator.parts if part.size]

    def pieces(self) -> list[_Piece]:
        """Return the pieces to reduce: each part's sums, in equal shares; the largest magnitudes go with the first."""
        num, pieces = self.ring.size, []
        piece_bytes = RING_PIECE_BYTES if isinstance(self.ring, DeviceRing) else PIECE_BYTES
        for part in self.parts:
            flat = part.shares(num).view(-1)
            length = max(piece_bytes, num * SHARE_BYTES) // flat.element_size() // num * num
            for first in range(0, len(flat), length):
                pieces.append(_Piece(self, part, first, len(flat), flat[first : first + length].view(num, -1)))
        pieces = pieces or [_Piece(self, None, 0, 0, None)]
        pieces[0].largest = self.accumulator.largest
        return pieces

    def take(self, num_micro_batches: int) -> None:
        """Give the results for all members to the accumulator; called in the thread that computes."""
        means, largest = tuple(self.means[part] for part in self.parts), self.largest
        if self.staging is not None:
            self.staging.arrived(means, self.staging.filled())
        elif isinstance(self.ring, DeviceRing):
            self.ring.hand_over(means if largest is None else (*means, largest))
        self.accumulator.take(dict(zip(self.parts, means, strict=True)), largest, num_micro_batches)
        for part, total in self.sums_of_means.items():
            part.sum_of_means = total


@dataclass(eq=False)
class _Piece:
    """A range of a part; ``part_size``: elements of the whole part, in equal shares; ``sums``: (members, elements)."""

    unit: _Unit
    part: UnitPart | None
    first: int
    part_size: int
    sums: Tensor | None
    largest: Tensor | None = None
    received: Tensor | None = None
    means: Tensor | None = None
    pending: list[Transfer] = field(default_factory=list)

    @property
    def ring(self) -> Ring:
        return self.unit.ring

    def computing(self) -> AbstractContextManager[object]:
        return self.ring.computing() if isinstance(self.ring, DeviceRing) else nullcontext()

    def scatter(self, memory: Memory) -> None:
        """Send every member its share of the sums."""
        with self.computing():
            if self.largest is not None:
                # the maximum of a number and NaN may be the number; infinity also means that the step must be skipped
                self.unit.largest = self.largest.nan_to_num(nan=math.inf, posinf=math.inf)
                self.pending.append(self.ring.reduce(self.unit.largest, dist.ReduceOp.MAX))
            if self.sums is not None:
                self.received = memory.take(self.sums.numel(), self.sums.dtype, self.sums.device).view(self.sums.shape)
                self.pending.append(self.ring.exchange(self.received, self.sums))

    def gather(self, num_micro_batches: int, memory: Memory) -> None:
        if not isinstance(self.ring, DeviceRing):  # the ring's stream has them in order
            self.wait()
        with self.computing():
            if self.part is None or self.received is None:
                return
            length = self.received.shape[1]
            first = self.first + self.ring.rank * length
            whole = self._memory_of_means(self.part, memory, self.ring.size * length)
            means = whole.view(-1, length)[self.ring.rank]
            make = partial(self.unit.accumulator.mean, self.part, self.received, first, num_micro_batches, means)
            self.ring.run(make) if isinstance(self.ring, DeviceRing) else make()
            self.pending.append(self.ring.gather(whole, means))
            memory.give_back(self.received)
            self.sums, self.received, self.means = None, None, whole

    def _memory_of_means(self, part: UnitPart, memory: Memory, size: int) -> Tensor:
        """Return the destination of this piece's means: their final place, or pinned memory that is copied there."""
        assert self.received is not None
        staging, dtype = self.unit.staging, part.mean_dtype
        if part not in self.unit.means:
            if staging is not None:
                made = staging.empty((self.part_size,), dtype)
            elif isinstance(self.ring, DeviceRing):  # not a larger piece's memory, which the next one can use
                made = self.received.new_empty(self.part_size, dtype=dtype)
            else:
                made = memory.take(self.part_size, dtype, self.received.device)
            self.unit.means[part] = made
        if staging is not None:
            return staging.device.pinned((size,), dtype)
        return self.unit.means[part][self.first : self.first + size]

    def copied_to_host(self, hosts: Sequence[Tensor]) -> None:
        """Record that the sums to be reduced are on the host now."""
        copies = iter(hosts)
        self.largest = None if self.largest is None else next(copies)
        self.sums = None if self.sums is None else next(copies).view(self.sums.shape)

    def wait(self) -> None:
        for pending in self.pending:
            pending.wait(_WHAT)
        self.pending.clear()

    def wait_for_means(self) -> None:
        """Block until the means are complete, and check those of floating-point sums that stand for the others."""
        self.wait()
        if self.part is not None and self.means is not None:
            on_host = self.means.device.type == "cpu" and not isinstance(self.ring, DeviceRing)
            if on_host and self.unit.accumulator.marks_non_finite:
                length = len(self.means) // self.ring.size
                shares = range(self.first, self.first + len(self.means), length)
                ranges = [span for first in shares for span in self.part.tensors_between(first, first + length)]
                means = self.means[[begin - self.first for _, begin, _ in ranges]]
                sums = self.unit.sums_of_means
                sums[self.part] = sums.get(self.part, 0.0) + float(means.sum())
            if self.unit.staging is not None:
                place = self.unit.means[self.part][self.first : self.first + len(self.means)]
                self.unit.staging.fill(place, self.means)
        self.means = None


class Reduction:
    """The reductions of one step, begun in the order in which they are ``put``, which all members of a ring share.

    They run piece by piece in a thread of their own, and each waits for its means only after the sums of the next one
    were sent, so that links are never idle. In a ring of devices, threads wait only for the means of the last piece but
    one. Other sums on a device are first copied to pinned memory, a few pieces at a time.
    """

    def __init__(self, interrupt: Interrupt, num_micro_batches: int, memory: Memory | None = None) -> None:
        self._interrupt = interrupt
        self._memory = memory or Memory(is_tight=True)
        self._num_micro_batches = num_micro_batches
        self._units: list[_Unit] = []
        self._to_copy: deque[_Piece] = deque()
        self._num_on_the_way = 0
        self._lock = threading.Lock()
        self._to_scatter: deque[_Piece] = deque()
        self._scattered: deque[_Piece] = deque()
        self._gathered: deque[_Piece] = deque()
        self._is_complete = self._is_done = False
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def put(self, accumulator: Accumulator, ring: Ring | None) -> None:
        """Reduce an accumulator that is complete; without a ring there is nothing to do."""
        if ring is None or self._failure is not None:
            return
        staging = None if isinstance(ring, DeviceRing) else staging_for(accumulator.device)
        unit = _Unit(accumulator, ring, staging)
        self._units.append(unit)
        pieces = unit.pieces()
        if isinstance(ring, DeviceRing):
            ring.catch_up()
        if staging is None:
            self._to_scatter.extend(pieces)
            self._interrupt.notify()
        else:
            unit.ready = staging.device.current.record()
            self._to_copy.extend(pieces)
            self._copy_next()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="morph-reduce", daemon=True)
            self._thread.start()

    def _copy_next(self) -> None:
        """Enqueue copies of further pieces to the host, as far as there is room for them; called from any thread."""
        while self._failure is None:
            with self._lock:
                if not self._to_copy or self._num_on_the_way == PIECES_ON_THE_WAY:
                    return
                piece = self._to_copy.popleft()
                self._num_on_the_way += 1
                staging = piece.unit.staging
                assert staging is not None
                given = [tensor.view(-1) for tensor in (piece.largest, piece.sums) if tensor is not None]
                staging.to_host(given, partial(self._on_host, piece), self._fail, beside=piece.unit.ready)

    def _on_host(self, piece: _Piece, hosts: Sequence[Tensor]) -> None:
        piece.copied_to_host(hosts)
        self._to_scatter.append(piece)
        if self._failure is not None:  # everything was released during this copy
            self._to_scatter.clear()
        self._interrupt.notify()

    def finish(self) -> None:
        """Block until everything that was put is reduced. Raises as ``Interrupt.wait_for``."""
        if self._thread is None:
            return
        self._is_complete = True
        self._interrupt.notify()
        self._interrupt.wait_for(lambda: self._is_done, _WHAT)
        if self._failure is not None:
            raise self._failure
        for unit in self._units:
            unit.take(self._num_micro_batches)
        self._let_go()

    def _let_go(self) -> None:
        """Release all rings, whose last holder must be the reaper of old groups: it waits for their operations."""
        self._units.clear()
        for pieces in (self._to_copy, self._to_scatter, self._scattered, self._gathered):
            pieces.clear()

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._interrupt.notify()

    def _run(self) -> None:
        try:
            self._reduce()
        except BaseException as error:  # for the waiting thread; an aborted generation has already ended the wait
            traceback.clear_frames(error.__traceback__)
            self._fail(error)
        if self._failure is not None:
            self._let_go()
        self._is_done = True
        self._interrupt.notify()

    def _reduce(self) -> None:
        while not self._is_over():
            self._interrupt.wait_for(
                lambda: bool(self._to_scatter) or self._failure is not None or self._is_over(),
                _WHAT,
                threading.TIMEOUT_MAX,
            )
            if self._failure is not None:
                return
            if self._to_scatter:
                piece = self._to_scatter.popleft()
                if self._scattered and self._scattered[0].ring.name != piece.ring.name:
                    # all pieces of one ring before those of the next: devices do one operation after the other
                    self._gather_next()
                piece.scatter(self._memory)
                self._scattered.append(piece)
            if len(self._scattered) > 1:
                self._gather_next()
        while self._scattered:
            self._gather_next()
        for piece in self._gathered:
            piece.wait_for_means()

    def _gather_next(self) -> None:
        piece = self._scattered.popleft()
        piece.gather(self._num_micro_batches, self._memory)
        if piece.unit.staging is not None:
            with self._lock:
                self._num_on_the_way -= 1
            self._copy_next()
        self._gathered.append(piece)
        if len(self._gathered) > 1:
            self._gathered.popleft().wait_for_means()

    def _is_over(self) -> bool:
        if not self._is_complete or self._to_scatter:
            return False
        with self._lock:
            waiting = sum(piece.unit.staging is not None for piece in self._scattered)
            return not self._to_copy and self._num_on_the_way == waiting and not self._to_scatter
