"""What the pool of workers wants of whoever reaches them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol


class Line(Protocol):
    """A connection to one worker; all may be called from any thread."""

    @property
    def stuck_s(self) -> float:
        """For how long nothing more of what is to be sent was taken; 0: nothing waits."""

    def send(self, body: bytes) -> None:
        """Send a message, or keep it until the other end takes it; on a connection that is over it is lost."""

    def hang_up(self) -> None:
        """End it."""


class Launcher(Protocol):
    """Starts workers, each of which calls the manager by itself, and ends them."""

    def start_worker(self, worker: str, vm: str) -> None:
        """Start a worker on its VM; returns at once. Where a VM begins with its worker there is nothing to do."""

    def kill(self, worker: str) -> None:
        """End a worker's process, if there is one."""

    def has_ended(self, worker: str) -> bool:
        """Whether the process of a worker that has not called yet is known to be gone."""

    def adopt(self) -> Collection[str]:
        """Return the workers that another manager started, and may be alive."""
