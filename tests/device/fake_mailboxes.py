"""Mailboxes of a fake device in a worker's process, which can be killed at any stage of a message."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import Any

from morph.runtime.device import mailboxes
from morph.runtime.device.mailboxes import MailRoom
from tests.device.fake_device import FakeDevice


@dataclass(frozen=True)
class FakeMailRoom:
    """The function with which a worker's process makes its mailboxes.

    ``kill_at``: a stage and a number n from 0; the process ends when it reaches the stage for the n-th time. Stages: it
    has shared its memory but not announced it (``share``), opened a peer's but not announced it (``open``), filled a
    slot but not announced it (``fill``), announced it but got no answer (``told``), read a slot (``read``), or sent the
    answer that is due (``answer``). ``opens``: whether it can open memory of other processes.
    """

    num_slots: int = 2
    slot_bytes: int = 1024
    kill_at: tuple[str, int] | None = None
    opens: bool = True

    def opened_on(self, device: FakeDevice) -> MailRoom:
        """Return the mail room of a device; from now on this process ends at the given stage."""
        device.opens = self.opens
        if self.kill_at is not None:
            kind, number = self.kill_at
            left = [number]
            places: dict[str, tuple[Any, str, bool]] = {
                "share": (device, "shared", True),
                "open": (device, "opened", True),
                "fill": (mailboxes.Mailbox, "fill", True),
                "told": (mailboxes.SendingEnd, "_await_slot", False),
                "read": (mailboxes.ReceivingEnd, "_answer", False),
                "answer": (mailboxes.ReceivingEnd, "_answer", True),
            }
            owner, name, behind = places[kind]
            work = getattr(owner, name)

            def ending(*arguments: Any) -> Any:
                left[0] -= 1
                if left[0] < 0 and not behind:
                    os.kill(os.getpid(), signal.SIGKILL)
                result = work(*arguments)
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return result

            setattr(owner, name, ending)
        return MailRoom(device, self.num_slots, self.slot_bytes)
