from __future__ import annotations

from pathlib import Path

import pytest
import torch

from calibrate.optimizer import measure_units
from calibrate.sections import SectionMeasurement, measure_sections
from morph.cutting import CutModel, ExportedJob, cut, export_job
from morph.data import MicroBatchLoader
from morph.job import Job, load_job

JOB = f"{Path(__file__).parents[2]}/configs/jobs/tiny_gpt.py:job"
LENGTH, WIDTH = 16, 32


@pytest.fixture(scope="module")
def prepared() -> tuple[Job, ExportedJob, CutModel]:
    job = load_job(JOB)
    exported = export_job(job)
    return job, exported, cut(exported, num_sections=6, micro_batch_size=2)


@pytest.fixture(scope="module")
def measured(prepared: tuple[Job, ExportedJob, CutModel]) -> dict[str, SectionMeasurement]:
    job, exported, model = prepared
    loader = MicroBatchLoader(job.dataset(), 0, job.batch_size, 2)
    return measure_sections(job, model, exported.initial_parameters, loader, num_samples=6, budget_s=0.0)


def test_each_kind_of_section_is_measured_once(
    prepared: tuple[Job, ExportedJob, CutModel], measured: dict[str, SectionMeasurement]
) -> None:
    model = prepared[2]
    assert measured.keys() == {section.signature for section in model.sections}
    assert len(measured) == 4
    for entry in measured.values():
        assert entry.forward.num_samples == entry.backward.num_samples == 5
        assert 0 < entry.forward.median_s < 1
        assert 0 < entry.backward.median_s < 1


def test_stored_bytes_are_those_of_one_sample(
    prepared: tuple[Job, ExportedJob, CutModel], measured: dict[str, SectionMeasurement]
) -> None:
    sections = prepared[2].sections
    by_index = [measured[section.signature] for section in sections]
    assert by_index[0].input_bytes_per_sample == LENGTH * 8
    assert by_index[1].input_bytes_per_sample == LENGTH * WIDTH * 4
    assert by_index[5].input_bytes_per_sample == LENGTH * WIDTH * 4 + LENGTH * 8
    for entry in by_index:
        assert LENGTH * WIDTH * 4 < entry.activation_bytes_per_sample < 40 * LENGTH * WIDTH * 4


def test_measuring_changes_no_initial_parameter(prepared: tuple[Job, ExportedJob, CutModel]) -> None:
    job, exported, model = prepared
    before = {name: tensor.clone() for name, tensor in exported.initial_parameters.items()}
    measure_units(job, model, exported.initial_parameters, num_samples=3)
    for name, tensor in exported.initial_parameters.items():
        assert torch.equal(tensor, before[name])
        assert not tensor.requires_grad


def test_the_optimizer_state_of_adam_is_twice_the_parameters(prepared: tuple[Job, ExportedJob, CutModel]) -> None:
    job, exported, model = prepared
    units = measure_units(job, model, exported.initial_parameters, num_samples=3)
    assert units.keys() == {unit.id for unit in model.units}
    for unit in model.units:
        size = sum(exported.initial_parameters[name].numel() * 4 for name in unit.parameters)
        steps = 4 * len(unit.parameters)
        assert units[unit.id].optimizer_bytes == 2 * size + steps
        assert units[unit.id].step.median_s > 0
