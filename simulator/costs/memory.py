"""What a stage holds on its device and in host memory, and when it holds most: bytes of any run of sections.

Some moments of a run are looked at, each with its parts; a stage needs as much as its fullest moment:

- *computing*: parameters, optimizer state, sums, stored inputs of the micro-batches in flight, their activations where
  the stage does not recompute, and what one backward takes at most (the profile's peaks); a stage that runs its
  sections again in groups stores the input of each group, and its backward takes what that of one group does;
- *reducing*: parameters, optimizer state, sums, and mean gradients with what the conversion takes; with several
  replicas also shares of two units' sums on their way (on a device whose rings are NCCL's: the two pieces that are
  received at a time), and the backward of the first section, which may still run;
- *updating*: parameters, optimizer state, mean gradients, and what the optimizer takes while it steps;
- *giving up*: with several replicas, the sums of a step that is given up after its reduction, and the sums of all
  that are made again from the mean gradients, which another shape goes on with;
- *changing*: the units of the old shape and those of the new one side by side, and sums of a step that was given up. Of
  the old shape no more is known than that a worker holds no unit twice: twice the stage, at most the whole model.

Frozen weights are there at every moment: a worker lets go of an earlier stage's before it reads those of the next.
What the allocator keeps for itself and the device's context come on top (0 on a CPU).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from morph.contract.cluster import MAILBOX_SLOT_BYTES, MAILBOX_SLOTS, RING_PIECE_BYTES, RING_PIECES
from morph.contract.profile import Profile
from simulator.engine.compilation import compiled, entry
from simulator.engine.redundant_loop import LAG
from simulator.inputs.request import MemoryRules

# Bytes of what any run of sections holds of its own, a unit that several of them use counted once.


Ints = npt.NDArray[np.int64]


class HeldBytes:
    """Of parameters, optimizer state, sums of gradients, and mean gradients as they are reduced.

    Args:
        profile: What calibration measured.
    """

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
        """Bytes of a part, of runs that begin with sections ``begin`` and end before ``end``, which go together."""
        sums = self._sums[part]
        held: Ints = sums[end] - sums[begin] - (0 if self._twice is None else self._twice[part][begin, end])
        return held


def running_sums(values: Sequence[int] | Ints) -> Ints:
    """0, the first value, the sum of the first two and so on: [values + 1]."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.asarray(values, np.int64))])


def _counted_twice(profile: Profile, own: Mapping[str, Sequence[int]]) -> dict[str, Ints] | None:
    """By part, what the sections begin..end-1 count more than once: [K + 1, K + 1]; None where nothing is shared."""
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


Parts = dict[str, Ints]
NEVER = 2**62
_MESSAGES_AT_ONCE = 3
"""Of each border: two that are received ahead (the runtime's ``NUM_POSTED``), and one on its way out."""
_UNITS_AT_ONCE = 2
"""Of a reduction: sums of one are received while another's means are waited for."""
_MOST_GROUP_SIZES = 24
_VERSIONS_KEPT = 2
"""Of checkpoints that a worker wrote, their copies in host memory."""
MOMENTS = {
    "computing": "a stage computes",
    "reducing": "gradients are reduced",
    "updating": "the optimizer steps",
    "giving up": "a step is given up that was reduced",
    "changing": "the shape changes",
}
"""In words, after "while"."""


class StageMemory:
    """Memory of stages at one micro-batch size.

    Args:
        profile: What calibration measured.
        micro_batch_size: m.
        rules: What else a run holds.
        single: Whether there is one replica only: nothing is reduced then, and nobody else drives the same stage.
        grouped: Whether stages that do not fit otherwise run their sections again in groups.

    Arguments ``begin`` and ``end`` of its methods are first sections of stages, and ends, of shapes that go together;
    ``live`` says of how many sections each runs again together, 0: of all (``StagePlan.live_sections``).
    """

    def __init__(
        self, profile: Profile, micro_batch_size: int, rules: MemoryRules, *, single: bool, grouped: bool = False
    ) -> None:
        m, sections, environment = micro_batch_size, profile.sections, profile.environment
        self.rules, self.single, self._environment = rules, single, environment
        self._num_sections = len(sections)
        self.apart = environment.host_memory_bytes is not None
        """Whether the device has memory of its own, apart from the host's."""
        self._optimizer_in_host = profile.optimizer_in_host_memory
        crossing = [0, *(m * section.output_bytes_per_sample for section in sections[:-1]), 0]
        given = [m * section.input_bytes_per_sample for section in sections]
        self.stored: Ints = np.array([min(pair) for pair in zip(given, crossing[:-1], strict=True)], np.int64)
        batches = [have - border for have, border in zip(given, self.stored.tolist(), strict=True)]
        held = [m * section.activation_bytes_per_sample + own for section, own in zip(sections, batches, strict=True)]
        self.activations = running_sums(held)
        peaks = [
            max(section.peak_bytes.get(m, 0) + own, kept) + behind
            for section, own, kept, behind in zip(sections, batches, held, crossing[1:], strict=True)
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
        """Of groups, those that are tried, largest first: all up to about ten."""
        if grouped:
            sizes = np.geomspace(1, max(1, len(sections) - 1), _MOST_GROUP_SIZES).round().astype(int)
            self.group_sizes = tuple(np.unique(sizes)[::-1].tolist())
        self._groups: dict[int, tuple[Ints, Ints]] = {}

    # ---- of stages ----

    def device_bytes(
        self, begin: Ints, end: Ints, window: Ints, recompute: npt.NDArray[np.bool_], live: Ints | int = 0
    ) -> Ints:
        """What stages take at their fullest moment, before allocator and context."""
        if "tables" not in vars(self) and not np.any(live):  # a search has worked them out; one shape needs few runs
            moments = self.moments(begin, end, window, recompute)
            fullest: Ints = np.maximum.reduce([_total(parts) for parts in moments.values()])
            return fullest
        more: Ints = self.base(begin, end, recompute) + window * self.each(begin, end, recompute)
        for size in set(np.atleast_1d(live).tolist()) - {0} if np.any(live) else ():
            taken, stored = self.group_tables(size)
            more = np.where(live == size, taken[begin, end] + window * stored[begin, end], more)
        return np.maximum(self.tables[2][begin, end], more)

    def group_tables(self, size: int) -> tuple[Ints, Ints]:
        """Of every run of sections, [K + 1, K + 1]: ``base`` and ``each`` where groups of so many are run again."""
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

    def fitting_sizes(
        self, begin: Ints, end: Ints, window: Ints, recompute: npt.NDArray[np.bool_], usable: int
    ) -> Ints:
        """Of each stage the groups in which it takes no more; 0 where it needs none, or none are enough.

        The largest, which leave most of the recompute to the wait for the gradient. On the last stage, which does not
        wait, the smallest: its gradients are complete soonest.
        """
        found = np.zeros_like(begin)
        short = np.flatnonzero(self.device_bytes(begin, end, window, recompute) > usable)
        if len(short) and self.group_sizes:
            first, last, sizes = begin[short], end[short], np.array(self.group_sizes)
            taken, stored = (tables[:, first, last] for tables in self.all_group_tables)
            fits = (last - first > sizes[:, None]) & (taken + window[short] * stored <= usable)
            fits &= self.tables[2][first, last] <= usable
            places = np.where(short == len(begin) - 1, len(sizes) - 1 - fits[::-1].argmax(0), fits.argmax(0))
            found[short] = np.where(fits.any(0), sizes[places], 0)
        return found

    def base(self, begin: Ints, end: Ints, recompute: npt.NDArray[np.bool_] | bool) -> Ints:
        """While a stage computes, without what each micro-batch in flight takes."""
        again, kept, _ = self.tables
        return np.where(recompute, again[begin, end], kept[begin, end])

    def each(self, begin: Ints, end: Ints, recompute: npt.NDArray[np.bool_] | bool) -> Ints:
        """What each micro-batch in flight takes."""
        held = np.where(recompute, 0, self.activations[end] - self.activations[begin])
        taken: Ints = self.stored[begin] + held
        return taken

    def host_bytes(self, begin: Ints, end: Ints) -> Ints:
        """Host memory beside a device with memory of its own; 0 where the host's is the device's."""
        parts = self.host_parts(begin, end)
        return _total(parts) if parts else np.zeros(np.broadcast_shapes(np.shape(begin), np.shape(end)), np.int64)

    def host_parts(self, begin: Ints, end: Ints) -> Parts:
        """Parts of host memory beside a device with memory of its own; none where the host's is the device's."""
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
        self, begin: Ints, end: Ints, window: Ints, recompute: npt.NDArray[np.bool_], live: Ints | int = 0
    ) -> Mapping[str, Parts]:
        """Parts by moment, of the device's memory, before allocator and context."""
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
        """Parameters, and the optimizer state that is on the device."""
        held: Ints = self._held("parameters", begin, end) + self._device_optimizer(begin, end)
        return held

    def sums(self, begin: Ints, end: Ints) -> Ints:
        """Sums of gradients."""
        return self._held("sums", begin, end)

    def crossing(self, begin: Ints) -> Ints:
        """What of a micro-batch comes in before these sections: of the first, nothing."""
        return self._crossing[begin]

    # ---- limits ----

    def fits_host(self, begin: Ints, end: Ints) -> bool:
        """Whether host memory suffices for each of the stages."""
        limit = self._environment.host_memory_bytes
        return limit is None or bool((self.host_bytes(begin, end) <= limit).all())

    def usable_bytes(self, device_bytes: int) -> int:
        """Of a device's memory, what is left for tensors."""
        left = max(0, device_bytes - self._environment.context_bytes)
        return left * 1000 // (1000 + self._environment.allocator_permille)

    def whole_bytes(self, tensors: Ints) -> Ints:
        """A device's memory for so many bytes of tensors, with what the allocator keeps and the context."""
        permille = self._environment.allocator_permille
        kept = tensors // 1000 * permille - (-(tensors % 1000) * permille // 1000)
        whole: Ints = tensors + kept + self._environment.context_bytes
        return whole

    def most_windows(
        self, begin: Ints, end: Ints, recompute: npt.NDArray[np.bool_] | bool, usable: int, *, grouped: bool = True
    ) -> Ints:
        """The largest window of each stage with so many bytes of tensors; below 1 if none does, 2**62 if all do."""
        most = _most(usable - self.base(begin, end, recompute), self.each(begin, end, recompute))
        if grouped and self.group_sizes:
            taken, stored = (tables[:, begin, end] for tables in self.all_group_tables)
            most = np.maximum(most, _most(usable - taken, stored).max(0))
        found: Ints = np.where(self.limited_tables[2][begin, end] > usable, 0, np.maximum(0, most))
        return found

    @cached_property
    def tables(self) -> tuple[Ints, Ints, Ints]:
        """Of every run of sections, [K + 1, K + 1]: ``base`` with recompute and without, the fullest other moment."""
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
        """The same; the last is beyond all limits where host memory does not suffice."""
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
        found = {"reducing": reducing, "updating": updating}
        if self.rules.keeps_sums and not self.single:
            found["giving up"] = kept | {"sums, and whole ones": 2 * sums, "mean gradients": on_device}
        if self.rules.changes:
            state = self.device_state(begin, end)
            whole = self._whole("parameters") + (0 if self._optimizer_in_host else self._whole("optimizer"))
            changing = {part: size for part, size in kept.items() if part not in ("parameters", "optimizer state")}
            found["changing"] = changing | {"old and new units": np.minimum(whole, 2 * state)}
            if self.rules.keeps_sums:
                found["changing"]["sums"] = sums
            if not self.apart:
                found["changing"] |= self._leaving(begin, end)
        return found

    def _kept(self, begin: Ints, end: Ints) -> Parts:
        """At every moment: the stage's state, what it follows, and copies in host memory where that is the device's."""
        parts = {
            "parameters": self._held("parameters", begin, end),
            "optimizer state": self._device_optimizer(begin, end),
        }
        if self._constants[-1]:
            parts["frozen weights"] = self._constants[end] - self._constants[begin]
        if self.rules.mailboxes and self.apart:
            behind, before = np.asarray(begin) > 0, np.asarray(end) < self._num_sections
            num = 2 if self.rules.changes else behind.astype(np.int64) + before  # it keeps those of an earlier place
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
        """Of a stage: its own, where there are replicas, and one for each unit that other stages use too."""
        shape = np.broadcast_shapes(np.shape(begin), np.shape(end))
        found = np.full(shape, 0 if self.single else 1, np.int64)
        for sections in self._ties:
            used = np.stack([np.less_equal(begin, section) & np.less(section, end) for section in sections])
            found += used.any(0) & ~used.all(0)
        return found

    def _always_in_host(self, begin: Ints, end: Ints) -> Parts:
        """Copies of the newest checkpoints, and what is kept of others' sums."""
        parts: Parts = {}
        if self.rules.saves:
            parts["checkpoint copies"] = _VERSIONS_KEPT * self._state(begin, end) // (1 if self.single else 2)
        if self.rules.copies_sums:
            parts["others' sums"] = self._of_others(self._held("sums", begin, end), begin, end)
        return parts

    def _leaving(self, begin: Ints, end: Ints) -> Parts:
        """Units on their way to others, in host memory, when the shape changes."""
        return {"units that leave": self._state(begin, end)} if self.rules.changes else {}

    def _of_others(self, size: Ints, begin: Ints, end: Ints) -> Ints:
        """As much of another worker's stage as of the own one; nothing where there is no other worker."""
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
        """Sums of two units, which are received by the shares of a ring's members."""
        shares: Ints = _UNITS_AT_ONCE * self._running(self._sums, begin, end)
        return shares

    def _running(self, values: Ints, begin: Ints, end: Ints) -> Ints:
        """The largest of some sections' values."""
        key = id(values)
        if key not in self._largest:
            size = self._num_sections
            held = np.tri(size, dtype=np.bool_).T  # by first section and last one
            least = int(values.min())
            table = np.zeros((size, size + 1), np.int64)
            table[:, 1:] = np.maximum.accumulate(np.where(held, values, least), axis=1) * held
            self._largest[key] = table
        found: Ints = self._largest[key][begin, end]
        return found

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
    """First sections and ends of the stages that begin at these sections."""
    begin = np.asarray(boundaries, np.int64)
    return begin, np.append(begin[1:], num_sections)


def _most(room: Ints, each: Ints) -> Ints:
    """How often each fits; below 1 where it does not, 2**62 where nothing more is taken."""
    return np.where(each > 0, room // np.maximum(1, each), np.where(room < 0, 0, NEVER))


def _total(parts: Parts) -> Ints:
    total: Ints = np.add.reduce(np.broadcast_arrays(*parts.values()))
    return total


# What redundant computation holds of the next stage, the last stage of the first (Bamboo, sections 5.1 and 5.2).
#
# On the device: its parameters and optimizer state. Redundant forwards alone (``eflb``) leave their activations to host
# memory, with one micro-batch's being computed and another's on its way; with backwards (``efeb``) they stay for the
# micro-batches that the next stage has in flight, and there are sums of gradients. Where stages recompute, a redundant
# forward leaves nothing: of it only the stage's input would be stored, which its predecessor has made itself.


_BUFFERS = 2
Flags = npt.NDArray[np.bool_]


def next_activations(memory: StageMemory, begin: Ints, end: Ints, recompute: Flags) -> Ints:
    """Of one micro-batch, what the next stage keeps from its forward to its backward beside its input: int64[P]."""
    held = np.where(recompute, 0, memory.activations[end] - memory.activations[begin])
    return np.roll(held, -1)


def redundant_parts(memory: StageMemory, begin: Ints, end: Ints, window: Ints, recompute: Flags) -> Parts:
    """On each stage's device: int64[P] each; nothing with one stage only."""
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


def redundant_host_bytes(memory: StageMemory, begin: Ints, end: Ints, recompute: Flags, num_micro_batches: int) -> Ints:
    """In host memory, until the mini-batch is over: int64[P].

    Of each micro-batch what it gave to the next stage and to the one before, from which lost gradients are computed
    again, and with ``eflb`` the next stage's activations.
    """
    name = memory.rules.redundant_computation
    if name not in ("lflb", "eflb") or len(begin) == 1:
        return np.zeros(len(begin), np.int64)
    kept = np.roll(memory.crossing(begin), -1) + memory.crossing(begin)
    if name == "eflb":
        kept = kept + next_activations(memory, begin, end, recompute)
    found: Ints = num_micro_batches * kept
    return found
