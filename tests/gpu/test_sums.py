"""Exact sums have the same bits on a CUDA device as on the CPU."""

from __future__ import annotations

from typing import Any

import torch

from morph.cutting.sections.section import ParameterUnit
from morph.runtime.state import fixed_point
from morph.runtime.state.unit_state import UnitState

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
    """``_fused`` compares them when it is first called, and returns False if they differ or cannot be compiled."""
    assert fixed_point._fused(torch.device("cuda", torch.cuda.current_device())) is not None
