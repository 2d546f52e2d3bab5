"""Tensors in bf16 across cuts: the same bits wherever stages begin, within a stage too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from calibrate.timing.bench import make_bench
from morph.contract.errors import JobError
from morph.cutting import CutModel, cut, export_job
from morph.cutting.cache.artefact import read_entry, write_entry
from morph.data import MicroBatchLoader
from morph.jobs.job import Job
from morph.runtime.step.stage import Stage
from morph.runtime.step.sums import MicroBatchSums
from tests.training.training_jobs import BATCH_SIZE, MICRO_BATCH_SIZE, NUM_SECTIONS, WIDTH, narrow, plain

CPU = torch.device("cpu")


def cut_of(job: Job) -> CutModel:
    return cut(export_job(job), num_sections=NUM_SECTIONS, micro_batch_size=MICRO_BATCH_SIZE)


@pytest.fixture(scope="module")
def model() -> CutModel:
    return cut_of(narrow)


def gradients(model: CutModel, begins: list[int], *, recompute: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and summed gradients of one micro-batch, by stages that begin at these sections."""
    initial = export_job(narrow).initial_parameters
    parameters = {name: value.clone().requires_grad_() for name, value in initial.items()}
    loader = MicroBatchLoader(narrow.dataset(), narrow.seed, BATCH_SIZE, MICRO_BATCH_SIZE)
    stages = [
        Stage(
            model,
            range(first, end),
            recompute=recompute,
            parameters=parameters,
            load_batch=lambda micro_batch, keys: loader.load(0, micro_batch, keys),
            seed=1,
            step=2,
            precision="fp32",
        )
        for first, end in zip(begins, [*begins[1:], NUM_SECTIONS], strict=True)
    ]
    values: tuple[Tensor, ...] = ()
    for stage in stages:
        values = stage.forward(3, tuple(value.clone() for value in values))
    found: dict[str, Tensor] = {}
    arriving: tuple[Tensor | None, ...] = (torch.ones(()),)
    for stage in reversed(stages):
        if recompute:
            stage.recompute(3)
        sink = MicroBatchSums(
            lambda _, name, gradient: found.update({name: gradient + found.get(name, 0)}), lambda _: None
        )
        arriving = stage.backward(3, arriving, sink)
        assert all(gradient is None or gradient.dtype == torch.bfloat16 for gradient in arriving)
    return values[0], found


def test_half_the_bytes_cross_each_cut_and_are_kept_and_the_loss_stays_wide(model: CutModel) -> None:
    usual = cut_of(plain)
    for section, whole in zip(model.sections[:-1], usual.sections[:-1], strict=True):
        assert {spec.dtype for spec in section.outputs if spec.requires_grad} == {torch.bfloat16}
        assert sum(spec.num_bytes for spec in section.outputs) * 2 == sum(spec.num_bytes for spec in whole.outputs)
    for before, behind in zip(model.sections, model.sections[1:], strict=False):
        assert before.outputs == behind.inputs
    assert model.sections[-1].outputs == usual.sections[-1].outputs
    assert model.fingerprint != usual.fingerprint
    assert [section.signature for section in model.sections] == [section.signature for section in usual.sections]


def test_calibration_runs_a_section_on_narrow_tensors(model: CutModel) -> None:
    initial = export_job(narrow).initial_state
    loader = MicroBatchLoader(narrow.dataset(), narrow.seed, BATCH_SIZE, MICRO_BATCH_SIZE)
    bench = make_bench(narrow, model.sections[1], initial, loader, CPU)
    assert bench.given_bytes() == MICRO_BATCH_SIZE * WIDTH * 2
    assert [output.dtype for output in bench.forward(0).outputs] == [torch.bfloat16]
    bench.both()


@pytest.mark.slow
@pytest.mark.parametrize("begins", [[0, 1, 2, 3], [0, 2]])
def test_gradients_have_the_same_bits_wherever_stages_begin(model: CutModel, begins: list[int]) -> None:
    loss, expected = gradients(model, [0], recompute=False)
    found_loss, found = gradients(model, begins, recompute=True)
    assert torch.equal(loss, found_loss)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not torch.equal(loss, gradients(cut_of(replace(narrow, boundary="same")), [0], recompute=False)[0])


def test_a_kept_cut_has_the_narrow_borders(model: CutModel) -> None:
    exported = export_job(narrow)
    again = read_entry(write_entry(exported, model, "/jobs"), "/jobs").model
    assert [section.outputs for section in again.sections] == [section.outputs for section in model.sections]
    assert again.fingerprint == model.fingerprint


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"boundary": "fp16"}, "boundary: is not right (got 'fp16'); allowed: 'same' or 'bf16'"),
        ({"master_weights": "fp32"}, "master_weights: is not right (got 'fp32'); allowed: True or False"),
    ],
)
def test_other_types_are_refused(fields: dict[str, str], told: str) -> None:
    with pytest.raises(JobError) as refused:
        replace(plain, **fields)  # type: ignore[arg-type]
    assert told in str(refused.value)
