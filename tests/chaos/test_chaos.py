"""A run under faults from outside ends like an undisturbed run; `make soak` plays more of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from morph.contract.profile import load_profile
from tests.chaos.faults import FAULTS
from tests.chaos.playing import Bounds, play
from tests.chaos.world import Setting
from tests.system.harness import uninterrupted

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

STEPS, READ_S, CHECKPOINT_EVERY = 60, 0.05, 6
SEED = 13
BOUNDS = Bounds(faults_s=80.0, stuck_s=400.0, calm_s=(0.2, 1.0))


@pytest.mark.parametrize("launcher", ["processes", pytest.param("ray", marks=pytest.mark.long)])
def test_a_run_under_faults_from_outside_ends_with_undisturbed_weights(
    calibrated: Path, tmp_path: Path, launcher: Literal["ray", "processes"]
) -> None:
    reference = uninterrupted(STEPS, tmp_path / "reference", load_profile(calibrated).num_sections)
    setting = Setting(calibrated, STEPS, launcher, READ_S, CHECKPOINT_EVERY)
    played = play(SEED, setting, lambda: reference, tmp_path, BOUNDS)
    print("\n".join([played.told(), *played.lines]))  # pytest shows this when the test fails
    assert played.failures == []
    assert played.faults.total() >= 3


@pytest.mark.long
def test_a_run_whose_manager_is_killed_15_times_ends_with_undisturbed_weights(calibrated: Path, tmp_path: Path) -> None:
    steps = 120
    reference = uninterrupted(steps, tmp_path / "reference", load_profile(calibrated).num_sections)
    setting = Setting(calibrated, steps, "processes", READ_S, CHECKPOINT_EVERY)
    kills = [fault for fault in FAULTS if fault.name == "manager killed"]
    played = play(SEED, setting, lambda: reference, tmp_path, replace(BOUNDS, apart_steps=(5, 7)), kills)
    print("\n".join([played.told(), *played.lines]))
    assert played.failures == []
    assert played.faults["manager killed"] >= 15
    assert played.steps == steps
