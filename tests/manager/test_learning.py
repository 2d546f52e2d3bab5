"""Corrections of the profile from compute times during a run, and plans that use them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from controller_script import Script
from simulated_job import make_plan, make_unequal

from manager.controller.state.actions import Action, NoteCorrection
from manager.controller.state.events import ComputeTimesSeen, Event, WorkerLost, WorkerTimes
from manager.controller.state.nodes import NodeState
from manager.controller.state.profile_correction import (
    MATERIAL,
    MOST_STAGES,
    Correction,
    StageRatios,
    correction_of,
    is_material,
    with_observation,
)
from manager.controller.state.state import Phase
from manager.journal import journal as journal_module
from manager.journal.journal import Journal
from manager.journal.replay import replay
from manager.report.journal_reader import read_report
from manager.report.summary import summarise
from manager.run_dir import JOURNAL
from morph.contract.plan import StagePlan
from morph.contract.pool import Pool

SECTIONS_S = (1.0, 1.0, 2.0, 1.0, 1.0, 2.0)
TIMES = {"": SECTIONS_S}
NOISE = 0.08


def seen(
    factors: list[float],
    cuts: list[list[int]],
    num: int,
    seed: int,
    node_type: str = "",
    found: tuple[StageRatios, ...] = (),
) -> tuple[StageRatios, ...]:
    """Return observations of every stage of these shapes, with noise, after the earlier ones in ``found``."""
    draw = random.Random(seed)
    for _ in range(num):
        for bounds in cuts:
            for first, end in zip(bounds, [*bounds[1:], len(SECTIONS_S)], strict=True):
                true_s = sum(SECTIONS_S[index] * factors[index] for index in range(first, end))
                ratio = math.log(true_s / sum(SECTIONS_S[first:end])) + draw.gauss(0, NOISE)
                found = with_observation(found, range(first, end), ratio, node_type)
    return found


TYPES = TIMES | {"fast": SECTIONS_S, "slow": tuple(3 * time_s for time_s in SECTIONS_S), "other": SECTIONS_S}


@pytest.mark.parametrize("seed", range(5))
def test_only_the_type_slower_than_its_profile_is_found(seed: int) -> None:
    """In an unequal plan: one pipeline of three stages on one type, and one of two on the other."""
    ratios = seen([1] * 6, [[0, 2, 4]], 60, seed, "fast")
    ratios = seen([1.3] * 6, [[0, 3]], 60, seed + 100, "slow", ratios)
    found = correction_of(ratios, TYPES)
    assert is_material(None, found, ratios, TYPES)
    assert found.of_type("slow").factors == pytest.approx([1.3] * 6, abs=0.05)
    assert found.of_type("fast").factors == pytest.approx([1.0] * 6, abs=0.05)
    assert "; on slow section" in found.sentence
    unseen = found.of_type("other")
    assert 1.0 < unseen.factors[0] < 1.15
    assert unseen.errors[0] > 2 * found.of_type("slow").errors[0]


def test_a_section_slower_on_two_types_counts_as_slower_on_a_third() -> None:
    ratios: tuple[StageRatios, ...] = ()
    for name in ("fast", "slow"):
        ratios = seen([1, 1, 1.5, 1, 1, 1], [[0, 3], [0, 2, 4], [0, 2, 3, 5]], 60, 1, name, ratios)
    factors = correction_of(ratios, TYPES).of_type("other").factors
    assert factors[2] == max(factors)
    assert 1.1 < factors[2] < 1.5


def test_a_type_that_ran_only_some_sections_is_uncertain_of_the_others() -> None:
    some, every = (correction_of(seen([1.3] * 6, cuts, 60, 0, "slow")[:first], TYPES) for cuts, first in PARTS)
    assert some.of_type("slow").errors[5] > 1.5 * every.of_type("slow").errors[5]
    assert some.of_type("slow").errors[0] == pytest.approx(every.of_type("slow").errors[0], rel=0.05)


PARTS = (([[0, 3]], 1), ([[0, 3]], 2))
"""Cuts, and the number of their stages that are observed."""


def test_no_type_is_forgotten_because_another_has_many_stages() -> None:
    cuts = [[0, *range(2, 6)], [0, 1, *range(3, 6)], [0, 1, 2, 4, 5], [0, 1, 2, 3, 5], [0, 3]]
    ratios = seen([1.3] * 6, [[0, 3]], 3, 0, "slow")
    ratios = seen([1.0] * 6, cuts, 3, 1, "fast", ratios)
    assert len(ratios) <= MOST_STAGES
    assert [entry.num for entry in ratios if entry.node_type == "slow"] == [3, 3]
    assert correction_of(ratios, TYPES).of_type("slow").factors[0] > 1.2


@pytest.mark.parametrize("seed", range(5))
def test_a_slower_section_is_found_where_different_cuts_tell_it_apart(seed: int) -> None:
    ratios = seen([1, 1, 1.3, 1, 1, 1], [[0, 3], [0, 2, 4], [0, 2, 3, 5]], 60, seed)
    found = correction_of(ratios, TIMES)
    assert found.factors[2] == pytest.approx(1.3, abs=0.05)
    others = [factor for index, factor in enumerate(found.factors) if index != 2]
    assert max(abs(factor - 1) for factor in others) < 0.08
    assert is_material(None, found, ratios, TIMES)


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_not_found(seed: int) -> None:
    for num in (1, 3, 10, 100):
        ratios = seen([1.0] * 6, [[0, 3]], num, seed)
        found = correction_of(ratios, TIMES)
        assert not is_material(None, found, ratios, TIMES), f"{num} observations of nothing but noise: {found.sentence}"


def test_a_slowdown_of_all_measured_sections_applies_to_unmeasured_ones() -> None:
    found = correction_of((StageRatios(first_section=0, end_section=3, num=200, mean=math.log(1.2)),), TIMES)
    assert found.factors[5] == pytest.approx(1.2, abs=0.02)
    assert found.errors[3] > found.errors[0]


def test_few_observations_are_shrunk_to_one_and_uncertain() -> None:
    once, often = (
        correction_of((StageRatios(first_section=0, end_section=6, num=num, mean=math.log(1.2)),), TIMES)
        for num in (1, 100)
    )
    assert 1 < once.factors[0] < often.factors[0] < 1.21
    assert once.errors[0] > often.errors[0]


def test_a_machine_that_grows_slower_after_long_is_found_slower() -> None:
    entry = StageRatios(first_section=0, end_section=6)
    for ratio in (0.0,) * 100_000 + (0.3,) * 2_000:
        entry = entry.with_one(ratio)
    assert correction_of((entry,), TIMES).factors[0] == pytest.approx(math.exp(0.3), rel=0.01)
    assert entry.variance < 0.01**2


def test_a_change_within_the_error_or_of_little_is_not_material() -> None:
    often, once = (StageRatios(first_section=0, end_section=1, num=num) for num in (400, 1))
    told = Correction(factors=(1.2,), errors=(0.01,))
    little, much = (Correction(factors=(factor,), errors=(0.01,)) for factor in (1.22, 1.3))
    assert not is_material(told, little, (often,), {"": (1.0,)})
    assert not is_material(told, much, (once,), {"": (1.0,)})
    assert is_material(told, much, (often,), {"": (1.0,)})


EVERY = "every"
"""Every type of GPU is slower than profiled."""


def trained(make: Callable[..., Script] = Script) -> Script:
    plans = {2: make_plan(2, 1), 3: make_plan(3, 1), 4: make_plan(2, 2)}
    script = make(plans=plans, expected_nodes=4, section_compute_s=SECTIONS_S)
    script.ready("n0", "n1", "n2", "n3")
    script.reshaped()
    return script


def tell_times(script: Script, slower: float, num: int = 40, slow_type: str = "") -> list[NoteCorrection]:
    """Report times of every member several times, with section 5, one type of GPU, or all slower than profiled.

    Returns the corrections that the controller reported.
    """
    told: list[NoteCorrection] = []
    assert script.state.plan is not None
    for _ in range(num):
        times = []
        for slot in script.state.slots:
            stage = script.state.plan.stages[slot.stage]
            times_s = script.state.config.compute_s[stage.node_type]
            named = slow_type in (EVERY, stage.node_type)
            is_slow = {index: named if slow_type else index == 5 for index in stage.sections}
            device_s = sum(times_s[index] * (slower if is_slow[index] else 1) for index in stage.sections)
            times.append(
                WorkerTimes(
                    worker=slot.worker, generation=script.state.generation, compute_s=(99.0,), device_s=(device_s,)
                )
            )
        told += [act for act in script.tell(ComputeTimesSeen(times=tuple(times))) if isinstance(act, NoteCorrection)]
    return told


def test_a_correction_is_reported_only_when_it_changes() -> None:
    script = trained()
    assert tell_times(script, 1.0) == []
    told = tell_times(script, 3.0, 200)
    assert 1 <= len(told) < 10
    assert script.state.measured.correction == told[-1].correction
    assert told[-1].correction.factors[5] > told[-1].correction.factors[0]


def test_corrections_count_at_the_next_shape_and_cause_none() -> None:
    script = trained()
    generation = script.state.generation
    tell_times(script, 3.0)
    assert script.state.phase is Phase.TRAINING
    assert script.state.generation == generation
    assert script.state.config.factors == ()
    script.tell(WorkerLost(worker=script.members[-1], cause="revoked"))
    while script.state.generation == generation:
        script.aborted()
    assert script.state.config.factors == script.state.measured.correction.factors
    planned = script.state.config.plans[script.state.plan.num_workers]
    assert script.state.plan.expected.mini_batch_s > planned.expected.mini_batch_s


def test_workers_that_share_cores_teach_nothing() -> None:
    """What neighbours on the same cores, the manager too, take is no property of a section."""
    for num_cores, learns in ((4, False), (5, True)):
        script = trained(partial(Script, num_cores=num_cores))
        assert bool(tell_times(script, 3.0)) is learns
        assert bool(script.state.measured.stage_ratios) is learns
        config = script.state.config
        learned_elsewhere = config.corrected((3.0,) * 6)
        assert (learned_elsewhere.best_plan(4) != config.best_plan(4)) is learns


@pytest.mark.parametrize(("slower_now", "kept"), [(1.0, False), (1.5, True)])
def test_a_correction_that_misled_about_the_next_shape_is_dropped(slower_now: float, kept: bool) -> None:
    script = trained()
    tell_times(script, 1.5, 100, slow_type=EVERY)
    assert min(script.state.measured.correction.factors) > 1.3
    generation = script.state.generation
    script.tell(WorkerLost(worker=script.members[-1], cause="revoked"))
    while script.state.generation == generation:
        script.aborted()
    script.reshaped()
    told = tell_times(script, slower_now, 5, slow_type=EVERY)
    assert script.state.measured.forecasts.are_worse is not kept
    assert bool(told) is not kept
    assert (script.state.measured.correction.factors == (1.0,) * 6) is not kept


SHAPES = {depth: make_plan(depth, 1) for depth in range(2, 7)}


def forecast_errors(seed: int, num_cores: int | None = None, jump: float = 1.0) -> tuple[float, float]:
    """Return the errors (of logarithms) of the forecasts of four shapes, summed: corrected ones, and the profile's own.

    A worker is lost after each shape, which was observed once to eight times. Sections differ from the profile, all
    alike or each on its own; on the way, the time of all is multiplied once by ``jump``. Where cores are shared, the
    neighbours of each shape take another part of them.
    """
    draw = random.Random(seed)
    common, own, jump_at = draw.choice([0, 0.4]), draw.choice([0, 0.2]), draw.choice([3, 4, 5])
    level = draw.gauss(0, common)
    factors = [math.exp(level + draw.gauss(0, own)) for _ in SECTIONS_S]

    def compute_s(stage: StagePlan) -> float:
        return sum(SECTIONS_S[index] * factors[index] for index in stage.sections)

    script = Script(plans=SHAPES, expected_nodes=6, section_compute_s=SECTIONS_S, num_cores=num_cores)
    script.ready(*(f"n{index}" for index in range(6)))
    corrected = profiled = 0.0
    for depth in range(6, 1, -1):
        script.reshaped()
        plan, planned_s = script.state.plan, SHAPES[depth].expected.mini_batch_s
        slowest_s = max(sum(SECTIONS_S[index] for index in stage.sections) for stage in plan.stages)
        true_s = planned_s * max(map(compute_s, plan.stages)) / slowest_s
        if depth < 6:
            corrected += abs(math.log(plan.expected.mini_batch_s / true_s))
            profiled += abs(math.log(planned_s / true_s))
        noise, taken = draw.choice([0.01, 0.03, 0.1]), draw.uniform(1, 1.5) if num_cores else 1.0
        for _ in range(draw.choice([1, 4, 8])):
            times = [
                WorkerTimes(
                    worker=slot.worker,
                    generation=script.state.generation,
                    compute_s=(taken * compute_s(plan.stages[slot.stage]) * math.exp(draw.gauss(0, noise)),),
                )
                for slot in script.state.slots
            ]
            script.tell(ComputeTimesSeen(times=tuple(times)))
        if depth == jump_at:
            factors = [jump * factor for factor in factors]
        generation = script.state.generation
        script.tell(WorkerLost(worker=script.members[-1], cause="revoked"))
        while depth > 2 and script.state.generation == generation:
            script.aborted()
    return corrected, profiled


@pytest.mark.slow
def test_in_no_history_is_a_corrected_forecast_worse_than_the_profiles_own() -> None:
    """Beyond the change that counts as material; a jump of the machines' speed, which nobody foresees, misleads once.

    Where cores are shared, the forecast is the profile's.
    """
    for jump in (1.0, 1.4):
        errors = [forecast_errors(seed, jump=jump) for seed in range(20)]
        excess = [corrected - profiled for corrected, profiled in errors]
        assert max(excess) <= MATERIAL + math.log(jump), (jump, excess)
        assert sum(excess) < -0.3 * sum(profiled for _, profiled in errors)
    for corrected, profiled in (forecast_errors(seed, num_cores=6) for seed in range(5)):
        assert corrected == pytest.approx(profiled)


def mixed(make: Callable[..., Script] = Script) -> Script:
    """Return a script with two fast and three slow workers in one shape."""
    plans = [
        make_unequal((2, 1, "fast"), *kinds) for kinds in ([], [(1, 1, "slow")], [(2, 1, "slow")], [(3, 1, "slow")])
    ]
    script = make(
        plans={plan.pool: plan for plan in plans},
        expected_nodes=5,
        section_compute_s=SECTIONS_S,
        type_compute_s={name: TYPES[name] for name in ("fast", "slow")},
    )
    script.ready("f0", "f1", node_type="fast")
    script.ready("s0", "s1", "s2", node_type="slow")
    script.reshaped()
    return script


def after_a_loss(script: Script) -> str:
    """Return the shape after the loss of one slow worker."""
    generation = script.state.generation
    script.tell(WorkerLost(worker="s2", cause="revoked"))
    while script.state.generation == generation:
        script.aborted()
    return f"{script.state.plan.shape} on {script.state.plan.pool}"


def test_a_type_slower_than_profiled_is_left_out_if_that_helps() -> None:
    script = mixed()
    assert script.state.plan.shape == "2x1 + 3x1"
    assert tell_times(script, 1.0) == []
    told = tell_times(script, 4.0, 100, "slow")
    assert 1 <= len(told) < 10
    correction = script.state.measured.correction
    assert correction == told[-1].correction
    assert min(correction.of_type("slow").factors) > 2
    assert max(correction.of_type("fast").factors) < 1.1
    assert after_a_loss(mixed()) == "2x1 + 2x1 on fast=2,slow=2"
    assert after_a_loss(script) == "2x1 on fast=2"
    assert script.state.config.type_factors["slow"] == correction.of_type("slow").factors


def test_a_slow_workers_times_teach_nothing() -> None:
    script = trained()
    workers = {
        name: entry.model_copy(update={"node": NodeState.SUSPECT}) for name, entry in script.state.workers.items()
    }
    script.state = script.state.model_copy(update={"workers": workers})
    assert tell_times(script, 3.0, 1) == []
    assert script.state.measured.stage_ratios == ()


class JournalledScript(Script):
    def __init__(self, journal: Journal, **fields: object) -> None:
        super().__init__(**fields)
        self.journal = journal
        journal.append_config(0.0, self.state.config)

    def tell(self, event: Event, at_s: float | None = None) -> tuple[Action, ...]:
        actions = super().tell(event, at_s)
        assert self.last is not None
        self.journal.append_decision(self.now_s, event, self.last)
        return actions


@pytest.mark.parametrize("snapshot_every", [1, 10_000])
def test_a_journal_with_corrections_replays_to_the_same_state(
    snapshot_every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "SNAPSHOT_EVERY", snapshot_every)
    with Journal.open(tmp_path / JOURNAL) as journal:
        script = mixed(partial(JournalledScript, journal))
        tell_times(script, 4.0, 100, "slow")
        assert after_a_loss(script) == "2x1 on fast=2"
        assert replay(journal) == script.state
        assert replay(journal).config.best_plan(Pool.parse("fast=2,slow=2")) == script.state.plan
    report = read_report(tmp_path)
    assert report.correction == script.state.measured.correction
    assert "; on slow sections 0-1 take " in summarise(report)
