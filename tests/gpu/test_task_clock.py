"""Events of a CUDA device tell how long its work took, however long the launch took."""

from __future__ import annotations

import time

import torch

from morph.runtime.device.task_clock import clock_of


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
