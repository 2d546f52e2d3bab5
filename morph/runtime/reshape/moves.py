"""Brings a worker's units to the version of a reshape: they are kept, received, loaded or made anew.

Partial sums of an abandoned step follow them. Named tensors are a stream of chunks: a header, then the bytes of all.
Only small tensors are copied on the host; a device's go through pinned memory, a few chunks at a time.
"""

from __future__ import annotations

import json
import mmap
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from morph.checkpoint.manifest import read_manifest, version_url
from morph.checkpoint.unit_files import layout, read_unit, views
from morph.contract.errors import CheckpointError, WaitTimeout
from morph.contract.messages import MicroBatchLoss, StateSource
from morph.contract.rules import CheckpointRules
from morph.contract.salvage import Salvage, SalvagedSum
from morph.runtime.device.links import Leaving
from morph.runtime.device.staging import Staging, staging_for
from morph.runtime.groups.channels import Carrier, Transfer, as_bytes
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.state.unit_state import UnitState
from morph.runtime.step.sums import HeldSum, held_sum

NUM_PREFETCHED = 4
"""Number of checkpoint units that one worker reads at a time."""
_LOSSES = "losses"
_HOST = torch.device("cpu")
MakeUnit = Callable[[str, bool], UnitState]
T = TypeVar("T")
CHUNK_BYTES = 1 << 24
OWN_CHUNK_BYTES = 1 << 20
"""Bytes. Tensors of at least this size begin a chunk; smaller ones share one."""
CHUNKS_UNDER_WAY = 4
"""The number of a device's chunks that are under way at a time."""


@dataclass(frozen=True)
class MoveContext:
    """Context of the moves of one worker in one reshape.

    ``make_unit(unit, empty)``: at version 0; ``empty``: about to be loaded. ``host_copy(version, unit, sha256)``: this
    worker's copy of a unit that it wrote. ``interrupt``: ends the wait for storage, bounded by ``rules``.
    """

    worker: str
    version: int
    checkpoint_url: str
    held: Mapping[str, UnitState]
    make_unit: MakeUnit
    channel: Callable[[str, str], Carrier]
    adopt: Callable[[str], UnitState]
    interrupt: Interrupt
    host_copy: Callable[[int, str, str], Mapping[str, Tensor] | None] = lambda _version, _unit, _sha256: None
    salvage: Salvage | None = None
    sums: Sequence[HeldSum] = ()
    rules: CheckpointRules = field(default_factory=CheckpointRules)

    @property
    def moving_sums(self) -> list[SalvagedSum]:
        """Partial sums that this worker sends or receives."""
        sums = () if self.salvage is None else self.salvage.sums
        moved = [entry for entry in sums if entry.holder != entry.receiver]
        return [entry for entry in moved if self.worker in (entry.holder, entry.receiver)]


def start_sending(sources: Sequence[StateSource], context: MoveContext) -> list[Transfer]:
    """Start sending every unit and sum that others get from this worker: see ``send_tensors``.

    Each worker receives before it waits for these to leave. Raises CheckpointError as ``take_units``.
    """
    pending: list[Transfer] = []
    requested = [source for source in sources if source.peer == context.worker]
    stored = _from_checkpoint([source.unit for source in requested if source.kind == "checkpoint"], context)
    for source in requested:
        if source.kind == "checkpoint":
            pending += _send(next(stored)[0], context, source.worker)
        elif source.kind == "peer":
            # no unit changes before everything has left, or the generation is over and no worker takes it
            tensors = context.held[source.unit].copy_later().lend()
            pending += _send(tensors, context, source.worker)
    for entry in context.moving_sums:
        if entry.holder == context.worker:
            held = held_sum(entry.sum, context.sums)
            text = json.dumps([loss.model_dump() for loss in held.losses]).encode()
            encoded = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            pending += _send({**held.tensors, _LOSSES: encoded}, context, entry.receiver)
    return pending


def _send(tensors: Mapping[str, Tensor], context: MoveContext, receiver: str) -> list[Transfer]:
    return send_tensors(tensors, context.channel(context.worker, receiver), context.interrupt)


def take_sums(context: MoveContext) -> tuple[list[HeldSum], int]:
    """Receive the partial sums of others that this worker continues, after its units; return them and their bytes."""
    received, num_bytes = [], 0
    for entry in context.moving_sums:
        if entry.receiver == context.worker:
            tensors, size = receive_tensors(context.channel(entry.holder, context.worker), _HOST)
            num_bytes += size
            losses = json.loads(bytes(tensors.pop(_LOSSES).tolist()))
            decoded = tuple(MicroBatchLoss.model_validate(loss) for loss in losses)
            received.append(HeldSum(entry.sum, tensors, decoded))
    return received, num_bytes


def send_in_background(
    sources: Sequence[StateSource], context: MoveContext, interrupt: Interrupt
) -> Callable[[], None]:
    """Prepare units for peers in a thread and send them; calling the result blocks until all have left."""
    started = interrupt.start(partial(start_sending, sources, context), "send")

    def wait() -> None:
        interrupt.wait_for(started.done, "units to be made ready for peers")
        for transfer in started.result():
            transfer.wait("a unit's state to leave for a peer")

    return wait


def take_units(sources: Sequence[StateSource], context: MoveContext) -> tuple[dict[str, UnitState], int]:
    """Collect this worker's units at the wanted version; returns them and the bytes received from peers.

    Raises CheckpointError if one is damaged or storage does not answer; GenerationAborted, PeerLost.
    """
    units: dict[str, UnitState] = {}
    received_bytes = 0
    own = [source for source in sources if source.worker == context.worker]
    read = [source.unit for source in own if source.kind == "checkpoint" and source.peer is None]
    stored = _from_checkpoint(read, context)
    for source in own:
        if source.kind == "keep":
            units[source.unit] = context.held[source.unit]
            units[source.unit].reload()
            continue
        if source.kind == "ahead":
            units[source.unit] = context.adopt(source.unit)
            continue
        state = context.make_unit(source.unit, source.kind != "initial")
        if source.peer is not None:
            channel = context.channel(source.peer, context.worker)
            sent, size = receive_tensors(channel, _home_of(state))
            received_bytes += size
            state.load(sent, for_good=True)
        elif source.kind == "checkpoint":
            tensors, alone = next(stored)
            state.load(tensors, for_good=alone)
        units[source.unit] = state
    for name, state in units.items():
        assert state.version == context.version, f"unit {name} is at version {state.version}, not {context.version}"
    return units, received_bytes


def _from_checkpoint(units: Sequence[str], context: MoveContext) -> Iterator[tuple[Mapping[str, Tensor], bool]]:
    """Yield units in this order, from this worker's own copies or storage, with whether their memory is unshared.

    While one is loaded, the next ``NUM_PREFETCHED`` are read and checked.
    """
    if not units:
        return

    def wait(future: Future[T], what: str, num_bytes: int = 0) -> T:
        try:
            context.interrupt.wait_for(future.done, what, context.rules.file_limit_s(num_bytes))
        except WaitTimeout as error:
            raise CheckpointError(f"{version_url(context.checkpoint_url, context.version)}: {error}") from error
        return future.result()

    started = context.interrupt.start(partial(read_manifest, context.checkpoint_url, context.version), "restore")
    manifest = wait(started, "the manifest")
    digests = {entry.unit: entry.sha256 for entry in manifest.units}
    sizes = {entry.unit: entry.size_bytes for entry in manifest.units}

    def read(unit: str) -> tuple[Mapping[str, Tensor], bool]:
        copied = context.host_copy(context.version, unit, digests[unit]) if unit in digests else None
        return (read_unit(context.checkpoint_url, manifest, unit), True) if copied is None else (copied, False)

    reading: deque[Future[tuple[Mapping[str, Tensor], bool]]] = deque()
    for index, unit in enumerate(units):
        while len(reading) < NUM_PREFETCHED and index + len(reading) < len(units):
            reading.append(context.interrupt.start(partial(read, units[index + len(reading)]), "restore"))
        together = sum(sizes.get(queued, 0) for queued in units[index : index + NUM_PREFETCHED])
        yield wait(reading.popleft(), f"unit {unit} to be read", together)


def _home_of(state: UnitState) -> torch.device:
    """Return the device on which the optimizer works on a unit: its state stays there."""
    parameters = (parameter for group in state.optimizer.param_groups for parameter in group["params"])
    return next((parameter.device for parameter in parameters), _HOST)


def chunks(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Divide a stream of tensors of these sizes: return the beginning and end of each chunk, in bytes."""
    begin = end = 0
    for size in sizes:
        if size >= OWN_CHUNK_BYTES and end > begin:
            yield begin, end
            begin = end
        end += size
        while end - begin >= CHUNK_BYTES or (size >= OWN_CHUNK_BYTES and end > begin):
            yield begin, min(begin + CHUNK_BYTES, end)
            begin = min(begin + CHUNK_BYTES, end)
    if end > begin:
        yield begin, end


def send_tensors(tensors: Mapping[str, Tensor], carrier: Carrier, interrupt: Interrupt) -> list[Transfer]:
    """Start sending tensors, which may not change until they have left; waits for those on a device."""
    header, names = layout(tensors)
    flat = [as_bytes(tensors[name].detach().contiguous()) for name in names if tensors[name].numel()]
    text = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    pending = [carrier.transfer(torch.tensor([len(header)])), carrier.transfer(text)]
    under_way: deque[Transfer] = deque()
    for pieces in _pieces(flat):
        staging = next((staging_of for piece in pieces if (staging_of := staging_for(piece.device)) is not None), None)
        while under_way and (staging is None or len(under_way) >= CHUNKS_UNDER_WAY):  # the next waits for its turn
            under_way.popleft().wait("a part of a unit's state to leave")
        if staging is None:
            pending.append(carrier.transfer(_joined(pieces)))
        else:
            under_way.append(Leaving(pieces, staging, carrier.transfer, interrupt, joined=True))
    for transfer in under_way:
        transfer.wait("a unit's state to leave")
    return pending


def receive_tensors(carrier: Carrier, device: torch.device) -> tuple[dict[str, Tensor], int]:
    """Receive the tensors of ``send_tensors``, and their size in bytes. Raises as ``Interrupt.wait_for``."""
    size = torch.zeros(1, dtype=torch.int64)
    carrier.transfer(size).wait("the size of a unit's header")
    text = torch.empty(int(size), dtype=torch.uint8)
    carrier.transfer(text).wait("a unit's header")
    header = bytes(text.numpy())
    offsets, make = views(header)
    total = max((end for _, end in offsets), default=0)
    cut = chunks([end - begin for begin, end in offsets])
    staging = staging_for(device)
    if staging is None:
        body = _memory(total)
        for transfer in [carrier.transfer(body[begin:end]) for begin, end in cut]:
            transfer.wait("a unit's state")
    else:
        body = _staged(carrier, staging, total, cut)
    return make(body), len(header) + total


def _memory(num_bytes: int) -> Tensor:
    """Return host memory in large pages: the first use of small pages takes longer than receiving the bytes."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # not every kernel has large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _staged(carrier: Carrier, staging: Staging, total: int, cut: Iterator[tuple[int, int]]) -> Tensor:
    body = staging.empty((total,), torch.uint8)
    posted: deque[tuple[Tensor, Tensor, Transfer]] = deque()

    def take() -> None:
        into, host, transfer = posted.popleft()
        transfer.wait("a unit's state")
        staging.fill(into, host)

    for begin, end in cut:
        host = staging.device.pinned((end - begin,), torch.uint8)
        posted.append((body[begin:end], host, carrier.transfer(host)))
        if len(posted) == CHUNKS_UNDER_WAY:
            take()
    while posted:
        take()
    staging.arrived((body,), staging.filled())
    return body


def _pieces(flat: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Return the parts of flat tensors in each chunk."""
    sizes = [tensor.numel() for tensor in flat]
    ends = list(accumulate(sizes))
    index = 0
    for begin, end in chunks(sizes):
        pieces = []
        while begin < end:
            first = ends[index] - sizes[index]
            stop = min(end, ends[index])
            pieces.append(flat[index][begin - first : stop - first])
            begin = stop
            index += stop == ends[index]
        yield pieces


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))
