"""One of the processes between which messages and all-reduces are measured: ``python -m calibrate.peer``.

Reads one JSON line (:class:`PeerSpec`) from standard input, writes its time stamps to a file, and ends. When its
standard input closes, the process that started it is gone, and it ends at once.

Time stamps are ``time.monotonic_ns``: one clock for all processes of a machine.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, ProcessGroupGloo

from morph.runtime.channels import Channel, GroupSpec, Ring, form_group
from morph.runtime.interrupt import Interrupt

_WARM_UP = 2
_TIMEOUT_S = 60.0
_HOST = "127.0.0.1"


@dataclass(frozen=True)
class PeerSpec:
    """What one process does; see ``calibrate.network.measure_network``."""

    rank: int
    num_peers: int
    folder: str
    message_sizes: list[int]
    reduced_sizes: list[int]
    ring_sizes: list[int]
    in_flight: list[int]
    num_samples: int
    element: str

    def to_line(self) -> bytes:
        """Write as one line."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @property
    def result_path(self) -> Path:
        """Where this process writes what it measured."""
        return Path(self.folder) / f"{self.rank}.json"


class Peer:
    """The measurements of one process, in the same order in all of them."""

    def __init__(self, spec: PeerSpec) -> None:
        self._spec = spec
        self._interrupt = Interrupt(0)
        self._element = {"int64": torch.int64, "float32": torch.float32}[spec.element]
        self._store = FileStore(str(Path(spec.folder) / "store"), spec.num_peers)
        self._store.set_timeout(timedelta(seconds=_TIMEOUT_S))

    def run(self) -> dict[str, Any]:
        """Measure everything; returns time stamps by what was done."""
        rings = {size: self._ring(f"ring{size}", size) for size in sorted({2, *self._spec.ring_sizes})}
        result: dict[str, Any] = {"activation": {}, "gradient": {}, "all_reduce": {}}
        down, up = self._channel("activation", 0), self._channel("gradient", 1)
        if down is not None and up is not None:
            for size in self._spec.message_sizes:
                result["activation"][str(size)], result["gradient"][str(size)] = self._messages(down, up, size)
        if (pair := rings[2]) is not None:
            result["barrier"] = self._reductions(pair, torch.zeros(1, dtype=torch.int64), 1)
        for ring_size in self._spec.ring_sizes:
            ring = rings[ring_size]
            if ring is None:
                continue
            for size in self._spec.reduced_sizes:
                tensor = torch.zeros(max(1, size // self._element.itemsize), dtype=self._element)
                for count in self._spec.in_flight:
                    result["all_reduce"][f"{ring_size}/{size}/{count}"] = self._reductions(ring, tensor, count)
        return result

    def _group(self, name: str, size: int) -> ProcessGroupGloo | None:
        members = tuple(str(rank) for rank in range(size))
        if self._spec.rank >= size:
            return None
        group: ProcessGroupGloo = form_group(self._store, GroupSpec(name, members), str(self._spec.rank), _HOST)
        return group

    def _ring(self, name: str, size: int) -> Ring | None:
        group = self._group(name, size)
        return None if group is None else Ring(group, self._interrupt)

    def _channel(self, name: str, sender: int) -> Channel | None:
        group = self._group(name, 2)
        return None if group is None else Channel(group, sender, self._interrupt)

    def _messages(self, down: Channel, up: Channel, size: int) -> tuple[list[int], list[int]]:
        """Send forth and back; returns time stamps of sending (on the sender) or receipt (on the receiver)."""
        payload, arrived = torch.zeros(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
        downward: list[int] = []
        upward: list[int] = []

        def send(channel: Channel, stamps: list[int]) -> None:
            stamps.append(time.monotonic_ns())
            channel.transfer(payload.clone()).wait("a message to leave", _TIMEOUT_S)

        def receive(channel: Channel, stamps: list[int]) -> None:
            channel.transfer(arrived).wait("a message to arrive", _TIMEOUT_S)
            stamps.append(time.monotonic_ns())

        for _ in range(_WARM_UP + self._spec.num_samples):
            if self._spec.rank == 0:
                send(down, downward)
                receive(up, upward)
            else:
                receive(down, downward)
                send(up, upward)
        return downward[_WARM_UP:], upward[_WARM_UP:]

    def _reductions(self, ring: Ring, tensor: torch.Tensor, count: int) -> list[tuple[int, int]]:
        """Run ``count`` all-reduces at once, after a barrier; returns (start, end) of each sample."""
        tensors = [tensor.clone() for _ in range(count)]
        ready = torch.zeros(1, dtype=torch.int64)
        stamps: list[tuple[int, int]] = []
        for _ in range(_WARM_UP + self._spec.num_samples):
            ring.reduce(ready, dist.ReduceOp.SUM).wait("the barrier", _TIMEOUT_S)
            start_ns = time.monotonic_ns()
            for pending in [ring.reduce(part, dist.ReduceOp.SUM) for part in tensors]:
                pending.wait("the all-reduce", _TIMEOUT_S)
            stamps.append((start_ns, time.monotonic_ns()))
        return stamps[_WARM_UP:]


def _end_with_parent() -> None:
    """Block until standard input closes, then end this process."""
    while os.read(0, 1024):  # not through sys.stdin, whose lock would spoil the end of a process that fails
        pass
    os._exit(1)


def main() -> None:
    """Measure as the line on standard input says."""
    spec = PeerSpec(**json.loads(sys.stdin.buffer.readline()))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    code = 1
    try:
        spec.result_path.write_text(json.dumps(Peer(spec).run()), encoding="utf-8")
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # without waiting for gloo's threads


if __name__ == "__main__":
    main()
