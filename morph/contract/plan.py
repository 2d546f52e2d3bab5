"""The plan: one shape P x D for one job, and what the simulator expects of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from morph.contract import ranges
from morph.contract.base import Value, read_json
from morph.contract.errors import PlanError

Schedule = Literal["varuna", "gpipe", "1f1b"]
Count = Annotated[int, ranges.COUNT.field]
CountKey = Annotated[int, Field(ge=1)]
"""JSON's keys are text."""
Number = Annotated[int, Field(strict=True, ge=0)]
Seconds = Annotated[float, Field(strict=True, ge=0)]


class StagePlan(Value):
    """Consecutive sections ``first_section .. end_section - 1`` on one worker.

    ``window`` is how many micro-batches may be in flight (forward started, backward not finished). ``live_sections``:
    of how many sections a stage with recompute holds activations at once. It keeps the input of each group of so many,
    counted from the end; the last group is run again in the task R, the others within B. None: all in R.
    """

    first_section: Number
    end_section: Count
    window: Count
    recompute: bool
    live_sections: Count | None = None

    @property
    def sections(self) -> range:
        """The section numbers of this stage."""
        return range(self.first_section, self.end_section)

    @property
    def groups(self) -> tuple[range, ...]:
        """The sections that are run again together, counted from the end: the first of these may be fewer."""
        size = self.live_sections if self.recompute and self.live_sections else len(self.sections)
        starts = sorted(
            {max(self.first_section, end - size) for end in range(self.end_section, self.first_section, -size)}
        )
        return tuple(range(first, end) for first, end in itertools.pairwise((*starts, self.end_section)))


class Expectation(Value):
    """What the simulator expects of the plan, and where one mini-batch's worker-seconds go.

    ``parts_s`` maps a part (forward, recompute, backward, redundant, bubble, all_reduce, optimizer, commit) to
    seconds per worker of one mini-batch, averaged over workers; they add up to ``mini_batch_s``.
    """

    mini_batch_s: Seconds
    examples_per_s: Annotated[float, Field(strict=True, ge=0)]
    lower_bound_s: Seconds
    peak_memory_bytes: Number = Field(description="of the fullest stage's device")
    memory_moment: str = Field(default="", description="when that is, such as computing or reducing")
    memory_parts_bytes: dict[str, Number] = Field(default={}, description="what it consists of then")
    followed_memory_bytes: Number = Field(
        default=0, description="peak_memory_bytes where each stage's state is kept by another worker too; 0: not asked"
    )
    host_memory_bytes: Number = Field(
        default=0, description="of the fullest stage, where devices have memory of their own"
    )
    parts_s: dict[str, Seconds]


class Plan(Value):
    """A shape and its stages.

    ``orders[n][s]`` is stage s's static task order when its replica has n micro-batches: a string
    over F (forward), R (recompute), B (backward); the k-th F is the replica's micro-batch k, and so
    for R and B. A stage that does not recompute has no R.
    """

    schema_version: Literal[1] = 1
    fingerprint: str = Field(description="of the cut model; equals the profile's")
    schedule: Schedule
    micro_batch_size: Count
    num_micro_batches: Count = Field(description="N = M / m over all replicas")
    num_replicas: Count = Field(description="D")
    stages: tuple[StagePlan, ...] = Field(min_length=1)
    orders: dict[CountKey, tuple[str, ...]]
    expected: Expectation
    node_sizes: tuple[Count, ...] = Field(default=(), description="GPUs of each node planned for; empty: one each")
    placement: tuple[tuple[Number, ...], ...] = Field(
        default=(), description="[replica][stage]: number of the node in node_sizes; empty: anywhere"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Plan:
        end = 0
        for index, stage in enumerate(self.stages):
            if stage.first_section != end or stage.end_section <= stage.first_section:
                raise ValueError(f"stages[{index}] does not begin at section {end} or holds no section")
            end = stage.end_section
        if self.num_replicas > self.num_micro_batches:
            raise ValueError(f"{self.num_replicas} replicas have only {self.num_micro_batches} micro-batches to share")
        for count in self.micro_batches_per_replica:
            orders = self.orders.get(count)
            if orders is None or len(orders) != len(self.stages):
                raise ValueError(f"orders lack {count} micro-batches for each of the {len(self.stages)} stages")
            for index, (order, stage) in enumerate(zip(orders, self.stages, strict=True)):
                want = {"F": count, "B": count, "R": count if stage.recompute else 0}
                if {task: order.count(task) for task in "FRB"} != want or len(order) != sum(want.values()):
                    raise ValueError(f"orders[{count}][{index}] does not hold each task of {count} micro-batches once")
        self._check_placement()
        return self

    def _check_placement(self) -> None:
        if not self.placement:
            return
        if len(self.placement) != self.num_replicas or any(len(row) != len(self.stages) for row in self.placement):
            raise ValueError(f"placement is not {self.num_replicas} replicas of {len(self.stages)} stages")
        workers = [node for row in self.placement for node in row]
        for node in sorted(set(workers)):
            room = self.node_sizes[node] if node < len(self.node_sizes) else 0
            if workers.count(node) > room:
                raise ValueError(f"placement puts {workers.count(node)} workers on node {node}, which has {room} GPUs")

    @property
    def pipeline_depth(self) -> int:
        """P."""
        return len(self.stages)

    @property
    def num_workers(self) -> int:
        """P * D."""
        return len(self.stages) * self.num_replicas

    @property
    def shape(self) -> str:
        """``"PxD"``."""
        return f"{self.pipeline_depth}x{self.num_replicas}"

    @cached_property
    def micro_batches_per_replica(self) -> tuple[int, ...]:
        """How many micro-batches each replica gets; the first N mod D replicas get one more."""
        return tuple(len(share) for share in shares(self.num_micro_batches, self.num_replicas))

    def micro_batches_of(self, replica: int) -> range:
        """Global numbers of the micro-batches dealt to one replica, in the order it runs them."""
        return shares(self.num_micro_batches, self.num_replicas)[replica]

    def share_of(self, replica: int, micro_batches: Sequence[int]) -> Sequence[int]:
        """One replica's part of some of the micro-batches, where only these are run."""
        share = shares(len(micro_batches), self.num_replicas)[replica]
        return micro_batches[share.start : share.stop]

    def order_of(self, stage: int, num_micro_batches: int) -> str:
        """A stage's static task order for so many micro-batches, at most what a replica has in a whole step.

        Where the plan has none for that number, it is that of a whole step without the tasks of the last micro-batches:
        each task still comes after what it needs, and no more micro-batches are in flight.
        """
        known = self.orders.get(num_micro_batches)
        if known is not None:
            return known[stage]
        seen = dict.fromkeys("FRB", 0)
        kept = []
        for task in self.orders[max(self.orders)][stage]:
            if seen[task] < num_micro_batches:
                kept.append(task)
            seen[task] += 1
        return "".join(kept)


def shares(num_micro_batches: int, num_replicas: int) -> list[range]:
    """Deal micro-batches to replicas: the first ones get one more where they do not divide evenly."""
    share, extra = divmod(num_micro_batches, num_replicas)
    starts = [replica * share + min(replica, extra) for replica in range(num_replicas + 1)]
    return [range(start, end) for start, end in itertools.pairwise(starts)]


def load_plan(path: Path) -> Plan:
    """Read a plan file.

    Raises:
        PlanError: naming the file and, where there is one, the field.
    """
    return read_json(path, Plan, PlanError)
