"""Determines when VMs come, are warned and are taken: according to a trace, or at a rate. Pure.

``recorded`` brings its own VMs; ``Lifetimes`` and ``Removals`` take VMs that others bring.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count, groupby
from typing import Literal, Protocol

from morph.contract.trace import Trace, TraceEvent

LifeS = Callable[[str, int], float]
"""A function that draws the duration (seconds) of a VM's life with this number."""


@dataclass(frozen=True)
class Change:
    """VMs come, are warned or are taken at the same moment. ``taken_s``: when VMs that are warned will be taken."""

    time_s: float
    kind: Literal["came", "warned", "taken"]
    vms: tuple[str, ...]
    taken_s: float = math.inf


@dataclass(frozen=True)
class Recorded(Change):
    """``event``: the event of the trace by which the VM comes or is taken."""

    event: TraceEvent = field(kw_only=True)


def recorded(trace: Trace, num_played: int = 0, now_s: float = 0.0) -> list[Recorded]:
    """Return the arrivals, warnings and removals of a trace after its first ``num_played`` events, in order of time.

    At one moment, arrivals and removals precede warnings, in the trace's order. No VM is warned before it comes, and a
    warning that is in force at ``now_s`` is given then.
    """
    came_s: dict[str, float] = {}
    changes: list[Recorded] = []
    for number, event in enumerate(trace.events):
        vms, is_new = (event.node_id,), event.event == "add"
        if is_new:
            came_s[event.node_id] = event.time_s
        if number < num_played:
            continue
        changes.append(Recorded(event.time_s, "came" if is_new else "taken", vms, event=event))
        if event.notice_s is not None:
            warned_s = max(came_s[event.node_id], event.time_s - event.notice_s, now_s)
            changes.append(Recorded(warned_s, "warned", vms, event.time_s, event=event))
    return sorted(changes, key=lambda change: (change.time_s, change.kind == "warned"))


class Lives(Protocol):
    """A source of warnings and removals for VMs that others bring."""

    @property
    def end_s(self) -> float:
        """The time after which nothing happens."""

    def between(self, vms: Mapping[str, float], after_s: float, until_s: float) -> tuple[Change, ...]:
        """Return the events in (``after_s``, ``until_s``], in order; ``vms``: the present VMs and when they came."""


@dataclass(frozen=True)
class Lifetimes:
    """Each VM lives for an exponential time: the preemption injector of Spotify (6.2.1, Eq. 6.1).

    A lifetime counts from the VM's birth, or from ``start_s`` if the VM is older; by Eq. 6.1 a VM's age makes no
    difference. A VM that is not taken at the end of its lifetime gets another lifetime. ``notice_s``: time between the
    warning and the removal of a VM; 0: no warning.
    """

    life_s: LifeS
    start_s: float = -math.inf
    end_s: float = math.inf
    notice_s: float = 0.0

    def between(self, vms: Mapping[str, float], after_s: float, until_s: float) -> tuple[Change, ...]:
        ends: list[tuple[float, int, str, float]] = []
        for vm, since_s in vms.items():
            begun_s = max(since_s, self.start_s)
            taken_s = self._taken_s(vm, begun_s, after_s)
            ends.append((taken_s, 1, vm, taken_s))
            warned_s = max(begun_s, taken_s - self.notice_s)
            if self.notice_s and warned_s > after_s:
                ends.append((warned_s, 0, vm, taken_s))
        return tuple(
            Change(time_s, "taken", (vm,)) if is_end else Change(time_s, "warned", (vm,), taken_s)
            for time_s, is_end, vm, taken_s in sorted(ends)
            if time_s <= until_s
        )

    def _taken_s(self, vm: str, begun_s: float, after_s: float) -> float:
        """Return the end of the first lifetime that ends after a moment."""
        time_s = begun_s
        for number in count():
            time_s += self.life_s(vm, number)
            if time_s > after_s:
                break
        return time_s


@dataclass(frozen=True)
class Removals:
    """Takes as many VMs at once as a trace does, at its times after ``start_s``; the seed picks them."""

    seed: int
    trace: Trace
    start_s: float

    @property
    def end_s(self) -> float:
        return self.start_s + self.trace.duration_s

    def between(self, vms: Mapping[str, float], after_s: float, until_s: float) -> tuple[Change, ...]:
        left, changes = set(vms), []
        removed = (event.time_s for event in self.trace.events if event.event == "remove")
        for trace_s, together in groupby(removed):
            if after_s < self.start_s + trace_s <= until_s:
                drawn = sorted(left, key=lambda vm: _uniform(self.seed, vm, trace_s))[: len(list(together))]
                left.difference_update(drawn)
                if drawn:
                    changes.append(Change(self.start_s + trace_s, "taken", tuple(drawn)))
        return tuple(changes)


def by_name(seed: int, mttp_s: float) -> LifeS:
    """Draw lifetimes with this mean that depend on seed, name and number alone, whatever the order of the VMs."""
    return lambda vm, number: -mttp_s * math.log(_uniform(seed, vm, number))


class InOrder:
    """Draws lifetimes in the order of the first question about each VM, so that they do not depend on VMs' names."""

    def __init__(self, seed: int, mttp_s: float) -> None:
        self._random, self._rate_per_s = random.Random(seed), 1 / mttp_s
        self._drawn: dict[tuple[str, int], float] = {}

    def __call__(self, vm: str, number: int) -> float:
        if (vm, number) not in self._drawn:
            self._drawn[vm, number] = self._random.expovariate(self._rate_per_s)
        return self._drawn[vm, number]


def _uniform(seed: int, vm: str, number: float) -> float:
    """Return a number above 0 and at most 1 that depends only on the arguments."""
    digest = hashlib.sha256(f"{seed} {number!r} {vm}".encode()).digest()
    return (int.from_bytes(digest[:8], "big") + 1) / 2**64
