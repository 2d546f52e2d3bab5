from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from calibrate.computing.meter import deal, meter_of
from calibrate.computing.optimizer import measure_units
from calibrate.computing.sections import SectionMeasurement, measure_benches
from calibrate.computing.subject import Subject, load_subject
from calibrate.timing.clocks import clock_of
from calibrate.timing.samples import Sampling
from morph.cutting import CutModel
from morph.jobs.job import LossScaling
from tests.forked_modules import SUBPROCESS

pytestmark = pytest.mark.slow

FEW = Sampling(budget_s=9.0, most=3)
JOB = f"{Path(__file__).parents[2]}/configs/jobs/tiny_gpt.py:job"
LENGTH, WIDTH = 16, 32


@pytest.fixture(scope="module")
def subject() -> Subject:
    return load_subject(JOB, torch.device("cpu"), 6)


@pytest.fixture(scope="module")
def model(subject: Subject) -> CutModel:
    return subject.cut(2)


@pytest.fixture(scope="module")
def measured(subject: Subject, model: CutModel) -> dict[str, SectionMeasurement]:
    with meter_of(subject, [subject.device]) as meter:
        return meter(model, Sampling(budget_s=0.0, most=6))


def test_each_kind_of_section_is_measured_once(model: CutModel, measured: dict[str, SectionMeasurement]) -> None:
    assert measured.keys() == {section.signature for section in model.sections}
    assert len(measured) == 4
    for entry in measured.values():
        assert entry.forward.num_samples == entry.backward.num_samples == 5
        assert entry.forward.median_s > 0
        assert entry.backward.median_s > 0


def test_stored_bytes_are_those_of_one_sample(model: CutModel, measured: dict[str, SectionMeasurement]) -> None:
    by_index = [measured[section.signature] for section in model.sections]
    assert by_index[0].input_bytes_per_sample == LENGTH * 8
    assert by_index[1].input_bytes_per_sample == LENGTH * WIDTH * 4
    assert by_index[5].input_bytes_per_sample == LENGTH * WIDTH * 4 + LENGTH * 8
    for entry in by_index:
        assert LENGTH * WIDTH * 4 < entry.activation_bytes_per_sample < 40 * LENGTH * WIDTH * 4


def test_the_peak_holds_more_than_what_is_saved_for_the_backward(
    model: CutModel, measured: dict[str, SectionMeasurement]
) -> None:
    for section in model.sections:
        entry = measured[section.signature]
        gradients = sum(math.prod(model.parameter_specs[name][0]) * 4 for name in section.parameters)
        assert 2 * entry.activation_bytes_per_sample < entry.peak_bytes
        assert entry.peak_bytes < 8 * entry.activation_bytes_per_sample + 4 * gradients


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch itself triggers it on import
def test_sections_that_are_compiled_are_measured_with_the_memory_of_their_operations(
    subject: Subject, measured: dict[str, SectionMeasurement], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    subject = replace(subject, job=replace(subject.job, compile=True))
    model = subject.cut(2)
    kind = model.sections[0].signature
    benches = subject.benches(model, {kind})
    found = measure_benches(benches, 2, clock_of(subject.device), Sampling(budget_s=0.0, most=5))
    assert found[kind].peak_bytes == measured[kind].peak_bytes
    assert found[kind].activation_bytes_per_sample == measured[kind].activation_bytes_per_sample
    assert found[kind].forward.num_samples == 5


def test_measuring_changes_no_initial_parameter(subject: Subject, model: CutModel) -> None:
    initial = subject.loaded.exported.initial_parameters
    before = {name: initial[name].clone() for name in initial}
    measure_units(subject, model, FEW)
    for name in initial:
        assert torch.equal(initial[name], before[name])
        assert not initial[name].requires_grad


def test_the_optimizer_state_of_adam_is_twice_the_parameters(subject: Subject, model: CutModel) -> None:
    initial = subject.loaded.exported.initial_parameters
    units = measure_units(subject, model, FEW)
    assert units.keys() == {unit.id for unit in model.units}
    for unit in model.units:
        size = sum(initial[name].numel() * 4 for name in unit.parameters)
        steps = 4 * len(unit.parameters)
        assert units[unit.id].optimizer_bytes == 2 * size + steps
        assert units[unit.id].step.median_s > 0


def test_a_step_is_measured_with_all_that_the_job_does_in_it(subject: Subject, model: CutModel) -> None:
    """Clipping, a schedule and a loss scale are measured too, because workers use them."""
    made = []

    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        made.append(torch.optim.lr_scheduler.StepLR(optimizer, 1))
        return made[-1]

    job = replace(subject.job, clip_grad_norm=0.5, lr_scheduler=schedule, loss_scaling=LossScaling())
    units = measure_units(replace(subject, job=job), model, FEW)
    assert {entry.step.num_samples for entry in units.values()} == {3}
    assert made
    # two warm up, three are measured, and one is for the memory
    assert all(scheduler.last_epoch == 6 for scheduler in made)


def test_kinds_are_dealt_so_that_devices_finish_together() -> None:
    kinds = [SimpleNamespace(signature=name, cost=cost) for name, cost in [("a", 1.0), ("b", 4.0), ("c", 2.0)]]
    assert deal(kinds, 2) == [["b"], ["c", "a"]]  # type: ignore[arg-type]
    assert deal(kinds, 9) == [["b"], ["c"], ["a"]]  # type: ignore[arg-type]


def test_several_devices_measure_side_by_side_the_same_kinds(
    subject: Subject,
    model: CutModel,
    measured: dict[str, SectionMeasurement],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Measure on two "devices" that are both the CPU: sizes must be equal, and times mean nothing."""
    monkeypatch.setattr("calibrate.helpers.crew.subprocess", SUBPROCESS)
    with meter_of(subject, [subject.device, subject.device]) as meter:
        found = meter(model, Sampling(budget_s=0.0, most=5))
    assert found.keys() == measured.keys()
    for kind, entry in found.items():
        assert entry.activation_bytes_per_sample == measured[kind].activation_bytes_per_sample
        assert entry.peak_bytes == measured[kind].peak_bytes
        assert entry.forward.median_s > 0
