"""One stage in a process of its own, under Morph's executor and under torch's schedules."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from benchmarks.emulated_links.cases import SMALL, Case, Way, order_of
from benchmarks.emulated_links.slow import NoSums, SleepingModule, SleepingStage, SlowChannel, SlowStage, Wire
from benchmarks.harness import LOOPBACK
from morph.cutting.cuts.cut_model import BoundaryTensor
from morph.runtime.device.links import HostLink
from morph.runtime.groups.channels import GroupSet, GroupSpec, connect_store
from morph.runtime.groups.faults import FaultPlan
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.step.executor import Executor, Neighbours, StageWork


class StageProcess:
    """One stage, under Morph's executor and under torch's schedules."""

    def __init__(self, stage: int, num_stages: int, port: int) -> None:
        torch.set_num_threads(1)
        self._stage, self._num_stages = stage, num_stages
        store = PrefixStore("torch", connect_store(LOOPBACK, port))
        dist.init_process_group("gloo", store=store, rank=stage, world_size=num_stages)
        self._interrupt = Interrupt(1)
        self._groups = GroupSet(self._interrupt)
        names = [f"w{index}" for index in range(num_stages)]
        specs = [
            GroupSpec(f"b{boundary}/{kind}", (names[boundary], names[boundary + 1]))
            for boundary in range(num_stages - 1)
            for kind in ("act", "grad")
        ]
        self._groups.form(specs, names[stage], LOOPBACK, lambda: connect_store(LOOPBACK, port))

    def prepare(self, way: Way, case: Case) -> None:
        """Set up one mini-batch."""
        stage, last = self._stage, self._stage == self._num_stages - 1
        slow = case.latency_s > 0 or case.jitter_s > 0
        self._wires = {True: Wire(case, stage, 0), False: Wire(case, stage, 1)} if slow else {}
        self._case = case
        if way.torchs:
            module = SleepingModule(case, last, way.again(self._num_stages)[stage])
            pipeline = self._pipeline = SlowStage(module, stage, self._num_stages)
            kind = ScheduleGPipe if way.schedule == "gpipe" else Schedule1F1B
            self._schedule = kind(pipeline, case.num_micro_batches, loss_fn=lambda output, _: output.sum())
            self._run: Callable[[], None] = self._run_torch
            self._run()  # once to infer the shapes
            pipeline.wires = self._wires
        else:
            self._run = partial(self._run_morph, self._work(way, case))

    def run(self) -> float:
        """Run the mini-batch; returns seconds."""
        begin_s = time.perf_counter()
        self._run()
        took_s = time.perf_counter() - begin_s
        for wire in self._wires.values():
            wire.close()
        return took_s

    def _work(self, way: Way, case: Case) -> StageWork:
        last = self._stage == self._num_stages - 1
        border = (BoundaryTensor("hidden", (case.message_bytes // 4,), torch.float32, True),)
        return StageWork(
            micro_batches=range(case.num_micro_batches),
            order=order_of(way, case, self._stage),
            window=way.windows(case)[self._stage],
            opportunistic=way.schedule == "varuna",
            inputs=border if self._stage else (),
            outputs=(BoundaryTensor("loss", SMALL, torch.float32, True),) if last else border,
        )

    def _run_morph(self, work: StageWork) -> None:
        sums: Any = NoSums()
        stage: Any = SleepingStage(self._case, self._stage == self._num_stages - 1)
        device = torch.device("cpu")
        executor = Executor(stage, work, self._neighbours(), self._interrupt, FaultPlan(()), device)
        executor.run(sums)
        executor.finish()

    def _neighbours(self) -> Neighbours:
        stage = self._stage
        behind = stage + 1 < self._num_stages
        return Neighbours(
            activations_in=HostLink(self._groups.channel(f"b{stage - 1}/act", f"w{stage - 1}")) if stage else None,
            gradients_out=self._sending(f"b{stage - 1}/grad", downstream=False) if stage else None,
            activations_out=self._sending(f"b{stage}/act", downstream=True) if behind else None,
            gradients_in=HostLink(self._groups.channel(f"b{stage}/grad", f"w{stage + 1}")) if behind else None,
        )

    def _sending(self, name: str, *, downstream: bool) -> Any:
        channel = self._groups.channel(name, f"w{self._stage}")
        return HostLink(SlowChannel(channel, self._wires[downstream], self._interrupt) if self._wires else channel)

    def _run_torch(self) -> None:
        count = self._case.num_micro_batches
        if self._stage == 0:
            self._schedule.step(torch.ones(count, 1), return_outputs=False)
        elif self._stage == self._num_stages - 1:
            self._schedule.step(target=torch.zeros(count, 1), losses=[], return_outputs=False)
        else:
            self._schedule.step(return_outputs=False)
        if self._pipeline.wires:
            neighbours = (self._stage > 0) + (self._stage < self._num_stages - 1)
            self._pipeline.drain(count * neighbours)
