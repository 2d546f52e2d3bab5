"""A model of how VMs of a spot cluster come and go, with a few parameters per zone, from which traces are drawn.

Revocations are a Poisson process in each zone, whose rate is proportional to the present VMs and depends on the hour of
the day. Each takes one or more VMs of its zone at the same instant (Bamboo, section 3: most come in bulk and hit one
zone), and may hit other zones, too. The provider replaces every missing VM after an exponential delay. Prices fluctuate
around their mean.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import simpy
from pydantic import Field, ValidationError, model_validator

from morph.contract.base import Value, first_problem, read_json
from morph.contract.errors import ConfigError
from morph.contract.kinds import MODEL
from morph.contract.trace import Trace, TraceEvent, TracePrice

HOURS = 24
_REVERSION = 0.9
"""Autocorrelation of a price: the share of its logarithm's deviation from the mean that remains one step later."""


class Zone(Value):
    """One zone: how many VMs are wanted there, how they are lost and replaced, and their price."""

    name: str = Field(default="zone-a", min_length=1)
    vms: int = Field(ge=1, le=100_000, description="that are wanted; there are never more")
    initial: int | None = Field(default=None, ge=0, description="that are there at first; default: all")
    losses_per_vm_h: float = Field(ge=0, description="mean over the day")
    by_hour: tuple[float, ...] = Field(default=(), description="24 factors of it, for each hour of the day")
    sizes: dict[int, float] = Field(default={1: 1.0}, min_length=1, description="weight of revocations by VMs taken")
    replacement_s: float = Field(gt=0, description="mean time until a missing VM comes")
    usd_per_h: float | None = Field(default=None, ge=0, description="mean price of a VM")
    price_spread: float = Field(default=0.0, ge=0, description="standard deviation of the price's logarithm")

    @model_validator(mode="after")
    def _in_range(self) -> Zone:
        if self.by_hour and (len(self.by_hour) != HOURS or min(self.by_hour) < 0 or max(self.by_hour) <= 0):
            raise ValueError("by_hour: 24 factors, not negative and not all 0")
        if min(self.sizes) < 1 or min(self.sizes.values()) < 0 or sum(self.sizes.values()) <= 0:
            raise ValueError("sizes: numbers of VMs, each with a weight that is not negative, and not all 0")
        if self.initial is not None and self.initial > self.vms:
            raise ValueError("initial: at most vms")
        return self

    @property
    def mean_size(self) -> float:
        """The number of VMs that a revocation takes on average."""
        return sum(size * weight for size, weight in self.sizes.items()) / sum(self.sizes.values())

    def factor(self, hour: float) -> float:
        """Return the rate of losses at this hour of the day, relative to its mean."""
        if not self.by_hour:
            return 1.0
        return self.by_hour[int(hour) % HOURS] * HOURS / sum(self.by_hour)


class TraceModel(Value):
    """A spot cluster. ``together``: probability that a revocation in one zone hits each other zone at the same time."""

    zones: tuple[Zone, ...] = Field(min_length=1)
    together: float = Field(default=0.0, ge=0, le=1)
    least: int = Field(default=0, ge=0, description="VMs that revocations leave at least, of all zones")
    noticed: float = Field(default=0.0, ge=0, le=1, description="share of VMs lost that are told of before")
    notice_s: float = Field(default=120.0, gt=0, description="how long before")
    start_hour: float = Field(default=0.0, ge=0, lt=HOURS, description="of the day, at time 0")
    price_every_s: float = Field(default=3600.0, gt=0, description="between two prices")
    instance_type: str = "spot"

    @property
    def num_vms(self) -> int:
        """The number of VMs wanted in all zones."""
        return sum(zone.vms for zone in self.zones)

    def draw(self, seed: int, duration_s: float, *, source: str = "") -> Trace:
        """Draw a trace of this duration. The same arguments give the identical trace."""
        return _Drawing(self, seed, duration_s, source or f"drawn:seed={seed}").trace()

    def with_zones(self, num_zones: int) -> TraceModel:
        """Return a model with as many VMs in so many equal zones, which behave like the present first zone."""
        first, names = self.zones[0], _names(num_zones)
        shares = _dealt(self.num_vms, num_zones)
        most = [{size: weight for size, weight in first.sizes.items() if size <= share} for share in shares]
        zones = [
            first.model_copy(update={"name": name, "vms": share, "initial": None, "sizes": sizes or {1: 1.0}})
            for name, share, sizes in zip(names, shares, most, strict=True)
            if share
        ]
        return self.model_copy(update={"zones": tuple(zones)})


def spot_model(
    vms: int,
    *,
    losses_per_vm_h: float,
    bulk_share: float = 0.5,
    replacement_s: float = 300.0,
    num_zones: int = 2,
    initial: int | None = None,
    **more: float | str,
) -> TraceModel:
    """Return a model with equal zones. A ConfigError names an argument that is out of range.

    ``bulk_share``: of revocations that take two or more VMs at once (2 + a geometric number, 3 on average).
    """
    if not 0 <= bulk_share <= 1:
        raise ConfigError("is out of range", field="bulk_share", value=bulk_share, allowed="0 to 1")
    sizes = {1: 1 - bulk_share} | {2 + k: bulk_share * 0.5 ** (k + 1) for k in range(10)}
    at_first = [None] * num_zones if initial is None else _dealt(initial, num_zones)
    zones = [
        {
            "name": name,
            "vms": share,
            "initial": first,
            "losses_per_vm_h": losses_per_vm_h,
            "sizes": {size: weight for size, weight in sizes.items() if weight},
            "replacement_s": replacement_s,
        }
        for name, share, first in zip(_names(num_zones), _dealt(vms, num_zones), at_first, strict=True)
        if share
    ]
    try:
        return TraceModel.model_validate({"zones": zones, **more})
    except ValidationError as error:
        field, problem, value = first_problem(error)
        raise ConfigError(problem, source="spot cluster", field=field, value=value) from error


def load_model(path: Path) -> TraceModel:
    """Read a model as JSON; a ConfigError names file, field and value."""
    return read_json(path, TraceModel, ConfigError, MODEL)


class _Drawing:
    """A trace that is being drawn.

    In each zone one process revokes VMs, and for each missing VM another process replaces it. Times are whole
    milliseconds. Pauses are drawn when they are decided, before the process that waits for them starts.
    """

    def __init__(self, model: TraceModel, seed: int, duration_s: float, source: str) -> None:
        self._model, self._duration_s = model, duration_s
        self._rng, self._prices_rng = np.random.default_rng([seed, 0]), np.random.default_rng([seed, 1])
        self._alive: list[dict[str, float]] = [{} for _ in model.zones]
        self._told = {"instance_type": model.instance_type, "source": source}
        self._events: list[TraceEvent] = []
        self._own_per_s = _own_rates(
            [zone.vms * zone.losses_per_vm_h / 3600 / zone.mean_size for zone in model.zones], model.together
        )
        self._env = simpy.Environment()
        self._num_added = 0

    def trace(self) -> Trace:
        """Draw the trace."""
        for place, zone in enumerate(self._model.zones):
            initial = zone.vms if zone.initial is None else zone.initial
            for _ in range(initial):
                self._come(place)
            for _ in range(zone.vms - initial):
                self._env.process(self._replacement(place, self._pause_ms(zone.replacement_s)))
            between_s = self._between_s(place)
            if between_s < math.inf:
                self._env.process(self._revocations(place, between_s, self._pause_ms(between_s)))
        while self._env.peek() / 1000 <= self._duration_s:
            self._env.step()
        drawn = (price for place in range(len(self._model.zones)) for price in self._price(place))
        prices = sorted(drawn, key=lambda price: price.time_s)
        return Trace(events=tuple(self._events), prices=tuple(prices), end_s=self._duration_s)

    @property
    def _now_s(self) -> float:
        return self._env.now / 1000

    def _pause_ms(self, mean_s: float) -> int:
        """Draw an exponential pause with this mean, in milliseconds."""
        at_s = round(self._now_s + float(self._rng.exponential(mean_s)), 3)
        return round(1000 * at_s) - int(self._env.now)

    def _replacement(self, place: int, pause_ms: int) -> Generator[simpy.Event, Any, None]:
        yield self._env.timeout(pause_ms)
        self._come(place)

    def _revocations(self, place: int, between_s: float, pause_ms: int) -> Generator[simpy.Event, Any, None]:
        """Revoke VMs of a zone, and perhaps of others at the same time."""
        while True:
            yield self._env.timeout(pause_ms)
            pause_ms = self._pause_ms(between_s)
            if self._rng.random() < self._likely(place):
                self._take(place)
                for other in range(len(self._model.zones)):
                    if other != place and self._rng.random() < self._model.together:
                        self._take(other)

    def _between_s(self, place: int) -> float:
        """Return the mean time between possible revocations in a zone, at the rate with all of its VMs present."""
        zone, rate = self._model.zones[place], self._own_per_s[place]
        peak = max(zone.factor(hour) for hour in range(HOURS))
        return 1 / (rate * peak) if rate else math.inf

    def _likely(self, place: int) -> float:
        """Return the probability that a possible revocation happens now."""
        zone = self._model.zones[place]
        peak = max(zone.factor(hour) for hour in range(HOURS))
        return len(self._alive[place]) / zone.vms * zone.factor(self._model.start_hour + self._now_s / 3600) / peak

    def _come(self, place: int) -> None:
        node, self._num_added = f"vm{self._num_added}", self._num_added + 1
        self._alive[place][node] = self._now_s
        self._record(place, node, "add")

    def _take(self, place: int) -> None:
        zone, alive = self._model.zones[place], self._alive[place]
        weights = np.array(list(zone.sizes.values()))
        size = int(self._rng.choice(list(zone.sizes), p=weights / weights.sum()))
        spare = sum(map(len, self._alive)) - self._model.least
        victims = [str(node) for node in self._rng.permutation(sorted(alive))][: max(0, min(size, spare))]
        noticed = self._rng.random() < self._model.noticed
        for node in victims:
            lived_s = self._now_s - alive.pop(node)
            notice_s = min(self._model.notice_s, lived_s) if noticed and lived_s else None
            self._record(place, node, "remove", notice_s)
            self._env.process(self._replacement(place, self._pause_ms(zone.replacement_s)))

    def _record(self, place: int, node: str, event: str, notice_s: float | None = None) -> None:
        zone = self._model.zones[place].name
        entry = {"time_s": self._now_s, "event": event, "node_id": node, "zone": zone, "notice_s": notice_s}
        self._events.append(TraceEvent.model_validate(entry | self._told))

    def _price(self, place: int) -> Iterator[TracePrice]:
        """Yield the prices of a zone in order of time."""
        zone, step_s = self._model.zones[place], self._model.price_every_s
        if zone.usd_per_h is None:
            return
        num = 1 + (int(self._duration_s / step_s) if zone.price_spread else 0)
        off, jump = 0.0, zone.price_spread * math.sqrt(1 - _REVERSION**2)
        for number in range(num):
            usd = zone.usd_per_h * math.exp(off - zone.price_spread**2 / 2) if zone.price_spread else zone.usd_per_h
            yield TracePrice(time_s=number * step_s, usd_per_h=round(usd, 4), zone=zone.name, **self._told)
            off = _REVERSION * off + float(self._prices_rng.normal(0.0, jump))


def _own_rates(rates: Sequence[float], together: float) -> list[float]:
    """Return how often revocations begin in each zone, given how often one hits it: r_z = own_z + together * others."""
    begun = sum(rates) / (1 + together * (len(rates) - 1))
    if together == 1:
        return [begun / len(rates)] * len(rates)
    return [max(0.0, (rate - together * begun) / (1 - together)) for rate in rates]


def _names(num_zones: int) -> Sequence[str]:
    return [f"zone-{chr(ord('a') + number)}" if number < 26 else f"zone-{number}" for number in range(num_zones)]


def _dealt(vms: int, num_zones: int) -> list[int]:
    """Return so many VMs spread evenly over zones."""
    return [vms // num_zones + (place < vms % num_zones) for place in range(num_zones)]


def sizes_of(counts: Mapping[int, int]) -> dict[int, float]:
    """Return weights from how often each number of VMs was taken at once."""
    whole = sum(counts.values())
    return {size: count / whole for size, count in sorted(counts.items())} if whole else {1: 1.0}
