"""Mailboxes of a fake device in a worker's process, which may be killed at any stage of a message."""

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

    ``kill_at``: the process ends when it is there for the n-th time (from 0): it has shared its memory and not said so
    (``share``), opened a peer's and not said so (``open``), filled a slot and not told of it (``fill``), told of what
    it filled and has no answer (``told``), read a slot (``read``), or answered for one where that was due (``answer``).
    ``opens``: whether it can open memory of others.
    """

    num_slots: int = 2
    slot_bytes: int = 1024
    kill_at: tuple[str, int] | None = None
    opens: bool = True

    def opened_on(self, device: FakeDevice) -> MailRoom:
        """The mail room of a device; from now on this process ends where that was said."""
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
