"""A device that works through a queue in ticks: operations take the device's time, but none of the host's."""

from __future__ import annotations


class QueuedDevice:
    """A device whose ``now`` counts ticks of the host (milliseconds for events), and ``synced`` the host's waits."""

    def __init__(self) -> None:
        self.now = 0.0
        self.busy_until = 0.0
        self.synced = 0

    def launch(self, ticks: float, host_ticks: float = 1.0) -> None:
        """Queue work of this many ticks; the launch takes some of the host's ticks too."""
        self.now += host_ticks
        self.busy_until = max(self.busy_until, self.now) + ticks

    def recorded(self) -> QueuedEvent:
        """Return an event behind everything that is queued so far."""
        return QueuedEvent(self, max(self.busy_until, self.now))


class QueuedEvent:
    """An event like a recorded ``torch.cuda.Event`` with timing."""

    def __init__(self, device: QueuedDevice, due: float) -> None:
        self._device, self.due = device, due

    def query(self) -> bool:
        return self.due <= self._device.now

    def synchronize(self) -> None:
        """Let the host wait until the device has reached the event."""
        self._device.synced += 1
        self._device.now = max(self._device.now, self.due)

    def elapsed_time(self, end_event: QueuedEvent) -> float:
        """Return milliseconds between two events; both must have been reached, as torch demands."""
        if not (self.query() and end_event.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return end_event.due - self.due
