"""No VM has all replicas of a stage where that can be avoided, and pipelines stay inside of VMs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from simulated_job import SIZES, UNITS, make_plan

from manager.controller.shape.placement import place
from manager.controller.shape.spreading import spread
from manager.controller.state.config import units_by_stage
from morph.contract.messages import Slot
from morph.contract.vm_names import vm_of, workers_of
from tests.seeds import each_seed


def crew(num_vms: int, num_devices: int) -> list[str]:
    return [worker for vm in range(num_vms) for worker in workers_of(f"vm{vm}", num_devices)]


def fresh(num_stages: int, num_replicas: int, workers: Sequence[str]) -> tuple[Slot, ...]:
    plan = make_plan(num_stages, num_replicas)
    return place(plan, workers, {}, units_by_stage(plan, UNITS), SIZES)


SHAPES = [
    (stages, replicas, vms, devices)
    for stages, replicas, devices in itertools.product((1, 2, 3, 6), (2, 3, 4), (2, 3, 4, 8))
    for vms in range(replicas, replicas + 4)
    if stages * replicas <= vms * devices
]


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_a_first_placement_survives_the_loss_of_any_vm_where_there_are_as_many_as_replicas(seed: int | None) -> None:
    for stages, replicas, vms, devices in SHAPES:
        workers = crew(vms, devices)
        if seed is not None:
            random.Random(seed).shuffle(workers)
        slots = fresh(stages, replicas, workers)
        assert len({slot.worker for slot in slots}) == stages * replicas
        for stage in range(stages):
            on = [vm_of(slot.worker) for slot in slots if slot.stage == stage]
            assert len(set(on)) == replicas, (stages, replicas, vms, devices, slots)


def test_pipelines_stay_inside_of_vms_that_hold_them() -> None:
    slots = fresh(3, 2, crew(3, 4))
    of_replica = [[slot.worker for slot in slots if slot.replica == replica] for replica in (0, 1)]
    assert of_replica == [["vm0.d0", "vm0.d1", "vm0.d2"], ["vm1.d0", "vm1.d1", "vm1.d2"]]


@pytest.mark.parametrize(("stages", "replicas", "vms", "devices"), SHAPES)
def test_a_pipeline_changes_vms_no_oftener_than_it_must(stages: int, replicas: int, vms: int, devices: int) -> None:
    slots = fresh(stages, replicas, crew(vms, devices))
    each = min(devices, stages)  # of one VM, without two replicas of a stage
    for replica in range(replicas):
        row = [vm_of(slot.worker) for slot in slots if slot.replica == replica]
        changes = sum(one != other for one, other in pairwise(row))
        assert changes <= -(-stages // each), (row, slots)


def test_the_order_of_workers_alone_on_their_vms_is_what_it_was() -> None:
    slots = fresh(2, 2, ["d", "a", "c", "b", "e"])
    assert [slot.worker for slot in slots] == ["d", "a", "c", "b"]


def test_a_newcomer_takes_the_stage_that_its_vm_has_not() -> None:
    plan = make_plan(2, 2)
    needed = units_by_stage(plan, UNITS)
    held = {"a.d0": frozenset(needed[0]), "b.d0": frozenset(needed[1])}
    slots = place(plan, ["a.d0", "b.d0", "a.d1", "b.d1"], held, needed, SIZES)
    assert [[slot.worker for slot in slots if slot.stage == stage] for stage in (0, 1)] == [
        ["a.d0", "b.d1"],
        ["a.d1", "b.d0"],
    ]
    assert {(slot.worker, slot.replica) for slot in slots if slot.worker.startswith("a")} == {("a.d0", 0), ("a.d1", 0)}


@pytest.mark.parametrize(
    ("stages", "per_zone"), [(3, (3, 3)), (2, (4, 2)), (6, (6, 6, 6)), (3, (4, 2, 3)), (1, (2, 1))]
)
def test_replicas_of_a_stage_are_in_different_zones_and_a_pipeline_in_one_where_it_fits(
    stages: int, per_zone: tuple[int, ...]
) -> None:
    zones = {f"n{zone}{place}": f"z{zone}" for zone, num in enumerate(per_zone) for place in range(num)}
    workers = sorted(zones, key=lambda worker: worker[::-1])  # VMs of all zones come in turns
    plan = make_plan(stages, sum(per_zone) // stages)
    slots = place(plan, workers, {}, units_by_stage(plan, UNITS), SIZES, zones)
    for stage in range(stages):
        assert len({zones[slot.worker] for slot in slots if slot.stage == stage}) > 1
    rows = [[zones[slot.worker] for slot in slots if slot.replica == number] for number in range(plan.num_replicas)]
    within = sum(len(set(row)) == 1 for row in rows)
    assert within >= (sum(num // stages for num in per_zone) if len(set(per_zone)) == 1 else 1)


def num_at_risk(stages: Sequence[Sequence[int]], vms: Sequence[str]) -> int:
    return sum(len(stage) > 1 and len({vms[worker] for worker in stage}) == 1 for stage in stages)


def fewest_at_risk(vms: Sequence[str], kinds: list[list[int]], dealt: list[list[int]]) -> int:
    """By trying everything."""

    def rest(number: int, stages: tuple[tuple[int, ...], ...]) -> int:
        kind, stage = divmod(number, len(dealt))
        if kind == len(kinds):
            return num_at_risk(stages, vms)
        taken = {worker for workers in stages for worker in workers}
        free = [worker for worker in kinds[kind] if worker not in taken]
        least = len(dealt)
        for chosen in itertools.combinations(free, dealt[stage][kind]):
            grown = (*stages[:stage], stages[stage] + chosen, *stages[stage + 1 :])
            least = min(least, rest(number + 1, grown))
            if not least:
                break
        return least

    return rest(0, ((),) * len(dealt))


@each_seed(300)
def test_no_other_choice_among_workers_that_hold_the_same_leaves_fewer_stages_at_risk(seed: int) -> None:
    draw = random.Random(seed)
    workers = [worker for vm in range(draw.randint(2, 4)) for worker in workers_of(f"v{vm}", draw.randint(1, 4))]
    draw.shuffle(workers)
    workers = workers[:7]
    kind_of = [draw.randrange(3) for _ in workers]
    kinds = [[worker for worker, kind in enumerate(kind_of) if kind == number] for number in range(3)]
    num_stages = draw.randint(1, 3)
    num_replicas = draw.randint(1, max(1, min(3, len(workers) // num_stages)))
    num_stages = min(num_stages, len(workers) // num_replicas)
    dealt = [[0] * 3 for _ in range(num_stages)]
    for number, worker in enumerate(draw.sample(range(len(workers)), num_stages * num_replicas)):
        dealt[number % num_stages][kind_of[worker]] += 1
    stages = spread(workers, kinds, dealt)
    assert [[sum(kind_of[worker] == kind for worker in stage) for kind in range(3)] for stage in stages] == dealt
    assert len({worker for stage in stages for worker in stage}) == num_stages * num_replicas
    vms = [vm_of(worker) for worker in workers]
    assert num_at_risk(stages, vms) == fewest_at_risk(vms, kinds, dealt)
