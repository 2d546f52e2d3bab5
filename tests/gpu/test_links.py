"""The contract of links on a CUDA device; no operation of a link waits for the device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from morph.runtime.device.devices import CudaDevice
from morph.runtime.device.links import StagedLink
from morph.runtime.device.staging import Staging
from tests.device.link_contract import Ends, LinkContract, Pair, Spec

CUDA = torch.device("cuda")
LONG_CYCLES = 1 << 31
"""Cycles for which a device takes about a second."""


def from_device(tensor: Tensor) -> Tensor:
    assert tensor.device.type == "cuda"
    torch.cuda.synchronize()
    return tensor.cpu()


class CudaContract(LinkContract):
    """What a link does on a CUDA device beyond the contract."""

    def test_sending_waits_for_no_kernel_yet_sends_their_results(self, ends: Ends) -> None:
        arriving = ends.links["b"].receive([Spec((1 << 20,))])
        tensor = torch.zeros(1 << 20, device=CUDA)
        torch.cuda._sleep(LONG_CYCLES)
        tensor.fill_(3.0)
        ends.links["a"].send([tensor])
        assert not torch.cuda.current_stream().query(), "send has waited for the device"
        tensor.fill_(4.0)
        ends.await_done("b", arriving)
        assert bool((from_device(arriving.take()[0]) == 3.0).all())

    def test_freed_memory_is_not_reused_during_a_copy(self, ends: Ends) -> None:
        for number in range(50):
            arriving = ends.links["b"].receive([Spec((1 << 18,))])
            ends.links["a"].send([torch.full((1 << 18,), float(number), device=CUDA)])
            torch.full((1 << 18,), -1.0, device=CUDA)  # this takes the memory of the sent tensor if that is free
            ends.await_done("b", arriving)
            (taken,) = arriving.take()
            assert bool((taken == number).all())


class TestStagedOnCuda(CudaContract):
    """Both members on one device, each with its own streams."""

    @pytest.fixture
    def ends(self, pair: Pair) -> Ends:
        staging = {name: Staging(CudaDevice(CUDA)) for name in "ab"}
        interrupts = pair.interrupts
        return Ends(
            pair,
            {name: StagedLink(pair.channel(name), staging[name], interrupts[name]) for name in "ab"},
            staging["a"],
            place=lambda tensor: tensor.to(CUDA),
            read=from_device,
        )
