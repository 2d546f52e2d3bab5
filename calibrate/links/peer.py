"""One of the processes between which messages and reductions are measured (``python -m calibrate.links.peer``).

Its answers are time stamps of ``time.monotonic_ns``; two machines' clocks are compared meanwhile.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # while importing: the imported objects stay, and scanning them repeatedly takes a sixth of the time

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from calibrate.helpers.helper_end import HelperPipe, serve
from calibrate.links.network import MeetingPoint, NetworkSpec, PeerSpec
from calibrate.timing.clocks import finish_work, use_device
from calibrate.timing.samples import ROUGHLY_WITHIN, Sampling
from morph.contract.cluster import RingSetting
from morph.cutting.sections.section import BoundaryTensor
from morph.runtime.device.link_choice import Forming, room_for
from morph.runtime.device.links import Link, Receiver, Sender, link_over
from morph.runtime.device.nccl import communicators
from morph.runtime.device.rings import CommunicatorSet
from morph.runtime.groups.channels import Channel, GroupSet, GroupSpec, Ring, connect_store
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.state.accumulators import Accumulator, ExactAccumulator, FastAccumulator
from morph.runtime.state.fixed_point import prepare
from morph.runtime.state.parts import Memory
from morph.runtime.state.reduction import Reduction

_WARM_UP = 2
_TIMEOUT_S = 60.0
_MEET_TIMEOUT_S = 280.0
"""Seconds to wait for the last process: importing torch from a cold or distant disk takes minutes."""
_BATCH = 10
_ELEMENTS = {"int64": torch.int64, "float32": torch.float32}
_CLOCK_BYTES = 8
_CLOCK_SAMPLING = Sampling(budget_s=0.25, most=20)

Stamps = list[int]
Spans = list[tuple[int, int]]


class Peer:
    """The measurements of one process; all processes make them in the same order."""

    def __init__(self, spec: PeerSpec) -> None:
        self._rank, self._place, self._spec = spec.rank, spec.place, spec.network
        self._name = str(spec.rank)
        self._interrupt = Interrupt(0, _MEET_TIMEOUT_S)
        self._groups = GroupSet(self._interrupt)
        self._element = _ELEMENTS[self._spec.element]
        self._device = torch.device(spec.device)
        use_device(self._device)
        self._sampling = Sampling(budget_s=self._spec.budget_s, most=self._spec.most, within=ROUGHLY_WITHIN)

    def run(self) -> dict[str, Any]:
        """Make all measurements; return the time stamps by measurement."""
        result: dict[str, Any] = {"activation": {}, "gradient": {}, "all_reduce": {}, "clock": []}
        at_once: dict[int, int] = {}
        for size, _, count in self._spec.reductions():
            at_once[size] = max(count, at_once.get(size, 1))
        edges = [GroupSpec("activation", ("0", "1")), GroupSpec("gradient", ("1", "0"))]
        pairs = [GroupSpec("barrier", ("0", "1"))]
        specs = {size: [_ring(size, number) for number in range(count)] for size, count in at_once.items()}
        in_rings = [spec for ring in specs.values() for spec in ring]
        self._groups.form([*edges, *pairs, *in_rings], self._name, self._place.listen, self._open_store)
        down, up = self._channel(edges[0]), self._channel(edges[1])
        links, staged = self._mailboxes(edges)
        pair, rings = self._rings(pairs), {size: self._rings(ring) for size, ring in specs.items()}
        before_bytes = _beside_torch_bytes(self._device)
        self._groups.device_rings = over = self._on_devices(in_rings)
        on_devices = [] if over is None else [spec for spec in in_rings if over.ring(spec.name) is not None]

        def compare_clocks() -> None:
            if self._place.two_nodes and down is not None and up is not None:
                ping = _Messages(down, up, _CLOCK_BYTES, self._rank, self._interrupt, torch.device("cpu"))
                result["clock"].append(ping.measure(_CLOCK_SAMPLING))

        compare_clocks()
        if down is not None and up is not None:
            for size in self._spec.message_sizes:
                messages = _Messages(down, up, size, self._rank, self._interrupt, self._device, links)
                result["activation"][str(size)], result["gradient"][str(size)] = messages.measure(self._sampling)
                compare_clocks()
        if pair:
            result["barrier"] = self._reductions(pair[0], pair, self._element.itemsize)
            compare_clocks()
        for ring_size, size, count in self._spec.reductions():
            if count > 1 and specs[ring_size][0] in on_devices:
                continue  # a device has one stream for all of its rings
            if ring := rings[ring_size]:
                used = self._rings(specs[ring_size][:count])
                result["all_reduce"][f"{ring_size}/{size}/{count}"] = self._reductions(ring[0], used, size)
                compare_clocks()
        taken_bytes = _beside_torch_bytes(self._device) - before_bytes
        result["devices"] = {
            "staged": staged,
            "nccl": [size for size, ring in specs.items() if ring[0] in on_devices],
            "ring_bytes": max(0, taken_bytes) // len(on_devices) if on_devices else None,
        }
        self._groups.clear()
        return result

    def _open_store(self) -> Store:
        store = connect_store(self._place.store_host, self._place.store_port)
        store.set_timeout(timedelta(seconds=_MEET_TIMEOUT_S))
        return store

    def _rings(self, specs: Sequence[GroupSpec]) -> list[Ring]:
        """Return this process's rings through host memory."""
        return [ring for spec in specs if self._name in spec.members and (ring := self._groups.ring(spec.name))]

    def _channel(self, edge: GroupSpec) -> Channel | None:
        """Return the channel of an edge, from its first member."""
        return self._groups.channel(edge.name, edge.members[0]) if self._name in edge.members else None

    def _mailboxes(self, edges: Sequence[GroupSpec]) -> tuple[dict[str, Link], list[str]]:
        """Return the links that keep messages on devices, by their edges' names, and the reasons why others do not."""
        room = room_for(self._spec.links, self._device) if self._name in edges[0].members else None
        if room is None:
            is_asked = self._spec.links != "staged"
            return {}, ["tensors are not on a device with memory of its own"] if is_asked else []
        forming = Forming(room, edges, self._name, self._groups, self._interrupt)
        return self._interrupt.call(lambda: forming.links(self._open_store), "mailboxes"), forming.refused

    def _on_devices(self, specs: Sequence[GroupSpec]) -> CommunicatorSet | None:
        """Return this process's rings that NCCL reduces, if it is requested."""
        setting: RingSetting = "gloo" if self._spec.rings == "gloo" else "auto"
        return communicators(setting, self._device, specs, self._name, self._interrupt, self._open_store)

    def _reductions(self, votes_over: Ring, rings: Sequence[Ring], size: int) -> Spans:
        """Reduce sums over each ring at once, after a barrier that counts who wants more; return (start, end)."""
        accumulators = [self._accumulator(size // self._element.itemsize) for _ in rings]
        votes = torch.zeros(1, dtype=torch.int64)
        spans: Spans = []
        durations_s: list[float] = []
        begun_s = time.perf_counter()
        while True:
            votes.fill_(self._sampling.wants_more([durations_s[_WARM_UP:]], time.perf_counter() - begun_s))
            votes_over.reduce(votes, dist.ReduceOp.SUM).wait("the barrier", _TIMEOUT_S)
            if not votes.item():
                return spans[_WARM_UP:]
            start_ns = time.monotonic_ns()
            started = [Reduction(self._interrupt, 1) for _ in rings]
            for reduction, accumulator, ring in zip(started, accumulators, rings, strict=True):
                reduction.put(accumulator, ring)
            for reduction in started:
                reduction.finish()
            spans.append((start_ns, time.monotonic_ns()))
            durations_s.append((spans[-1][1] - start_ns) / 1e9)

    def _accumulator(self, size: int) -> Accumulator:
        like = {"": torch.zeros(max(1, size), device=self._device)}
        if self._element == torch.int64:
            return ExactAccumulator(like, {"": 0}, 1, memory=Memory(self._device))
        return FastAccumulator(like, memory=Memory(self._device))


def _ring(size: int, number: int) -> GroupSpec:
    """Return a ring with even ranks first: they are on one node, odd ones on the other, so it crosses once each way."""
    return GroupSpec(f"ring{size}.{number}", tuple(map(str, (*range(0, size, 2), *range(1, size, 2)))))


def _beside_torch_bytes(device: torch.device) -> int:
    """Return the used bytes of a CUDA device's memory, except those that torch's allocator holds for this process."""
    if device.type != "cuda":
        return 0
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return int(total_bytes - free_bytes - torch.cuda.memory_reserved(device))


class _Messages:
    """Sends messages of one size there and back, through a worker's sender and receiver."""

    def __init__(
        self,
        down: Channel,
        up: Channel,
        size: int,
        rank: int,
        interrupt: Interrupt,
        device: torch.device,
        links: Mapping[str, Link] = MappingProxyType({}),
    ) -> None:
        self._begins = rank == 0
        over = [(down, links.get("activation")), (up, links.get("gradient"))]
        out, back = over if self._begins else reversed(over)
        self._out, self._in = (link or link_over(channel, device, interrupt) for channel, link in (out, back))
        self._spec = BoundaryTensor("message", (size,), torch.uint8, False)
        self._interrupt = interrupt
        self._device = device
        self._sent: Stamps = []
        self._received: Stamps = []

    def measure(self, sampling: Sampling) -> tuple[Stamps, Stamps]:
        """Return stamps of the messages down and up: of sending on the sender, of receipt on the receiver.

        The last message of a batch says how many the next one has, or 0 to end.
        """
        begun_s = time.perf_counter()

        def next_batch() -> int:
            return self._next_batch(sampling, time.perf_counter() - begun_s)

        self._run(_WARM_UP, lambda: 1)
        self._sent.clear()
        self._received.clear()
        count = 1
        while count:
            count = self._run(count, next_batch)
        return (self._sent, self._received) if self._begins else (self._received, self._sent)

    def _next_batch(self, sampling: Sampling, spent_s: float) -> int:
        """Return how many messages are still needed and fit into the budget, by those so far; at most a batch."""
        known_s = [(end - start) / 1e9 for start, end in zip(self._sent, self._received, strict=False)]
        count = len(self._sent) + 1  # including the one that is about to be sent
        known_s = [*known_s, *([known_s[-1] if known_s else 0.0] * (count - len(known_s)))]
        if not sampling.wants_more([known_s], spent_s):
            return 0
        fitting = int((sampling.budget_s - spent_s) / max(known_s[-1], 1e-6))
        return min(_BATCH, sampling.most - count, max(1, sampling.least - count, fitting))

    def _run(self, count: int, next_count: Callable[[], int]) -> int:
        sender, receiver = Sender(self._out), Receiver(self._in, (self._spec,), count)
        payload = torch.zeros(self._spec.shape, dtype=torch.uint8, device=self._device)
        for number in range(1, count + 1):
            if self._begins:
                payload[0] = next_count() if number == count else 0
                self._send(sender, payload)
                self._receive(receiver, number)
            else:
                payload = self._receive(receiver, number)
                self._send(sender, payload)
        sender.flush()
        return int(payload[0])

    def _send(self, sender: Sender, payload: torch.Tensor) -> None:
        finish_work(self._device)
        self._sent.append(time.monotonic_ns())
        sender.send((payload,))

    def _receive(self, receiver: Receiver, number: int) -> torch.Tensor:
        self._interrupt.wait_for(lambda: receiver.arrived() >= number, "a message to arrive", _TIMEOUT_S)
        (arrived,) = receiver.take()
        finish_work(self._device)
        self._received.append(time.monotonic_ns())
        return arrived


def measure(order: Mapping[str, Any]) -> dict[str, Any]:
    """Do what ``peer_message`` says."""
    spec = PeerSpec(order["rank"], order["device"], MeetingPoint(**order["place"]), NetworkSpec(**order["network"]))
    return Peer(spec).run()


def _work(line: HelperPipe) -> None:
    torch.set_num_threads(1)
    line.answer(measure(line.next()))


if __name__ == "__main__":
    prepare()  # for all forked processes
    serve(_work)
