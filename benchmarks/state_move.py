"""A unit's state from one process to another, beside the bare link.

    python -m benchmarks state_move --gb 1.2

Two processes of this machine, joined by gloo over loopback. In turn, several times each: so many bytes as one bare gloo
broadcast into memory that the receiver has already (``gloo``), into memory of its own each time (``gloo fresh``), and
over a plain TCP socket (``tcp``); a unit with AdamW's moments as a reshape moves it, from the sender's state into the
receiver's, which a step could use next (``chunks``); and the same as one payload, as it was before (``payload``).
"""

from __future__ import annotations

import socket
import statistics
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import LOOPBACK, head, in_turns, machine, row, spread, wall_s
from benchmarks.remote import Remote, call, call_all, end_all
from morph.checkpoint.unit_files import from_payload, to_payload
from morph.cutting.sections.section import ParameterUnit
from morph.runtime.groups.channels import Channel, GroupSet, GroupSpec, connect_store
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.groups.store import StoreHost
from morph.runtime.pre_copy.stream import receive_tensors, send_tensors
from morph.runtime.state.unit_state import UnitState

TIMEOUT_S = 120.0
NUM_PARAMETERS = 24
WAYS = ("gloo", "gloo_fresh", "tcp", "chunks", "payload")
UNIT = ParameterUnit("s0", (0,), tuple(f"w{index}" for index in range(NUM_PARAMETERS)))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in parameters])


def make_state(num_bytes: int, *, stepped: bool) -> UnitState:
    """Parameters and two moments: a third of the bytes each."""
    size = num_bytes // 12 // NUM_PARAMETERS
    state = UnitState(
        UNIT, {name: torch.randn(size) for name in UNIT.parameters}, adamw, num_micro_batches=1, exact=True
    )
    if stepped:
        for parameter in state.parameters.values():
            parameter.grad = torch.randn(size)
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)
    return state


class Side:
    """One process: sends or receives in each of the ways."""

    def __init__(self, member: str, store_port: int, num_bytes: int) -> None:
        torch.set_num_threads(1)
        self._sends = member == "a"
        self._interrupt = Interrupt(1)
        self._groups = GroupSet(self._interrupt)
        spec = GroupSpec("pair", ("a", "b"))
        self._groups.form([spec], member, LOOPBACK, lambda: connect_store(LOOPBACK, store_port))
        self._channel: Channel = self._groups.channel("pair", "a")
        self._buffer = torch.ones(num_bytes, dtype=torch.uint8)
        self._state = make_state(num_bytes, stepped=self._sends)
        self._num_bytes = num_bytes

    def listen(self) -> int:
        listener = socket.create_server((LOOPBACK, 0))
        self._listener = listener
        return int(listener.getsockname()[1])

    def connect(self, port: int | None) -> None:
        self._socket = self._listener.accept()[0] if port is None else socket.create_connection((LOOPBACK, port))

    def gloo(self) -> None:
        self._channel.transfer(self._buffer).wait("it", TIMEOUT_S)

    def gloo_fresh(self) -> None:
        buffer = self._buffer if self._sends else torch.empty(self._num_bytes, dtype=torch.uint8)
        self._channel.transfer(buffer).wait("it", TIMEOUT_S)

    def tcp(self) -> None:
        view = memoryview(self._buffer.numpy())  # type: ignore[arg-type]
        if self._sends:
            self._socket.sendall(view)
            return
        done = 0
        while done < len(view):
            done += self._socket.recv_into(view[done:])

    def chunks(self) -> None:
        if self._sends:
            for transfer in send_tensors(self._state.copy_later().lend(), self._channel, self._interrupt):
                transfer.wait("it", TIMEOUT_S)
        else:
            self._load(receive_tensors(self._channel, torch.device("cpu"))[0])

    def payload(self) -> None:
        """As it was before chunks."""
        size = torch.zeros(1, dtype=torch.int64)
        if self._sends:
            payload = to_payload(self._state.tensors())
            size[0] = len(payload)
            for part in (size, torch.frombuffer(bytearray(payload), dtype=torch.uint8)):
                self._channel.transfer(part).wait("it", TIMEOUT_S)
            return
        self._channel.transfer(size).wait("it", TIMEOUT_S)
        body: Tensor = torch.empty(int(size), dtype=torch.uint8)
        self._channel.transfer(body).wait("it", TIMEOUT_S)
        self._load(from_payload(memoryview(body.numpy())))  # type: ignore[arg-type]

    def _load(self, tensors: dict[str, Tensor]) -> None:
        self._state.load(tensors, for_good=True)


def main(gb: float = 1.2, rounds: int = 7) -> None:
    num_bytes = int(gb * 1e9) // (12 * NUM_PARAMETERS) * 12 * NUM_PARAMETERS
    store = StoreHost(LOOPBACK)
    sides = [Remote(partial(Side, member, store.port(), num_bytes)) for member in "ab"]
    port = call(sides[0], "listen")
    sides[0].send("connect", None)
    call(sides[1], "connect", port)
    sides[0].answer()
    ways = {way: partial(wall_s, partial(call_all, sides, way)) for way in WAYS}
    took_s = in_turns(ways, rounds, warm_up=1)  # the first round touches memory for the first time
    end_all(sides)
    bare_s = statistics.median(took_s["gloo"])
    print(machine())
    head("way | took | GB/s | of the bare link")
    for way, found in took_s.items():
        median_s = statistics.median(found)
        row(way, spread(found), f"{num_bytes / median_s / 1e9:.2f}", f"{median_s / bare_s:.2f}")
