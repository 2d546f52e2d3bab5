"""The plan: the pipelines that train one job together, and the simulator's expectations."""

from __future__ import annotations

import itertools
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from morph.contract import ranges
from morph.contract.base import Value, read_json
from morph.contract.errors import PlanError
from morph.contract.kinds import PLAN
from morph.contract.pool import Pool

Schedule = Literal["varuna", "gpipe", "1f1b"]
Count = Annotated[int, ranges.COUNT.field]
CountKey = Annotated[int, Field(ge=1)]
"""A number as a key; it is converted, because JSON has only text for keys."""
Number = Annotated[int, Field(strict=True, ge=0)]
Seconds = Annotated[float, Field(strict=True, ge=0)]


class StagePlan(Value):
    """Consecutive sections ``first_section .. end_section - 1`` on one worker.

    ``window`` is how many micro-batches may be in flight (forward started, backward not finished). ``live_sections``:
    the number of sections whose activations a stage with recompute holds at once. The stage keeps the input of each
    group of this many sections, counted from the end; the last group is recomputed in the task R, the others within B.
    None: all sections are recomputed in R.
    """

    first_section: Number
    end_section: Count
    window: Count
    recompute: bool
    live_sections: Count | None = None
    node_type: str = Field(default="", description="type of the worker's GPU; empty: any, or there is only one type")

    @property
    def sections(self) -> range:
        """The section numbers of this stage."""
        return range(self.first_section, self.end_section)

    @property
    def groups(self) -> tuple[range, ...]:
        """Groups of sections that are recomputed together, counted from the end; the first may be smaller."""
        size = self.live_sections if self.recompute and self.live_sections else len(self.sections)
        starts = sorted(
            {max(self.first_section, end - size) for end in range(self.end_section, self.first_section, -size)}
        )
        return tuple(range(first, end) for first, end in itertools.pairwise((*starts, self.end_section)))


class Expectation(Value):
    """The simulator's expectations, and the breakdown of one mini-batch's worker-seconds.

    ``parts_s`` maps a part (forward, recompute, backward, redundant, bubble, all_reduce, optimizer, commit) to
    seconds per worker of one mini-batch, averaged over workers; they add up to ``mini_batch_s``.
    """

    mini_batch_s: Seconds
    examples_per_s: Annotated[float, Field(strict=True, ge=0)]
    lower_bound_s: Seconds
    peak_memory_bytes: Number = Field(description="memory of the fullest stage's device")
    memory_moment: str = Field(default="", description="time of that peak, such as computing or reducing")
    memory_parts_bytes: dict[str, Number] = Field(default={}, description="parts of that peak")
    followed_memory_bytes: Number = Field(
        default=0, description="peak_memory_bytes if each stage's state is kept by another worker too; 0: not computed"
    )
    memory_with_sums_bytes: Number = Field(
        default=0, description="peak_memory_bytes if the sums of an abandoned step are kept; 0: not computed"
    )
    host_memory_bytes: Number = Field(
        default=0, description="host memory of the fullest stage, if devices have their own memory"
    )
    host_with_sums_bytes: Number = Field(default=0, description="the same if sums are kept; 0: not computed")
    parts_s: dict[str, Seconds]


class PipelineKind(Value):
    """Equal pipelines: the same depth, cuts and types of GPUs; ``micro_batches``: of each of them, in a step."""

    num_stages: Count
    micro_batches: tuple[Count, ...] = Field(min_length=1)

    @property
    def num_replicas(self) -> int:
        """The number of pipelines of this kind."""
        return len(self.micro_batches)

    @property
    def longest_share(self) -> int:
        """The micro-batches of the pipeline that has most."""
        return max(self.micro_batches)


class Plan(Value):
    """Pipelines, each of which is a replica of the model, and their stages.

    ``stages`` has those of the first kind of pipeline, then those of the second, and so on: stage s is an index into
    all of them, whatever its pipeline. Replicas, too, are numbered in the order of their kinds.

    ``orders[n][s]`` is stage s's static task order when its replica has n micro-batches: a string over F (forward), R
    (recompute), B (backward). The k-th F is that of the replica's micro-batch k, and so are the k-th R and B. A stage
    that does not recompute has no R. The string is empty if no pipeline of the stage's kind has n micro-batches.
    """

    schema_version: Literal[1] = 1
    fingerprint: str = Field(description="fingerprint of the cut model; equals the profile's")
    schedule: Schedule
    micro_batch_size: Count
    num_micro_batches: Count = Field(description="N = M / m over all replicas")
    num_replicas: Count = Field(description="D, pipelines of all kinds")
    stages: tuple[StagePlan, ...] = Field(min_length=1)
    kinds: tuple[PipelineKind, ...] = Field(
        default=(),
        description="kinds of pipelines; empty: all are equal, and the first N mod D have one micro-batch more",
    )
    orders: dict[CountKey, tuple[str, ...]]
    expected: Expectation
    node_sizes: tuple[Count, ...] = Field(default=(), description="GPUs of each planned node; empty: one each")
    placement: tuple[tuple[Number, ...], ...] = Field(
        default=(), description="[replica][stage]: number of the node in node_sizes; empty: anywhere"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Plan:
        if self.num_replicas > self.num_micro_batches:
            raise ValueError(f"{self.num_replicas} replicas have only {self.num_micro_batches} micro-batches to share")
        self._check_kinds()
        for kind, stages in zip(self.pipeline_kinds, self._stages_of_kinds, strict=True):
            self._check_stages(stages)
            for count in sorted(set(kind.micro_batches)):
                self._check_orders(stages, count)
        self._check_placement()
        return self

    def _check_kinds(self) -> None:
        if not self.kinds:
            return
        for name, present, planned in (
            ("stages", sum(kind.num_stages for kind in self.kinds), len(self.stages)),
            ("replicas", sum(kind.num_replicas for kind in self.kinds), self.num_replicas),
            ("micro-batches", sum(sum(kind.micro_batches) for kind in self.kinds), self.num_micro_batches),
        ):
            if present != planned:
                raise ValueError(f"kinds have {present} {name} in all, the plan has {planned}")

    def _check_stages(self, stages: range) -> None:
        end = 0
        for index in stages:
            stage = self.stages[index]
            if stage.first_section != end or stage.end_section <= stage.first_section:
                raise ValueError(f"stages[{index}] does not begin at section {end} or holds no section")
            end = stage.end_section
        if end != self.num_sections:
            raise ValueError(f"stages[{stages[-1]}] ends at section {end}, stages[-1] at {self.num_sections}")

    def _check_orders(self, stages: range, count: int) -> None:
        orders = self.orders.get(count)
        if orders is None or len(orders) != len(self.stages):
            raise ValueError(f"orders lack {count} micro-batches for each of the {len(self.stages)} stages")
        for index in stages:
            order = orders[index]
            want = {"F": count, "B": count, "R": count if self.stages[index].recompute else 0}
            if {task: order.count(task) for task in "FRB"} != want or len(order) != sum(want.values()):
                raise ValueError(f"orders[{count}][{index}] does not hold each task of {count} micro-batches once")

    def _check_placement(self) -> None:
        if not self.placement:
            return
        depths = [len(self.stages_of(replica)) for replica in range(self.num_replicas)]
        if [len(row) for row in self.placement] != depths:
            wanted = " and ".join(f"{kind.num_replicas} replicas of {kind.num_stages}" for kind in self.pipeline_kinds)
            raise ValueError(f"placement is not {wanted} stages")
        workers = [node for row in self.placement for node in row]
        for node in sorted(set(workers)):
            room = self.node_sizes[node] if node < len(self.node_sizes) else 0
            if workers.count(node) > room:
                raise ValueError(f"placement puts {workers.count(node)} workers on node {node}, which has {room} GPUs")

    @property
    def num_sections(self) -> int:
        """K."""
        return self.stages[-1].end_section

    @property
    def pipeline_depth(self) -> int:
        """P of the deepest pipeline."""
        return max(kind.num_stages for kind in self.pipeline_kinds)

    @property
    def num_workers(self) -> int:
        """P * D, summed over the kinds of pipelines."""
        return sum(kind.num_stages * kind.num_replicas for kind in self.pipeline_kinds)

    @cached_property
    def pool(self) -> Pool:
        """The required GPUs, by type."""
        return Pool.counting(self.stages[stage].node_type for stage, _ in self.places)

    @property
    def shape(self) -> str:
        """``"PxD"``, or a term for each kind of pipeline: ``"8x2 + 11x1"``."""
        return " + ".join(f"{kind.num_stages}x{kind.num_replicas}" for kind in self.pipeline_kinds)

    @cached_property
    def pipeline_kinds(self) -> tuple[PipelineKind, ...]:
        """Every kind of pipeline; one kind if all are equal."""
        if self.kinds:
            return self.kinds
        dealt = tuple(len(share) for share in shares(self.num_micro_batches, self.num_replicas))
        return (PipelineKind.model_construct(num_stages=len(self.stages), micro_batches=dealt),)

    @cached_property
    def _stages_of_kinds(self) -> tuple[range, ...]:
        ends = itertools.accumulate((kind.num_stages for kind in self.pipeline_kinds), initial=0)
        return tuple(range(first, end) for first, end in itertools.pairwise(ends))

    @cached_property
    def _replicas_of_kinds(self) -> tuple[range, ...]:
        ends = itertools.accumulate((kind.num_replicas for kind in self.pipeline_kinds), initial=0)
        return tuple(range(first, end) for first, end in itertools.pairwise(ends))

    @cached_property
    def _kind_of_stage(self) -> tuple[int, ...]:
        return tuple(number for number, stages in enumerate(self._stages_of_kinds) for _ in stages)

    @cached_property
    def _kind_of_replica(self) -> tuple[int, ...]:
        return tuple(number for number, replicas in enumerate(self._replicas_of_kinds) for _ in replicas)

    def stages_of(self, replica: int) -> range:
        """Return the stages of one pipeline, first to last."""
        return self._stages_of_kinds[self._kind_of_replica[replica]]

    def replicas_of(self, stage: int) -> range:
        """Return the pipelines that have this stage."""
        return self._replicas_of_kinds[self._kind_of_stage[stage]]

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Every (stage, replica) with a worker, in order."""
        return tuple((stage, replica) for stage in range(len(self.stages)) for replica in self.replicas_of(stage))

    def kind_of(self, replica: int) -> PipelineKind:
        """Return the kind of one pipeline."""
        return self.pipeline_kinds[self._kind_of_replica[replica]]

    def position(self, stage: int) -> int:
        """Return the number of stages before a stage in its pipelines."""
        return stage - self._stages_of_kinds[self._kind_of_stage[stage]].start

    def node_at(self, stage: int, replica: int) -> int | None:
        """Return the number of the node on which a place was planned; None: any node."""
        return self.placement[replica][self.position(stage)] if self.placement else None

    def is_first(self, stage: int) -> bool:
        """Return whether a pipeline begins with this stage."""
        return self.stages[stage].first_section == 0

    def is_last(self, stage: int) -> bool:
        """Return whether a pipeline ends with this stage."""
        return self.stages[stage].end_section == self.num_sections

    @cached_property
    def reduction_rounds(self) -> tuple[int, ...]:
        """By section, the round that reduces the gradients that the section completes."""
        cuts = [[self.stages[stage].first_section for stage in stages] for stages in self._stages_of_kinds]
        return reduction_rounds(cuts, self.num_sections)

    @cached_property
    def micro_batches_per_replica(self) -> tuple[int, ...]:
        """The number of micro-batches of each replica."""
        return tuple(count for kind in self.pipeline_kinds for count in kind.micro_batches)

    @cached_property
    def _share_ends(self) -> tuple[int, ...]:
        return tuple(itertools.accumulate(self.micro_batches_per_replica, initial=0))

    def share_of(self, replica: int, micro_batches: Sequence[int]) -> Sequence[int]:
        """Return one replica's part of some micro-batches if only these run: the same share as in a whole step."""
        if not self.kinds:
            share = shares(len(micro_batches), self.num_replicas)[replica]
            return micro_batches[share.start : share.stop]
        first, end = (
            len(micro_batches) * dealt // self.num_micro_batches for dealt in self._share_ends[replica : replica + 2]
        )
        return micro_batches[first:end]

    def order_of(self, stage: int, num_micro_batches: int) -> str:
        """Return a stage's static task order for a number of micro-batches, at most those of a whole step.

        If the plan has no order for that number, the result is the order of a whole step without the tasks of the last
        micro-batches: each task still follows the tasks that it needs, and no more micro-batches are in flight.
        """
        known = self.orders.get(num_micro_batches)
        if known is not None and known[stage]:
            return known[stage]
        seen = dict.fromkeys("FRB", 0)
        kept = []
        for task in max((orders[stage] for orders in self.orders.values()), key=len):
            if seen[task] < num_micro_batches:
                kept.append(task)
            seen[task] += 1
        return "".join(kept)


def _key_of(given: object) -> int | Pool:
    """Read a key of a table of plans: a number of GPUs, or a pool."""
    if isinstance(given, int) or (isinstance(given, str) and given.isdigit()):
        return int(given)
    return given if isinstance(given, Pool) else Pool.parse(str(given), "plans")


def _key_text(key: int | Pool) -> int | str:
    return key if isinstance(key, int) else str(key)


PlanKey = Annotated[Any, BeforeValidator(_key_of), PlainSerializer(_key_text)]
PlanTable = Annotated[dict[PlanKey, Plan], Field(min_length=1)]
"""The best plan for each number of GPUs, or for each pool if there are several types."""


def by_pool(plans: Mapping[int, Plan] | Mapping[Pool, Plan]) -> list[tuple[Pool, Plan]]:
    """Return a table's plans with their pools, the fewest GPUs first."""
    entries = [(Pool.of(key) if isinstance(key, int) else key, plan) for key, plan in plans.items()]
    return sorted(entries, key=lambda entry: (entry[0].num_gpus, entry[0]))


def by_need(plans: Iterable[Plan]) -> dict[Pool, Plan]:
    """Return the fastest of some plans for each pool that one of them needs, without redundant entries."""
    fastest: dict[Pool, Plan] = {}
    for plan in plans:
        known = fastest.get(plan.pool)
        if known is None or plan.expected.examples_per_s > known.expected.examples_per_s:
            fastest[plan.pool] = plan
    return fastest


def kinds_in(shape: str) -> tuple[tuple[int, int], ...]:
    """Read a shape as ``Plan.shape`` writes it: (stages, replicas) of each kind of pipeline."""
    return tuple((int(stages), int(replicas)) for stages, replicas in re.findall(r"(\d+)x(\d+)", shape))


def reduction_rounds(cuts: Iterable[Sequence[int]], num_sections: int) -> tuple[int, ...]:
    """Return, for pipelines with these cuts, the round that reduces the gradients that each section completes.

    A sequence of sections that no pipeline cuts has one ring, with one worker of every pipeline. Each worker reduces
    its rings round by round, from the last section to the first within a round. No worker has two rings in one round,
    so that rings do not wait for each other from one end of the model to the other. Equal pipelines have one round.
    ``cuts``: first sections of the stages of each kind of pipeline. ``num_sections``: K.
    """
    stages = [[bisect_right(firsts, section) for section in range(num_sections)] for firsts in map(tuple, cuts)]
    taken: dict[tuple[int, int], set[int]] = {}
    rounds = [0] * num_sections
    next_holders: list[tuple[int, int]] = []
    for section in reversed(range(num_sections)):
        holders = [(kind, stage[section]) for kind, stage in enumerate(stages)]
        if holders == next_holders:
            rounds[section] = rounds[section + 1]
            continue
        used = set().union(*(taken.setdefault(holder, set()) for holder in holders))
        rounds[section] = next(number for number in range(len(used) + 1) if number not in used)
        for holder in holders:
            taken[holder].add(rounds[section])
        next_holders = holders
    return tuple(rounds)


def shares(num_micro_batches: int, num_replicas: int) -> list[range]:
    """Deal micro-batches to replicas; the first ones get one more if the number does not divide evenly."""
    share, extra = divmod(num_micro_batches, num_replicas)
    starts = [replica * share + min(replica, extra) for replica in range(num_replicas + 1)]
    return [range(start, end) for start, end in itertools.pairwise(starts)]


def load_plan(path: Path) -> Plan:
    """Read a plan file."""
    return read_json(path, Plan, PlanError, PLAN)
