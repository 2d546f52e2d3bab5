"""Step times of a plain loop, and of Morph's workers, which share the device."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.harness import wall_s
from benchmarks.remote import Called, Remote
from benchmarks.workers import Crew, cut_job, loss_of, plan_by_hand
from morph.contract.cluster import LinkSetting
from morph.contract.plan import Plan
from morph.cutting.deferred_init.construct import build_really
from morph.data import MicroBatchLoader
from morph.jobs.job import load_job
from morph.runtime.step.kernels import kernels_for, kernels_now, prepare_cublas, set_kernels
from morph.runtime.step.stage import autocast


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class PlainLoop:
    """A job's training without Morph, with the same precision.

    Args:
        job_path: path/to/file.py:name.
        device: "cuda" or "cpu".
        free: Use torch's own choice of kernels and a fused AdamW, in place of the kernels that exact sums allow.
    """

    def __init__(self, job_path: str, device: str, free: bool = False) -> None:
        torch.set_num_threads(1)
        self.job, self._device, self._step = load_job(job_path), device, 0
        if not free:
            prepare_cublas()
            set_kernels(kernels_for(self.job.accumulation, kernels_now()))
        with torch.device(device):
            self.model = build_really(self.job.model, self.job.seed).to(device)
        self._optimizer = self.job.optimizer(self.model.named_parameters())
        if free and device == "cuda":
            self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)
        m = self.job.micro_batch_size
        assert m is not None
        data = self.job.dataset()
        self._loader, self._keys = MicroBatchLoader(data, self.job.seed, self.job.batch_size, m), tuple(data[0])
        self.num_micro_batches = self.job.batch_size // m

    def step(self) -> torch.Tensor:
        """Train one step; return its loss."""
        losses = []
        for micro_batch in range(self.num_micro_batches):
            batch = self._loader.load(self._step, micro_batch, self._keys)
            with autocast(self.job.precision, self._device):
                moved = {key: value.to(self._device, non_blocking=True) for key, value in batch.items()}
                loss = loss_of(self.job, self.model, moved)
            (loss / self.num_micro_batches).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        if self.job.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.job.clip_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._step += 1
        return torch.stack(losses).mean()

    def times_s(self, num_steps: int) -> list[float]:
        """Return the seconds of so many steps, after one to warm up."""

        def run() -> None:
            self.step()
            synchronize(self._device)

        return [wall_s(run) for _ in range(num_steps + 1)][1:]


def plan_of(depth: int, fingerprint: str, num_sections: int, micro_batch_size: int, num: int) -> Plan:
    """Return the plan of one replica with one or two equal stages, in the order 1F1B."""
    orders = ["F" + "FB" * (num - 1) + "B", "FB" * num][-depth:]
    return plan_by_hand(
        [num_sections * stage // depth for stage in range(depth + 1)],
        1,
        {num: orders},
        num_micro_batches=num,
        windows=[depth - stage for stage in range(depth)],
        schedule="varuna",
        m=micro_batch_size,
        fingerprint=fingerprint,
    )


def morph_times_s(
    job_path: str,
    device: str,
    depth: int,
    num_steps: int,
    folder: str,
    links: LinkSetting = "staged",
    make: Callable[[Callable[[], object]], Called] = Remote,
) -> list[float]:
    """Return the seconds of so many steps of ``depth`` workers with exact sums, after one to warm up."""
    model = cut_job(job_path)
    m = model.micro_batch_size
    num = load_job(job_path).batch_size // m
    crew = Crew(job_path, model, folder, depth, device=device, links=links, make=make)
    try:
        crew.begin(plan_of(depth, model.fingerprint, len(model.sections), m, num))
        return [wall_s(crew.step) for _ in range(num_steps + 1)][1:]
    finally:
        crew.end()
