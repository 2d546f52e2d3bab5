"""Copies from and to a computing device: states, frames and sums, in pieces of pinned memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from morph.contract.errors import GenerationAborted
from morph.cutting.cuts.cut_model import ParameterUnit
from morph.runtime.attendants.wire import Frame, send_frame
from morph.runtime.device import staging
from morph.runtime.device.staging import fill, moved, staging_of, to_host
from morph.runtime.reshape.moves import receive_tensors, send_tensors
from morph.runtime.state import reduction as reducing
from morph.runtime.state.accumulators import ExactAccumulator
from morph.runtime.state.parts import Memory
from morph.runtime.state.reduction import Reduction
from morph.runtime.state.unit_state import UnitState
from tests.device.device_tensors import ALIGNMENT, PageableCopy, placed, read
from tests.device.fake_device import FakeDevice, only_device
from tests.device.link_contract import BOUND_S, Pair, arrived

PIECE_BYTES = 1 << 10
SIZES = {"even": (64, 48), "of 64 bytes": (16, 9), "odd": (37, 41), "small": (3,)}
UNIT = ParameterUnit("s0", (0,), tuple(SIZES))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    monkeypatch.setattr(staging, "PIECE_BYTES", PIECE_BYTES)
    with only_device(FakeDevice()) as found:
        yield found


def adam(parameters: Iterable[tuple[str, Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in parameters], lr=0.01)


def unit_state(seed: int) -> UnitState:
    draw = torch.Generator().manual_seed(seed)
    tensors = {name: placed(torch.randn(shape, generator=draw)) for name, shape in SIZES.items()}
    state = UnitState(UNIT, tensors, adam, num_micro_batches=2, exact=True, for_good=True)
    step(state, seed)
    return state


def step(state: UnitState, seed: int) -> None:
    draw, accumulator = torch.Generator().manual_seed(seed), state.new_accumulator()
    for name, shape in SIZES.items():
        for _ in range(2):
            accumulator.add(name, placed(torch.randn(shape, generator=draw)))
    state.reduced = accumulator.finish(2, state.version)
    state.apply()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(read(one[name]), read(other[name])) for name in one)


@pytest.mark.parametrize("forbidden", ["cpu", "copy_", "numpy", "memoryview", "sum with the host's"])
def test_the_host_cannot_read_or_write_a_fake_devices_memory(device: FakeDevice, forbidden: str) -> None:
    there, here = placed(torch.ones(1000)), torch.ones(1000)
    work = {
        "cpu": there.cpu,
        "copy_": lambda: there.copy_(here),
        "numpy": there.numpy,
        "memoryview": lambda: memoryview(there),  # type: ignore[arg-type]
        "sum with the host's": lambda: there + here,
    }[forbidden]
    with pytest.raises((PageableCopy, TypeError, RuntimeError)):
        work()


def test_tensors_go_to_the_host_and_back_while_the_device_computes(device: FakeDevice) -> None:
    tensors = {
        "large": torch.randn(37, 41),
        "turned": torch.randn(30, 20).t(),
        "narrow": torch.randn(700).to(torch.bfloat16),
        "complex": torch.complex(torch.randn(300), torch.randn(300)),
        "scalar": torch.tensor(3.0),
        "none": torch.empty(0),
    }
    on_host = to_host({name: placed(tensor) for name, tensor in tensors.items()} | {"host": torch.ones(3)})
    assert same(on_host, tensors | {"host": torch.ones(3)})
    assert all(tensor.is_contiguous() for tensor in on_host.values())
    assert same({name: moved(tensor, device.kind) for name, tensor in tensors.items()}, tensors)
    into = placed(torch.zeros(37, 41, dtype=torch.float64))
    fill(into, tensors["large"])
    assert torch.equal(read(into), tensors["large"].to(torch.float64))
    assert 0 < device.most_pinned_bytes <= PIECE_BYTES
    assert device.num_stalls == 0, "what computes waits for no copy"


def test_the_next_step_waits_for_the_copy_of_a_state(device: FakeDevice) -> None:
    state, twin = unit_state(1), unit_state(1)
    before = twin.tensors()
    copy = state.copy_later()
    device.hang()
    with ThreadPoolExecutor(2) as pool:
        taking = pool.submit(copy.take)
        stepping = pool.submit(step, state, 2)
        assert not taking.done()
        assert not stepping.done()
        device.hung = False
        copied = taking.result(BOUND_S)
        stepping.result(BOUND_S)
    assert copied is not None
    assert same(copied, before)
    step(twin, 2)
    assert same(state.tensors(), twin.tensors())
    assert device.num_stalls == 0


def test_an_unwanted_state_is_not_copied_before_the_next_step(device: FakeDevice) -> None:
    state = unit_state(1)
    num_copies = device.num_copies
    copy = state.copy_later()
    copy.leave()
    step(state, 2)
    assert copy.take() is None
    assert device.num_copies == num_copies


def test_a_frame_of_a_devices_tensors_arrives_bit_for_bit(device: FakeDevice) -> None:
    tensors = {"sums": torch.arange(3000), "largest": torch.ones(3, dtype=torch.float64), "told": torch.arange(5)}
    mixed = {name: tensor if name == "told" else placed(tensor) for name, tensor in tensors.items()}
    frame = Frame({"kind": "sums"}, mixed)
    assert same(arrived(lambda connection: send_frame(connection, frame)), tensors)
    assert device.most_pinned_bytes <= PIECE_BYTES


def test_received_states_are_aligned_like_torchs_own_memory(device: FakeDevice, pair: Pair) -> None:
    state, empty = unit_state(1), unit_state(2)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send_tensors, state.copy_later().lend(), pair.channel("a"), pair.interrupts["a"])
        tensors, _ = receive_tensors(pair.channel("b"), device.kind)
        for transfer in sending.result(BOUND_S):
            transfer.wait("it to leave", BOUND_S)
    empty.load(tensors, for_good=True)
    assert same(empty.tensors(), state.tensors())
    moments = [value for kept in empty.optimizer.state.values() for value in kept.values() if value.dim()]
    assert len(moments) == 2 * len(SIZES)
    for tensor in (*empty.parameters.values(), *moments):
        assert tensor.data_ptr() % ALIGNMENT == 0, tuple(tensor.shape)


def test_few_pieces_of_sums_are_under_way_and_delay_no_message(
    device: FakeDevice, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reducing, "PIECE_BYTES", PIECE_BYTES)
    monkeypatch.setattr(reducing, "SHARE_BYTES", 8)
    like = placed(torch.zeros(5000))
    sums = ExactAccumulator({"w": like}, {"w": 40}, 2, memory=Memory(like.device))
    sums.add("w", placed(torch.ones(5000)))
    device.hang()
    reduction = Reduction(pair.interrupts["a"], 2)
    reduction.put(sums, pair.ring("a"))
    streams = staging_of(device.kind)
    messages, beside = streams._out, streams._out_sums
    assert not messages.entries  # type: ignore[attr-defined]
    # each waits for the sums, is copied, and is followed by an event; the largest magnitudes go with the first
    assert len(beside.entries) == 3 * reducing.PIECES_ON_THE_WAY + 1  # type: ignore[attr-defined]
    pair.interrupts["a"].abort()
    with pytest.raises(GenerationAborted):
        reduction.finish()


def test_sums_of_many_pieces_are_reduced_through_little_pinned_memory(
    device: FakeDevice, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reducing, "PIECE_BYTES", PIECE_BYTES)
    monkeypatch.setattr(reducing, "SHARE_BYTES", 8)
    numbers = torch.linspace(-1.0, 1.0, 5000)

    def reduce(member: str) -> Tensor:
        like = placed(torch.zeros(5000))
        sums = ExactAccumulator({"w": like}, {"w": 40}, 2, memory=Memory(like.device))
        sums.add("w", placed(numbers * (1.0 if member == "a" else 3.0)))
        reduction = Reduction(pair.interrupts[member], 2)
        reduction.put(sums, pair.ring(member))
        reduction.finish()
        return sums.finish(2, 0).gradients["w"]

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(reduce, "ab")
    assert torch.equal(read(first), read(second))
    assert torch.allclose(read(first), 2 * numbers, atol=1e-6)
    assert device.most_pinned_bytes <= PIECE_BYTES
