"""Sends named tensors as a stream of chunks: a header, then the bytes of all tensors.

On the host, only small tensors, which share a chunk, are copied; others go from their memory to their destination. A
device's bytes go through pinned memory, a few chunks at a time, so that copies and network overlap and host memory
never holds a whole unit.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate

import torch
from torch import Tensor

from morph.checkpoint.unit_files import layout, views
from morph.runtime.device.links import Leaving
from morph.runtime.device.staging import Staging, staging_for
from morph.runtime.groups.channels import Carrier, Transfer, as_bytes
from morph.runtime.groups.interrupt import Interrupt

CHUNK_BYTES = 1 << 24
OWN_CHUNK_BYTES = 1 << 20
"""Bytes. Tensors of at least this size begin a chunk; smaller ones share one."""
CHUNKS_UNDER_WAY = 4
"""The number of a device's chunks that are under way at a time."""


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
    """Start sending tensors, which may not change before they have left.

    Returns at once for tensors on the host. For tensors on a device it returns when they have left.
    """
    header, names = layout(tensors)
    flat = [as_bytes(tensors[name].detach().contiguous()) for name in names if tensors[name].numel()]
    text = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    pending = [carrier.transfer(torch.tensor([len(header)])), carrier.transfer(text)]
    under_way: deque[Transfer] = deque()
    for pieces in _pieces(flat):
        staging = next((found for piece in pieces if (found := staging_for(piece.device)) is not None), None)
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
    """Receive the tensors of ``send_tensors``; return them, in new memory on a device, and their size in bytes.

    Raises GenerationAborted, PeerLost or WaitTimeout if they did not arrive.
    """
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
