"""Sums are freed with their step: eight bytes per parameter must not wait for garbage collection."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from morph.runtime.groups.faults import FaultPlan
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.step.sums import KnownSums

STEP = SimpleNamespace(step=3, attempt=0)
PLAN = SimpleNamespace(
    num_micro_batches=4, num_sections=1, stages=(SimpleNamespace(sections=range(1), first_section=0, end_section=1),)
)


def _current(every: int = 1) -> Any:
    return SimpleNamespace(
        slot=SimpleNamespace(stage=0),
        plan=PLAN,
        order=SimpleNamespace(copy_sums_every=every, keep_sums=True, salvage_in=lambda _order: None),
        units={},
        topology=SimpleNamespace(unit_rings={}, split_units=frozenset(), rounds={}),
        ring_of=lambda _unit: None,
        interrupt=Interrupt(1),
        micro_batches_in=lambda _order: range(4),
        num_micro_batches=lambda _order: 4,
    )


def test_the_sums_of_a_decided_step_are_freed_at_once() -> None:
    offered: list[int] = []
    known = KnownSums("w0", FaultPlan(()), lambda step, _copies: offered.append(step), lambda _step: [])
    gc.disable()
    try:
        running = known.begin(_current(), STEP)  # type: ignore[arg-type]
        running.count(0)
        assert offered == [3]
        freed = weakref.ref(running)
        del running
        known.forget_before(4)
        assert freed() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(("every", "copied_after"), [(1, [1, 2, 3]), (2, [2]), (3, [1])])
def test_at_most_the_sums_between_two_copies_are_run_again(every: int, copied_after: list[int]) -> None:
    counted = 0
    copied: list[int] = []
    known = KnownSums("w0", FaultPlan(()), lambda _step, _copies: copied.append(counted), lambda _step: [])
    running = known.begin(_current(every), STEP)  # type: ignore[arg-type]
    for micro_batch in range(4):
        counted = micro_batch + 1
        running.count(micro_batch)
        assert counted - max(copied, default=0) <= every
    assert copied == copied_after


def test_sums_of_a_decided_step_are_dropped_when_the_shape_changes() -> None:
    unwanted = partial(pytest.fail, "copies of a decided step are wanted")
    known = KnownSums("w0", FaultPlan(()), lambda _step, _copies: None, lambda _step: unwanted())
    running = known.begin(_current(), STEP)  # type: ignore[arg-type]
    running.partial_sums = lambda: pytest.fail("sums of a decided step are wanted")  # type: ignore[method-assign]
    known.keep(4)
    assert known.told() is None
