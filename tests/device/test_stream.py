"""Tensors as a stream of chunks: the received values, the copies, and the amount in transit at a time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from morph.contract.errors import GenerationAborted, PeerLost
from morph.runtime.groups.channels import Pending
from morph.runtime.reshape import moves
from morph.runtime.reshape.moves import chunks, receive_tensors, send_tensors
from tests.device.device_tensors import placed, read
from tests.device.fake_device import FakeDevice, only_device
from tests.device.link_contract import BOUND_S, Pair

CPU = torch.device("cpu")
SMALL_CHUNK, SMALL_OWN = 1 << 10, 1 << 8


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "CHUNK_BYTES", SMALL_CHUNK)
    monkeypatch.setattr(moves, "OWN_CHUNK_BYTES", SMALL_OWN)


def state() -> dict[str, Tensor]:
    return {
        "param/large": torch.randn(37, 41),
        "param/turned": torch.randn(30, 20).t(),
        "param/narrow": torch.randn(700).to(torch.bfloat16),
        "optim/large/step": torch.tensor(3.0),
        "buffer/flags": torch.tensor([True, False, True]),
        "buffer/none": torch.empty(0),
        "numbers": torch.arange(77, dtype=torch.uint8),
    }


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and torch.equal(first[name], second[name]) for name in first
    )


@given(st.lists(st.integers(0, 5000), max_size=20))
def test_chunks_cover_the_stream_in_order_and_each_large_tensor_begins_one(sizes: list[int]) -> None:
    cut = list(chunks(sizes))
    ends = [0, *(end for _, end in cut)]
    assert [begin for begin, _ in cut] == ends[:-1]
    assert ends[-1] == sum(sizes)
    assert all(0 < end - begin <= moves.CHUNK_BYTES for begin, end in cut)
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    begun = {begin for begin, _ in cut}
    assert all(start in begun for start, size in zip(starts, sizes, strict=True) if size >= moves.OWN_CHUNK_BYTES)


@pytest.mark.parametrize("sends_staged", [False, True])
@pytest.mark.parametrize("receives_staged", [False, True])
def test_a_state_arrives_bit_for_bit_between_hosts_and_devices(
    pair: Pair, sends_staged: bool, receives_staged: bool
) -> None:
    """Numbers and counters are always on the host; their chunks are shared with tensors from the device."""
    tensors, more = state(), {"numbers": torch.arange(9)}
    on_host = ("numbers", "optim/large/step")
    given = {name: placed(one) if sends_staged and name not in on_host else one for name, one in tensors.items()}

    def send() -> None:
        for some in (given, more):
            for transfer in send_tensors(some, pair.channel("a"), pair.interrupts["a"]):
                transfer.wait("it to leave", BOUND_S)

    with only_device(FakeDevice()) as device, ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send)
        for some in (tensors, more):
            arrived, num_bytes = receive_tensors(pair.channel("b"), device.kind if receives_staged else CPU)
            assert equal({name: read(one) for name, one in arrived.items()}, some)
            assert num_bytes > sum(tensor.nbytes for tensor in some.values())
        sent.result(BOUND_S)
    assert bool(device.num_copies) == (sends_staged or receives_staged)


class Recording:
    """A carrier that keeps everything that it is given."""

    def __init__(self, *, done: bool) -> None:
        self.given: list[Tensor] = []
        self._done = done

    def transfer(self, tensor: Tensor) -> Pending:
        self.given.append(tensor)
        made = Pending.__new__(Pending)
        made.done, made.done_at_s = self._done, 0.0
        made.wait = lambda *_: 0.0  # type: ignore[method-assign]
        return made


def test_on_the_host_a_large_tensor_leaves_from_where_it_is(pair: Pair) -> None:
    carrier, tensors = Recording(done=True), {"param/large": torch.randn(1000)}
    pending = send_tensors(tensors, carrier, pair.interrupts["a"])
    assert len(pending) == len(carrier.given) == 2 + 4
    begin = tensors["param/large"].data_ptr()
    assert [part.data_ptr() - begin for part in carrier.given[2:]] == [0, 1024, 2048, 3072]


def test_a_devices_state_is_never_whole_in_host_memory(pair: Pair) -> None:
    """Check that, while nothing arrives, only a few chunks are copied and handed to the wire."""
    carrier, interrupt = Recording(done=False), pair.interrupts["a"]
    with only_device(FakeDevice()) as device, ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send_tensors, {"param/large": placed(torch.randn(10_000))}, carrier, interrupt)
        interrupt.wait_for(lambda: len(carrier.given) == 2 + moves.CHUNKS_UNDER_WAY, "the first chunks", BOUND_S)
        assert device.num_copies == moves.CHUNKS_UNDER_WAY
        interrupt.abort()
        with pytest.raises(GenerationAborted):
            sending.result(BOUND_S)


@pytest.fixture
def broken(pair: Pair) -> Iterator[Pair]:
    yield pair
    for interrupt in pair.interrupts.values():
        interrupt.abort()


def test_a_sender_that_goes_in_the_middle_is_lost(broken: Pair) -> None:
    header, _ = moves.layout(state())
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(receive_tensors, broken.channel("b"), CPU)
        for part in (torch.tensor([len(header)]), torch.frombuffer(bytearray(header), dtype=torch.uint8)):
            broken.channel("a").transfer(part).wait("it to leave", BOUND_S)
        broken.groups["a"].clear()
        with pytest.raises(PeerLost):
            receiving.result(BOUND_S)
