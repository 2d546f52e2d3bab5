"""Decides which worker drives each stage, who sends it each unit's state, and who saves it. Pure and deterministic."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import lru_cache
from itertools import groupby, zip_longest
from types import MappingProxyType
from typing import Literal

from manager.controller.shape.overlap import largest_overlap
from morph.contract.messages import Slot, StateSource, UnitId, WorkerId
from morph.contract.plan import Plan
from morph.contract.vm_names import vm_of

Holdings = Mapping[WorkerId, Set[UnitId]]


def place(
    plan: Plan,
    workers: Sequence[WorkerId],
    held: Holdings,
    needed: Sequence[Sequence[UnitId]],
    sizes: Mapping[UnitId, int],
    zones: Mapping[WorkerId, str] = MappingProxyType({}),
    types: Mapping[WorkerId, str] = MappingProxyType({}),
) -> tuple[Slot, ...]:
    """Assign workers to slots so that the fewest bytes have to move; returns slots ordered by (stage, replica).

    The result is exact. Workers of one type that hold the same units are interchangeable, so whole kinds of workers are
    assigned to stages. There must be enough of each stage's type; among equal workers, the later ones are left over.
    Replicas of a stage go to different VMs, or zones, as far as possible; see ``spread``.
    """
    kinds: dict[tuple[frozenset[UnitId], str], list[int]] = {}
    for index, worker in enumerate(workers):
        kinds.setdefault((frozenset(held.get(worker, ())), types.get(worker, "")), []).append(index)
    never = -(1 + len(workers) * sum(sizes.values()))  # more than all other assignments together could gain
    overlap = [[0 if stage.node_type in ("", of) else never for _, of in kinds] for stage in plan.stages]
    rows_of: defaultdict[UnitId, list[list[int]]] = defaultdict(list)
    for row, units in zip(overlap, needed, strict=True):
        for unit in units:
            rows_of[unit].append(row)
    for column, (holds, _) in enumerate(kinds):
        for unit in holds:
            for row in rows_of.get(unit, ()):
                if row[column] != never:
                    row[column] += sizes[unit]
    dealt = largest_overlap(
        overlap,
        [len(plan.replicas_of(stage)) for stage in range(len(needed))],
        [len(queue) for queue in kinds.values()],
    )
    fits = all(gain >= 0 or not num for row in zip(overlap, dealt, strict=True) for gain, num in zip(*row, strict=True))
    assert fits, f"no workers of the types that {plan.shape} needs: {plan.pool}"
    firsts = frozenset(stage for stage in range(len(needed)) if plan.is_first(stage))
    sections = [stage.sections for stage in plan.stages]
    return tuple(
        _slot(workers[index], stage, replica)
        for stage, indices in enumerate(spread(workers, list(kinds.values()), dealt, zones, firsts, sections))
        for replica, index in zip(plan.replicas_of(stage), indices, strict=True)
    )


def choose_sources(
    slots: Sequence[Slot],
    needed: Sequence[Sequence[UnitId]],
    held: Holdings,
    sizes: Mapping[UnitId, int],
    restore: str | None,
    unable: Set[WorkerId] = frozenset(),
) -> tuple[StateSource, ...]:
    """Return, for each worker and unit of its stage, where the state comes from: itself, if it holds it.

    Other units come from living holders, with the bytes to send spread evenly and no chains, or from ``restore``. For
    workers in ``unable``, which cannot read that, others read and send them.
    """
    stages = [frozenset(units) for units in needed]
    lacked: dict[WorkerId, list[UnitId]] = {}
    for slot in slots:
        missing_here = stages[slot.stage].difference(held.get(slot.worker, ()))
        lacked[slot.worker] = [unit for unit in needed[slot.stage] if unit in missing_here] if missing_here else []
    holders_of = {
        unit: [worker for worker, units in held.items() if unit in units]
        for unit in dict.fromkeys(unit for units in lacked.values() for unit in units)
    }
    wanted = [(worker, unit) for worker, units in lacked.items() for unit in units if holders_of[unit]]
    senders = _share_sending(wanted, holders_of, sizes)
    readers: dict[tuple[WorkerId, UnitId], WorkerId] = {}
    if unable and restore == "checkpoint":
        able = [worker for worker in held if worker not in unable]
        unread = [(worker, unit) for worker, units in lacked.items() for unit in units if not holders_of[unit]]
        load = {reader: sum(sizes[unit] for worker, unit in unread if worker == reader) for reader in able}
        relayed = [entry for entry in unread if entry[0] in unable]
        readers = _share_sending(relayed, dict.fromkeys(holders_of, able), sizes, load)
    sources: list[StateSource] = []
    for slot in slots:
        worker, units, missing = slot.worker, needed[slot.stage], lacked[slot.worker]
        if not missing:
            sources += _all_kept(worker, tuple(units))
            continue
        for unit in units:
            if unit not in missing:
                sources.append(_source(worker, unit, "keep"))
            elif holders_of[unit]:
                sources.append(_source(worker, unit, "peer", senders[worker, unit]))
            else:
                assert restore in ("checkpoint", "initial"), f"unit {unit} has no source"
                kind: Literal["checkpoint", "initial"] = "checkpoint" if restore == "checkpoint" else "initial"
                sources.append(_source(worker, unit, kind, readers.get((worker, unit))))
    return tuple(sources)


@lru_cache(maxsize=2**12)
def _all_kept(worker: WorkerId, units: tuple[UnitId, ...]) -> tuple[StateSource, ...]:
    return tuple(_source(worker, unit, "keep") for unit in units)


@lru_cache(maxsize=2**15)
def _source(
    worker: WorkerId, unit: UnitId, kind: Literal["keep", "peer", "checkpoint", "initial"], peer: WorkerId | None = None
) -> StateSource:
    """Return a cached source: most of them stay the same from one shape to the next."""
    return StateSource.model_construct(worker=worker, unit=unit, kind=kind, peer=peer)


@lru_cache(maxsize=2**13)
def _slot(worker: WorkerId, stage: int, replica: int) -> Slot:
    return Slot.model_construct(worker=worker, stage=stage, replica=replica)


def _share_sending(
    lacked: Sequence[tuple[WorkerId, UnitId]],
    holders_of: Mapping[UnitId, Sequence[WorkerId]],
    sizes: Mapping[UnitId, int],
    load: Mapping[WorkerId, int] = MappingProxyType({}),
) -> dict[tuple[WorkerId, UnitId], WorkerId]:
    """Choose the least loaded holder (``load``: bytes) to send each missing unit: rarest unit first, then largest."""
    loads = defaultdict(int, load)
    senders: dict[tuple[WorkerId, UnitId], WorkerId] = {}
    for worker, unit in sorted(lacked, key=lambda entry: (len(holders_of[entry[1]]), -sizes[entry[1]])):
        sender = min(holders_of[unit], key=loads.__getitem__)
        loads[sender] += sizes[unit]
        senders[worker, unit] = sender
    return senders


def share_units(
    slots: Sequence[Slot], needed: Sequence[Sequence[UnitId]], sizes: Mapping[UnitId, int]
) -> dict[UnitId, WorkerId]:
    """Choose one writer per unit among its holders: largest units first, each to the least loaded holder."""
    load = {slot.worker: 0 for slot in slots}
    holders_of: dict[UnitId, list[WorkerId]] = {unit: [] for unit in sizes}
    for stage, group in groupby(slots, key=lambda slot: slot.stage):
        workers = [slot.worker for slot in group]
        for unit in needed[stage]:
            holders_of[unit] += workers
    writers: dict[UnitId, WorkerId] = {}
    for unit in sorted(sizes, key=lambda unit: (-sizes[unit], unit)):
        writers[unit] = min(holders_of[unit], key=load.__getitem__)
        load[writers[unit]] += sizes[unit]
    return writers


def spread(
    workers: Sequence[WorkerId],
    kinds: Sequence[Sequence[int]],
    dealt: Sequence[Sequence[int]],
    zones: Mapping[WorkerId, str] = MappingProxyType({}),
    firsts: Set[int] = frozenset({0}),
    sections: Sequence[range] = (),
) -> list[list[int]]:
    """Choose the workers of each stage; returns, for each stage, their positions by replica.

    A lost VM takes all of its workers with it, so the replicas of a stage go to different VMs (or zones, if each worker
    has its own VM) where that moves no additional bytes; then pipelines are kept within VMs. ``kinds``: positions of
    workers that hold the same units; ``dealt[s][k]``: how many of kind k drive stage s; ``firsts``: the first stages of
    pipelines; ``sections``: those of each stage, if unequal pipelines may share some.
    """
    homes = [vm_of(worker) for worker in workers]
    if homes == list(workers):
        homes = [zones.get(worker, "") for worker in workers]
    if len(set(homes)) in (1, len(homes)):
        queues = [iter(kind) for kind in kinds]
        return [
            sorted(next(queue) for queue, count in zip(queues, counts, strict=True) for _ in range(count))
            for counts in dealt
        ]
    dealing = _Dealing(homes, sections or [range(stage, stage + 1) for stage in range(len(dealt))])
    wanted = [[counts[kind] for counts in dealt] for kind in range(len(kinds))]
    settled_first = sorted(range(len(kinds)), key=lambda kind: sum(count > 0 for count in wanted[kind]))
    for kind in settled_first:
        dealing.deal(kinds[kind], wanted[kind])
    for stage in range(len(dealt)):
        if dealing.at_risk(stage):
            dealing.mend(stage, set())
    return dealing.by_replica(firsts)


class _Dealing:
    """An assignment in progress. ``at[s]``: positions of workers; ``where``: each worker's stage, None if left over.

    ``rivals[s]``: the stages, s included, that share a section with s; ``holders[s]``: for each section of s, the
    stages that have it.
    """

    def __init__(self, vms: Sequence[str], sections: Sequence[range]) -> None:
        self.vms = vms
        self.rank = {vm: rank for rank, vm in enumerate(dict.fromkeys(self.vms))}
        self.at: list[set[int]] = [set() for _ in sections]
        self.on: list[Counter[str]] = [Counter() for _ in sections]
        having: defaultdict[int, list[int]] = defaultdict(list)
        for stage, mine in enumerate(sections):
            for section in mine:
                having[section].append(stage)
        self.holders = [{frozenset(having[section]) for section in mine} for mine in sections]
        self.rivals = [frozenset[int]().union(*holders) for holders in self.holders]
        self.where: dict[int, int | None] = {}
        self.alike: dict[int, Sequence[int]] = {}

    def deal(self, kind: Sequence[int], wanted: Sequence[int]) -> None:
        """Assign workers of one kind, pipeline by pipeline and VM by VM, to stages that their VM does not have."""
        turn, left = max(1, sum(count > 0 for count in wanted)), dict[str, int]()
        keyed = []
        for worker in kind:
            vm = self.vms[worker]
            left[vm] = (seen := left.get(vm, 0)) + 1
            keyed.append((seen // turn, self.rank[vm], worker))
        free = [worker for _, _, worker in sorted(keyed)]
        for stage in _pipelines(wanted):
            on = self._on(self.rivals[stage])
            least = min([on.get(vm, 0) for vm in left])
            worker = next(worker for worker in free if on.get(self.vms[worker], 0) == least)
            free.remove(worker)
            self._put(worker, stage)
            vm = self.vms[worker]
            left[vm] -= 1
            if not left[vm]:
                del left[vm]
        self.where |= dict.fromkeys(free)
        self.alike |= dict.fromkeys(kind, kind)

    def at_risk(self, stage: int) -> bool:
        """Whether a section of this stage has several workers, but all on one VM."""
        return any(len(on) == 1 and max(on.values()) > 1 for on in map(self._on, self.holders[stage]))

    def _on(self, stages: Set[int]) -> Mapping[str, int]:
        if len(stages) == 1:
            return self.on[next(iter(stages))]
        total: dict[str, int] = {}
        for stage in stages:
            for vm, num in self.on[stage].items():
                total[vm] = total.get(vm, 0) + num
        return total

    def mend(self, stage: int, tried: set[int]) -> bool:
        """Swap a worker of a stage at risk with one of its kind on another VM; return whether that ended the risk."""
        tried.add(stage)
        changes = [
            (mine, other)
            for mine in sorted(self.at[stage])
            for other in self.alike[mine]
            if self.where[other] not in tried and self.vms[other] != self.vms[mine]
        ]
        for mine, other in changes:
            where = self.where[other]
            touched = self.rivals[stage] if where is None else self.rivals[stage] | self.rivals[where]
            safe = [position for position in touched if position != where and not self.at_risk(position)]
            self._change(mine, other)
            mended = not self.at_risk(stage) and not any(map(self.at_risk, safe))
            if mended and (
                where is None or not self.at_risk(where) or (where not in tried and self.mend(where, tried))
            ):
                return True
            self._change(other, mine)
        return False

    def by_replica(self, firsts: Set[int]) -> list[list[int]]:
        """Number replicas in order of appearance, with neighbouring stages of a replica on one VM where possible."""
        stages: list[list[int]] = []
        before: list[int] = []
        for stage, workers in enumerate(self.at):
            before = [] if stage in firsts else before
            left = sorted(workers)
            beside: list[int | None] = []
            for previous in before:
                same = next((worker for worker in left if self.vms[worker] == self.vms[previous]), None)
                if same is not None:
                    left.remove(same)
                beside.append(same)
            rest = iter(left)
            before = [next(rest) if worker is None else worker for worker in beside] + list(rest)
            stages.append(before)
        return stages

    def _put(self, worker: int, stage: int) -> None:
        self.at[stage].add(worker)
        self.on[stage][self.vms[worker]] += 1
        self.where[worker] = stage

    def _take(self, worker: int, stage: int) -> None:
        self.at[stage].remove(worker)
        self.on[stage] -= Counter([self.vms[worker]])

    def _change(self, position: int, other: int) -> None:
        stages = self.where[position], self.where[other]
        for worker, stage in zip((position, other), stages, strict=True):
            if stage is not None:
                self._take(worker, stage)
        for worker, stage in zip((other, position), stages, strict=True):
            self.where[worker] = None
            if stage is not None:
                self._put(worker, stage)


def _pipelines(wanted: Sequence[int]) -> Iterator[int]:
    """Yield the stages that lack a worker, pipeline by pipeline."""
    for pipeline in zip_longest(*([stage] * count for stage, count in enumerate(wanted))):
        yield from (stage for stage in pipeline if stage is not None)
