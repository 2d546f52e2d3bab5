"""Mailboxes on a CUDA device: the contract within one process, and memory that another process opens."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import pytest
import torch
from torch import Tensor

from morph.runtime.device.devices import CudaDevice
from morph.runtime.device.links import Link
from morph.runtime.device.mailboxes import Mailbox, MailRoom, ReceivingEnd, SendingEnd
from morph.runtime.device.staging import Staging
from tests.device.link_contract import Ends, Pair
from tests.gpu.test_links import CUDA, CudaContract, from_device
from tests.waiting import BOUND_S


@pytest.mark.parametrize(("num_slots", "slot_bytes"), [(4, 8 << 20), (1, 65536)])
class TestMailboxesOnCuda(CudaContract):
    """Both ends in one process, which cannot open its own memory by a handle: the receiver gets the memory itself."""

    @pytest.fixture
    def ends(self, pair: Pair, num_slots: int, slot_bytes: int) -> Ends:
        rooms = {name: MailRoom(CudaDevice(CUDA), num_slots, slot_bytes) for name in "ab"}
        box = rooms["a"].box(0)
        ways = {name: tuple(pair.groups[name].channel(pair.names[0], sender) for sender in "ab") for name in "ab"}
        sending = SendingEnd(box, *ways["a"], pair.interrupts["a"])
        receiving = ReceivingEnd(box._slots, rooms["b"], *ways["b"], pair.interrupts["b"])
        del ways
        for name, end in (("a", sending), ("b", receiving)):
            pair.groups[name].at_clear.append(end.close)
        staging = Staging(CudaDevice(CUDA))
        links: dict[str, Link] = {"a": sending, "b": receiving}
        return Ends(pair, links, staging, place=lambda tensor: tensor.to(CUDA), read=from_device)


def _read(connection: Connection) -> None:
    """Run a process that opens memory, and reports the contents of its slots again and again."""
    slots: Tensor | None = CudaDevice(CUDA).opened(connection.recv_bytes()).view(2, 4096)
    while slots is not None:
        connection.send_bytes(bytes(slots.cpu().flatten().tolist()))
        if connection.recv_bytes() == b"end":
            slots = None
    connection.send_bytes(b"let go")


@pytest.mark.parametrize("killed", [False, True])
def test_another_process_reads_a_mailbox_once_its_event_is_done(killed: bool) -> None:
    box = Mailbox(CudaDevice(CUDA), 2, 4096)
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_read, args=(theirs,), daemon=True)
    process.start()
    box.take(1, "it")
    mine.send_bytes(box.handle)
    for number in range(20):
        assert mine.poll(BOUND_S)
        before = mine.recv_bytes()
        if number:
            assert before[4096 * ((number - 1) % 2)] == number
        piece = torch.full((4096,), number + 1, dtype=torch.uint8, device=CUDA)
        box.fill("it", number, piece, box.device.current.record()).wait()
        mine.send_bytes(b"again")
    assert mine.poll(BOUND_S)
    mine.recv_bytes()
    if killed:
        process.kill()
    else:
        mine.send_bytes(b"end")
        assert mine.poll(BOUND_S)
        assert mine.recv_bytes() == b"let go"
    process.join(BOUND_S)
    for number in range(4):  # whatever happened to the reading process
        piece = torch.full((4096,), number, dtype=torch.uint8, device=CUDA)
        box.fill("it", number, piece, box.device.current.record()).wait()
    assert box._slots[:, 0].tolist() == [2, 3]
