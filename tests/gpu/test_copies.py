"""States are copied from a computing CUDA device and back with the same bits, and leave no memory in use."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from socket import socket

import torch
from torch import Tensor

from morph.checkpoint.manifest import DEVICE_ALIGNMENT
from morph.runtime.attendants.wire import Frame, send_frame
from morph.runtime.device.devices import device_for
from morph.runtime.device.staging import PIECE_BYTES, Ready, moved, to_host
from tests.device.link_contract import BOUND_S, arrived

CUDA = torch.device("cuda", 0)
SLEEP_CYCLES = 1 << 32
"""The cycles of a kernel of about two seconds."""


def state() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {
        "large": torch.randn(3 * PIECE_BYTES // 8 + 5, generator=draw),
        "turned": torch.randn(700, 300, generator=draw).t(),
        "narrow": torch.randn(70_001, generator=draw).to(torch.bfloat16),
        "step": torch.tensor(3.0),
        "none": torch.empty(0),
    }


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def is_computing() -> bool:
    return not torch.cuda.current_stream().query()


def test_a_state_leaves_the_device_while_that_computes_and_comes_back() -> None:
    tensors = state()
    there = {name: moved(tensor, CUDA) for name, tensor in tensors.items()}
    assert same(to_host(there), tensors)  # afterwards, pinned memory exists
    ready = Ready(there.values())
    torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
    with ThreadPoolExecutor(1) as pool:
        copied = pool.submit(to_host, there, ready).result(BOUND_S)
    assert is_computing(), "the copy waited for what was computed after it was requested"
    assert same(copied, tensors)
    torch.cuda.synchronize()


def test_a_frame_of_the_devices_tensors_is_sent_while_that_computes() -> None:
    tensors = state()
    there = {name: moved(tensor, CUDA) for name, tensor in tensors.items()}
    to_host(there)

    def send(connection: socket) -> None:
        frame = Frame({"kind": "state"}, there)
        torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        send_frame(connection, frame)
        assert is_computing()

    assert same(arrived(send), tensors)
    torch.cuda.synchronize()


def test_memory_that_nothing_uses_goes_back_to_other_processes() -> None:
    device = device_for(CUDA)
    device.release()
    before = torch.cuda.memory_reserved()
    taken = torch.empty(1 << 28, dtype=torch.uint8, device=CUDA)
    assert taken.data_ptr() % DEVICE_ALIGNMENT == 0
    del taken
    assert torch.cuda.memory_reserved() >= before + (1 << 28)
    device.release()
    assert torch.cuda.memory_reserved() <= before
