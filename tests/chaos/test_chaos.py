"""A run under faults that are inflicted from outside ends as if nothing had happened: `make soak` does more."""

from __future__ import annotations

from pathlib import Path

import pytest

from morph.contract.profile import load_profile
from tests.chaos.playing import Bounds, play
from tests.chaos.world import Setting
from tests.system.harness import uninterrupted

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

STEPS = 150
SEED = 13
BOUNDS = Bounds(faults_s=60.0, stuck_s=400.0, calm_s=(0.2, 1.0))


def test_a_run_under_faults_from_outside_ends_with_the_weights_of_an_undisturbed_one(
    calibrated: Path, tmp_path: Path
) -> None:
    reference = uninterrupted(STEPS, tmp_path / "reference", load_profile(calibrated).num_sections)
    played = play(SEED, Setting(calibrated, STEPS), reference, tmp_path, BOUNDS)
    print("\n".join([played.told(), *played.lines]))  # shown by pytest when the test fails
    assert played.failures == []
    assert played.faults.total() >= 3
