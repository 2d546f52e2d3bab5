"""Placement moves little, and sources never chain."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest
from simulated_job import SIZES, UNEQUAL, UNITS, make_plan, make_unequal

from manager.controller.shape.overlap import largest_overlap
from manager.controller.shape.placement import choose_sources, place, share_units, spread
from manager.controller.state.config import units_by_stage
from morph.contract.messages import Slot
from morph.contract.vm_names import vm_of, workers_of
from tests.seeds import each_seed

WHOLE = frozenset(UNITS)


def test_a_stage_needs_its_sections_units_and_tied_ones_twice() -> None:
    assert units_by_stage(make_plan(2, 1), UNITS) == (("s0", "s1", "s2", "s0+s5"), ("s3", "s4", "s5", "s0+s5"))


@each_seed(60)
def test_placement_moves_the_fewest_bytes_there_are(seed: int) -> None:
    draw = random.Random(seed)
    plan = draw.choice([make_plan(2, 1), make_plan(3, 1), make_plan(2, 2), UNEQUAL[3], UNEQUAL[4], UNEQUAL[5]])
    needed = units_by_stage(plan, UNITS)
    workers = [f"n{number}" for number in range(5)] if seed % 2 else ["a.d0", "a.d1", "b.d0", "b.d1", "b.d2"]
    held = {worker: frozenset(draw.sample(sorted(UNITS), draw.randrange(5))) for worker in workers}
    slots = place(plan, workers, held, needed, SIZES)
    stages = [slot.stage for slot in slots]

    def kept(chosen: tuple[str, ...]) -> int:
        pairs = zip(chosen, stages, strict=True)
        return sum(SIZES[unit] for worker, stage in pairs for unit in needed[stage] if unit in held[worker])

    best = max(kept(chosen) for chosen in itertools.permutations(workers, len(stages)))
    assert kept(tuple(slot.worker for slot in slots)) == best


@each_seed(40)
def test_workers_drive_stages_of_their_type_with_the_fewest_bytes_moved(seed: int) -> None:
    draw = random.Random(seed)
    plan = make_unequal((2, 1, "fast"), (1, 1, "slow"), (1, 1, ""))
    needed = units_by_stage(plan, UNITS)
    types = {"a": "fast", "b": "fast", "c": "slow", "d": "slow", "e": "fast"}
    held = {worker: frozenset(draw.sample(sorted(UNITS), draw.randrange(7))) for worker in types}
    slots = place(plan, list(types), held, needed, SIZES, types=types)
    stages = [slot.stage for slot in slots]
    wanted = [plan.stages[stage].node_type for stage in stages]
    kept = {
        chosen: sum(SIZES[u] for worker, s in zip(chosen, stages, strict=True) for u in needed[s] if u in held[worker])
        for chosen in itertools.permutations(types, len(stages))
        if all(of in ("", types[worker]) for worker, of in zip(chosen, wanted, strict=True))
    }
    assert kept[tuple(slot.worker for slot in slots)] == max(kept.values())


def test_sources_keep_what_is_held_and_spread_the_rest_over_the_holders() -> None:
    plan = make_plan(2, 2)
    needed = units_by_stage(plan, UNITS)
    held = {"a": WHOLE, "b": WHOLE, "c": frozenset(), "d": frozenset()}
    slots = place(plan, list(held), held, needed, SIZES)
    sources = choose_sources(slots, needed, held, SIZES, None)
    assert len(sources) == 16
    assert all(source.kind == ("keep" if source.worker in "ab" else "peer") for source in sources)
    load: Counter[str] = Counter()
    for source in sources:
        if source.peer is not None:
            assert source.unit in held[source.peer]
            load[source.peer] += SIZES[source.unit]
    assert abs(load["a"] - load["b"]) <= max(SIZES.values())


def test_the_only_holder_of_a_unit_sends_no_others() -> None:
    held = {"a": {"s0", "s1"}, "b": {"s0"}, "c": set[str](), "d": set[str]()}
    slots = place(make_plan(1, 2), ["c", "d"], {}, (("s0", "s1"),), SIZES)
    sources = choose_sources(slots, (("s0", "s1"),), held, SIZES, None)
    assert Counter((source.unit, source.peer) for source in sources) == {("s1", "a"): 2, ("s0", "b"): 2}


@pytest.mark.parametrize("kind", ["checkpoint", "initial"])
def test_units_without_a_holder_are_restored_for_each_worker_that_needs_them(kind: str) -> None:
    plan = make_plan(2, 1)
    needed = units_by_stage(plan, UNITS)
    held = {"a": frozenset({"s0", "s0+s5"}), "b": frozenset()}
    sources = choose_sources(place(plan, list(held), held, needed, SIZES), needed, held, SIZES, kind)
    kinds = {(source.worker, source.unit): source.kind for source in sources}
    assert kinds["a", "s0"] == "keep"
    assert kinds["b", "s0+s5"] == "peer"
    assert kinds["a", "s1"] == kinds["b", "s5"] == kind


def test_each_unit_of_a_checkpoint_has_one_writer_and_replicas_share() -> None:
    plan = make_plan(1, 3)
    needed = units_by_stage(plan, UNITS)
    slots = place(plan, ["a", "b", "c"], {}, needed, SIZES)
    writers = share_units(slots, needed, SIZES)
    assert set(writers) == set(UNITS)
    assert Counter(writers.values()) == {"a": 1, "b": 3, "c": 3}


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
def test_a_first_placement_survives_the_loss_of_any_vm(seed: int | None) -> None:
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
    each = min(devices, stages)  # stages that one VM holds without two replicas of any
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
    ("kinds", "vms", "devices"),
    [(((3, 1), (2, 1)), 3, 2), (((3, 1), (1, 1)), 2, 3), (((2, 2), (3, 1)), 4, 2), (((4, 1), (1, 1)), 2, 4)],
)
def test_unequal_pipelines_survive_the_loss_of_any_vm(
    kinds: tuple[tuple[int, int], ...], vms: int, devices: int
) -> None:
    plan = make_unequal(*((stages, replicas, "") for stages, replicas in kinds))
    needed = units_by_stage(plan, UNITS)
    slots = place(plan, crew(vms, devices), {}, needed, SIZES)
    for unit in UNITS:
        assert len({vm_of(slot.worker) for slot in slots if unit in needed[slot.stage]}) > 1, (unit, slots)


@pytest.mark.parametrize(
    ("stages", "per_zone"), [(3, (3, 3)), (2, (4, 2)), (6, (6, 6, 6)), (3, (4, 2, 3)), (1, (2, 1))]
)
def test_replicas_of_a_stage_are_in_different_zones(stages: int, per_zone: tuple[int, ...]) -> None:
    zones = {f"n{zone}{place}": f"z{zone}" for zone, num in enumerate(per_zone) for place in range(num)}
    workers = sorted(zones, key=lambda worker: worker[::-1])  # VMs of all zones take turns
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
def test_no_choice_among_equal_holders_leaves_fewer_stages_at_risk(seed: int) -> None:
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


def worth(gain: list[list[int]], dealt: list[list[int]]) -> int:
    return sum(gain[row][column] * count for row, counts in enumerate(dealt) for column, count in enumerate(counts))


def best_by_trying(gain: list[list[int]], demand: list[int], supply: list[int]) -> int:
    rows = [row for row, need in enumerate(demand) for _ in range(need)]
    columns = [column for column, count in enumerate(supply) for _ in range(count)]
    tried = set(itertools.permutations(columns, len(rows)))
    return max(sum(gain[row][column] for row, column in zip(rows, chosen, strict=True)) for chosen in tried)


@each_seed(100)
def test_the_largest_overlap_is_found(seed: int) -> None:
    draw = random.Random(seed)
    demand = [draw.randint(1, 2) for _ in range(draw.randint(1, 3))]
    supply = [draw.randint(1, 3) for _ in range(draw.randint(1, 4))]
    while sum(supply) < sum(demand):
        supply.append(1)
    if sum(supply) > 7:
        supply = [1] * 7
    gain = [[draw.choice([0, 0, 1, 5, 9]) for _ in supply] for _ in demand]
    dealt = largest_overlap(gain, demand, supply)
    assert [sum(counts) for counts in dealt] == demand
    assert all(sum(counts[column] for counts in dealt) <= count for column, count in enumerate(supply))
    assert all(count >= 0 for counts in dealt for count in counts)
    assert worth(gain, dealt) == best_by_trying(gain, demand, supply)


def test_where_it_makes_no_difference_earlier_columns_are_taken() -> None:
    assert largest_overlap([[0, 0], [0, 0]], [2, 1], [4, 4]) == [[2, 0], [1, 0]]
