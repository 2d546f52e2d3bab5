"""The contract of all link implementations: a class of tests, for which each subclass provides the ``ends`` fixture."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from morph.contract.errors import GenerationAborted, PeerLost
from morph.runtime.attendants.wire import acknowledge, receive_frame
from morph.runtime.device.links import Link, TensorSpec
from morph.runtime.device.staging import Staging
from morph.runtime.groups.channels import Channel, GroupSet, GroupSpec, Ring, Transfer, connect_store
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.groups.store import StoreHost
from morph.runtime.state import reduction as reducing
from morph.runtime.state.accumulators import Accumulator, ExactAccumulator, FastAccumulator, Reduced
from morph.runtime.state.parts import Memory
from morph.runtime.state.reduction import Reduction
from tests.waiting import BOUND_S

LOOPBACK = "127.0.0.1"
_GENERATIONS = count(1)
_KINDS = [
    torch.arange(12, dtype=torch.float32).view(3, 4),
    torch.tensor(2.5),
    torch.tensor([True, False]),
    torch.arange(5, dtype=torch.int64),
    torch.ones(3, dtype=torch.bfloat16),
    torch.arange(70_000, dtype=torch.float64),
    torch.complex(torch.ones(3), torch.arange(3.0)),
]


@dataclass(frozen=True)
class Spec:
    """See ``TensorSpec``."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32


def spec_of(tensor: Tensor) -> TensorSpec:
    return Spec(tuple(tensor.shape), tensor.dtype)


def arrived(send: Callable[[socket.socket], None]) -> dict[str, Tensor]:
    """Return the tensors of the frame that is sent to a connection's other end."""
    ours, theirs = socket.socketpair()

    def receive() -> dict[str, Tensor]:
        received = receive_frame(theirs)
        assert received is not None
        acknowledge(theirs)
        return dict(received[0].tensors)

    with ours, theirs, ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(receive)
        send(ours)
        return receiving.result(BOUND_S)


class Pair:
    """Two members in one process, each with its groups of one generation: ``a`` sends to ``b``."""

    def __init__(self, store: StoreHost, limit_s: float) -> None:
        generation = next(_GENERATIONS)
        self.interrupts = {name: Interrupt(generation, limit_s) for name in "ab"}
        self.groups = {name: GroupSet(self.interrupts[name]) for name in "ab"}
        specs = [GroupSpec(f"{name}{generation}", ("a", "b")) for name in ("pair", "ring", "other")]
        self.names = [spec.name for spec in specs]

        def form(member: str) -> None:
            self.groups[member].form(specs, member, LOOPBACK, partial(connect_store, LOOPBACK, store.port()))

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(form, "ab"))

    def channel(self, member: str) -> Channel:
        return self.groups[member].channel(self.names[0], sender="a")

    def ring(self, member: str, number: int = 0) -> Ring:
        ring = self.groups[member].ring(self.names[1 + number])
        assert ring is not None
        return ring

    def close(self) -> None:
        """Close both groups at once: an operation that is under way in one ends when the other is closed."""
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(GroupSet.clear, self.groups.values()))


@pytest.fixture(scope="module")
def store() -> StoreHost:
    return StoreHost(LOOPBACK)


@pytest.fixture
def pair(store: StoreHost, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Return a pair of members; a test may set the bound of each collective, in seconds, by a parameter."""
    made = Pair(store, getattr(request, "param", BOUND_S))
    yield made
    made.close()


@dataclass(frozen=True)
class Ends:
    """Both ends of an implementation.

    ``place`` brings a host tensor to a member's device; ``read`` waits for the device and brings a tensor back.
    Reductions of either member use ``staging``.
    """

    pair: Pair
    links: dict[str, Link]
    staging: Staging | None = None
    place: Callable[[Tensor], Tensor] = torch.clone
    read: Callable[[Tensor], Tensor] = torch.clone
    check: Callable[[], None] = field(default=lambda: None)

    def await_done(self, member: str, transfer: Transfer) -> None:
        self.pair.interrupts[member].wait_for(lambda: transfer.done, "a transfer", BOUND_S)


def _staged_by(ends: Ends) -> AbstractContextManager[object]:
    return mock.patch.object(reducing, "staging_for", return_value=ends.staging)


class LinkContract:
    """Tests of every implementation."""

    @pytest.mark.parametrize("tensor", _KINDS, ids=lambda tensor: f"{tensor.dtype}{tuple(tensor.shape)}")
    def test_a_tensor_of_any_kind_arrives(self, ends: Ends, tensor: Tensor) -> None:
        arriving = ends.links["b"].receive([spec_of(tensor)])
        leaving = ends.links["a"].send([ends.place(tensor)])
        leaving.wait("it to leave", BOUND_S)
        arriving.wait("it to arrive", BOUND_S)
        (arrived,) = arriving.take()
        assert arrived.dtype == tensor.dtype
        assert torch.equal(ends.read(arrived), tensor)
        assert arriving.done_at_s > 0.0
        ends.check()

    def test_a_received_tensor_can_be_read_at_once(self, ends: Ends) -> None:
        arriving = ends.links["b"].receive([Spec((4,))])
        ends.links["a"].send([ends.place(torch.ones(4))])
        ends.await_done("b", arriving)
        doubled = arriving.take()[0] * 2  # the training thread's stream sees them without an explicit wait
        assert ends.read(doubled).tolist() == [2.0] * 4

    def test_a_message_of_several_tensors_arrives_whole_and_messages_in_order(self, ends: Ends) -> None:
        arrivals = [ends.links["b"].receive([Spec((4,)), Spec((), torch.int64)]) for _ in range(5)]
        for number in range(5):
            message = [torch.full((4,), float(number)), torch.tensor(number)]
            ends.links["a"].send([ends.place(tensor) for tensor in message])
        for number, arrival in enumerate(arrivals):
            ends.await_done("b", arrival)
            values, scalar = arrival.take()
            assert ends.read(values).tolist() == [float(number)] * 4
            assert int(ends.read(scalar)) == number
        ends.check()

    def test_attachments_arrive_with_each_message(self, ends: Ends) -> None:
        told = [torch.zeros(2, dtype=torch.uint8) for _ in range(7)]
        arrivals = [ends.links["b"].receive([Spec((3000,)), Spec((4,))], beside=[into]) for into in told]
        for number in range(7):
            message = [torch.full((3000,), float(number)), torch.ones(4)]
            beside = torch.tensor([number, 1], dtype=torch.uint8)
            ends.links["a"].send([ends.place(tensor) for tensor in message], beside=[beside])
        for number, (arrival, into) in enumerate(zip(arrivals, told, strict=True)):
            ends.await_done("b", arrival)
            assert into.tolist() == [number, 1]
            assert ends.read(arrival.take()[0]).tolist() == [float(number)] * 3000
        ends.check()

    def test_a_sender_may_change_its_tensor_at_once(self, ends: Ends) -> None:
        arriving = ends.links["b"].receive([Spec((1000,))])
        tensor = ends.place(torch.ones(1000))
        ends.links["a"].send([tensor])
        tensor.fill_(7.0)
        ends.await_done("b", arriving)
        assert ends.read(arriving.take()[0]).tolist() == [1.0] * 1000

    def test_a_sender_may_let_its_tensor_go_at_once_lent_or_not(self, ends: Ends) -> None:
        arrivals = [ends.links["b"].receive([Spec((1000,))]) for _ in range(2)]
        for lent in (False, True):
            ends.links["a"].send([ends.place(torch.full((1000,), 3.0))], lent=lent)
        for arrival in arrivals:
            ends.await_done("b", arrival)
            assert ends.read(arrival.take()[0]).tolist() == [3.0] * 1000
        ends.check()

    def test_a_view_of_something_larger_and_otherwise_laid_out_arrives(self, ends: Ends) -> None:
        whole = torch.arange(24, dtype=torch.float32).view(4, 6)
        arriving = ends.links["b"].receive([Spec((3, 4))])
        ends.links["a"].send([ends.place(whole).t()[::2]])
        ends.await_done("b", arriving)
        assert torch.equal(ends.read(arriving.take()[0]), whole.t()[::2])

    def test_nothing_to_send_is_sent_at_once(self, ends: Ends) -> None:
        leaving, arriving = ends.links["a"].send([]), ends.links["b"].receive([])
        leaving.wait("nothing", BOUND_S)
        arriving.wait("nothing", BOUND_S)
        assert arriving.take() == ()

    def test_an_abort_ends_the_wait_for_a_message(self, ends: Ends) -> None:
        arriving = ends.links["b"].receive([Spec((4,))])
        ends.pair.interrupts["b"].abort()
        with pytest.raises(GenerationAborted):
            arriving.wait("a message that never comes", BOUND_S)
        leaving = ends.links["a"].send([ends.place(torch.ones(4))])  # lets the fixture close the groups
        leaving.wait("it to leave", BOUND_S)

    def test_a_wait_for_a_closed_peer_ends_with_its_loss(self, ends: Ends) -> None:
        arriving = ends.links["b"].receive([Spec((4,))])
        del ends.links["a"]  # the threads hold its groups
        ends.pair.groups["a"].clear()
        with pytest.raises(PeerLost):
            arriving.wait("a message", BOUND_S)

    @pytest.mark.parametrize("kind", [ExactAccumulator, FastAccumulator])
    def test_a_ring_of_both_gives_the_same_means_to_both(self, ends: Ends, kind: type[Accumulator]) -> None:
        found: dict[str, list[Reduced]] = {}

        def reduce(member: str) -> None:
            sums = [self._sums(ends, kind, member, size) for size in (1000, 1, 7)]
            reduction = Reduction(ends.pair.interrupts[member], 2)
            for number, accumulator in enumerate(sums):
                reduction.put(accumulator, ends.pair.ring(member, number % 2))
            reduction.finish()
            found[member] = [accumulator.finish(2, 0) for accumulator in sums]

        with _staged_by(ends), ThreadPoolExecutor(2) as pool:
            list(pool.map(reduce, "ab"))
        for size, *each in zip((1000, 1, 7), found["a"], found["b"], strict=True):
            for reduced in each:
                assert ends.read(reduced.gradients["w"]).tolist() == [2.5] * size
                assert reduced.exponents == each[0].exponents
        ends.check()

    # A reduction whose other half never comes may be under way: closing its group waits until the bound has passed.
    @pytest.mark.parametrize("pair", [15.0], indirect=True, ids=["15 s"])
    def test_an_abort_ends_the_wait_for_a_reduction(self, ends: Ends) -> None:
        def reduce(member: str) -> None:
            with _staged_by(ends):
                reduction = Reduction(ends.pair.interrupts[member], 2)
                reduction.put(self._sums(ends, ExactAccumulator, member, 3), ends.pair.ring(member))
            ends.pair.interrupts[member].abort()
            with pytest.raises(GenerationAborted):
                reduction.finish()
            reduction._thread.join(BOUND_S)
            assert not reduction._thread.is_alive()

        reduce("a")
        reduce("b")

    def _sums(self, ends: Ends, kind: type[Accumulator], member: str, size: int) -> Accumulator:
        like = ends.place(torch.zeros(size))
        state: Any = {"w": like}, *(({"w": 40}, 2) if kind is ExactAccumulator else ())
        accumulator = kind(*state, memory=Memory(like.device))  # type: ignore[call-arg]
        accumulator.add("w", ends.place(torch.full((size,), 2.0 if member == "a" else 3.0)))
        return accumulator
