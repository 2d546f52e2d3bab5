from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from morph.contract.messages import ReshapeOrder, Slot, StateSource
from morph.contract.plan import Expectation, Plan, StagePlan
from morph.cutting.cuts.cut_model import ParameterUnit
from morph.runtime.groups.topology import (
    Topology,
    edge_name,
    move_name,
    moves_of,
    slot_of,
    topology,
    units_of_stage,
    worker_at,
)

NUM_SECTIONS = 6
UNITS = (
    *(ParameterUnit(f"s{index}", (index,), (f"w{index}",)) for index in range(NUM_SECTIONS)),
    ParameterUnit("s0+s5", (0, 5), ("embedding",)),
    ParameterUnit("s1+s2", (1, 2), ("shared",)),
)


def make_plan(bounds: list[int], num_replicas: int) -> Plan:
    """Return a plan of stages that begin at section 0 and at each of ``bounds``."""
    edges = [0, *bounds, NUM_SECTIONS]
    stages = tuple(
        StagePlan(first_section=first, end_section=end, window=1, recompute=False)
        for first, end in itertools.pairwise(edges)
    )
    return Plan(
        fingerprint="f",
        schedule="varuna",
        micro_batch_size=1,
        num_micro_batches=num_replicas,
        num_replicas=num_replicas,
        stages=stages,
        orders={1: ("FB",) * len(stages)},
        expected=Expectation(mini_batch_s=0, examples_per_s=0, lower_bound_s=0, peak_memory_bytes=0, parts_s={}),
    )


def make_order(bounds: list[int], num_replicas: int, moves: tuple[tuple[str, str], ...] = ()) -> ReshapeOrder:
    planned = make_plan(bounds, num_replicas)
    slots = tuple(
        Slot(worker=f"r{replica}p{stage}", stage=stage, replica=replica)
        for stage in range(planned.pipeline_depth)
        for replica in range(num_replicas)
    )
    sources = tuple(StateSource(worker=to, unit="s0", kind="peer", peer=giver) for giver, to in moves)
    return ReshapeOrder(generation=7, version=0, plan=planned, slots=slots, sources=sources)


BOUNDS = st.lists(st.integers(1, NUM_SECTIONS - 1), unique=True, max_size=5).map(sorted)


@pytest.mark.parametrize("depth", [2, 3, 6])
def test_long_pipelines_form_channels_in_as_many_rounds_as_short_ones(depth: int) -> None:
    groups = [group for group in topology(make_order(list(range(1, depth)), 1), UNITS).groups if "/b" in group.name]
    rounds, free_in = 0, dict.fromkeys((worker for group in groups for worker in group.members), 0)
    for group in groups:  # a group begins when its last member reaches it
        number = 1 + max(free_in[worker] for worker in group.members)
        free_in.update(dict.fromkeys(group.members, number))
        rounds = max(rounds, number)
    assert rounds == (2 if depth == 2 else 4)


@given(BOUNDS, st.integers(1, 4))
def test_every_unit_is_reduced_by_exactly_the_workers_that_use_it(bounds: list[int], num_replicas: int) -> None:
    order = make_order(bounds, num_replicas)
    laid_out = topology(order, UNITS)
    groups = {group.name: group for group in laid_out.groups}
    assert len(groups) == len(laid_out.groups)
    for unit in UNITS:
        users = {slot.worker for slot in order.slots if unit in units_of_stage(order.plan, slot.stage, UNITS)}
        members = groups[laid_out.unit_rings[unit.id]].members
        assert set(members) == users
        assert len(members) == len(users)


def names_with(laid_out: Topology, part: str) -> list[str]:
    return [group.name for group in laid_out.groups if part in group.name]


def test_a_stages_units_share_a_ring_and_tied_ones_have_their_own() -> None:
    laid_out = topology(make_order([2, 4], 2), UNITS)
    assert laid_out.unit_rings["s0"] == laid_out.unit_rings["s1"] == laid_out.unit_rings["s1+s2"].replace("0+1", "0")
    assert laid_out.unit_rings["s0+s5"].endswith("/0+2")
    groups = {group.name: group for group in laid_out.groups}
    assert groups[laid_out.unit_rings["s0+s5"]].members == ("r0p0", "r1p0", "r0p2", "r1p2")
    assert len(names_with(laid_out, "ring")) == 5


def test_a_tied_unit_within_one_stage_needs_no_ring_of_its_own() -> None:
    laid_out = topology(make_order([], 3), UNITS)
    assert set(laid_out.unit_rings.values()) == {"g7/ring/0"}


def test_each_replica_has_a_channel_for_each_direction_of_each_border() -> None:
    laid_out = topology(make_order([2, 4], 3), UNITS)
    edges = [group for group in laid_out.groups if "/b" in group.name]
    assert len(edges) == 3 * 2 * 2
    assert all(len(group.members) == 2 for group in edges)
    named = {group.name: group.members for group in edges}
    assert named[edge_name(7, 2, 1, "grad")] == ("r2p1", "r2p2")


def test_several_units_move_over_one_channel_per_pair_and_direction() -> None:
    pairs = (("b", "a"), ("a", "b"))
    sources = [
        StateSource(worker=to, unit=unit, kind="peer", peer=giver) for giver, to in pairs for unit in ("s0", "s1", "s2")
    ]
    sources.append(StateSource(worker="c", unit="s0", kind="checkpoint"))
    assert moves_of(sources) == (("a", "b"), ("b", "a"))
    assert move_name(3, "a", "b") != move_name(3, "b", "a")


def test_group_names_of_two_generations_differ() -> None:
    order = make_order([3], 2, (("r0p0", "r1p1"),))
    later = order.model_copy(update={"generation": 8})
    assert not {group.name for group in topology(order, UNITS).groups} & {
        group.name for group in topology(later, UNITS).groups
    }


def test_slots_are_found_by_worker_and_by_place() -> None:
    slots = make_order([3], 2).slots
    assert worker_at(slots, 1, 0) == "r0p1"
    found = slot_of(slots, "r1p0")
    assert (found.stage, found.replica) == (0, 1)
    assert slot_of(slots, "stranger") is None


@pytest.mark.parametrize(
    ("bounds", "stage", "expected"), [([2], 0, {"s0", "s1", "s0+s5", "s1+s2"}), ([3], 1, {"s3", "s4", "s5", "s0+s5"})]
)
def test_a_stage_holds_its_own_units_and_the_tied_ones_it_uses(
    bounds: list[int], stage: int, expected: set[str]
) -> None:
    assert {unit.id for unit in units_of_stage(make_plan(bounds, 1), stage, UNITS)} == expected


def test_each_edge_between_stages_is_a_group_named_sender_first() -> None:
    layout = topology(make_order([2, 4], 2), UNITS)
    assert len(layout.edges) == 2 * 2 * 2
    groups = {group.name: group.members for group in layout.groups}
    for edge in layout.edges:
        before, behind = groups[edge.name]
        assert edge.members == ((before, behind) if edge.name.endswith("act") else (behind, before))
