"""Converts the time stamps of two machines to one clock. Pure.

Short messages go forth and back between two processes again and again. The quickest of each direction took ``d +
offset`` and ``d - offset`` by the two clocks, so half of their difference is the offset. Its error is at most half of
the difference between the two directions' true times. Between two such comparisons, clocks are assumed to drift evenly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Stamps = Sequence[int]
Exchange = tuple[Stamps, Stamps]
"""Stamps of a message there and of one back: on the first process sent and received, on the second received and sent.
"""


@dataclass(frozen=True)
class TwoClocks:
    """Offsets of the second clock from the first, in ns, by the second clock's time in ns since ``base_ns``."""

    base_ns: int
    times_ns: tuple[float, ...]
    offsets_ns: tuple[float, ...]

    def on_first(self, stamp_ns: int) -> int:
        """Return a stamp of the second clock as the first would have shown it."""
        first_ns = self.offsets_ns[0]
        away_ns = [offset - first_ns for offset in self.offsets_ns]  # small numbers, so that a float is precise enough
        drift_ns = float(np.interp(stamp_ns - self.base_ns, self.times_ns, away_ns))
        return stamp_ns - int(first_ns) - round(drift_ns)


def compare(first: Sequence[Exchange], second: Sequence[Exchange]) -> TwoClocks:
    """Compute the offsets from the stamps of the two processes, for at least one exchange."""
    base_ns = second[0][0][0]
    times_ns, offsets_ns = [], []
    for (sent, got_back), (received, sent_back) in zip(first, second, strict=True):
        down_ns = min(end - start for start, end in zip(sent, received, strict=True))
        up_ns = min(end - start for start, end in zip(sent_back, got_back, strict=True))
        times_ns.append((received[0] + sent_back[-1]) / 2 - base_ns)
        offsets_ns.append((down_ns - up_ns) // 2)
    return TwoClocks(base_ns, tuple(times_ns), tuple(offsets_ns))


def on_one_clock(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the answers of the peers by rank, those of odd ranks with stamps as of the first rank's clock."""
    clocks = compare(results[0]["clock"], results[1]["clock"])
    return [_shifted(result, clocks) if rank % 2 else dict(result) for rank, result in enumerate(results)]


def _shifted(result: Mapping[str, Any], clocks: TwoClocks) -> dict[str, Any]:
    moved: dict[str, Any] = {**result, "all_reduce": {}}
    for direction in ("activation", "gradient"):
        moved[direction] = {size: list(map(clocks.on_first, stamps)) for size, stamps in result[direction].items()}
    for name, spans in result["all_reduce"].items():
        moved["all_reduce"][name] = _shifted_spans(spans, clocks)
    if "barrier" in result:
        moved["barrier"] = _shifted_spans(result["barrier"], clocks)
    return moved


def _shifted_spans(spans: Sequence[tuple[int, int]], clocks: TwoClocks) -> list[tuple[int, int]]:
    return [(clocks.on_first(start), clocks.on_first(end)) for start, end in spans]
