"""Which schedule bears slow and jittery links: real processes and messages, sleeps instead of computing.

    python benchmarks/emulated_links.py --stages 4 --micro-batches 16 --rounds 3
    python benchmarks/emulated_links.py --stages 8 --micro-batches 32 --rounds 3

The question of Varuna's Table 5. Every stage sleeps x for a forward and for a recompute and 2x for a backward, and
sends boundary tensors of real size over gloo; on top of that each message is held back by its link: a fixed latency,
with jitter also an exponential extra from a seeded generator (the same draws for every contender). Messages of a link
overlap and keep their order. Contenders take turns: Morph's executor with its own rules (window slopes 1, 2 and 4) and
with GPipe's and 1F1B's orders, and torch.distributed.pipelining's ScheduleGPipe and Schedule1F1B, whose sends are held
back by the same links and never make their sender wait.

Printed is the time of one mini-batch over N * 4x, and beside it what the simulator's engine expects for the same task
times and the mean latency.
"""

from __future__ import annotations

import argparse
import os
import queue
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from step_time.remote import Remote, call_all
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from morph.contract.messages import DEFAULT_LIMIT_S
from morph.cutting.cuts.cut_model import BoundaryTensor
from morph.runtime.device.links import HostLink
from morph.runtime.groups.channels import Channel, GroupSet, GroupSpec, Pending, connect_store
from morph.runtime.groups.faults import FaultPlan
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.groups.store import StoreHost
from morph.runtime.step.executor import Executor, Neighbours, StageWork
from simulator.playing.engine import StageTimes, run_pipeline
from simulator.playing.schedules import fixed_order, recomputes, stage_windows

LOOPBACK = "127.0.0.1"
SMALL = (1,)
"""Shape of what the last stage returns."""


@dataclass(frozen=True)
class Link:
    """Latency and mean of the exponential extra of every link, in units of x."""

    name: str
    latency: float
    jitter: float = 0.0


LINKS = (
    Link("normal", 0.5),
    Link("1.5x slower", 0.75),
    Link("2x slower", 1.0),
    Link("normal, jittery", 0.5, 0.5),
    Link("2x slower, jittery", 1.0, 1.0),
)


@dataclass(frozen=True)
class Case:
    """One mini-batch; times in seconds."""

    num_stages: int
    num_micro_batches: int
    message_bytes: int
    unit_s: float
    latency_s: float = 0.0
    jitter_s: float = 0.0
    seed: int = 0

    @property
    def ideal_s(self) -> float:
        return self.num_micro_batches * 4 * self.unit_s


@dataclass(frozen=True)
class Way:
    """One contender."""

    name: str
    schedule: str
    slope: int = 1
    torchs: bool = False

    def again(self, num_stages: int) -> tuple[bool, ...]:
        """Which stages recompute."""
        return recomputes(self.schedule, num_stages)  # type: ignore[arg-type]

    def windows(self, case: Case) -> tuple[int, ...]:
        return stage_windows(self.schedule, case.num_stages, case.num_micro_batches, self.slope)  # type: ignore[arg-type]


WAYS = (
    *(Way(f"Morph varuna, slope {slope}", "varuna", slope) for slope in (1, 2, 4)),
    Way("Morph gpipe", "gpipe"),
    Way("Morph 1f1b", "1f1b"),
    Way("torch ScheduleGPipe", "gpipe", torchs=True),
    Way("torch Schedule1F1B", "1f1b", torchs=True),
)


def engine_times(way: Way, case: Case, base_s: float) -> StageTimes:
    """The same task times; ``base_s`` is a message's own time."""
    unit = np.full(case.num_stages, round(case.unit_s * 1e9), np.int64)
    link = np.full(case.num_stages, round((case.latency_s + case.jitter_s + base_s) * 1e9), np.int64)
    windows, again = np.array(way.windows(case), np.int64), np.array(way.again(case.num_stages))
    return StageTimes(unit, unit, 2 * unit, link, link, windows, again)


def expected_s(way: Way, case: Case, base_s: float) -> float:
    times = engine_times(way, case, base_s)
    return run_pipeline(times, (case.num_micro_batches,), schedule=way.schedule).makespan_ns / 1e9  # type: ignore[arg-type]


def order_of(way: Way, case: Case, stage: int) -> str:
    """What a plan would hold for this link."""
    if way.schedule == "varuna":
        times = engine_times(way, case, 0.0)
        return run_pipeline(times, (case.num_micro_batches,), keep_orders=True).orders[0][stage]
    again = way.again(case.num_stages)[stage]
    return fixed_order(way.schedule, stage, case.num_stages, case.num_micro_batches, again)  # type: ignore[arg-type]


class Wire:
    """Holds messages back in a thread of its own: in order, each by the latency and an extra of its own."""

    def __init__(self, case: Case, stage: int, direction: int) -> None:
        self._latency_s, self._jitter_s = case.latency_s, case.jitter_s
        self._random = np.random.default_rng([case.seed, stage, direction])
        self._due_s = 0.0
        self._waiting: queue.SimpleQueue[tuple[float, Callable[[], None]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._deliver, daemon=True).start()

    def put(self, deliver: Callable[[], None]) -> None:
        extra_s = self._random.exponential(self._jitter_s) if self._jitter_s else 0.0
        self._due_s = max(self._due_s, time.perf_counter() + self._latency_s + extra_s)
        self._waiting.put((self._due_s, deliver))

    def close(self) -> None:
        self._waiting.put(None)

    def _deliver(self) -> None:
        while (entry := self._waiting.get()) is not None:
            due_s, deliver = entry
            time.sleep(max(0.0, due_s - time.perf_counter()))
            deliver()


class HeldBack:
    """A transfer that begins when its wire lets it; as ``Pending``."""

    def __init__(self, interrupt: Interrupt) -> None:
        self._interrupt = interrupt
        self.begun: Pending | None = None

    @property
    def done(self) -> bool:
        return self.begun is not None and self.begun.done

    @property
    def done_at_s(self) -> float:
        return self.begun.done_at_s if self.begun else 0.0

    def wait(self, what: str, timeout_s: float | None = None) -> float:
        return self._interrupt.wait_for(lambda: self.done, what, timeout_s)


class SlowChannel:
    """The sending end of a channel behind a wire."""

    def __init__(self, channel: Channel, wire: Wire, interrupt: Interrupt) -> None:
        self._channel, self._wire, self._interrupt = channel, wire, interrupt

    def transfer(self, tensor: Tensor) -> HeldBack:
        held = HeldBack(self._interrupt)

        def begin() -> None:
            held.begun = self._channel.transfer(tensor)

        self._wire.put(begin)
        return held


class SleepingStage:
    """As ``morph.runtime.step.stage.Stage``, but it sleeps."""

    def __init__(self, case: Case, last: bool) -> None:
        self._unit_s = case.unit_s
        self._output = torch.ones(SMALL if last else (case.message_bytes // 4,))
        self._gradient = torch.ones(case.message_bytes // 4)
        self.num_stored = self.num_live = 0

    def forward(self, micro_batch: int, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:  # noqa: ARG002
        time.sleep(self._unit_s)
        return (self._output,)

    def recompute(self, micro_batch: int) -> None:  # noqa: ARG002
        time.sleep(self._unit_s)

    def backward(self, micro_batch: int, gradients: Sequence[Tensor | None], add: object) -> tuple[Tensor]:  # noqa: ARG002
        time.sleep(2 * self._unit_s)
        return (self._gradient,)


class _Sleep(torch.autograd.Function):
    """Sleeps in both directions; returns tensors of the size that travels."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, like: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s, ctx.shape = backward_s, value.shape
        time.sleep(forward_s)
        return like.clone()

    @staticmethod
    def backward(ctx: Any, _gradient: Tensor) -> tuple[Tensor, None, None, None]:
        time.sleep(ctx.backward_s)
        return torch.ones(ctx.shape), None, None, None


class SleepingModule(nn.Module):
    """A stage for torch's pipeline; a recompute belongs to its backward, as with ``torch.utils.checkpoint``."""

    def __init__(self, case: Case, last: bool, recompute: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self._times_s = (case.unit_s, (3 if recompute else 2) * case.unit_s)
        self._like = torch.ones(1, *(SMALL if last else (case.message_bytes // 4,)))

    def forward(self, value: Tensor) -> Tensor:
        return _Sleep.apply(value + self.weight if value.shape[-1] == 1 else value, self._like, *self._times_s)


class _Sent:
    """Work of a send that a wire has taken over."""

    def wait(self) -> bool:
        return True


class TorchLinks:
    """Puts torch's point-to-point sends behind wires."""

    def __init__(self) -> None:
        self._send = dist.isend
        self.wires: dict[bool, Wire] = {}
        self._sent: queue.SimpleQueue[Any] = queue.SimpleQueue()
        dist.isend = dist.distributed_c10d.isend = self._isend
        self._rank = dist.get_rank()

    def _isend(
        self, tensor: Tensor, dst: int | None = None, group: Any = None, tag: int = 0, group_dst: Any = None
    ) -> Any:
        peer = group_dst if dst is None else dst
        assert peer is not None
        wire = self.wires.get(peer > self._rank)
        if wire is None:
            return self._send(tensor, group=group, tag=tag, group_dst=peer)
        copy = tensor.detach().clone()
        wire.put(lambda: self._sent.put((copy, self._send(copy, group=group, tag=tag, group_dst=peer))))
        return _Sent()

    def drain(self, count: int) -> None:
        """Wait until so many messages have left."""
        for _ in range(count):
            self._sent.get(timeout=DEFAULT_LIMIT_S)[1].wait()


class StageProcess:
    """One stage, under Morph's executor and under torch's schedules."""

    def __init__(self, stage: int, num_stages: int, port: int) -> None:
        torch.set_num_threads(1)
        self._stage, self._num_stages = stage, num_stages
        store = dist.TCPStore(LOOPBACK, port, is_master=False)
        dist.init_process_group("gloo", store=dist.PrefixStore("torch", store), rank=stage, world_size=num_stages)
        self._torch_links = TorchLinks()
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
            pipeline = PipelineStage(module, stage, self._num_stages, torch.device("cpu"))
            kind = ScheduleGPipe if way.schedule == "gpipe" else Schedule1F1B
            self._schedule = kind(pipeline, case.num_micro_batches, loss_fn=lambda output, _: output.sum())
            self._torch_links.wires = {}
            self._run = self._run_torch
            self._run()  # once to infer the shapes
            self._torch_links.wires = self._wires
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
        stage: Any = SleepingStage(self._case, self._stage == self._num_stages - 1)
        device = torch.device("cpu")
        Executor(stage, work, self._neighbours(), self._interrupt, FaultPlan(()), device).run({})

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
        if self._torch_links.wires:
            neighbours = (self._stage > 0) + (self._stage < self._num_stages - 1)
            self._torch_links.drain(count * neighbours)


@dataclass
class Result:
    way: Way
    link: Link
    case: Case
    took_s: list[float] = field(default_factory=list)


def one_batch(stages: list[Remote], way: Way, case: Case) -> float:
    """Seconds from the start to the end of the slowest stage."""
    call_all(stages, "prepare", way, case)
    begin_s = time.perf_counter()
    call_all(stages, "run")
    return time.perf_counter() - begin_s


def message_time_s(stages: list[Remote], case: Case) -> float:
    """A message's own time on links that hold nothing back: one micro-batch from end to end, less its sleeps."""
    alone = Case(case.num_stages, 1, case.message_bytes, case.unit_s)
    way = Way("alone", "1f1b")
    sleeps_s = case.num_stages * 3 * case.unit_s
    rest_s = [one_batch(stages, way, alone) - sleeps_s for _ in range(9)]
    return max(0.0, statistics.median(rest_s) / (2 * (case.num_stages - 1)))


def measure(options: argparse.Namespace) -> tuple[list[Result], float]:
    store = StoreHost(LOOPBACK)
    stages = [Remote(partial(StageProcess, stage, options.stages, store.port())) for stage in range(options.stages)]
    unit_s = options.unit_ms / 1e3
    plain = Case(options.stages, options.micro_batches, options.message_bytes, unit_s)
    base_s = message_time_s(stages, plain)
    results = [
        Result(
            way,
            link,
            Case(
                options.stages,
                options.micro_batches,
                options.message_bytes,
                unit_s,
                link.latency * unit_s,
                link.jitter * unit_s,
            ),
        )
        for link in LINKS
        for way in WAYS
    ]
    for round_index in range(options.rounds):
        for result in results:
            case = Case(**{**vars(result.case), "seed": round_index})
            result.took_s.append(one_batch(stages, result.way, case))
        print(f"round {round_index + 1} of {options.rounds} done", file=sys.stderr)
    for stage in stages:
        stage.end()
    return results, base_s


def report(results: list[Result], base_s: float) -> None:
    print("\nTime of one mini-batch over N * 4x, median (expected by the engine), and ratio to the best of torch's")
    print("| | " + " | ".join(link.name for link in LINKS) + " |\n|---|" + "---|" * len(LINKS))
    found = {(result.way, result.link): result for result in results}
    for way in WAYS:
        cells = []
        for link in LINKS:
            result = found[way, link]
            median_s = statistics.median(result.took_s)
            best_s = min(statistics.median(found[peer, link].took_s) for peer in WAYS if peer.torchs)
            share = median_s / result.case.ideal_s
            expected = expected_s(way, result.case, base_s) / result.case.ideal_s
            cells.append(f"{share:.3f} ({expected:.3f}) {median_s / best_s:.2f}")
        print(f"| {way.name} | " + " | ".join(cells) + " |")
    for link in LINKS:
        errors = [
            abs(statistics.median(r.took_s) / expected_s(r.way, r.case, base_s) - 1)
            for r in results
            if r.link is link and not r.way.torchs
        ]
        mean, worst = statistics.mean(errors), max(errors)
        print(f"{link.name}: Morph's runs differ from the engine by {mean:.1%} on average, {worst:.1%} at worst")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--unit-ms", type=float, default=20.0, help="x")
    parser.add_argument("--message-bytes", type=int, default=1 << 20)
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}")
    results, base_s = measure(options)
    print(
        f"P={options.stages}, N={options.micro_batches}, x={options.unit_ms:g} ms, {options.message_bytes} bytes, "
        f"{options.rounds} rounds; a message alone takes {base_s * 1e3:.2f} ms; load {os.getloadavg()[0]:.1f}"
    )
    report(results, base_s)


if __name__ == "__main__":
    main()
