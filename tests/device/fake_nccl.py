"""Communicators of fake devices for tests, which behave like NCCL's according to its documents and torch's source.

An operation's future is done when the operation is enqueued. The operation begins when its stream reaches it, and reads
its tensors then; its outputs hold poison until it is complete. An operation whose peer never comes stays at the head of
its stream, and blocks everyone who waits for the device until the communicator is aborted. Tensors travel through the
rendezvous store.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from morph.runtime.device.rings import DeviceFacts
from tests.device.device_tensors import is_on_device, memory_of
from tests.device.fake_device import FakeDevice, poison


class FakeCommunicator:
    """A communicator with the collectives of ``ProcessGroupNCCL`` that a ring uses."""

    def __init__(self, store: Store, rank: int, size: int, library: FakeNccl, number: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._library, self._number = library, number
        self._num_begun = 0
        self.aborted = False

    def alltoall_base(self, into: Tensor, out: Tensor, _sizes: object, _more: object, options: Any) -> object:
        def mine(given: list[Tensor]) -> Tensor:
            return torch.stack([one.view(self._size, -1)[self._rank] for one in given])

        return self._enqueue("exchange", into, out, options, mine)

    def _allgather_base(self, into: Tensor, out: Tensor, options: Any) -> object:
        return self._enqueue("gather", into, out, options, torch.cat)

    def allreduce(self, tensors: list[Tensor], options: Any) -> object:
        combine = {dist.ReduceOp.MAX: torch.amax, dist.ReduceOp.SUM: torch.sum}[options.reduceOp.op]
        (tensor,) = tensors
        return self._enqueue("reduce", tensor, tensor, options, lambda given: combine(torch.stack(given), dim=0))

    def _enqueue(
        self, kind: str, into: Tensor, out: Tensor, options: Any, result: Callable[[list[Tensor]], Tensor]
    ) -> object:
        assert not options.asyncOp, "it would go to a stream of the communicator's own"
        if self.aborted:
            raise RuntimeError("NCCL communicator was aborted")
        device = self._library.device
        assert device.current is not device.at_once, "it would stand in the way of what is computed"
        self._library.launched(self._number, kind)
        assert is_on_device(into)
        assert is_on_device(out)
        keys: list[str] = []

        def act() -> bool:
            if self.aborted:
                return True
            if not keys:
                keys.extend(f"{self._num_begun}/{kind}/{rank}" for rank in range(self._size))
                self._num_begun += 1
                self._store.set(
                    keys[self._rank], memory_of(out).contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                )
                poison(into)
            if not self._store.check(keys):
                return False
            given = [torch.frombuffer(bytearray(self._store.get(key)), dtype=out.dtype) for key in keys]
            memory_of(into).copy_(result(given).view(into.shape))
            return True

        device.current._put(act)
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result([into])
        return future


class FakeNccl:
    """See ``Library``; ``uuid`` is the device's.

    ``kill_at``: the process ends when it launches the n-th operation of this kind, or forms the n-th communicator.
    """

    def __init__(self, device: FakeDevice, uuid: str, kill_at: tuple[str, int] | None = None) -> None:
        self.device = device
        self.facts = DeviceFacts(uuid=uuid, nccl="2.27.0")
        self.launches: list[tuple[int, str]] = []
        self.formed: list[FakeCommunicator] = []
        self.aborts: list[int] = []
        self.is_forming, self.hold_forming = threading.Event(), threading.Event()
        self.hold_forming.set()
        self.left = threading.Event()
        self._kill_at, self._num = kill_at, dict[str, int]()

    def form(self, store: Store, rank: int, size: int, limit_s: float) -> FakeCommunicator:
        self._meet_fault("form")
        self.is_forming.set()
        assert self.hold_forming.wait(limit_s)
        store.set(f"uuid{rank}", self.facts.uuid)
        keys = [f"uuid{number}" for number in range(size)]
        for _ in range(int(limit_s * 100)):
            if store.check(keys) or self.left.wait(0.01):
                break
        if self.left.is_set():
            raise RuntimeError("the test is over")
        uuids = {store.get(key) for key in keys}
        assert len(uuids) == size, "two ranks on one device hang"
        self.formed.append(FakeCommunicator(store.clone(), rank, size, self, len(self.formed)))
        return self.formed[-1]

    def abort(self, communicators: Sequence[FakeCommunicator]) -> None:
        with self.device.condition:
            for one in communicators:
                one.aborted = True
            self.aborts.append(len(communicators))
            self.device.condition.notify_all()

    def launched(self, number: int, kind: str) -> None:
        """Note an operation of a communicator, by the number of this communicator."""
        self._meet_fault(kind)
        self.launches.append((number, kind))

    def _meet_fault(self, kind: str) -> None:
        number = self._num[kind] = self._num.get(kind, -1) + 1
        if (kind, number) == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
