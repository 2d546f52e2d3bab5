"""The benchmark of a real device runs: on the processor, at sizes that say nothing; and refuses where it has none."""

from __future__ import annotations

import re

import pytest
import torch

from benchmarks.device_speed import training
from benchmarks.device_speed.__main__ import TINY, communicators, copies, kernels, main, steps
from benchmarks.remote import InThisProcess
from morph.runtime.step.kernels import kernels_now, set_kernels


def test_sums_and_copies_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    kernels("cpu", 1 << 10, 1)
    copies("cpu", 1 << 12, 1)
    communicators("cpu")
    *rates, last = capsys.readouterr().out.splitlines()
    assert len(rates) == 5
    assert all(re.fullmatch(r".+: \d+\.\d GB/s", line) for line in rates)
    assert last == "communicators: need a CUDA device, and a torch with NCCL"


@pytest.mark.slow
def test_a_worker_is_timed_beside_a_plain_loop(capsys: pytest.CaptureFixture[str]) -> None:
    """In this process, where everything is imported already."""
    num_threads, kernels_before = torch.get_num_threads(), kernels_now()
    try:
        ((name, job_path),) = TINY.items()
        steps("cpu", name, job_path, 1, depths=(1,), make=InThisProcess)
    finally:
        torch.set_num_threads(num_threads)
        set_kernels(kernels_before)
    plain, morph = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"tiny_gpt, plain loop: \d+\.\d{3} s a step", plain)
    assert re.fullmatch(r"tiny_gpt, Morph 1x1: \d+\.\d{3} s a step, \d+\.\d\d of the plain loop", morph)


def test_two_workers_run_one_forward_and_one_backward_by_turns() -> None:
    plan = training.plan_of(2, "f", 6, 2, 3)
    assert plan.shape == "2x1"
    assert [(stage.first_section, stage.end_section, stage.window) for stage in plan.stages] == [(0, 3, 2), (3, 6, 1)]
    assert plan.orders == {3: ("FFBFBB", "FBFBFB")}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_it_refuses_in_one_sentence_where_there_is_no_device() -> None:
    with pytest.raises(SystemExit, match=r"^needs a CUDA device; torch \S+ finds none$"):
        main()
