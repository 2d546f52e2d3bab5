"""Bringing a worker's units to the version of a reshape: kept, from a peer, from a checkpoint, or made anew."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from morph.checkpoint.manifest import read_manifest
from morph.checkpoint.unit_files import from_payload, read_unit, to_payload
from morph.contract.messages import Source
from morph.runtime.groups.channels import GROUP_TIMEOUT_S, Carrier, Transfer
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.state.unit_state import UnitState

READ_AHEAD = 4
"""Units of a checkpoint that one worker reads at a time."""
MakeUnit = Callable[[str, bool], UnitState]


@dataclass(frozen=True)
class MoveContext:
    """What the moves of one worker in one reshape need.

    ``make_unit(unit, empty)``: its state at version 0, without its initial numbers where it is about to be loaded.
    ``host_copy(version, unit, sha256)``: what this worker wrote itself and still has, if it is what a manifest names.
    """

    worker: str
    version: int
    checkpoint_url: str
    held: Mapping[str, UnitState]
    make_unit: MakeUnit
    channel: Callable[[str, str], Carrier]
    adopt: Callable[[str], UnitState]
    host_copy: Callable[[int, str, str], Mapping[str, Tensor] | None] = lambda _version, _unit, _sha256: None


def start_sending(sources: Sequence[Source], context: MoveContext) -> list[Transfer]:
    """Start sending every unit that others take from this worker; returns at once.

    Two workers may take units from each other, so nobody waits for its own to leave before it has received.
    """
    pending: list[Transfer] = []
    for source in sources:
        if source.kind == "peer" and source.peer == context.worker:
            payload = to_payload(context.held[source.unit].tensors())
            channel = context.channel(context.worker, source.worker)
            pending.append(channel.transfer(torch.tensor([len(payload)], dtype=torch.int64)))
            pending.append(channel.transfer(torch.frombuffer(bytearray(payload), dtype=torch.uint8)))
    return pending


def send_in_background(sources: Sequence[Source], context: MoveContext, interrupt: Interrupt) -> Callable[[], None]:
    """Make units ready for peers in a thread and send them; the result blocks until all have left.

    So a worker that sends and receives does both at once. The result raises as ``Interrupt.wait_for``.
    """
    pending: list[Sequence[Transfer]] = []
    failure: list[Exception] = []

    def send() -> None:
        try:
            pending.append(start_sending(sources, context))
        except Exception as error:  # handed to the waiting thread below
            failure.append(error)
        interrupt.notify()

    def wait() -> None:
        interrupt.wait_for(lambda: bool(pending or failure), "units to be made ready for peers", GROUP_TIMEOUT_S)
        if failure:
            raise failure[0]
        for transfer in pending[0]:
            transfer.wait("a unit's state to leave for a peer")

    threading.Thread(target=send, name="morph-send", daemon=True).start()
    return wait


def take_units(sources: Sequence[Source], context: MoveContext) -> tuple[dict[str, UnitState], int]:
    """Collect this worker's units at the wanted version; returns them and the bytes received from peers.

    Raises:
        CheckpointError: when a checkpoint is incomplete or damaged.
    """
    units: dict[str, UnitState] = {}
    received_bytes = 0
    own = [source for source in sources if source.worker == context.worker]
    stored = _from_checkpoint([source.unit for source in own if source.kind == "checkpoint"], context)
    for source in own:
        if source.kind == "keep":
            units[source.unit] = context.held[source.unit]
            continue
        if source.kind == "ahead":
            units[source.unit] = context.adopt(source.unit)
            continue
        state = context.make_unit(source.unit, source.kind != "initial")
        if source.kind == "peer":
            assert source.peer is not None
            payload = receive_payload(context.channel(source.peer, context.worker))
            received_bytes += len(payload)
            state.load(from_payload(payload), for_good=True)
        elif source.kind == "checkpoint":
            tensors, alone = next(stored)
            state.load(tensors, for_good=alone)
        units[source.unit] = state
    for name, state in units.items():
        assert state.version == context.version, f"unit {name} is at version {state.version}, not {context.version}"
    return units, received_bytes


def _from_checkpoint(units: Sequence[str], context: MoveContext) -> Iterator[tuple[Mapping[str, Tensor], bool]]:
    """Yield units of the reshape's version in this order: this worker's own copies of what it wrote, else from storage.

    With each, whether nobody else has its memory. The next ``READ_AHEAD`` are read and checked while one is loaded.
    """
    if not units:
        return
    manifest = read_manifest(context.checkpoint_url, context.version)
    digests = {entry.unit: entry.sha256 for entry in manifest.units}

    def read(unit: str) -> tuple[Mapping[str, Tensor], bool]:
        copied = context.host_copy(context.version, unit, digests[unit]) if unit in digests else None
        return (read_unit(context.checkpoint_url, manifest, unit), True) if copied is None else (copied, False)

    with ThreadPoolExecutor(READ_AHEAD, thread_name_prefix="morph-restore") as pool:
        reading: deque[Future[tuple[Mapping[str, Tensor], bool]]] = deque()
        for unit in units:
            reading.append(pool.submit(read, unit))
            if len(reading) == READ_AHEAD:
                yield reading.popleft().result()
        while reading:
            yield reading.popleft().result()


def receive_payload(channel: Carrier) -> memoryview:
    """Receive one length-prefixed payload, in memory of its own."""
    size = torch.zeros(1, dtype=torch.int64)
    channel.transfer(size).wait("the size of a unit's state")
    payload: Tensor = torch.empty(int(size), dtype=torch.uint8)
    channel.transfer(payload).wait("a unit's state")
    return memoryview(payload.numpy())  # type: ignore[arg-type]
