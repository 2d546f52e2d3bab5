"""Sections of one pipeline on several types of node: each section has the times, links and memory of its own type.

A message between two types takes as long as on the slower type, or as between zones if that is longer. A ring consists
of stages with the same sections, so its all-reduce takes as long as on the type of these sections.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import Any

import numpy as np

from simulator.costs.memory import NEVER, Parts, StageMemory, running_sums
from simulator.costs.stage_costs import LinkCosts, SectionCosts
from simulator.engine.times import Flags, Ints
from simulator.inputs.transfer import AllReduce, JoinedAllReduce, OneAllReduce

_SUMS = ("forward_sum_ns", "backward_sum_ns", "optimizer_sum_ns")


class JoinedSections(SectionCosts):
    """Sections that are each on one of several types of node.

    ``of_types``: the sections on each type, at one m and under the same rules; ``type_of``: the place of each section's
    type there, int64[K]. ``limits``: memory of a device of each type; None: no limit.
    """

    def __init__(
        self, of_types: Sequence[SectionCosts], type_of: Ints, limits: Sequence[int | None] | None = None
    ) -> None:
        vars(self).update(vars(of_types[0]))  # sizes and bytes are the same on all types
        self.of_types, self.type_of = tuple(of_types), type_of
        self.grouped = any(each.grouped for each in of_types)
        self.limits = tuple(limits or [None] * len(of_types))
        for name in _SUMS:
            every = np.stack([np.diff(getattr(each, name)) for each in of_types])
            setattr(self, name, running_sums(every[type_of, np.arange(len(type_of))]))
        self.inter_node, self.intra_node = (self._links(name) for name in ("inter_node", "intra_node"))
        self._memory, self._all_reduces, self._mean_jitters = {}, {}, {}

    def _links(self, name: str) -> LinkCosts:
        """Return the times of the link after each section; between two types, the slower type's or the zones' times."""
        links: LinkCosts = copy(getattr(self, name))
        zones = np.array([each.profile.environment.zone for each in self.of_types])
        next_type = np.append(self.type_of[1:], self.type_of[-1])
        for field in vars(links):
            every = np.stack([getattr(getattr(each, name), field) for each in self.of_types])
            where = np.arange(self.num_sections)
            times = np.maximum(every[self.type_of, where], every[next_type, where])
            if self.between_zones is not None:
                crosses = zones[self.type_of] != zones[next_type]
                times = np.where(crosses, np.maximum(times, getattr(self.between_zones, field)), times)
            setattr(links, field, times)
        return links

    def memory(self, *, single: bool, follows: bool = False, sums: bool = False) -> StageMemory:
        key = single, follows, sums
        if key not in self._memory:
            every = [each.memory(single=single, follows=follows, sums=sums) for each in self.of_types]
            self._memory[key] = JoinedMemory(every, self.type_of, self.limits)
        return self._memory[key]

    def all_reduce(self, in_flight: int) -> OneAllReduce:
        if in_flight not in self._all_reduces:
            every = tuple(AllReduce(each.profile, in_flight) for each in self.of_types)
            self._all_reduces[in_flight] = JoinedAllReduce(every, self.type_of)
        return self._all_reduces[in_flight]


class JoinedMemory(StageMemory):
    """Memory of stages on the type of their first section; the types' limits replace the limit that methods receive."""

    def __init__(self, of_types: Sequence[StageMemory], type_of: Ints, limits: Sequence[int | None]) -> None:
        first = of_types[0]
        self.of_types, self._type_of, self._limits = tuple(of_types), type_of, tuple(limits)
        self.rules, self.single, self.activations = first.rules, first.single, first.activations
        self.group_sizes = max((each.group_sizes for each in of_types), key=len)
        self.apart = any(each.apart for each in of_types)

    @cached_property
    def _usable(self) -> tuple[int, ...]:
        """Bytes for tensors on a device of each type."""
        limits = zip(self.of_types, self._limits, strict=True)
        return tuple(NEVER - 1 if limit is None else each.usable_bytes(limit) for each, limit in limits)

    def _chosen(self, begin: Ints, value_of: Callable[[int, StageMemory], Any]) -> Any:
        """Return what ``value_of`` returns for each stage and the stage's type."""
        every = np.stack(np.broadcast_arrays(begin, *(value_of(*each) for each in enumerate(self.of_types)))[1:])
        return np.take_along_axis(every, self._type_of[np.broadcast_to(begin, every.shape[1:])][None], 0)[0]

    def _of_one(self, begin: Ints) -> StageMemory:
        return self.of_types[int(self._type_of[begin].item())]

    def device_bytes(self, begin: Ints, end: Ints, window: Ints, recompute: Flags, live: Ints | int = 0) -> Ints:
        sizes: Ints = self._chosen(begin, lambda _, each: each.device_bytes(begin, end, window, recompute, live))
        return sizes

    def peak_bytes(
        self, begin: Ints, end: Ints, window: Ints, recompute: Flags, live: Ints | int, more: Ints | int = 0
    ) -> Ints:
        sizes: Ints = self._chosen(begin, lambda _, each: each.peak_bytes(begin, end, window, recompute, live, more))
        return sizes

    def within(self, peak_bytes: Ints, begin: Ints, device_bytes: int) -> bool:  # noqa: ARG002
        limits = np.array([NEVER if limit is None else limit for limit in self._limits], np.int64)
        return bool((peak_bytes <= limits[self._type_of[begin]]).all())

    def fitting_sizes(self, begin: Ints, end: Ints, window: Ints, recompute: Flags, usable: int) -> Ints:  # noqa: ARG002
        sizes: Ints = self._chosen(
            begin, lambda place, each: each.fitting_sizes(begin, end, window, recompute, self._usable[place])
        )
        return sizes

    def most_windows(
        self,
        begin: Ints,
        end: Ints,
        recompute: Flags | bool,
        usable: int,  # noqa: ARG002
        *,
        grouped: bool = True,
    ) -> Ints:
        most: Ints = self._chosen(
            begin, lambda place, each: each.most_windows(begin, end, recompute, self._usable[place], grouped=grouped)
        )
        return most

    def host_bytes(self, begin: Ints, end: Ints) -> Ints:
        sizes: Ints = self._chosen(begin, lambda _, each: each.host_bytes(begin, end))
        return sizes

    def host_parts(self, begin: Ints, end: Ints) -> Parts:
        return self._of_one(begin).host_parts(begin, end)

    def moments(
        self, begin: Ints, end: Ints, window: Ints, recompute: Flags, live: Ints | int = 0
    ) -> Mapping[str, Parts]:
        return self._of_one(begin).moments(begin, end, window, recompute, live)

    def fits_host(self, begin: Ints, end: Ints) -> bool:
        own = self._type_of[begin]
        places = ((each, own == place) for place, each in enumerate(self.of_types))
        return all(each.fits_host(begin[here], end[here]) for each, here in places)

    def usable_bytes(self, device_bytes: int) -> int:
        """Return the limit unchanged, because methods use the types' limits instead."""
        return device_bytes
