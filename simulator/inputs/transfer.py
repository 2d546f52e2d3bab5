"""Times of messages and all-reduces of any size and ring, from the sizes and rings that were measured.

Send times (Varuna, Table 2: Act and Grad latencies): linear between measured sizes, constant below the
smallest, continued with the last slope beyond the largest (in proportion if only one size was measured).

All-reduce AR(D): for each measured ring the same rule in the size. Between two measured rings: linear in
the ring size. Outside them, from the nearest measured ring D0, by the ring all-reduce's own cost
2 (D - 1) alpha + 2 (D - 1)/D * S/beta (Patarasuk and Yuan 2009):

    AR(D, S) = AR(D0, S0) (D - 1)/(D0 - 1) + [AR(D0, S) - AR(D0, S0)] ((D - 1)/D) / ((D0 - 1)/D0)

with S0 the smallest measured size, whose time counts as latency alone. Without all-reduce measurements, AR follows from
the send times: 2 (D - 1) messages of S/D bytes. A size that was measured to be faster than a smaller one counts as
equally slow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from morph.contract.errors import PlanError
from morph.contract.profile import LinkProfile, Profile, SendTime

Floats = npt.NDArray[np.float64]
_FAR_BYTES = 1e18
_MOST_NS = 2.0**58


class Curve:
    """A time in ns over a size in bytes: piecewise linear."""

    def __init__(self, sizes_bytes: Sequence[float], times_ns: Sequence[float]) -> None:
        order = np.argsort(np.asarray(sizes_bytes, np.float64), kind="stable")
        sizes = np.asarray(sizes_bytes, np.float64)[order]
        times = np.asarray(times_ns, np.float64)[order]
        if len(sizes) > 1:
            slope = max(0.0, (times[-1] - times[-2]) / (sizes[-1] - sizes[-2]))
        else:
            slope = times[-1] / sizes[-1] if sizes[-1] > 0 else 0.0
        self.sizes_bytes: Floats = sizes
        self._sizes = np.append(sizes, _FAR_BYTES)
        self._times = np.append(times, times[-1] + slope * (_FAR_BYTES - sizes[-1]))

    def __call__(self, sizes_bytes: Floats) -> Floats:
        times: Floats = np.interp(sizes_bytes, self._sizes, self._times)
        return times


def send_curve(times: Sequence[SendTime], num_spreads: float = 0.0) -> Curve:
    """Return the one-way time over message size: median plus ``num_spreads`` median absolute deviations."""
    by_size = {entry.size_bytes: entry.time.median_s + num_spreads * entry.time.mad_s for entry in times}
    return Curve(list(by_size), [time_s * 1e9 for time_s in by_size.values()])


def bandwidth_bytes_per_s(link: LinkProfile) -> float:
    """Return a link's bandwidth from its two largest measured messages, in the slower direction."""

    def of(times: Sequence[tuple[int, float]]) -> float:
        small, large = (*sorted(times)[-2:],) if len(times) > 1 else ((0, 0.0), times[0])
        return (large[0] - small[0]) / max(1e-9, large[1] - small[1])

    return min(
        of([(entry.size_bytes, entry.time.median_s) for entry in times]) for times in (link.activation, link.gradient)
    )


class AllReduce:
    """AR(D, S) of one profile with ``in_flight`` all-reduces at once on a node; the nearest measured number is used."""

    def __init__(self, profile: Profile, in_flight: int = 1) -> None:
        measured = {entry.in_flight for entry in profile.all_reduce}
        nearest = min(measured, key=lambda number: (abs(number - in_flight), number), default=1)
        points: dict[int, dict[int, float]] = {}
        for entry in profile.all_reduce:
            if entry.in_flight == nearest:
                points.setdefault(entry.ring_size, {})[entry.size_bytes] = entry.time.median_s * 1e9
        self._curves = {
            ring: _growing(Curve(list(sizes), list(sizes.values()))) for ring, sizes in sorted(points.items())
        }
        self._send = _growing(send_curve(profile.inter_node.activation))
        link = profile.between_zones
        self._between_zones = None if link is None else _growing(send_curve(link.activation))
        self.zones: tuple[str, ...] = (profile.environment.zone,)

    def over_zones(self, ring_size: int, sizes_bytes: Floats) -> npt.NDArray[np.int64]:
        """Return times as if every message of a ring went from one zone to another; 0 without links between zones."""
        if self._between_zones is None:
            return np.zeros(sizes_bytes.shape, np.int64)
        times = np.where(sizes_bytes > 0, _by_messages(self._between_zones, ring_size, sizes_bytes), 0.0)
        return whole_ns(times, "an all-reduce")

    def times_ns(self, ring_size: int, sizes_bytes: Floats) -> npt.NDArray[np.int64]:
        """Return the time of an all-reduce of each size over a ring of ``ring_size``; 0 for one member or no bytes."""
        if ring_size <= 1:
            return np.zeros(len(sizes_bytes), np.int64)
        times = np.where(sizes_bytes > 0, self._positive(ring_size, sizes_bytes), 0.0)
        return whole_ns(times, "an all-reduce")

    def by_section_ns(self, ring_size: int, sizes_bytes: Floats) -> npt.NDArray[np.int64]:
        """Return the times of sizes that belong to sections: [..., K]."""
        return self.times_ns(ring_size, sizes_bytes.ravel()).reshape(sizes_bytes.shape)

    def _positive(self, ring_size: int, sizes: Floats) -> Floats:
        if not self._curves:
            return _by_messages(self._send, ring_size, sizes)
        rings = list(self._curves)
        if ring_size in self._curves:
            return self._curves[ring_size](sizes)
        if rings[0] < ring_size < rings[-1]:
            above = next(ring for ring in rings if ring > ring_size)
            below = rings[rings.index(above) - 1]
            share = (ring_size - below) / (above - below)
            return (1 - share) * self._curves[below](sizes) + share * self._curves[above](sizes)
        nearest = rings[0] if ring_size < rings[0] else rings[-1]
        curve = self._curves[nearest]
        latency = curve(curve.sizes_bytes[:1])
        bandwidth_share = ((ring_size - 1) / ring_size) / ((nearest - 1) / nearest)
        return latency * (ring_size - 1) / (nearest - 1) + np.maximum(0.0, curve(sizes) - latency) * bandwidth_share


def _by_messages(send: Curve, ring_size: int, sizes_bytes: Floats) -> Floats:
    return 2 * (ring_size - 1) * send(sizes_bytes / ring_size)


@dataclass(frozen=True)
class SlowestAllReduce:
    """AR(D, S) of a ring over several types of node and zones: that of the slowest type, or that between zones."""

    each: tuple[OneAllReduce, ...]

    @classmethod
    def of(cls, all_reduces: Iterable[AnyAllReduce]) -> SlowestAllReduce:
        """Return the slowest of these, each counted once."""
        every: list[OneAllReduce] = []
        for each in all_reduces:
            every += each.each if isinstance(each, SlowestAllReduce) else (each,)
        return cls(tuple({id(all_reduce): all_reduce for all_reduce in every}.values()))

    def times_ns(self, ring_size: int, sizes_bytes: Floats) -> npt.NDArray[np.int64]:
        times: npt.NDArray[np.int64] = np.max([ring.times_ns(ring_size, sizes_bytes) for ring in self.each], axis=0)
        if len({zone for ring in self.each for zone in ring.zones}) > 1:
            times = np.maximum(times, self.each[0].over_zones(ring_size, sizes_bytes))
        return times

    def by_section_ns(self, ring_size: int, sizes_bytes: Floats) -> npt.NDArray[np.int64]:
        every = [ring.by_section_ns(ring_size, sizes_bytes) for ring in self.each]
        times: npt.NDArray[np.int64] = np.max(every, axis=0)
        zones = np.array(np.broadcast_arrays(*(ring.zones for ring in self.each)))
        crossing = (zones != zones[0]).any(axis=0)
        if crossing.any():
            over = self.each[0].over_zones(ring_size, sizes_bytes)
            times = np.where(crossing, np.maximum(times, over), times)
        return times


@dataclass(frozen=True, eq=False)
class JoinedAllReduce:
    """AR(D, S) of pipelines whose sections are on several types of node; each section has the AR of its type."""

    each: tuple[AllReduce, ...]
    type_of: npt.NDArray[np.int64]

    @property
    def zones(self) -> tuple[str, ...]:
        """The zone of each section."""
        return tuple(self.each[place].zones[0] for place in self.type_of)

    def over_zones(self, ring_size: int, sizes_bytes: Floats) -> npt.NDArray[np.int64]:
        return self.each[0].over_zones(ring_size, sizes_bytes)

    def times_ns(self, ring_size: int, sizes_bytes: Floats) -> npt.NDArray[np.int64]:
        """Return the times on the slowest type, of rings over several sections."""
        return SlowestAllReduce(self.each).times_ns(ring_size, sizes_bytes)

    def by_section_ns(self, ring_size: int, sizes_bytes: Floats) -> npt.NDArray[np.int64]:
        every = np.stack([ring.by_section_ns(ring_size, sizes_bytes) for ring in self.each])
        times: npt.NDArray[np.int64] = np.moveaxis(every, -1, 1)[self.type_of, np.arange(len(self.type_of))].T
        return times


OneAllReduce = AllReduce | JoinedAllReduce
AnyAllReduce = OneAllReduce | SlowestAllReduce


def _growing(curve: Curve) -> Curve:
    """Return the curve, raised where a size would take less time than a smaller one."""
    sizes = curve.sizes_bytes
    return Curve(sizes.tolist(), np.maximum.accumulate(curve(sizes)).tolist())


def whole_ns(times_ns: Floats, what: str) -> npt.NDArray[np.int64]:
    """Round times to whole nanoseconds; PlanError: they are too large to be added up."""
    longest_ns = float(times_ns.max(initial=0.0))
    if not longest_ns < _MOST_NS:
        raise PlanError(
            f"{what} of this job would take {longest_ns / 1e9:.3g} s by the measured times and sizes",
            field="inter_node, intra_node or all_reduce",
            allowed=f"at most {_MOST_NS / 1e9:.3g} s",
        )
    return np.rint(times_ns).astype(np.int64)
