"""A clock that moves only during sleeps, and channels without a network."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class FakeTime:
    """A clock of which ``sleep`` takes ``oversleep_s`` longer than asked."""

    now_s: float = 100.0
    oversleep_s: float = 0.0
    slept: list[float] = field(default_factory=list)

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds + self.oversleep_s


@dataclass
class FakeTransfer:
    """A transfer that is done when the test says so."""

    done: bool = False
    done_at_s: float = 0.0

    def wait(self, what: str, timeout_s: float = 0.0) -> float:
        raise AssertionError(f"nobody waits here for {what} ({timeout_s})")


@dataclass
class FakeChannel:
    """A channel that keeps what it is given."""

    tensors: list[Tensor] = field(default_factory=list)
    transfers: list[FakeTransfer] = field(default_factory=list)

    def transfer(self, tensor: Tensor) -> FakeTransfer:
        self.tensors.append(tensor)
        self.transfers.append(FakeTransfer())
        return self.transfers[-1]
