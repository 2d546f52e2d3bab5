"""Rings of devices over communicators that behave like NCCL's, on devices that work in ticks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from morph.contract.cluster import RING_PIECES
from morph.contract.errors import ConfigError, GenerationAborted, PeerLost
from morph.runtime.device.nccl import library_for
from morph.runtime.device.rings import CommunicatorSet, DeviceFacts, DeviceRing, RingStream, rings_over_nccl, told_facts
from morph.runtime.device.staging import Staging
from morph.runtime.groups.channels import GroupSpec, connect_store
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.groups.store import StoreHost
from morph.runtime.state import reduction as reducing
from morph.runtime.state.accumulators import ExactAccumulator, Reduced
from morph.runtime.state.parts import Memory
from morph.runtime.state.reduction import Reduction
from tests.device.device_tensors import placed, read
from tests.device.fake_device import BOUND_S, FakeDevice, Ticking
from tests.device.fake_nccl import FakeNccl
from tests.device.link_contract import LOOPBACK, Ends, LinkContract, Pair
from tests.device.test_links import staged_ends
from tests.waiting import poll_until


class Members:
    """Return the rings of a pair's members, each with its own device; members in ``held`` form no communicator yet."""

    def __init__(self, pair: Pair, store: StoreHost, held: str = "") -> None:
        self.pair = pair
        self.devices = {name: FakeDevice() for name in "ab"}
        self.libraries = {name: FakeNccl(device, f"GPU-{name}") for name, device in self.devices.items()}
        for name in held:
            self.libraries[name].hold_forming.clear()
        open_store = partial(connect_store, LOOPBACK, store.port())
        self._specs = [GroupSpec(name, ("a", "b")) for name in pair.names[1:]]
        self.sets = {
            name: CommunicatorSet(
                self._specs, name, self.libraries[name], RingStream(device), pair.interrupts[name], open_store
            )
            for name, device in self.devices.items()
        }
        for name in "ab":
            pair.groups[name].device_rings = self.sets[name]

    def ring(self, name: str, number: int = 0) -> DeviceRing:
        ring = self.pair.groups[name].ring(self._specs[number].name)
        assert isinstance(ring, DeviceRing)
        return ring

    def tick(self) -> bool:
        did = [device.tick() for device in self.devices.values()]
        return any(did)


@pytest.fixture
def members(pair: Pair, store: StoreHost) -> Iterator[Members]:
    made = Members(pair, store)
    yield made
    for library in made.libraries.values():
        library.left.set()


@pytest.fixture
def ticked(members: Members) -> Iterator[Members]:
    ticking = Ticking(*members.devices.values())
    yield members
    ticking.stop()


class TestRingsOfFakeDevices(LinkContract):
    @pytest.fixture
    def ends(self, ticked: Members) -> Ends:
        made = staged_ends(ticked.pair, dict(ticked.devices))

        def check() -> None:
            launches = [library.launches for library in ticked.libraries.values()]
            assert launches[0] == launches[1], "operations of two communicators were launched in two orders"

        return Ends(made.pair, made.links, made.staging, placed, read, check)


def sums_of(name: str, size: int) -> ExactAccumulator:
    like = placed(torch.zeros(size))
    made = ExactAccumulator({"w": like}, {"w": 40}, 2, memory=Memory(like.device))
    made.add("w", placed(torch.linspace(-1.0, 2.0, size) * (1.0 if name == "a" else 3.0)))
    return made


def reduced(pair: Pair, sizes: tuple[int, ...]) -> dict[str, list[Reduced]]:
    """Reduce sums of these sizes over the rings of both members in turn."""

    def reduce(name: str) -> list[Reduced]:
        reduction = Reduction(pair.interrupts[name], 2)
        sums = [sums_of(name, size) for size in sizes]
        for number, accumulator in enumerate(sums):
            reduction.put(accumulator, pair.ring(name, number % 2))
        reduction.finish()
        return [accumulator.finish(2, 0) for accumulator in sums]

    with ThreadPoolExecutor(2) as pool:
        return dict(zip("ab", pool.map(reduce, "ab"), strict=True))


def test_sums_reduced_on_devices_have_the_bits_of_those_reduced_through_gloo(ticked: Members) -> None:
    sizes = (1000, 1, 7, 4097)
    on_devices = reduced(ticked.pair, sizes)
    for groups in ticked.pair.groups.values():
        groups.device_rings = None
    staging = Staging(ticked.devices["a"])
    with mock.patch.object(reducing, "staging_for", return_value=staging):
        through_gloo = reduced(ticked.pair, sizes)
    assert ticked.libraries["a"].launches == ticked.libraries["b"].launches
    assert {number for number, _ in ticked.libraries["a"].launches} == {0, 1}
    for name in "ab":
        for have, want in zip(on_devices[name], through_gloo[name], strict=True):
            assert torch.equal(read(have.gradients["w"]), read(want.gradients["w"]))
            assert have.exponents == want.exponents


def test_no_host_waits_between_the_operations_of_a_piece(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both members enqueue everything that two pieces need, and more, while the devices do nothing yet."""
    monkeypatch.setattr("morph.runtime.state.reduction.RING_PIECE_BYTES", 1)
    monkeypatch.setattr("morph.runtime.state.reduction.SHARE_BYTES", 800)
    launches = [library.launches for library in members.libraries.values()]
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(reduced, members.pair, (1000,))
        for name, launched in zip("ab", launches, strict=True):
            enough = partial(lambda launched: len(launched) >= 6, launched)
            poll_until(enough, f"two gathers of {name}")
        kinds = [kind for _, kind in launches[0]]
        assert kinds == ["reduce", "exchange", "exchange", "gather", "exchange", "gather"]
        ticking = Ticking(*members.devices.values())
        on_devices = whole.result(BOUND_S)["a"][0]
        ticking.stop()
    alone = sums_of("a", 1000)
    partial_sums = sums_of("b", 1000).partial()
    assert partial_sums is not None
    alone.merge(partial_sums)
    assert torch.equal(read(on_devices.gradients["w"]), read(alone.finish(2, 0).gradients["w"]))


def test_at_most_two_pieces_of_sums_are_received_at_a_time(ticked: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("morph.runtime.state.reduction.RING_PIECE_BYTES", 800)
    monkeypatch.setattr("morph.runtime.state.reduction.SHARE_BYTES", 8)
    memories: list[Memory] = []

    def tight(*, is_tight: bool) -> Memory:
        memories.append(Memory(is_tight=is_tight))
        return memories[-1]

    monkeypatch.setattr("morph.runtime.state.reduction.Memory", tight)
    reduced(ticked.pair, (3, 10, 30, 90, 300, 40, 500))
    assert len(memories) == 2
    for memory in memories:
        assert 800 <= sum(one.nbytes for one in memory.used.values()) <= RING_PIECES * 800


def test_an_operation_ends_with_its_event_and_not_with_its_future(members: Members) -> None:
    for name in "ab":
        poll_until(lambda name=name: len(members.libraries[name].formed) == 2, "forming")  # type: ignore[misc]
    into = {name: placed(torch.zeros(4)) for name in "ab"}
    pending = {
        name: members.ring(name).gather(into[name], placed(torch.full((2,), 1.0 if name == "a" else 2.0)))
        for name in "ab"
    }
    assert not any(one.done for one in pending.values())
    members.devices["a"].tick()  # its operation has begun, and the peer has not come
    assert bool(into["a"].isnan().all())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(pending["a"].wait, "it", BOUND_S)
        while not waiting.done():
            members.tick()
    assert into["a"].tolist() == [1.0, 1.0, 2.0, 2.0]


def test_operations_follow_the_work_that_the_calling_thread_enqueued(ticked: Members) -> None:
    values = {name: placed(torch.ones(3)) for name in "ab"}
    late = placed(torch.full((3,), 5.0))
    for name in "ab":
        ring, device = ticked.ring(name), ticked.devices[name]
        with device.condition:  # nothing ticks
            device.at_once.copy(values[name], late)
            ring.catch_up()
    pending = [ticked.ring(name).reduce(values[name], dist.ReduceOp.SUM) for name in "ab"]
    for one in pending:
        one.wait("the sum", BOUND_S)
    assert values["a"].tolist() == [10.0] * 3


def test_a_ring_is_used_before_its_communicator_is_formed(pair: Pair, store: StoreHost) -> None:
    """This happens in the first step of a generation, which does not wait for communicators."""
    made = Members(pair, store, held="b")
    ticking = Ticking(*made.devices.values())
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(reduced, pair, (5,))
        made.pair.interrupts["a"].wait_for(lambda: made.ring("a") is not None, "a", BOUND_S)
        assert not whole.done()
        made.libraries["b"].hold_forming.set()
        assert len(whole.result(BOUND_S)) == 2
    ticking.stop()


def test_waiting_for_an_absent_peer_ends_with_the_generation(ticked: Members) -> None:
    pending = ticked.ring("a").reduce(placed(torch.ones(3)), dist.ReduceOp.SUM)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(pending._event.wait)
        assert not waiting.done()
        ticked.pair.interrupts["a"].wait_for(lambda: len(ticked.sets["a"]._formed) == 2, "forming", BOUND_S)
        ticked.pair.interrupts["a"].abort()
        waiting.result(BOUND_S)
    with pytest.raises(GenerationAborted):
        pending.wait("the sum", BOUND_S)
    assert ticked.libraries["a"].aborts == [2], "communicators are aborted together, and once"
    with pytest.raises(GenerationAborted):
        ticked.ring("a").reduce(placed(torch.ones(3)), dist.ReduceOp.SUM)


def test_a_generation_that_ends_while_a_communicator_is_formed_leaves_none(pair: Pair, store: StoreHost) -> None:
    made = Members(pair, store, held="ab")
    assert all(library.is_forming.wait(BOUND_S) for library in made.libraries.values())
    for interrupt in pair.interrupts.values():
        interrupt.abort()
    with pytest.raises(GenerationAborted):
        made.ring("a").reduce(placed(torch.ones(1)), dist.ReduceOp.SUM)
    for library in made.libraries.values():
        library.hold_forming.set()
    for library in made.libraries.values():
        over = threading.Event()
        for _ in range(3000):
            if library.formed and all(one.aborted for one in library.formed):
                break
            over.wait(0.01)
        assert len(library.formed) == 1
        assert library.formed[0].aborted


@pytest.mark.parametrize("error", [RuntimeError, ValueError, OSError])
def test_whatever_forming_a_communicator_fails_with_ends_the_wait_for_it(
    pair: Pair, store: StoreHost, error: type[Exception]
) -> None:
    with mock.patch.object(FakeNccl, "form", side_effect=error("no such device")):
        made = Members(pair, store)
        with pytest.raises(PeerLost, match="no such device"):
            made.ring("a").reduce(placed(torch.ones(1)), dist.ReduceOp.SUM)


RINGS = [GroupSpec("first", ("a", "b")), GroupSpec("second", ("a", "c")), GroupSpec("third", ("b", "c"))]


def facts(**uuids: str) -> dict[str, DeviceFacts]:
    return {name: DeviceFacts(uuid=uuid, nccl="2.27.0") for name, uuid in uuids.items()}


@pytest.mark.parametrize(
    ("setting", "told", "names"),
    [
        ("gloo", facts(a="1", b="2", c="3"), []),
        ("auto", facts(a="1", b="2", c="3"), ["first", "second", "third"]),
        ("auto", facts(a="1", b="1", c="3"), ["second", "third"]),
        ("auto", facts(a="1", b="1", c="1"), []),
        ("auto", facts(a="1", b="2") | {"c": DeviceFacts(uuid="3", nccl="2.26.2")}, ["first"]),
        ("nccl", facts(a="1", b="2", c="3"), ["first", "second", "third"]),
    ],
)
def test_no_ring_has_two_members_on_one_device(setting: str, told: dict[str, DeviceFacts], names: list[str]) -> None:
    assert [ring.name for ring in rings_over_nccl(setting, RINGS, told)] == names  # type: ignore[arg-type]


def test_rings_that_nccl_cannot_form_are_refused_when_requested() -> None:
    with pytest.raises(ConfigError, match=r"vms.rings.*two workers of a reduction share a device"):
        rings_over_nccl("nccl", RINGS, facts(a="1", b="1", c="3"))
    with pytest.raises(ConfigError, match=r"vms.rings.*different versions of NCCL"):
        rings_over_nccl("nccl", RINGS, facts(a="1", b="2") | {"c": DeviceFacts(uuid="3", nccl="2.26.2")})


def test_members_learn_of_each_others_devices(store: StoreHost) -> None:
    told = facts(a="1", b="2", c="3")

    def tell(name: str) -> dict[str, DeviceFacts]:
        mine = [ring for ring in RINGS if name in ring.members]
        return told_facts(connect_store(LOOPBACK, store.port()), mine, name, told[name])

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(tell, "abc")) == [told] * 3


def test_nothing_is_asked_of_a_device_where_sums_go_through_the_host() -> None:
    assert library_for("auto", torch.device("cpu")) is None
    assert library_for("gloo", torch.device("cuda")) is None
    if not dist.is_nccl_available():
        assert library_for("auto", torch.device("cuda")) is None
        with pytest.raises(ConfigError, match=r"vms.rings: is not in this torch"):
            library_for("nccl", torch.device("cuda"))


def test_actions_for_a_generations_end_run_even_if_registered_late() -> None:
    interrupt, called = Interrupt(1), [threading.Event(), threading.Event()]
    interrupt.at_end(called[0].set)
    assert not called[0].is_set()
    interrupt.lose("it")
    interrupt.at_end(called[1].set)
    assert all(one.wait(BOUND_S) for one in called)
