"""Groups of two members in one process: messages, and all ways in which groups end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from morph.contract.errors import GenerationAborted, PeerLost, WaitTimeout
from morph.runtime.groups.channels import Channel, GlooRing, GroupSet, GroupSpec, Pending, Ring, connect_store
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.groups.reaper import Reaper
from morph.runtime.groups.store import StoreHost
from tests.waiting import BOUND_S, poll_until

LOOPBACK = "127.0.0.1"
PAIR = GroupSpec("pair", ("a", "b"))
ALONE = GroupSpec("alone", ("a",))


@pytest.fixture(scope="module")
def store() -> StoreHost:
    return StoreHost(LOOPBACK)


class Pair:
    """Two members, each with its groups of one generation."""

    def __init__(self, store: StoreHost, generation: int) -> None:
        self.interrupts = {name: Interrupt(generation) for name in "ab"}
        self.groups = {name: GroupSet(self.interrupts[name]) for name in "ab"}
        spec = GroupSpec(f"g{generation}", ("a", "b"))
        self.name = spec.name

        def form(member: str) -> None:
            self.groups[member].form([spec, ALONE], member, LOOPBACK, partial(connect_store, LOOPBACK, store.port()))

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(form, "ab"))

    def channel(self, member: str) -> Channel:
        return self.groups[member].channel(self.name, sender="a")

    def ring(self, member: str) -> Ring:
        ring = self.groups[member].ring(self.name)
        assert ring is not None
        return ring


GENERATIONS = iter(range(1, 1000))


@pytest.fixture
def pair(store: StoreHost) -> Iterator[Pair]:
    made = Pair(store, next(GENERATIONS))
    yield made
    for groups in made.groups.values():
        groups.clear()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12, dtype=torch.float32).view(3, 4),
        torch.tensor(2.5),
        torch.tensor([True, False]),
        torch.arange(5, dtype=torch.int64),
        torch.ones(3, dtype=torch.bfloat16),
        torch.zeros(300_000, dtype=torch.float64),
    ],
    ids=lambda tensor: f"{tensor.dtype}{tuple(tensor.shape)}",
)
def test_a_tensor_of_any_kind_arrives(pair: Pair, tensor: torch.Tensor) -> None:
    received = torch.empty_like(tensor)
    arriving = pair.channel("b").transfer(received)
    leaving = pair.channel("a").transfer(tensor)
    leaving.wait("it to leave", BOUND_S)
    arriving.wait("it to arrive", BOUND_S)
    assert torch.equal(received, tensor)


def test_messages_arrive_in_order_also_when_they_were_awaited_before(pair: Pair) -> None:
    received = [torch.empty(4) for _ in range(5)]
    arriving = [pair.channel("b").transfer(tensor) for tensor in received]
    assert not any(pending.done for pending in arriving)
    for value in range(5):
        pair.channel("a").transfer(torch.full((4,), float(value)))
    for pending in arriving:
        pending.wait("it to arrive", BOUND_S)
    assert [float(tensor[0]) for tensor in received] == [0, 1, 2, 3, 4]


def test_the_end_of_an_operation_wakes_whoever_waits_for_it() -> None:
    class Work:
        future: torch.futures.Future[object] = torch.futures.Future()

        def get_future(self) -> torch.futures.Future[object]:
            return self.future

    interrupt = Interrupt(1)
    pending = Pending("message", Work(), (), interrupt)  # type: ignore[arg-type]
    waiter = threading.Thread(target=pending.wait, args=("it", 4 * BOUND_S), daemon=True)
    waiter.start()
    poll_until(lambda: bool(interrupt._condition._waiters), "the thread to wait")  # type: ignore[attr-defined]
    Work.future.set_result(None)
    waiter.join(BOUND_S)
    assert not waiter.is_alive()


def test_an_empty_tensor_cannot_travel(pair: Pair) -> None:
    with pytest.raises(ValueError, match="empty"):
        pair.channel("a").transfer(torch.empty(0))


def test_a_ring_sums_integers_exactly_and_takes_the_largest(pair: Pair) -> None:
    sums = {name: torch.tensor([2**61 - 1, -7, index]) for index, name in enumerate("ab")}
    tops = {name: torch.tensor([float(index), -1.0], dtype=torch.float64) for index, name in enumerate("ab")}
    pending = [pair.ring(name).reduce(sums[name], dist.ReduceOp.SUM) for name in "ab"]
    pending += [pair.ring(name).reduce(tops[name], dist.ReduceOp.MAX) for name in "ab"]
    for one in pending:
        one.wait("the sum", BOUND_S)
    for name in "ab":
        assert sums[name].tolist() == [2**62 - 2, -14, 1]
        assert tops[name].tolist() == [1.0, -1.0]


def test_a_group_of_one_is_not_formed(pair: Pair) -> None:
    assert pair.groups["a"].ring("alone") is None


def test_an_abort_ends_the_wait_for_a_message(pair: Pair) -> None:
    pending = pair.channel("b").transfer(torch.empty(4))
    pair.interrupts["b"].abort()
    with pytest.raises(GenerationAborted):
        pending.wait("a message that never comes", BOUND_S)
    assert pair.groups["b"].broken
    assert not pair.groups["a"].broken
    pair.channel("a").transfer(torch.ones(4)).wait("it to leave", BOUND_S)  # lets the fixture close the groups


def test_a_peer_that_closes_its_end_is_lost(store: StoreHost) -> None:
    pair = Pair(store, next(GENERATIONS))
    pending = pair.channel("b").transfer(torch.empty(4))
    pair.groups["a"].clear()
    with pytest.raises(PeerLost, match=rf"lost a peer: {pair.name} between a and b"):
        pending.wait("a message", BOUND_S)
    assert pair.groups["b"].broken
    pair.groups["b"].clear()


def test_an_operation_that_is_refused_at_once_is_a_lost_peer_too() -> None:
    class Refusing:
        def broadcast(self, *_: object) -> object:
            raise RuntimeError("[gloo/pair.cc:1] Connection closed by peer. Try again")

        allreduce = broadcast

    for use in (
        lambda interrupt: Channel(Refusing(), 0, interrupt).transfer(torch.ones(1)),
        lambda interrupt: GlooRing(Refusing(), interrupt).reduce(torch.ones(1), dist.ReduceOp.SUM),
    ):
        interrupt = Interrupt(5)
        with pytest.raises(PeerLost, match="Connection closed by peer"):
            use(interrupt)
        assert interrupt.over


def test_forming_is_given_up_when_aborted(store: StoreHost) -> None:
    interrupt, asked = Interrupt(next(GENERATIONS)), threading.Event()

    def open_store() -> object:
        asked.set()
        return connect_store(LOOPBACK, store.port())

    def abort() -> None:
        asked.wait(BOUND_S)
        interrupt.abort()

    helper = threading.Thread(target=abort)
    helper.start()
    with pytest.raises(GenerationAborted):
        GroupSet(interrupt).form([GroupSpec("nobody comes", ("a", "b"))], "a", LOOPBACK, open_store)  # type: ignore[arg-type]
    helper.join(BOUND_S)


def test_a_store_that_is_gone_is_a_lost_peer() -> None:
    interrupt = Interrupt(1)

    def open_store() -> object:
        raise dist.DistNetworkError("the store is gone")

    with pytest.raises(PeerLost, match="forming its groups: the store is gone"):
        GroupSet(interrupt).form([PAIR], "a", LOOPBACK, open_store)  # type: ignore[arg-type]


def test_forming_is_bounded_by_the_limit_of_its_generation() -> None:
    release = threading.Event()
    with pytest.raises(WaitTimeout, match="forming groups"):
        GroupSet(Interrupt(1, limit_s=0.01)).form([PAIR], "a", LOOPBACK, lambda: release.wait(BOUND_S))  # type: ignore[arg-type, return-value]
    release.set()


def test_a_collective_may_take_as_long_as_its_reshape_says(store: StoreHost) -> None:
    interrupts = [Interrupt(next(GENERATIONS), limit_s=limit_s) for limit_s in (4800.0, 4800.0)]
    spec = GroupSpec("of a job with long steps", ("a", "b"))
    groups = [GroupSet(interrupt) for interrupt in interrupts]
    with ThreadPoolExecutor(2) as pool:
        open_store = partial(connect_store, LOOPBACK, store.port())
        formed = [
            pool.submit(group.form, [spec], name, LOOPBACK, open_store)
            for group, name in zip(groups, "ab", strict=True)
        ]
        for future in formed:
            future.result(BOUND_S)
    for group in groups:
        assert group._groups[spec.name][1].options._timeout.total_seconds() == 4800.0
        assert group.limit_s == 4800.0
        group.clear()


class _Groups:
    """A stand-in for a ``GroupSet`` that reports when it is closed."""

    def __init__(self, *, broken: bool, limit_s: float = 2 * BOUND_S, is_idle: bool = False) -> None:
        self.broken, self.limit_s, self.is_idle = broken, limit_s, is_idle
        self.closed = threading.Event()

    def clear(self) -> None:
        self.closed.set()


def test_clean_groups_are_closed_at_once_and_broken_ones_kept() -> None:
    reaper = Reaper()
    broken, clean = _Groups(broken=True), _Groups(broken=False)
    reaper.reap(broken)  # type: ignore[arg-type]
    reaper.reap(clean)  # type: ignore[arg-type]
    assert clean.closed.wait(BOUND_S)
    assert not broken.closed.is_set()


def test_broken_groups_are_closed_once_their_operations_have_timed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("morph.runtime.groups.reaper.MARGIN_S", 0.01)
    reaper, broken = Reaper(), _Groups(broken=True, limit_s=0.01)
    reaper.reap(broken)  # type: ignore[arg-type]
    assert broken.closed.wait(BOUND_S)


def test_broken_idle_groups_are_closed_once_all_messages_arrived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("morph.runtime.groups.reaper.LINGER_S", 0.01)
    reaper, busy, idle = Reaper(), _Groups(broken=True), _Groups(broken=True, is_idle=True)
    reaper.reap(busy)  # type: ignore[arg-type]
    reaper.reap(idle)  # type: ignore[arg-type]
    assert idle.closed.wait(BOUND_S)
    assert not busy.closed.is_set()
    busy.is_idle = True
    assert busy.closed.wait(BOUND_S)


def test_how_long_groups_are_kept_counts_from_when_they_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s = [0.0]
    clock = SimpleNamespace(monotonic=lambda: clock_s[0], sleep=time.sleep)
    monkeypatch.setattr("morph.runtime.groups.reaper.time", clock)
    monkeypatch.setattr("morph.runtime.groups.reaper.LOOK_EVERY_S", 0.01)
    reaper, early, busy, idle = Reaper(), *(_Groups(broken=True, is_idle=is_idle) for is_idle in (True, False, True))
    reaper.reap(early)  # type: ignore[arg-type]
    clock_s[0] = 10.0
    assert early.closed.wait(BOUND_S)
    clock_s[0] = 1e6
    reaper.reap(busy)  # type: ignore[arg-type]
    reaper.reap(idle)  # type: ignore[arg-type]
    assert not idle.closed.wait(0.1)
    clock_s[0] += 10.0
    assert idle.closed.wait(BOUND_S)
    assert not busy.closed.is_set()


def test_groups_are_busy_only_while_an_operation_is_under_way(store: StoreHost) -> None:
    pair = Pair(store, next(GENERATIONS))
    assert pair.groups["a"].is_idle
    pending = pair.channel("b").transfer(torch.zeros(3))
    assert not pair.groups["b"].is_idle
    pair.channel("a").transfer(torch.ones(3)).wait("it to leave")
    pending.wait("it to come")
    poll_until(lambda: all(groups.is_idle for groups in pair.groups.values()), "callbacks that end them")
    pair.channel("b").transfer(torch.zeros(3))
    pair.interrupts["b"].abort()
    assert not pair.groups["b"].is_idle
    pair.groups["a"].clear()
    poll_until(lambda: pair.groups["b"].is_idle, "the receive to fail")
    assert pair.interrupts["b"]._lost is not None
