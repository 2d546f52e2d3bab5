"""A history of numbers that stays small however long it gets."""

from __future__ import annotations

from dataclasses import dataclass, field

MOST_POINTS = 512


@dataclass
class Series:
    """Points (time in s, value), evenly thinned: when there are too many, every other one goes, and so it goes on.

    The newest point is always there.
    """

    _kept: list[tuple[float, float]] = field(default_factory=list)
    _newest: tuple[float, float] | None = None
    _stride: int = 1
    _seen: int = 0

    @property
    def points(self) -> list[tuple[float, float]]:
        """What is left of the history, oldest first."""
        if self._newest is None or self._kept[-1] == self._newest:
            return list(self._kept)
        return [*self._kept, self._newest]

    def add(self, time_s: float, value: float) -> None:
        """Append a point."""
        self._newest = (time_s, value)
        if self._seen % self._stride == 0:
            self._kept.append(self._newest)
        self._seen += 1
        if len(self._kept) == MOST_POINTS:
            self._kept = self._kept[::2]
            self._stride *= 2
