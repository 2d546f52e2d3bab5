"""Which of the workers that hold the same drives which stage, over VMs and zones: pure and deterministic.

A VM goes with all of its workers. So the replicas of a stage are dealt to different VMs, as far as that moves no byte
more, and then pipelines are kept inside of VMs. Where each worker has a VM of its own, the same goes for zones, whose
VMs are often revoked together: what is said of VMs here is then of zones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from types import MappingProxyType

from morph.contract.messages import WorkerId
from morph.contract.vm_names import vm_of


def spread(
    workers: Sequence[WorkerId],
    kinds: Sequence[Sequence[int]],
    dealt: Sequence[Sequence[int]],
    zones: Mapping[WorkerId, str] = MappingProxyType({}),
) -> list[list[int]]:
    """Choose who drives each stage.

    Args:
        workers: In order of appearance.
        kinds: The workers (positions) that hold the same, in order, for each kind.
        dealt: ``dealt[s][k]``: how many of kind k drive stage s.
        zones: Of the workers, where they are known.

    Returns:
        For each stage the workers (positions), by replica.
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
    dealing = _Dealing(homes, len(dealt))
    wanted = [[counts[kind] for counts in dealt] for kind in range(len(kinds))]
    settled_first = sorted(range(len(kinds)), key=lambda kind: sum(count > 0 for count in wanted[kind]))
    for kind in settled_first:
        dealing.deal(kinds[kind], wanted[kind])
    for stage in range(len(dealt)):
        if dealing.at_risk(stage):
            dealing.mend(stage, set())
    return dealing.by_replica()


class _Dealing:
    """Who drives what so far. ``at[s]``: positions of workers; ``where``: their stages, None for those left over."""

    def __init__(self, vms: Sequence[str], num_stages: int) -> None:
        self.vms = vms
        self.rank = {vm: rank for rank, vm in enumerate(dict.fromkeys(self.vms))}
        self.at: list[set[int]] = [set() for _ in range(num_stages)]
        self.on: list[Counter[str]] = [Counter() for _ in range(num_stages)]
        self.where: dict[int, int | None] = {}
        self.alike: dict[int, Sequence[int]] = {}

    def deal(self, kind: Sequence[int], wanted: Sequence[int]) -> None:
        """Deal workers of one kind: pipeline after pipeline, VM after VM, to a VM that the stage is not on yet.

        A VM's workers are neighbours in that order, so that its pipeline goes on within it; and a VM with more of them
        than there are stages comes again only once all others had their turn. So no stage gets two of a VM, where
        all workers are of one kind and there are VMs enough.
        """
        turn, seen = max(1, sum(count > 0 for count in wanted)), Counter[str]()
        keyed = []
        for worker in kind:
            vm = self.vms[worker]
            keyed.append((seen[vm] // turn, self.rank[vm], worker))
            seen[vm] += 1
        free = [worker for _, _, worker in sorted(keyed)]
        left = Counter(self.vms[worker] for worker in free)
        for stage in _pipelines(wanted):
            on = self.on[stage]
            least = min(on[vm] for vm in left)
            worker = next(worker for worker in free if on[self.vms[worker]] == least)
            free.remove(worker)
            self._put(worker, stage)
            left[self.vms[worker]] -= 1
            left = +left
        self.where |= dict.fromkeys(free)
        self.alike |= dict.fromkeys(kind, kind)

    def at_risk(self, stage: int) -> bool:
        """Whether one VM takes all of several replicas."""
        return len(self.on[stage]) == 1 and len(self.at[stage]) > 1

    def mend(self, stage: int, tried: set[int]) -> bool:
        """Change a worker of a stage at risk for one of its kind on another VM; returns whether no stage is at risk.

        That one's stage may be mended in the same way, each stage once (``tried``); else all stays as it was.
        """
        tried.add(stage)
        changes = [
            (mine, other)
            for mine in sorted(self.at[stage])
            for other in self.alike[mine]
            if self.where[other] not in tried and self.vms[other] != self.vms[mine]
        ]
        for mine, other in changes:
            where = self.where[other]
            self._change(mine, other)
            if where is None or not self.at_risk(where) or (where not in tried and self.mend(where, tried)):
                return True
            self._change(other, mine)
        return False

    def by_replica(self) -> list[list[int]]:
        """Number the replicas: in order of appearance, but a worker beside one of its VM in the stage before."""
        stages: list[list[int]] = []
        before: list[int] = []
        for workers in self.at:
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

    def _change(self, one: int, other: int) -> None:
        """Each drives what the other did."""
        stages = self.where[one], self.where[other]
        for worker, stage in zip((one, other), stages, strict=True):
            if stage is not None:
                self._take(worker, stage)
        for worker, stage in zip((other, one), stages, strict=True):
            self.where[worker] = None
            if stage is not None:
                self._put(worker, stage)


def _pipelines(wanted: Sequence[int]) -> Iterator[int]:
    """The stages that lack a worker, pipeline by pipeline."""
    for pipeline in zip_longest(*([stage] * count for stage, count in enumerate(wanted))):
        yield from (stage for stage in pipeline if stage is not None)
