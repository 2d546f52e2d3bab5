"""What a CUDA device does: links, mailboxes, NCCL, exact sums, events, and workers that share one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from morph.contract.cluster import LinkSetting
from morph.contract.errors import GenerationAborted
from morph.cutting.sections.section import ParameterUnit
from morph.runtime.device.devices import CudaDevice
from morph.runtime.device.links import StagedLink
from morph.runtime.device.nccl import library_for
from morph.runtime.device.rings import CommunicatorSet
from morph.runtime.device.staging import Staging, placed
from morph.runtime.device.task_clock import clock_of
from morph.runtime.groups.channels import GroupSpec
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.state import fixed_point
from morph.runtime.state.unit_state import UnitState
from tests.crew import Crew
from tests.data.test_ahead import KEYS, reading, step_of
from tests.device.link_contract import Ends, LinkContract, Pair, Spec
from tests.system.harness import JOB, load_tiny_job


def test_batches_that_data_workers_read_are_pinned_and_arrive_on_the_device() -> None:
    with reading("drawn", pinned=True) as found:
        found.expect(step_of(0))
        for step, micro_batch in step_of(0):
            batch = found.ahead.load(step, micro_batch, KEYS)
            assert all(batch[key].is_pinned() for key in KEYS if batch[key].numel())
            there = placed(batch, torch.device("cuda"))
            wanted = found.alone.load(step, micro_batch, KEYS)
            assert all(torch.equal(there[key].cpu(), wanted[key]) for key in KEYS)
        assert found.dataset.num_reads == 0


CUDA = torch.device("cuda")
LONG_CYCLES = 1 << 31
"""What a device takes a second or so for."""


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

    def test_memory_that_is_let_go_is_not_reused_under_a_copy(self, ends: Ends) -> None:
        for number in range(50):
            arriving = ends.links["b"].receive([Spec((1 << 18,))])
            ends.links["a"].send([torch.full((1 << 18,), float(number), device=CUDA)])
            torch.full((1 << 18,), -1.0, device=CUDA)  # takes the memory of what was sent, if that is free
            ends.await_done("b", arriving)
            (taken,) = arriving.take()
            assert bool((taken == number).all())


class TestStagedOnCuda(CudaContract):
    """Both members on one device, each with streams of its own."""

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


BOUND_S = 60.0


@pytest.mark.skipif(not dist.is_nccl_available(), reason="torch was built without NCCL")
def test_a_communicator_of_one_rank_works_until_its_generation_ends() -> None:
    device = torch.device("cuda")
    chosen = library_for("auto", device)
    assert chosen is not None
    library, stream = chosen
    assert library.facts.uuid
    interrupt, store = Interrupt(1), dist.HashStore()
    rings = CommunicatorSet([GroupSpec("alone", ("a",))], "a", library, stream, interrupt, lambda: store)
    ring = rings.ring("alone")
    assert ring is not None
    sums, received = torch.arange(6, device=device).view(1, 6), torch.zeros(1, 6, dtype=torch.int64, device=device)
    largest, gathered = torch.ones(1, dtype=torch.float64, device=device), torch.zeros(6, device=device)
    ring.catch_up()
    begun = [ring.reduce(largest, dist.ReduceOp.MAX), ring.exchange(received, sums)]
    begun.append(ring.gather(gathered, torch.linspace(0.0, 1.0, 6, device=device)))
    for one in begun:
        one.wait("an operation of one rank", BOUND_S)
    ring.hand_over([received, gathered])
    assert received.tolist() == sums.tolist()
    assert gathered.tolist() == torch.linspace(0.0, 1.0, 6).tolist()
    assert largest.tolist() == [1.0]
    interrupt.abort()
    with pytest.raises(GenerationAborted):
        ring.reduce(largest, dist.ReduceOp.MAX)
    rings.close()
    torch.cuda.synchronize()


NUM_MICRO_BATCHES = 12
SHAPE = (257, 129)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in parameters], lr=0.1)


def test_gradient_sums_have_equal_bits_on_cpu_and_cuda() -> None:
    generator = torch.Generator().manual_seed(3)
    scales = 2.0 ** torch.arange(-8, 4).float()
    gradients = [torch.randn(SHAPE, generator=generator) * scale for scale in scales]
    means = []
    for device, order in (("cpu", 1), ("cuda", 1), ("cuda", -1)):
        parameter = torch.zeros(SHAPE, device=device)
        unit = ParameterUnit("s0", (0,), ("w",))
        state = UnitState(unit, {"w": parameter}, sgd, num_micro_batches=NUM_MICRO_BATCHES, exact=True)
        sums = state.new_accumulator()
        for gradient in gradients[::order]:
            sums.add("w", gradient.to(device))
        reduced = sums.finish(NUM_MICRO_BATCHES, 0)
        assert not reduced.overflowed
        assert reduced.gradients["w"].device.type == device
        means.append(reduced.gradients["w"].cpu())
    assert torch.equal(means[0], means[1])
    assert torch.equal(means[0], means[2])


def test_one_kernel_adds_a_gradient_with_the_bits_of_torchs_kernels() -> None:
    """``_fused`` compares them when it is first asked, and says no where they differ or cannot be compiled."""
    assert fixed_point._fused(torch.device("cuda", torch.cuda.current_device())) is not None


def test_the_events_of_a_cuda_device_say_what_it_took() -> None:
    device = torch.device("cuda")
    clock, numbers = clock_of(device), torch.randn(4096, 4096, device=device)
    (numbers @ numbers).sum().item()
    start, begun_s = clock.mark(), time.perf_counter()
    for _ in range(50):
        numbers = (numbers @ numbers) / 4096
    end, launched_s = clock.mark(), time.perf_counter() - begun_s
    clock.wait(end)
    assert clock.is_over(end)
    assert launched_s < clock.seconds(start, end) <= time.perf_counter() - begun_s


NAMES = ("w0", "w1")
NUM_STEPS = 3


@pytest.mark.parametrize("links", ["staged", "ipc"])
def test_two_workers_on_one_device_give_equal_bits_in_every_shape(tmp_path: Path, links: LinkSetting) -> None:
    job = load_tiny_job()
    crew = Crew(job, NAMES)
    found = {}
    try:
        crew.set_up(JOB, job.fingerprint, tmp_path, device="cuda", links=links)
        for shapes in (("1x1",), ("2x1",), ("1x2",), ("2x1", "1x2")):
            crew.begin()
            for number, shape in enumerate(shapes):
                depth, replicas = map(int, shape.split("x"))
                crew.reshape(shape, NAMES[: depth * replicas])
                for name in crew.present:
                    assert len(crew.members[name].control("ends")) == (2 if depth == 2 and links == "ipc" else 0)
                crew.train(NUM_STEPS if shape == shapes[-1] else number + 1)
            found[shapes] = crew.digests()
    finally:
        crew.close()
    assert len({tuple(sorted(digests.items())) for digests in found.values()}) == 1
