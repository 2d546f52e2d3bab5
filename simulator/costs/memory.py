"""Memory of a stage on its device and in host memory at its peak, in bytes, for any run of sections.

The memory of a stage is the maximum over several moments of a run, each with its parts:

- *computing*: parameters, optimizer state, sums, stored inputs of the micro-batches in flight, their activations where
  the stage does not recompute, and the peak of one backward (from the profile); a stage that recomputes its sections in
  groups stores the input of each group, and its peak is that of one group's backward;
- *reducing*: parameters, optimizer state, sums, and mean gradients with the memory for their conversion; with several
  replicas also shares of two units' sums in transit (with NCCL rings: the two pieces that are received at a time), and
  the backward of the first section, which may still run;
- *updating*: parameters, optimizer state, mean gradients, and the optimizer's temporary memory;
- *giving up*: with several replicas, the sums of a step that is given up after its reduction, and the total sums that
  are restored from the mean gradients for another shape;
- *changing*: the units of the old shape and those of the new one together, and sums of a step that was given up. The
  old shape is unknown, but a worker holds no unit twice: twice the stage, at most the whole model.

Frozen weights count at every moment: a worker releases those of its former stage before it reads those of the next.
Memory that the allocator reserves and the device's context are added (0 on a CPU). Bytes of state are those of any run
of sections, in which a unit that several of them use counts once.

Redundant computation for the next stage, or on the last stage for the first (Bamboo, 5.1 and 5.2), adds that stage's
parameters and optimizer state. With redundant forwards alone (``eflb``) activations go to host memory; with backwards
(``efeb``) activations of the micro-batches in flight at the next stage stay, and there are sums of gradients. Where
stages recompute, a redundant forward stores nothing: the stage's input was computed by the worker itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from morph.contract.cluster import MAILBOX_SLOT_BYTES, MAILBOX_SLOTS, RING_PIECE_BYTES, RING_PIECES
from morph.contract.profile import Profile
from simulator.engine.compilation import compiled, entry
from simulator.engine.redundant_loop import LAG
from simulator.engine.times import Flags, Ints
from simulator.inputs.request import MemoryRules

Parts = dict[str, Ints]
NEVER = 2**62
"""More than any time (ns) or number of bytes: of what does not fit, or where there is no limit."""
_MESSAGES_AT_ONCE = 3
"""Messages at each border: two received ahead (the runtime's ``NUM_POSTED``), and one being sent."""
_UNITS_AT_ONCE = 2
"""Units per reduction: sums of one are received while another waits for its means."""
_MOST_GROUP_SIZES = 24
_VERSIONS_KEPT = 2
"""Copies in host memory of checkpoints that a worker wrote."""
MOMENTS = {
    "computing": "a stage computes",
    "reducing": "gradients are reduced",
    "updating": "the optimizer steps",
    "giving up": "a step is given up that was reduced",
    "changing": "the shape changes",
}
"""The moments in words, to follow "while"."""
_BUFFERS = 2
"""Micro-batches' activations on their way to host memory: one being computed, and one in transit."""


class HeldBytes:
    """Bytes of parameters, optimizer state, sums of gradients, and mean gradients during reduction."""

    def __init__(self, profile: Profile) -> None:
        sections = profile.sections
        own = {
            "parameters": [section.parameter_bytes for section in sections],
            "optimizer": [section.optimizer_bytes for section in sections],
            "sums": [section.gradient_bytes for section in sections],
            "gradients": [s.parameter_bytes if s.reduced_bytes is None else s.reduced_bytes for s in sections],
        }
        self._sums = {part: running_sums(values) for part, values in own.items()}
        self._twice = _counted_twice(profile, own)

    def __call__(self, part: str, begin: Ints, end: Ints) -> Ints:
        """Return the bytes of a part for runs of sections from ``begin`` to before ``end``, arrays that broadcast."""
        sums = self._sums[part]
        held: Ints = sums[end] - sums[begin] - (0 if self._twice is None else self._twice[part][begin, end])
        return held


def running_sums(values: Sequence[int] | Ints) -> Ints:
    """Return 0, the first value, the sum of the first two and so on: [values + 1]."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.asarray(values, np.int64))])


def _counted_twice(profile: Profile, own: Mapping[str, Sequence[int]]) -> dict[str, Ints] | None:
    """Return, by part, the bytes that sections begin..end-1 count repeatedly: [K + 1, K + 1]; None: none."""
    shared = [unit for unit in profile.units if len(set(unit.sections)) > 1 and unit.parameter_bytes]
    if not shared:
        return None
    size = profile.num_sections + 1
    tables = {part: np.zeros((size, size), np.int64) for part in own}
    for unit in shared:
        uses = np.zeros(size, np.int64)
        uses[np.array(sorted(set(unit.sections))) + 1] = 1
        before = np.cumsum(uses)
        more = np.maximum(0, before[None, :] - before[:, None] - 1)
        first = unit.sections[0]
        share = unit.parameter_bytes / max(1, profile.sections[first].parameter_bytes)
        for part, table in tables.items():
            known = unit.optimizer_bytes if part == "optimizer" else None
            table += more * (round(own[part][first] * share) if known is None else known)
    return tables


class StageMemory:
    """Memory of stages at one micro-batch size.

    ``single``: there is only one replica: nothing is reduced, and no other worker drives the same stage. ``grouped``:
    stages that do not fit otherwise recompute their sections in groups. Arguments ``begin`` and ``end`` of methods are
    the first sections and the ends of stages, arrays that broadcast; ``live`` is the number of sections that each stage
    recomputes together, 0: all (``StagePlan.live_sections``).
    """

    def __init__(
        self, profile: Profile, micro_batch_size: int, rules: MemoryRules, *, single: bool, grouped: bool = False
    ) -> None:
        m, sections, environment = micro_batch_size, profile.sections, profile.environment
        self.rules, self.single, self._environment = rules, single, environment
        self._num_sections = len(sections)
        self.apart = environment.host_memory_bytes is not None
        """Whether the device has its own memory, separate from the host's."""
        self._optimizer_in_host = profile.optimizer_in_host_memory
        crossing = [0, *(m * section.output_bytes_per_sample for section in sections[:-1]), 0]
        given = [m * section.input_bytes_per_sample for section in sections]
        self.stored: Ints = np.array([min(pair) for pair in zip(given, crossing[:-1], strict=True)], np.int64)
        batches = [have - border for have, border in zip(given, self.stored.tolist(), strict=True)]
        held = [m * section.activation_bytes_per_sample + own for section, own in zip(sections, batches, strict=True)]
        self.activations = running_sums(held)
        peaks = [
            max(section.peak_bytes.get(m, 0) + own, kept) + outgoing
            for section, own, kept, outgoing in zip(sections, batches, held, crossing[1:], strict=True)
        ]
        self._peaks: Ints = self.activations[:-1] + np.array(peaks, np.int64)
        self._crossing: Ints = np.array(crossing, np.int64)
        self._held = HeldBytes(profile)
        self._ties = [sorted(set(unit.sections)) for unit in profile.units if len(set(unit.sections)) > 1]
        self._constants = running_sums([section.constant_bytes for section in sections])
        gradients = [section.gradient_bytes for section in sections]
        self._sums: Ints = np.array(gradients, np.int64)
        self._finish: Ints = np.array([section.finish_bytes for section in sections], np.int64)
        self._step: Ints = np.array([section.step_bytes for section in sections], np.int64)
        self.group_sizes: tuple[int, ...] = ()
        """Sizes of groups that are tried, largest first: all up to about ten."""
        if grouped:
            sizes = np.geomspace(1, max(1, len(sections) - 1), _MOST_GROUP_SIZES).round().astype(int)
            self.group_sizes = tuple(np.unique(sizes)[::-1].tolist())
        self._groups: dict[int, tuple[Ints, Ints]] = {}

    # ---- of stages ----

    def device_bytes(self, begin: Ints, end: Ints, window: Ints, recompute: Flags, live: Ints | int = 0) -> Ints:
        """Return the stages' memory at their peak, without allocator and context."""
        if "tables" not in vars(self) and not np.any(live):  # only searches compute tables
            moments = self.moments(begin, end, window, recompute)
            fullest: Ints = np.maximum.reduce([_total(parts) for parts in moments.values()])
            return fullest
        more: Ints = self.base(begin, end, recompute) + window * self.each(begin, end, recompute)
        for size in set(np.atleast_1d(live).tolist()) - {0} if np.any(live) else ():
            taken, stored = self.group_tables(size)
            more = np.where(live == size, taken[begin, end] + window * stored[begin, end], more)
        return np.maximum(self.tables[2][begin, end], more)

    def peak_bytes(
        self,
        begin: Ints,
        end: Ints,
        window: Ints,
        recompute: Flags,
        live: Ints | int,
        more: Ints | int = 0,
    ) -> Ints:
        """Return the stages' memory at their peak with allocator and context; ``more``: bytes of further tensors."""
        return self.whole_bytes(self.device_bytes(begin, end, window, recompute, live) + more)

    def within(self, peak_bytes: Ints, begin: Ints, device_bytes: int) -> bool:  # noqa: ARG002 (of several types)
        """Whether each stage, whose first section is in ``begin``, fits on its device."""
        return bool((peak_bytes <= device_bytes).all())

    def group_tables(self, size: int) -> tuple[Ints, Ints]:
        """Return ``base`` and ``each`` of every run of sections, [K + 1, K + 1], with groups of this size."""
        if size not in self._groups:
            taken, stored = self._of_groups((size,))
            self._groups[size] = taken[0], stored[0]
        return self._groups[size]

    @cached_property
    def all_group_tables(self) -> tuple[Ints, Ints]:
        """The same of each of ``group_sizes``: [sizes, K + 1, K + 1]."""
        tables = self._of_groups(self.group_sizes)
        self._groups |= {size: (taken, stored) for size, taken, stored in zip(self.group_sizes, *tables, strict=True)}
        return tables

    def _of_groups(self, sizes: Sequence[int]) -> tuple[Ints, Ints]:
        alone, (begin, end) = np.zeros_like(self.tables[0]), np.triu_indices(self._num_sections)
        alone[begin, end + 1] = self._running(self._peaks, begin, end + 1) - self.activations[begin]
        taken, stored = _tabulate_groups(alone, self.stored, np.array(sizes, np.int64))
        return taken + (self.tables[0] - alone), stored

    def fitting_sizes(self, begin: Ints, end: Ints, window: Ints, recompute: Flags, usable: int) -> Ints:
        """Return for each stage the size of groups with which it fits; 0 where it needs none, or none suffices.

        It is the largest such size, with which most of the recompute overlaps the wait for the gradient. On the last
        stage, which does not wait, it is the smallest, because its gradients are complete soonest.
        """
        group_sizes = np.zeros_like(begin)
        short = np.flatnonzero(self.device_bytes(begin, end, window, recompute) > usable)
        if len(short) and self.group_sizes:
            first, last, sizes = begin[short], end[short], np.array(self.group_sizes)
            taken, stored = (tables[:, first, last] for tables in self.all_group_tables)
            fits = (last - first > sizes[:, None]) & (taken + window[short] * stored <= usable)
            fits &= self.tables[2][first, last] <= usable
            places = np.where(short == len(begin) - 1, len(sizes) - 1 - fits[::-1].argmax(0), fits.argmax(0))
            group_sizes[short] = np.where(fits.any(0), sizes[places], 0)
        return group_sizes

    def base(self, begin: Ints, end: Ints, recompute: Flags | bool) -> Ints:
        """Return the memory while a stage computes, without that of micro-batches in flight."""
        again, kept, _ = self.tables
        return np.where(recompute, again[begin, end], kept[begin, end])

    def each(self, begin: Ints, end: Ints, recompute: Flags | bool) -> Ints:
        """Return the memory of each micro-batch in flight."""
        held = np.where(recompute, 0, self.activations[end] - self.activations[begin])
        taken: Ints = self.stored[begin] + held
        return taken

    def host_bytes(self, begin: Ints, end: Ints) -> Ints:
        """Return the host memory of a device with its own memory; 0 where they are the same."""
        parts = self.host_parts(begin, end)
        return _total(parts) if parts else np.zeros(np.broadcast_shapes(np.shape(begin), np.shape(end)), np.int64)

    def host_parts(self, begin: Ints, end: Ints) -> Parts:
        """Return the parts of host memory of a device with its own memory; none where they are the same."""
        if not self.apart:
            return {}
        parts = self._always_in_host(begin, end) | self._leaving(begin, end)
        messages = self._messages(begin, end)
        if not self.single:
            messages = messages + 2 * self._shares(begin, end) + self._held("gradients", begin, end)
        parts |= {"messages": messages, "process": np.full_like(messages, self._environment.process_bytes)}
        if self._optimizer_in_host:
            state = self._state(begin, end) + self._held("gradients", begin, end)
            parts["optimizer and its copies"] = state + self._running(self._step, begin, end)
        return parts

    def moments(
        self, begin: Ints, end: Ints, window: Ints, recompute: Flags, live: Ints | int = 0
    ) -> Mapping[str, Parts]:
        """Return the parts of the device's memory by moment, without allocator and context."""
        held = np.where(recompute, 0, (window - 1) * (self.activations[end] - self.activations[begin]))
        stored = self.stored[begin]
        activations = held + self._running(self._peaks, begin, end) - self.activations[begin]
        for size in set(np.atleast_1d(live).tolist()) - {0}:
            taken, each = (table[begin, end] for table in self.group_tables(size))
            stored = np.where(live == size, each, stored)
            activations = np.where(live == size, taken - _total(self._computing(begin, end)), activations)
        computing = self._computing(begin, end) | {"stored inputs": window * stored, "activations": activations}
        return {"computing": computing, **self._other_moments(begin, end)}

    def device_state(self, begin: Ints, end: Ints) -> Ints:
        """Return the bytes of parameters, and of optimizer state that is on the device."""
        held: Ints = self._held("parameters", begin, end) + self._device_optimizer(begin, end)
        return held

    def sums(self, begin: Ints, end: Ints) -> Ints:
        """Return the bytes of sums of gradients."""
        return self._held("sums", begin, end)

    def crossing(self, begin: Ints) -> Ints:
        """Return the bytes that a micro-batch sends to these sections; 0 for the first."""
        return self._crossing[begin]

    # ---- limits ----

    def fits_host(self, begin: Ints, end: Ints) -> bool:
        """Whether host memory suffices for each of the stages."""
        return bool((self.limited_tables[2][begin, end] < NEVER).all())

    def usable_bytes(self, device_bytes: int) -> int:
        """Return the part of a device's memory that is available for tensors."""
        left = max(0, device_bytes - self._environment.context_bytes)
        return left * 1000 // (1000 + self._environment.allocator_permille)

    def whole_bytes(self, tensors: Ints) -> Ints:
        """Return the memory of a device with so many bytes of tensors, including allocator and context."""
        permille = self._environment.allocator_permille
        kept = tensors // 1000 * permille - (-(tensors % 1000) * permille // 1000)
        whole: Ints = tensors + kept + self._environment.context_bytes
        return whole

    def most_windows(
        self, begin: Ints, end: Ints, recompute: Flags | bool, usable: int, *, grouped: bool = True
    ) -> Ints:
        """Return the largest window of each stage within so many bytes of tensors; below 1: none; 2**62: any."""
        most = _most(usable - self.base(begin, end, recompute), self.each(begin, end, recompute))
        if grouped and self.group_sizes:
            taken, stored = (tables[:, begin, end] for tables in self.all_group_tables)
            most = np.maximum(most, _most(usable - taken, stored).max(0))
        windows: Ints = np.where(self.limited_tables[2][begin, end] > usable, 0, np.maximum(0, most))
        return windows

    @cached_property
    def tables(self) -> tuple[Ints, Ints, Ints]:
        """For all runs of sections, [K + 1, K + 1]: ``base`` with and without recompute, and other moments' peak."""
        begin, end = np.ogrid[0 : self._num_sections + 1, 0 : self._num_sections + 1]
        begin = np.minimum(begin, self._num_sections - 1)
        end = np.maximum(begin, end)
        computing = (
            _total(self._computing(begin, end)) + self._running(self._peaks, begin, end) - self.activations[begin]
        )
        floor = np.maximum.reduce([_total(parts) for parts in self._other_moments(begin, end).values()])
        return computing, computing - (self.activations[end] - self.activations[begin]), floor

    @cached_property
    def limited_tables(self) -> tuple[Ints, Ints, Ints]:
        """``tables`` with the last one beyond all limits where host memory does not suffice."""
        limit = self._environment.host_memory_bytes
        if limit is None:
            return self.tables
        begin, end = np.ogrid[0 : self._num_sections + 1, 0 : self._num_sections + 1]
        fits = self.host_bytes(np.minimum(begin, self._num_sections - 1), np.maximum(begin, end)) <= limit
        again, kept, floor = self.tables
        return again, kept, np.where(fits, floor, NEVER)

    # ---- inside ----

    def _computing(self, begin: Ints, end: Ints) -> Parts:
        sums, messages = self._held("sums", begin, end), self._messages(begin, end)
        return self._kept(begin, end) | {"sums": sums, "messages": messages}

    def _other_moments(self, begin: Ints, end: Ints) -> dict[str, Parts]:
        kept, sums = self._kept(begin, end), self._held("sums", begin, end)
        gradients = self._held("gradients", begin, end)
        on_device = np.zeros_like(gradients) if self._optimizer_in_host else gradients
        reducing = kept | {"sums": sums, "mean gradients": on_device + self._running(self._finish, begin, end)}
        if self._rings_on_device:
            received = RING_PIECES * np.minimum(RING_PIECE_BYTES, self._running(self._sums, begin, end))
            reducing["received sums"] = np.where(self._num_rings(begin, end) > 0, received, 0)
        if not self.single:
            reducing["activations"] = self._peaks[begin] - self.activations[begin]
            if not self.apart:
                reducing["messages"] = self._shares(begin, end)
        stepping = np.zeros_like(gradients) if self._optimizer_in_host else self._running(self._step, begin, end)
        updating = kept | {"mean gradients": on_device, "optimizer step": stepping}
        moments = {"reducing": reducing, "updating": updating}
        if self.rules.keeps_sums and not self.single:
            moments["giving up"] = kept | {"sums, and whole ones": 2 * sums, "mean gradients": on_device}
        if self.rules.changes:
            state = self.device_state(begin, end)
            whole = self._whole("parameters") + (0 if self._optimizer_in_host else self._whole("optimizer"))
            changing = {part: size for part, size in kept.items() if part not in ("parameters", "optimizer state")}
            moments["changing"] = changing | {"old and new units": np.minimum(whole, 2 * state)}
            if self.rules.keeps_sums:
                moments["changing"]["sums"] = sums
            if not self.apart:
                moments["changing"] |= self._leaving(begin, end)
        return moments

    def _kept(self, begin: Ints, end: Ints) -> Parts:
        """Return the parts at every moment: own state, followed state, and host copies if memory is shared."""
        parts = {
            "parameters": self._held("parameters", begin, end),
            "optimizer state": self._device_optimizer(begin, end),
        }
        if self._constants[-1]:
            parts["frozen weights"] = self._constants[end] - self._constants[begin]
        if self.rules.mailboxes and self.apart:
            has_previous, has_next = np.asarray(begin) > 0, np.asarray(end) < self._num_sections
            num = 2 if self.rules.changes else has_previous.astype(np.int64) + has_next  # earlier mailboxes are kept
            parts["mailboxes"] = MAILBOX_SLOTS * MAILBOX_SLOT_BYTES * (num + np.zeros_like(parts["parameters"]))
        if self._rings_on_device:
            parts["NCCL"] = self._environment.ring_bytes * self._num_rings(begin, end)
        if self.rules.follows and self.single:
            followed = self.device_state(begin, end)
            parts["state that is followed"] = self._of_others(
                followed + self._held("gradients", begin, end), begin, end
            )
        return parts if self.apart else parts | self._always_in_host(begin, end)

    @property
    def _rings_on_device(self) -> bool:
        return self.rules.rings_on_device and self.apart

    def _num_rings(self, begin: Ints, end: Ints) -> Ints:
        """Return the rings of a stage: its own, if there are replicas, and one for each unit shared between stages."""
        shape = np.broadcast_shapes(np.shape(begin), np.shape(end))
        num_rings = np.full(shape, 0 if self.single else 1, np.int64)
        for sections in self._ties:
            used = np.stack([np.less_equal(begin, section) & np.less(section, end) for section in sections])
            num_rings += used.any(0) & ~used.all(0)
        return num_rings

    def _always_in_host(self, begin: Ints, end: Ints) -> Parts:
        """Return the copies of the newest checkpoints, and of other workers' sums."""
        parts: Parts = {}
        if self.rules.saves:
            parts["checkpoint copies"] = _VERSIONS_KEPT * self._state(begin, end) // (1 if self.single else 2)
        if self.rules.copies_sums:
            parts["others' sums"] = self._of_others(self._held("sums", begin, end), begin, end)
        return parts

    def _leaving(self, begin: Ints, end: Ints) -> Parts:
        """Return the units that are sent to others through host memory when the shape changes."""
        return {"units that leave": self._state(begin, end)} if self.rules.changes else {}

    def _of_others(self, size: Ints, begin: Ints, end: Ints) -> Ints:
        """Return ``size`` for another worker's stage, assumed equal to the own; 0 where there is no other worker."""
        return np.where((end - begin == self._num_sections) & self.single, 0, size)

    def _state(self, begin: Ints, end: Ints) -> Ints:
        state: Ints = self._held("parameters", begin, end) + self._held("optimizer", begin, end)
        return state

    def _whole(self, part: str) -> Ints:
        return self._held(part, np.zeros(1, np.int64), np.array([self._num_sections]))

    def _device_optimizer(self, begin: Ints, end: Ints) -> Ints:
        held = self._held("optimizer", begin, end)
        return np.zeros_like(held) if self._optimizer_in_host else held

    def _messages(self, begin: Ints, end: Ints) -> Ints:
        taken: Ints = _MESSAGES_AT_ONCE * (self._crossing[begin] + self._crossing[end])
        return taken

    def _shares(self, begin: Ints, end: Ints) -> Ints:
        """Return the bytes of two units' sums in transit, in shares of a ring's members."""
        shares: Ints = _UNITS_AT_ONCE * self._running(self._sums, begin, end)
        return shares

    def _running(self, values: Ints, begin: Ints, end: Ints) -> Ints:
        """Return the maximum of some values over each run of sections."""
        key = id(values)
        if key not in self._largest:
            size = self._num_sections
            held = np.tri(size, dtype=np.bool_).T  # by first section and last one
            least = int(values.min())
            table = np.zeros((size, size + 1), np.int64)
            table[:, 1:] = np.maximum.accumulate(np.where(held, values, least), axis=1) * held
            self._largest[key] = table
        largest: Ints = self._largest[key][begin, end]
        return largest

    @cached_property
    def _largest(self) -> dict[int, Ints]:
        return {}


@entry
@compiled
def _tabulate_groups(alone, stored, sizes):  # type: ignore[no-untyped-def]
    """What activations take of every run of sections in groups of each size, and what each micro-batch in flight does.

    ``alone``: what the forward of every run takes as one group.
    """
    taken = np.zeros((len(sizes), *alone.shape), np.int64)
    each = np.zeros((len(sizes), *alone.shape), np.int64)
    for place in range(len(sizes)):
        for end in range(1, len(alone)):
            cut = max(0, end - sizes[place])
            for begin in range(end):
                if begin < cut:
                    taken[place, begin, end] = max(taken[place, begin, cut], alone[cut, end])
                    each[place, begin, end] = each[place, begin, cut] + stored[cut]
                else:
                    taken[place, begin, end], each[place, begin, end] = alone[begin, end], stored[begin]
    return taken, each


def spans(boundaries: Sequence[int], num_sections: int) -> tuple[Ints, Ints]:
    """Return the first sections and the ends of the stages that begin at these sections."""
    begin = np.asarray(boundaries, np.int64)
    return begin, np.append(begin[1:], num_sections)


def _most(room: Ints, each: Ints) -> Ints:
    """Return how often ``each`` fits into ``room``; below 1 where it does not, 2**62 where ``each`` is 0."""
    return np.where(each > 0, room // np.maximum(1, each), np.where(room < 0, 0, NEVER))


def _total(parts: Parts) -> Ints:
    total: Ints = np.add.reduce(np.broadcast_arrays(*parts.values()))
    return total


def next_activations(memory: StageMemory, begin: Ints, end: Ints, recompute: Flags) -> Ints:
    """Return the bytes per micro-batch that the next stage keeps for its backward, without its input: int64[P]."""
    held = np.where(recompute, 0, memory.activations[end] - memory.activations[begin])
    return np.roll(held, -1)


def redundant_parts(memory: StageMemory, begin: Ints, end: Ints, window: Ints, recompute: Flags) -> Parts:
    """Return the parts on each stage's device: int64[P] each; none with one stage only."""
    name = memory.rules.redundant_computation
    if name == "off" or len(begin) == 1:
        return {}
    parts = {"redundant layers": np.roll(memory.device_state(begin, end), -1)}
    activations = next_activations(memory, begin, end, recompute)
    if name == "eflb":
        parts["redundant activations"] = _BUFFERS * activations
    elif name == "efeb":
        parts["redundant activations"] = (np.roll(window, -1) + LAG) * activations
        parts["redundant sums"] = np.roll(memory.sums(begin, end), -1)
    return parts


def next_host_bytes(memory: StageMemory, begin: Ints, end: Ints, recompute: Flags, num_micro_batches: int) -> Ints:
    """Return the bytes kept in host memory until the mini-batch is over: int64[P].

    For each micro-batch these are the messages to both neighbours, from which lost gradients are recomputed, and with
    ``eflb`` the next stage's activations.
    """
    name = memory.rules.redundant_computation
    if name not in ("lflb", "eflb") or len(begin) == 1:
        return np.zeros(len(begin), np.int64)
    kept = np.roll(memory.crossing(begin), -1) + memory.crossing(begin)
    if name == "eflb":
        kept = kept + next_activations(memory, begin, end, recompute)
    num_bytes: Ints = num_micro_batches * kept
    return num_bytes
