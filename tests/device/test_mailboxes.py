"""Links over mailboxes: the contract, reused slots, lost peers, and memory that cannot be shared or opened."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Literal
from unittest import mock

import pytest
import torch

from morph.contract.errors import ConfigError, GenerationAborted, PeerLost
from morph.contract.messages import WorkerSetup
from morph.runtime.device import link_choice
from morph.runtime.device.devices import CudaDevice
from morph.runtime.device.link_choice import WorkerMachine, edges_within, mailboxes
from morph.runtime.device.links import Link
from morph.runtime.device.mailboxes import Mailbox, MailRoom, ReceivingEnd, SendingEnd
from morph.runtime.device.staging import Staging
from morph.runtime.groups.channels import GroupSpec, connect_store
from morph.runtime.groups.store import StoreHost
from tests.device.device_tensors import placed, read
from tests.device.fake_device import BOUND_S, DeviceLost, FakeDevice, Ticking
from tests.device.link_contract import LOOPBACK, Ends, LinkContract, Pair, Spec
from tests.waiting import poll_until
from tests.worker_setup import SETUP

Setting = Literal["auto", "ipc", "staged"]


def setup_of(worker: str, links: Setting = "auto") -> WorkerSetup:
    return SETUP.model_copy(update={"worker": worker, "links": links})


class Neighbours:
    """Make both ends of an edge from ``a`` to ``b``; later pairs use their devices and mail rooms again."""

    def __init__(self, store: StoreHost, num_slots: int = 4, slot_bytes: int = 4096) -> None:
        self._store = store
        self.devices = {name: FakeDevice() for name in "ab"}
        self.rooms = {name: MailRoom(device, num_slots, slot_bytes) for name, device in self.devices.items()}

    def join(self, pair: Pair, setting: Setting = "auto") -> dict[str, Link]:
        """Return the links on which both ends agree, by worker."""
        edges = [GroupSpec(pair.names[0], ("a", "b"))]
        open_store = partial(connect_store, LOOPBACK, self._store.port())
        here = threading.local()

        def form(name: str) -> dict[str, Link]:
            here.room = self.rooms[name]
            return mailboxes(setup_of(name, setting), edges, pair.groups[name], pair.interrupts[name], open_store)

        with ThreadPoolExecutor(2) as pool, mock.patch.object(link_choice, "room_for") as room_for:
            room_for.side_effect = lambda *_: here.room
            begun = {name: pool.submit(form, name) for name in "ab"}
            found = {name: one.result(BOUND_S) for name, one in begun.items()}
        return {name: links[pair.names[0]] for name, links in found.items() if links}


class TestMailboxesOnAFakeDevice(LinkContract):
    @pytest.fixture(params=[(4, 1 << 20), (1, 4096)], ids=lambda size: f"{size[0]} of {size[1]} bytes")
    def ends(self, pair: Pair, store: StoreHost, request: pytest.FixtureRequest) -> Iterator[Ends]:
        neighbours = Neighbours(store, *request.param)
        links = neighbours.join(pair)
        assert isinstance(links["a"], SendingEnd)
        assert isinstance(links["b"], ReceivingEnd)
        staging = Staging(neighbours.devices["a"])
        ticking = Ticking(*neighbours.devices.values())
        yield Ends(pair, links, staging, placed, read)
        ticking.stop()

    def test_a_fast_sender_reuses_its_slots_for_every_shape(self, ends: Ends, pair: Pair) -> None:
        sizes = [1, 7000, 512, 40_000, 3, 1024, *range(90, 120), 2]
        messages = [[torch.full((size,), float(size)), torch.arange(number)] for number, size in enumerate(sizes)]
        leaving = [ends.links["a"].send([ends.place(tensor) for tensor in message]) for message in messages]
        assert not leaving[-1].done
        for message in messages:
            arriving = ends.links["b"].receive([Spec(tuple(tensor.shape), tensor.dtype) for tensor in message])
            ends.await_done("b", arriving)
            for arrived, tensor in zip(arriving.take(), message, strict=True):
                assert torch.equal(ends.read(arrived), tensor)
        for one in leaving:
            ends.await_done("a", one)
        ends.check()


@pytest.fixture
def neighbours(store: StoreHost, pair: Pair) -> Iterator[Neighbours]:
    """Release hanging devices before the pair is closed: otherwise its two ends wait for the device and each other."""
    made = Neighbours(store)
    yield made
    for device in made.devices.values():
        device.abort()  # releases the threads that wait for the device


def tick(device: FakeDevice, until: Callable[[], bool], what: str) -> None:
    """Let one device work until a condition holds."""
    poll_until(lambda: device.tick() or until(), what)
    poll_until(lambda: not device.tick() and until(), what)


def test_no_more_slots_are_filled_than_there_are(neighbours: Neighbours, pair: Pair) -> None:
    links, device = neighbours.join(pair), neighbours.devices["a"]
    leaving = [links["a"].send([placed(torch.full((4,), float(number)))]) for number in range(9)]
    tick(device, lambda: device.num_copies == 4, "four slots to be filled")
    for _ in range(50):
        assert not device.tick()
        time.sleep(0.001)
    assert device.num_copies == 4
    assert not leaving[4].done


def test_a_message_stands_in_its_slot_and_untaken_bytes_are_poison(neighbours: Neighbours, pair: Pair) -> None:
    links = neighbours.join(pair)
    arriving = links["b"].receive([Spec((4,))])
    links["a"].send([placed(torch.full((4,), 5.0))])
    for _ in range(50):
        assert not arriving.done, "the sender's device has not done the copy"
        time.sleep(0.001)
    tick(neighbours.devices["a"], lambda: arriving.done, "the message")
    (untaken,) = arriving._read[0]  # type: ignore[attr-defined]
    assert bool(untaken.isnan().all())
    (taken,) = arriving.take()
    assert taken.tolist() == [5.0] * 4
    assert neighbours.devices["b"].used == [taken.data_ptr()]


def test_sending_ignores_a_hanging_device_and_an_abort_ends_every_wait(neighbours: Neighbours, pair: Pair) -> None:
    links = neighbours.join(pair)
    neighbours.devices["a"].hang()
    arriving = links["b"].receive([Spec((4,))])
    leaving = links["a"].send([placed(torch.ones(4))])
    filling = neighbours.rooms["a"].box(0)._stream.entries  # type: ignore[attr-defined]
    poll_until(lambda: len(filling) == 3, "its end to wait for the device")
    for name, transfer in (("a", leaving), ("b", arriving)):
        pair.interrupts[name].abort()
        with pytest.raises(GenerationAborted):
            transfer.wait("it to leave or arrive", BOUND_S)


def test_waiting_for_a_send_raises_the_loss_of_the_device(neighbours: Neighbours, pair: Pair) -> None:
    links = neighbours.join(pair)
    neighbours.devices["a"].hang()
    leaving = links["a"].send([placed(torch.ones(4))])
    neighbours.devices["a"].abort()
    with pytest.raises(DeviceLost):
        leaving.wait("it to leave", BOUND_S)
    with pytest.raises(DeviceLost):
        links["a"].send([placed(torch.ones(4))]).wait("it to leave", BOUND_S)


def test_a_sender_sees_that_its_receiver_left_a_slot_filled(neighbours: Neighbours, pair: Pair) -> None:
    links = neighbours.join(pair)
    leaving = links["a"].send([placed(torch.ones(4))])
    tick(neighbours.devices["a"], lambda: neighbours.devices["a"].num_copies == 1, "a slot to be filled")
    del links["b"]
    pair.groups["b"].clear()
    with pytest.raises(PeerLost):
        leaving.wait("it to leave", BOUND_S)


def test_a_peers_memory_is_released_once_the_device_has_read_it(neighbours: Neighbours, pair: Pair) -> None:
    links = neighbours.join(pair)
    held = weakref.ref(links["b"]._slots)  # type: ignore[attr-defined]
    arriving = links["b"].receive([Spec((4,))])
    links["a"].send([placed(torch.full((4,), 5.0))])
    neighbours.devices["b"].hang()
    tick(neighbours.devices["a"], lambda: arriving.done, "the message")
    for interrupt in pair.interrupts.values():
        interrupt.abort()
    for _ in range(50):
        assert held() is not None, "a copy out of it is still to come"
        time.sleep(0.001)
    neighbours.devices["b"].hung = False
    tick(neighbours.devices["b"], lambda: held() is None, "the memory to be let go")


def test_morphs_share_no_new_memory_and_leave_no_thread(neighbours: Neighbours, store: StoreHost) -> None:
    ticking = Ticking(*neighbours.devices.values())
    num_threads = 0
    for number in range(6):
        pair = Pair(store, BOUND_S)
        links = neighbours.join(pair)
        arrivals = [links["b"].receive([Spec((3000,))]) for _ in range(7)]
        for index in range(7):
            links["a"].send([placed(torch.full((3000,), float(index)))])
        for index, arriving in enumerate(arrivals):
            pair.interrupts["b"].wait_for(lambda found=arriving: found.done, "a message", BOUND_S)  # type: ignore[misc]
            assert read(arriving.take()[0]).tolist() == [float(index)] * 3000
        if number % 2:
            for interrupt in pair.interrupts.values():
                interrupt.abort()
        pair.close()
        poll_until(lambda: not [one for one in threading.enumerate() if one.name == "morph-mailbox"], "the ends to end")
        num_threads = num_threads or threading.active_count()
        assert threading.active_count() <= num_threads
    assert [len(device._shared) for device in neighbours.devices.values()] == [1, 0]
    ticking.stop()


def test_a_link_of_an_earlier_generation_touches_no_slot(neighbours: Neighbours) -> None:
    box, device = Mailbox(neighbours.devices["a"], 2, 64), neighbours.devices["a"]
    piece, ready = placed(torch.ones(8, dtype=torch.uint8)), device.current.record()
    box.take(1, "first")
    box.fill("first", 0, piece, ready)
    box.take(2, "second")
    box.take(1, "a first one that was slow to form")
    box.fill("second", 0, piece, ready)
    for owner in ("first", "a first one that was slow to form"):
        with pytest.raises(GenerationAborted):
            box.fill(owner, 0, piece, ready)


@pytest.mark.parametrize("cannot", ["share", "open"])
def test_both_ends_use_the_host_where_one_must_and_say_so_once(
    neighbours: Neighbours, store: StoreHost, cannot: str, caplog: pytest.LogCaptureFixture
) -> None:
    neighbours.devices["a"].shares = cannot != "share"
    neighbours.devices["b"].opens = cannot != "open"
    link_choice._say_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            pair = Pair(store, BOUND_S)
            assert neighbours.join(pair) == {}
            pair.close()
    (said,) = {record.getMessage() for record in caplog.records}
    assert len(caplog.records) <= 2, "the ends are in one process here, and each may say it"
    assert "through host memory" in said
    assert cannot in said


@pytest.mark.parametrize("cannot", ["share", "open"])
def test_an_impossible_path_between_devices_is_refused_when_requested(
    neighbours: Neighbours, pair: Pair, cannot: str
) -> None:
    neighbours.devices["a"].shares = cannot != "share"
    neighbours.devices["b"].opens = cannot != "open"
    with pytest.raises(ConfigError, match=rf"vms.links.*cannot {cannot}.*ipc.*auto or staged"):
        neighbours.join(pair, "ipc")


def test_workers_of_two_machines_go_through_the_host_and_share_nothing(neighbours: Neighbours, pair: Pair) -> None:
    with mock.patch.object(link_choice, "this_machine", side_effect=["one", "two"]):
        assert neighbours.join(pair, "ipc") == {}
    assert not neighbours.devices["a"]._shared


def test_an_edge_is_within_a_machine_where_both_of_its_ends_are() -> None:
    edges = [GroupSpec("near", ("a", "b")), GroupSpec("far", ("b", "c")), GroupSpec("back", ("b", "a"))]
    places = {name: WorkerMachine(machine=machine) for name, machine in (("a", "1"), ("b", "1"), ("c", "2"))}
    assert [edge.name for edge in edges_within(edges, places)] == ["near", "back"]


def test_nothing_is_asked_of_a_device_where_tensors_go_through_the_host() -> None:
    assert link_choice.room_for("auto", torch.device("cpu")) is None
    assert link_choice.room_for("staged", torch.device("cuda")) is None


def test_an_invalid_handle_of_cuda_memory_is_not_opened() -> None:
    with pytest.raises(ValueError, match="3 bytes are not a handle"):
        CudaDevice(torch.device("cuda:0")).opened(b"abc")


def test_torch_gets_shared_memory_back_without_waiting_for_an_event() -> None:
    device, given = CudaDevice(torch.device("cuda:0")), []
    device.kind = torch.device("cpu", 0)
    memory = torch.UntypedStorage(4096)

    def share(_storage: torch.UntypedStorage) -> tuple[object, ...]:
        return 0, b"h" * 65, 4096, 512, b"/torch_7_1_2", 3, b"e" * 64, True

    def open_shared(*arguments: object) -> torch.UntypedStorage:
        given.extend(arguments)
        return memory

    with mock.patch.multiple(
        torch.UntypedStorage, _share_cuda_=share, _new_shared_cuda=staticmethod(open_shared), create=True
    ):
        _, handle = device.shared(4096)
        found = device.opened(handle)
    assert given == [0, b"h" * 65, 4096, 512, b"/torch_7_1_2", 3, b"", False]
    assert found.shape == (4096,)
    assert found.data_ptr() == memory.data_ptr()
