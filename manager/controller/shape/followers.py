"""Chooses which worker follows which, and whether following pays (decision 0019). Pure and deterministic."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from heapq import heappop, heappush, heapreplace
from typing import NamedTuple

from manager.controller.shape.placement import Holdings
from manager.controller.shape.risk import holders_of, losses_per_vm_s, mean_s_to_fatal_loss, vms_of
from manager.controller.shape.salvage import keeps_sums
from manager.controller.shape.selection import cost_of_morph_s
from manager.controller.state.bounds import LINK_BYTES_PER_S, SAVE_COPY_BYTES_PER_S, STORAGE_BYTES_PER_S, SUM_BYTES
from manager.controller.state.state import ControllerState
from manager.controller.state.transition import Transition
from morph.contract.messages import Slot, UnitId, WorkerId
from morph.contract.plan import Plan
from morph.contract.salvage import Follow
from morph.contract.vm_names import vm_of
from morph.contract.waits import cheapest_interval_s
from morph.words import counted

COPY_BYTES_PER_S = 2.0e9
"""Bytes per second at which a worker copies its partial sums in memory; it does not train meanwhile."""

FREE_S, FREE_SHARE = 0.001, 0.01
"""Followers of a small state are always kept if they add less than this to a step, in seconds and as a share of it.

Steps vary by more than that. The rate of VM losses is a guess until several have been seen, and a loss that goes back
to a checkpoint repeats steps that a follower would have saved.
"""
MEASURED_FROM_BYTES = 1 << 24
"""Bytes. The time to move a smaller state measures threads and messages rather than the link."""
PAYS_WITHIN_S = 3600.0
"""Seconds. A shape is re-formed only to change its followers if that saves more than it costs within this time."""
_Kind = tuple[frozenset[UnitId], str | None]
"""Units and zone: workers of one kind differ only in the workers that they follow already."""
_Rank = tuple[int, int, int, WorkerId]
"""Followed by the asking worker (0), by none (1), by another (2); bytes it keeps for others; its place; its name."""


class Redundancy(NamedTuple):
    """How a shape protects against losses: the reason in a few words, and the share of the time that this saves."""

    follows: tuple[Follow, ...]
    copy_sums_every: int
    why: str
    worth: float = 0.0
    in_host: bool = False

    @property
    def told(self) -> str:
        """The text for the journal; empty if there is no protection and nothing to explain."""
        num = len({unit for follow in self.follows for unit in follow.units})
        where = ", in its host memory" if self.in_host else ""
        said = [f"{counted(num, 'unit is', 'units are')} kept in step on a second VM{where}"] if num else []
        said += [self.why] if self.why else []
        if self.copy_sums_every:
            every = counted(self.copy_sums_every, "micro-batch", "micro-batches")
            said.append(f"partial sums are copied after every {every}")
        return "; ".join(said)


def followers_due(transition: Transition) -> str | None:
    """Return why the present shape should gain or lose its followers now, after a save; None if it should not."""
    state = transition.state
    if not state.saving.save_times.weighs or state.reshape is None:
        return None
    transition.change_save_times(weighs=False)
    if not _sole_units(state.slots, state.config.units_of(state.reshape.plan)):
        return None
    held = {worker: state.workers[worker].holds for worker in state.ready_workers}
    present, best = (
        state.reshape.follows,
        redundancy_of(state, state.reshape.plan, state.slots, held, transition.now_s),
    )
    if _follows_state(present) == _follows_state(best.follows):
        return None
    return best.why if abs(best.worth) * PAYS_WITHIN_S > cost_of_morph_s(state) else None


def _follows_state(follows: Sequence[Follow]) -> bool:
    return any(follow.units for follow in follows)


def redundancy_of(
    state: ControllerState, plan: Plan, slots: Sequence[Slot], held: Holdings, now_s: float
) -> Redundancy:
    """Choose followers by the policy; "auto": units get a follower where that costs less than losses would.

    A follower costs the time in which gradients still travel after the last backward, and the copies of partial sums,
    whose best interval is sqrt(2 cost / rate) (Young's formula); it saves the steps since the last checkpoint.
    """
    policy = state.config.policy.redundancy
    if policy == "off":
        return Redundancy((), 0, "")
    needed = state.config.units_of(plan)
    parameters = {unit: size / state.config.state_copies for unit, size in state.config.unit_bytes.items()}
    sole = _sole_units(slots, needed)
    is_telling = state.config.stage_bytes(plan) >= MEASURED_FROM_BYTES
    measured = state.measured.state_bytes_per_s if is_telling else None
    speed = measured or state.config.link_bytes_per_s or LINK_BYTES_PER_S
    step_s = plan.expected.mini_batch_s
    every = 0
    if keeps_sums(state.config, plan):
        every = _copy_every(plan, slots, needed, parameters, speed, losses_per_vm_s(state, now_s))
    if not sole and not every:
        return Redundancy((), 0, "")
    links = choose_followers(slots, needed, held, state.config.unit_bytes, sole, zones_of(state))
    why, worth = "", 0.0
    keeps = bool(sole)
    in_host = not _fits_device(state, plan) and _fits_host(state, plan, links)
    if policy == "auto" and sole and step_s:
        kept = {follow.units for follow in links}
        exposed_s = max((sum(parameters[unit] for unit in units) for units in kept), default=0.0) / speed
        cost = exposed_s / step_s
        gain = _gain(state, plan, slots, links, now_s)
        fits = in_host or _fits_device(state, plan)
        worth = gain - cost
        is_free = exposed_s <= FREE_S and cost <= FREE_SHARE
        if is_free:
            worth = max(worth, 0.0)  # no shape is formed again only for these
        keeps = (worth > 0 or is_free) and fits
        saved = f" and save {gain:.2%}" if gain < 1 else "; without them losses undo all progress"
        why = f"followers cost {cost:.2%} of the time{saved}"
        if not fits:
            why += "; but they do not fit on the devices, nor in host memory with one unit at a time on a device"
    if not keeps:
        links = tuple(
            follow.model_copy(update={"units": (), "known": ()}) if follow.units else follow for follow in links
        )
    if not every:
        links = tuple(follow for follow in links if follow.units)
    return Redundancy(links, every if links else 0, why, worth, in_host and _follows_state(links))


def _fits_device(state: ControllerState, plan: Plan) -> bool:
    room = state.config.device_memory_bytes
    return room is None or plan.expected.followed_memory_bytes <= room


def _fits_host(state: ControllerState, plan: Plan, links: Sequence[Follow]) -> bool:
    """Whether followed state and gradients fit into host memory, and one unit at a time on a device for its update."""
    config, expected = state.config, plan.expected
    if config.host_memory_bytes is None or config.device_memory_bytes is None:
        return False
    kept = [
        sum(config.unit_bytes[unit] for link in links if link.follower == worker for unit in link.units)
        for worker in {link.follower for link in links}
    ]
    with_gradients = (config.state_copies + 1) / config.state_copies
    largest_bytes = max(config.unit_bytes.values(), default=0) * with_gradients
    most = max(kept, default=0) * with_gradients
    return (
        expected.host_memory_bytes + most <= config.host_memory_bytes
        and expected.peak_memory_bytes + largest_bytes <= config.device_memory_bytes
    )


def choose_followers(
    slots: Sequence[Slot],
    needed: Sequence[Sequence[UnitId]],
    held: Holdings,
    sizes: Mapping[UnitId, int],
    sole: Set[UnitId],
    zones: Mapping[WorkerId, str],
) -> tuple[Follow, ...]:
    """Give each worker a follower on another VM; no worker gets one if all are on one VM.

    Preferred are workers that hold most of the units already, then those in another zone, those that it follows itself
    (pairs), and those that keep the fewest bytes for others. ``needed``: units by stage; ``held``: by worker; ``sole``:
    units that only one VM holds in this shape.
    """
    stages = [frozenset(units) for units in needed]
    own = {slot.worker: stages[slot.stage] for slot in slots}
    candidates = _Candidates(own, held, sizes, zones)
    follows: list[Follow] = []
    promised: set[UnitId] = set()  # two workers of one VM may drive the same unit: one of them sends it
    for slot in slots:
        follower = candidates.take(slot.worker)
        if follower is None:
            continue
        units: tuple[UnitId, ...] = ()
        known: tuple[UnitId, ...] = ()
        if not sole.isdisjoint(own[slot.worker]):
            wanted = own[slot.worker] & sole - promised - own[follower]
            units = tuple(unit for unit in needed[slot.stage] if unit in wanted)
            known = tuple(unit for unit in units if unit in held.get(follower, ()))
            promised.update(units)
        follows.append(Follow.model_construct(worker=slot.worker, follower=follower, units=units, known=known))
    return tuple(follows)


class _Candidates:
    """Candidates for followers, in a heap per kind; ranks only grow, and are updated at the top of their heap."""

    def __init__(
        self,
        own: Mapping[WorkerId, frozenset[UnitId]],
        held: Holdings,
        sizes: Mapping[UnitId, int],
        zones: Mapping[WorkerId, str],
    ) -> None:
        self._own, self._sizes, self._zones = own, sizes, zones
        self._bytes = {units: sum(sizes[unit] for unit in units) for units in set(own.values())}
        self._vms = {worker: vm_of(worker) for worker in own}
        self._places = {worker: place for place, worker in enumerate(own)}
        self._load = dict.fromkeys(own, 0)
        self._follower: dict[WorkerId, WorkerId] = {}
        self._followed_by: dict[WorkerId, list[WorkerId]] = {}
        self._kinds: dict[WorkerId, _Kind] = {}
        self._heaps: dict[_Kind, list[_Rank]] = {}
        self._sharing: dict[_Kind, tuple[list[list[_Kind]], dict[_Kind, int]]] = {}
        self._ranks: dict[WorkerId, _Rank] = {}
        for worker, units in own.items():  # in the order of their places, so that each list is a valid heap
            has = held.get(worker, units)
            kind = self._kinds[worker] = units if has == units else units.union(has), zones.get(worker)
            self._heaps.setdefault(kind, []).append(self._ranked(worker))
        self._having: defaultdict[UnitId, list[_Kind]] = defaultdict(list)
        for kind in self._heaps:
            for unit in kind[0]:
                self._having[unit].append(kind)

    def take(self, me: WorkerId) -> WorkerId | None:
        """Assign a follower to this worker, and return it; None if all workers are on its VM."""
        vm = self._vms[me]
        for kinds in self._by_use(me):
            ranks = [rank for kind in kinds if (rank := self._least(kind, vm)) is not None]
            for each in self._followed_by.get(me, ()):
                if self._vms[each] != vm and self._kinds[each] in kinds:
                    ranks.append((0, *self._ranks[each][1:]))
            if ranks:
                follower = self._follower[me] = min(ranks)[-1]
                self._followed_by.setdefault(follower, []).append(me)
                self._load[follower] += self._bytes[self._own[me]]
                self._ranked(me)
                self._ranked(follower)
                return follower
        return None

    def _ranked(self, worker: WorkerId) -> _Rank:
        rank = 2 if worker in self._follower else 1, self._load[worker], self._places[worker], worker
        self._ranks[worker] = rank
        return rank

    def _by_use(self, me: WorkerId) -> Iterator[list[_Kind]]:
        """Yield the kinds that are equally useful to this worker, the most useful ones first."""
        mine, zone = key = self._own[me], self._zones.get(me)
        if key not in self._sharing:
            shared: dict[_Kind, int] = {}
            for unit in mine:
                for kind in self._having[unit] if self._sizes[unit] else ():
                    shared[kind] = shared.get(kind, 0) + self._sizes[unit]
            equal: dict[tuple[int, bool], list[_Kind]] = {}
            for kind, size in shared.items():
                equal.setdefault((-size, kind[1] == zone), []).append(kind)
            self._sharing[key] = [equal[use] for use in sorted(equal)], shared
        groups, shared = self._sharing[key]
        yield from groups
        for is_here in (False, True):
            yield [kind for kind in self._heaps if (kind[1] == zone) == is_here and kind not in shared]

    def _least(self, kind: _Kind, vm: str) -> _Rank | None:
        """Return the first-ranked worker of this kind that is not on this VM."""
        heap, aside = self._heaps[kind], []
        while heap:
            present = self._ranks[heap[0][-1]]
            if heap[0] is not present:
                heapreplace(heap, present)
            elif self._vms[heap[0][-1]] == vm:
                aside.append(heappop(heap))
            else:
                break
        first = heap[0] if heap else None
        for rank in aside:
            heappush(heap, rank)
        return first


def _sole_units(slots: Sequence[Slot], needed: Sequence[Sequence[UnitId]]) -> frozenset[UnitId]:
    return frozenset(unit for unit, vms in vms_of(slots, needed).items() if len(vms) == 1)


def zones_of(state: ControllerState) -> dict[WorkerId, str]:
    """Return the zone of each worker, because VMs of one zone are often lost together."""
    return {worker: f"{entry.facts.region}/{entry.facts.zone}" for worker, entry in state.workers.items()}


def _gain(state: ControllerState, plan: Plan, slots: Sequence[Slot], links: Sequence[Follow], now_s: float) -> float:
    """Return the share of the time that followers save, from the cost of fatal losses without and with them."""
    needed = state.config.units_of(plan)
    interval_s = 2 * plan.expected.mini_batch_s
    without_s = mean_s_to_fatal_loss(state, now_s, holders_of(slots, needed, ()))
    with_s = mean_s_to_fatal_loss(state, now_s, holders_of(slots, needed, links))
    saves, most = state.saving.save_times, state.config.written_bytes(plan)
    stall_s = most / SAVE_COPY_BYTES_PER_S if saves.stall_s is None else saves.stall_s
    durable_s = most / STORAGE_BYTES_PER_S if saves.durable_s is None else saves.durable_s
    every_s = max(cheapest_interval_s(stall_s, without_s), durable_s, interval_s)
    if state.config.policy.checkpoint_every_steps is not None:
        every_s = state.config.policy.checkpoint_every_steps * plan.expected.mini_batch_s
    return (1 / without_s - 1 / with_s) * (every_s / 2 + durable_s)


def _copy_every(
    plan: Plan,
    slots: Sequence[Slot],
    needed: Sequence[Sequence[UnitId]],
    parameters: Mapping[UnitId, float],
    speed: float,
    rate: float,
) -> int:
    """Return after how many micro-batches partial sums are copied; 0 if steps are too short for copies to pay."""
    most = SUM_BYTES * max(sum(parameters[unit] for unit in units) for units in needed)
    share = max(plan.micro_batches_per_replica)
    period_s = plan.expected.mini_batch_s / share
    lost_per_s = rate * len({vm_of(slot.worker) for slot in slots})
    if not period_s or not lost_per_s:
        return 0
    every_s = max(cheapest_interval_s(most / COPY_BYTES_PER_S, 1 / lost_per_s), most / speed)
    every = math.ceil(every_s / period_s)
    return every if 2 * every <= share else 0
