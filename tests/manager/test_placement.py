"""Placement moves little, and sources never chain."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from simulated_job import SIZES, UNITS, make_plan

from manager.controller.shape.placement import choose_sources, place, share_units
from manager.controller.state.config import units_by_stage
from tests.seeds import each_seed

WHOLE = frozenset(UNITS)


def test_a_stage_needs_the_units_of_its_sections_and_a_tied_unit_belongs_to_both_ends() -> None:
    assert units_by_stage(make_plan(2, 1), UNITS) == (("s0", "s1", "s2", "s0+s5"), ("s3", "s4", "s5", "s0+s5"))


def test_workers_stay_where_they_are_when_nothing_changed() -> None:
    plan = make_plan(3, 2)
    needed = units_by_stage(plan, UNITS)
    workers = [f"n{number}" for number in range(6)]
    first = place(plan, workers, {}, needed, SIZES)
    held = {slot.worker: frozenset(needed[slot.stage]) for slot in first}
    again = place(plan, workers[::-1], held, needed, SIZES)
    assert {slot.worker: slot.stage for slot in again} == {slot.worker: slot.stage for slot in first}


def test_every_slot_is_filled_once_and_spare_workers_are_left_over() -> None:
    plan = make_plan(2, 2)
    slots = place(plan, [f"n{number}" for number in range(7)], {}, units_by_stage(plan, UNITS), SIZES)
    assert [(slot.stage, slot.replica) for slot in slots] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len({slot.worker for slot in slots}) == 4


@each_seed(60)
def test_placement_moves_the_fewest_bytes_there_are(seed: int) -> None:
    draw = random.Random(seed)
    plan = make_plan(*draw.choice([(2, 1), (3, 1), (2, 2)]))
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


def test_who_alone_holds_a_unit_is_spared_the_others() -> None:
    held = {"a": {"s0", "s1"}, "b": {"s0"}, "c": set[str](), "d": set[str]()}
    slots = place(make_plan(1, 2), ["c", "d"], {}, (("s0", "s1"),), SIZES)
    sources = choose_sources(slots, (("s0", "s1"),), held, SIZES, None)
    assert Counter((source.unit, source.peer) for source in sources) == {("s1", "a"): 2, ("s0", "b"): 2}


@pytest.mark.parametrize("kind", ["checkpoint", "initial"])
def test_what_nobody_holds_is_restored_for_each_worker_that_needs_it(kind: str) -> None:
    plan = make_plan(2, 1)
    needed = units_by_stage(plan, UNITS)
    held = {"a": frozenset({"s0", "s0+s5"}), "b": frozenset()}
    sources = choose_sources(place(plan, list(held), held, needed, SIZES), needed, held, SIZES, kind)
    kinds = {(source.worker, source.unit): source.kind for source in sources}
    assert kinds["a", "s0"] == "keep"
    assert kinds["b", "s0+s5"] == "peer"
    assert kinds["a", "s1"] == kinds["b", "s5"] == kind


def test_each_unit_of_a_checkpoint_has_one_writer_that_holds_it_and_replicas_share_the_work() -> None:
    plan = make_plan(1, 3)
    needed = units_by_stage(plan, UNITS)
    slots = place(plan, ["a", "b", "c"], {}, needed, SIZES)
    writers = share_units(slots, needed, SIZES)
    assert set(writers) == set(UNITS)
    assert Counter(writers.values()) == {"a": 1, "b": 3, "c": 3}
