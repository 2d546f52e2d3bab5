"""Draws from a profile's quantiles: the simulator's own luck."""

from __future__ import annotations

import numpy as np
import pytest

from morph.contract.emulation import Duration
from morph.contract.profile import Profile, Timing
from morph.runtime.emulation.draws import Luck
from simulator import synthetic_profile
from simulator.inputs.jitter import Luck as SimulatedLuck

NUM_SECTIONS, NUM_MICRO_BATCHES = 3, 16
SPREAD = (0.5, 1.0, 4.0)


def spread_profile() -> Profile:
    profile = synthetic_profile(num_sections=NUM_SECTIONS, micro_batch_sizes=(1,), batch_size=NUM_MICRO_BATCHES)
    timing = Timing(median_s=1.0, mad_s=0.1, num_samples=9, quantiles_s=SPREAD)
    link = tuple(entry.model_copy(update={"time": timing}) for entry in profile.inter_node.activation)
    sections = tuple(
        section.model_copy(update={"forward": {1: timing}, "backward": {1: timing}}) for section in profile.sections
    )
    inter_node = profile.inter_node.model_copy(update={"activation": link, "gradient": link})
    return profile.model_copy(update={"sections": sections, "inter_node": inter_node})


def luck(seed: int | None, step: int = 4) -> Luck:
    return Luck(seed, step, NUM_SECTIONS, NUM_MICRO_BATCHES)


def test_without_a_seed_every_time_is_the_sum_of_medians() -> None:
    durations = {0: Duration(median_s=1.0, quantiles_s=SPREAD), 2: Duration(median_s=2.0)}
    assert luck(None).times_s("forward", durations, range(3)) == pytest.approx([3.0, 3.0, 3.0])


@pytest.mark.parametrize("kind", ["forward", "recompute", "backward"])
def test_tasks_are_drawn_as_the_simulator_draws_them(kind: str) -> None:
    simulated = SimulatedLuck(spread_profile(), 1, NUM_MICRO_BATCHES, 7, 4).task_sums_ns(kind)
    durations = {section: Duration(median_s=1.0, quantiles_s=SPREAD) for section in (1, 2)}
    drawn = luck(7).times_s(kind, durations, range(5, 9))
    assert drawn == pytest.approx((simulated[3] - simulated[1])[5:9] / 1e9)


@pytest.mark.parametrize("kind", ["activation", "gradient"])
def test_messages_are_drawn_as_the_simulator_draws_them(kind: str) -> None:
    profile = spread_profile()
    simulated = SimulatedLuck(profile, 1, NUM_MICRO_BATCHES, 7, 4).message_ns(kind, 1, profile.inter_node, 1e5)
    drawn = luck(7).times_s(kind, {1: Duration(median_s=1.0, quantiles_s=SPREAD)}, range(NUM_MICRO_BATCHES))
    assert drawn == pytest.approx(simulated / 1e9)


def test_another_step_and_another_seed_draw_other_times() -> None:
    durations = {0: Duration(median_s=1.0, quantiles_s=SPREAD)}
    first = luck(7).times_s("forward", durations, range(9))
    assert not np.array_equal(first, luck(8).times_s("forward", durations, range(9)))
    assert not np.array_equal(first, luck(7, step=5).times_s("forward", durations, range(9)))
