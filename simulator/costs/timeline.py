"""The timeline of one simulated mini-batch as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from simulator.costs.finish import Finish
from simulator.costs.stage_costs import StageCosts
from simulator.costs.worker_times import worker_times
from simulator.engine.times import Ints, Played
from simulator.inputs.conditions import Conditions

TASK_NAMES = {"F": "forward", "R": "recompute", "B": "backward"}
REDUNDANT_NAMES = ("redundant_forward", "redundant_backward")
COLUMNS = ("replica", "stage", "task", "micro_batch", "start_s", "end_s")
_Row = tuple[int, int, str, int, float, float]


def timeline_frame(
    costs: StageCosts, counts: Sequence[int], conditions: Conditions, played: Played, after: Finish
) -> pd.DataFrame:
    """Return one row per task, ordered by replica, stage and start; ``micro_batch`` counts in the replica; -1: none.

    A worker's own tasks may lie between the first begin and the end of a redundant one.
    """
    times = worker_times(costs, counts, conditions)
    durations = {"F": times.forward_ns, "R": times.recompute_ns, "B": times.backward_ns}
    num_stages, num_replicas = played.last_backward_ns.shape
    rows: list[_Row] = []
    for replica in range(num_replicas):
        for stage in range(num_stages):
            numbers, first = dict.fromkeys("FRB", 0), len(rows)
            starts = played.start_ns[replica][stage]
            for letter, start in zip(played.orders[replica][stage], starts, strict=True):
                end = int(start) + int(durations[letter][stage, replica, 0])
                rows.append((replica, stage, TASK_NAMES[letter], numbers[letter], int(start) / 1e9, end / 1e9))
                numbers[letter] += 1
            if played.redundant_ns:
                rows += _redundant_rows(played.redundant_ns[replica][stage], replica, stage)
                rows[first:] = sorted(rows[first:], key=lambda row: row[4])
            rows += _closing_rows(costs, after, num_replicas, replica, stage)
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype({"start_s": np.float64, "end_s": np.float64})


def _redundant_rows(spans: Ints, replica: int, stage: int) -> Iterator[_Row]:
    for task, of_kind in zip(REDUNDANT_NAMES[: len(spans)], spans.tolist(), strict=True):
        for number, (begin, end) in enumerate(of_kind):
            yield replica, stage, task, number, begin / 1e9, end / 1e9


def _own_reduces(costs: StageCosts, after: Finish, num_replicas: int, stage: int) -> Iterator[tuple[int, int]]:
    """Yield (start, duration) of each section's reduction, one after the other in a ring, from the last section on."""
    reduced, remaining_ns = costs.reduced, costs.reduced.remaining_ns(num_replicas)
    if after.rings is not None:
        reduced, remaining_ns = after.rings.spans, after.rings.remaining_ns
    (first, *_), (end, *_) = (where[stage : stage + 1].tolist() for where in costs.spans)
    free = 0
    for section in range(end - 1, first - 1, -1):
        if section + 1 < end and reduced.stage[section] != reduced.stage[section + 1]:
            free = 0  # rings wait for each other in another order, which ``ready_ns`` contains
        start = max(free, int(after.ready_ns[section]))
        is_first = section == reduced.first[section]
        duration = int(remaining_ns[section] - (0 if is_first else remaining_ns[section - 1]))
        if duration:
            yield start, duration
            free = start + duration


def _closing_rows(costs: StageCosts, after: Finish, num_replicas: int, replica: int, stage: int) -> list[_Row]:
    reduces = list(_own_reduces(costs, after, num_replicas, stage))
    reduces += [(start, duration) for stages, start, duration in after.tied if stage in stages]
    rows = [
        (replica, stage, "all_reduce", -1, start / 1e9, (start + duration) / 1e9)
        for start, duration in reduces
        if duration
    ]
    decided = after.prepared_ns + costs.sections.commit_ns
    rows.append((replica, stage, "commit", -1, after.prepared_ns / 1e9, decided / 1e9))
    rows.append((replica, stage, "optimizer", -1, decided / 1e9, (decided + int(costs.optimizer_ns[stage])) / 1e9))
    return rows
