from __future__ import annotations

import os
import signal

import pytest

from morph.contract.faults import Fault, SlowSpell
from morph.runtime.groups.faults import FaultPlan


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: seen.append((pid, number)))
    return seen


def plan(**fields: object) -> FaultPlan:
    return FaultPlan([Fault.model_validate({"worker": "w", **fields})])


def test_the_nth_arrival_at_the_phase_of_the_step_kills(kills: list[tuple[int, int]]) -> None:
    faults = plan(phase="backward", step=3, nth=2)
    for step in (2, 3, 4):
        faults.begin(step)
        for arrival in range(4):
            faults.reach("forward")
            faults.reach("backward")
            assert len(kills) == (step > 3 or (step == 3 and arrival >= 2))
    assert kills == [(os.getpid(), signal.SIGKILL)]


def test_arrivals_are_counted_anew_from_each_beginning(kills: list[tuple[int, int]]) -> None:
    faults = plan(phase="forward", step=1, nth=1)
    for _ in range(3):  # the step begins again and again, as after aborts
        faults.begin(1)
        faults.reach("forward")
    assert kills == []
    faults.reach("forward")
    assert len(kills) == 1


def test_a_slow_spell_lasts_from_its_first_step_until_before_its_end() -> None:
    spells = [
        SlowSpell(worker="w", factor=1.5, first_step=2, end_step=4),
        SlowSpell(worker="w", factor=2.0, first_step=3),
    ]
    faults = FaultPlan([], spells)
    found = []
    for step in range(6):
        faults.begin(step)
        found.append(faults.slowness)
    assert found == [1.0, 1.0, 1.5, 3.0, 2.0, 2.0]
