"""A device that works through a queue in ticks: operations take none of the host's time, only its own."""

from __future__ import annotations


class QueuedDevice:
    """``now`` are ticks of the host, milliseconds for events; ``synced`` counts how often the host waited for it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.busy_until = 0.0
        self.synced = 0

    def launch(self, ticks: float, host_ticks: float = 1.0) -> None:
        """Queue work of so many ticks; launching it takes the host some ticks, too."""
        self.now += host_ticks
        self.busy_until = max(self.busy_until, self.now) + ticks

    def recorded(self) -> QueuedEvent:
        """An event behind what it was given so far."""
        return QueuedEvent(self, max(self.busy_until, self.now))


class QueuedEvent:
    """As a recorded ``torch.cuda.Event`` with timing."""

    def __init__(self, device: QueuedDevice, due: float) -> None:
        self._device, self.due = device, due

    def query(self) -> bool:
        """Whether the device has come to it."""
        return self.due <= self._device.now

    def synchronize(self) -> None:
        """The host waits until it has."""
        self._device.synced += 1
        self._device.now = max(self._device.now, self.due)

    def elapsed_time(self, end_event: QueuedEvent) -> float:
        """Milliseconds; both must be over, as torch demands."""
        if not (self.query() and end_event.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return end_event.due - self.due
