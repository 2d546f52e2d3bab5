"""Spreads workers that hold the same units over stages, by VM and zone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import zip_longest
from types import MappingProxyType

from morph.contract.messages import WorkerId
from morph.contract.vm_names import vm_of


def spread(
    workers: Sequence[WorkerId],
    kinds: Sequence[Sequence[int]],
    dealt: Sequence[Sequence[int]],
    zones: Mapping[WorkerId, str] = MappingProxyType({}),
    firsts: Set[int] = frozenset({0}),
    sections: Sequence[range] = (),
) -> list[list[int]]:
    """Choose the workers of each stage; returns, for each stage, their positions by replica.

    A lost VM takes all of its workers with it. So the replicas of a stage go to different VMs, where that moves no
    additional bytes; after that, pipelines are kept within VMs. If each worker has its own VM, zones take the place of
    VMs here, because VMs of one zone are often revoked together. ``workers`` are in order of appearance. ``kinds``: for
    each kind, the positions of the workers that hold the same units, in order. ``dealt[s][k]``: how many workers of
    kind k drive stage s. ``firsts``: the first stages of pipelines. ``sections``: those of each stage, because stages
    of unequal pipelines may share some; if absent, no two stages share a section.
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
    """The assignment so far. ``at[s]``: positions of workers; ``where``: the stage of each worker, None if left over.

    ``rivals[s]``: the stages, s included, that share a section with s; ``holders[s]``: for each section of s, the
    stages that have it.
    """

    def __init__(self, vms: Sequence[str], sections: Sequence[range]) -> None:
        self.vms = vms
        self.rank = {vm: rank for rank, vm in enumerate(dict.fromkeys(self.vms))}
        self.at: list[set[int]] = [set() for _ in sections]
        self.on: list[Counter[str]] = [Counter() for _ in sections]
        of_section = {
            section: frozenset(stage for stage, others in enumerate(sections) if section in others)
            for mine in sections
            for section in mine
        }
        self.holders = [{of_section[section] for section in mine} for mine in sections]
        self.rivals = [frozenset[int]().union(*holders) for holders in self.holders]
        self.where: dict[int, int | None] = {}
        self.alike: dict[int, Sequence[int]] = {}

    def deal(self, kind: Sequence[int], wanted: Sequence[int]) -> None:
        """Assign workers of one kind, pipeline by pipeline and VM by VM, each to a stage that its VM does not have yet.

        Workers of one VM are neighbours in that order, so that a pipeline continues within its VM. A VM with more
        workers than there are stages has its next turn only after all others. So no stage gets two workers of one VM if
        all workers are of one kind and there are enough VMs.
        """
        turn, seen = max(1, sum(count > 0 for count in wanted)), Counter[str]()
        keyed = []
        for worker in kind:
            vm = self.vms[worker]
            keyed.append((seen[vm] // turn, self.rank[vm], worker))
            seen[vm] += 1
        free = [worker for _, _, worker in sorted(keyed)]
        left = dict(Counter(self.vms[worker] for worker in free))
        for stage in _pipelines(wanted):
            on = self._on(self.rivals[stage])
            least = min(on[vm] for vm in left)
            worker = next(worker for worker in free if on[self.vms[worker]] == least)
            free.remove(worker)
            self._put(worker, stage)
            vm = self.vms[worker]
            left[vm] -= 1
            if not left[vm]:
                del left[vm]
        self.where |= dict.fromkeys(free)
        self.alike |= dict.fromkeys(kind, kind)

    def at_risk(self, stage: int) -> bool:
        """Whether one VM has all workers, of several, for some section of this stage."""
        held = [self._on(holders) for holders in self.holders[stage]]
        return any(len(on) == 1 and on.total() > 1 for on in held)

    def _on(self, stages: Set[int]) -> Counter[str]:
        if len(stages) == 1:
            return self.on[next(iter(stages))]
        total: Counter[str] = Counter()
        for stage in stages:
            total += self.on[stage]
        return total

    def mend(self, stage: int, tried: set[int]) -> bool:
        """Swap a worker of a stage at risk with one of its kind on another VM; return whether that ended the risk.

        The other worker's stage may be mended in the same way, each stage once (``tried``). If that fails, all swaps
        are undone.
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
            touched = self.rivals[stage] if where is None else self.rivals[stage] | self.rivals[where]
            safe = [one for one in touched if one != where and not self.at_risk(one)]
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

    def _change(self, one: int, other: int) -> None:
        stages = self.where[one], self.where[other]
        for worker, stage in zip((one, other), stages, strict=True):
            if stage is not None:
                self._take(worker, stage)
        for worker, stage in zip((other, one), stages, strict=True):
            self.where[worker] = None
            if stage is not None:
                self._put(worker, stage)


def _pipelines(wanted: Sequence[int]) -> Iterator[int]:
    """Yield the stages that lack a worker, pipeline by pipeline."""
    for pipeline in zip_longest(*([stage] * count for stage, count in enumerate(wanted))):
        yield from (stage for stage in pipeline if stage is not None)
