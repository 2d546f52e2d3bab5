"""NCCL on one CUDA device: a communicator of one rank is formed, works on a stream of its own, and is aborted."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from morph.contract.errors import GenerationAborted
from morph.runtime.device.nccl import library_for
from morph.runtime.device.rings import CommunicatorSet
from morph.runtime.groups.channels import GroupSpec
from morph.runtime.groups.interrupt import Interrupt
from tests.waiting import BOUND_S


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
