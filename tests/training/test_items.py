"""Items of every kind train equally in every shape, and as in a plain loop over the same batches."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from manager.controller.state.evaluations import totals_of
from morph import Loss
from morph.cutting import cut, export_job
from morph.data.loader import order_of, recipe_of
from morph.data.packing import packs
from morph.jobs.job import load_job
from morph.preflight.data_check import check_data
from morph.runtime.workloads.evaluation import Evaluator
from tests.system.harness import cut_for_workers
from tests.training.shapes import ShapesCrew, parameters_of, spec_of, trained_alone
from tests.training.training_jobs import MICRO_BATCH_SIZE, NUM_SECTIONS, Texts, lengths, next_token_loss, padded_by_hand

NUM_STEPS = 5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nested", "collated", "varying_with_dropout", "packed"])
def test_every_shape_gives_the_same_bits(crew: ShapesCrew, tmp_path: Path, name: str) -> None:
    alone = crew.train(name, [("1x1", NUM_STEPS)], tmp_path / "alone")
    shapes = crew.train(name, [("2x2", 2), ("1x3", 4), ("2x1", NUM_STEPS)], tmp_path / "shapes", lose=True)
    assert shapes.digests == alone.digests
    assert shapes.losses == alone.losses
    assert shapes.evaluations == alone.evaluations


@pytest.mark.slow
def test_an_evaluations_values_per_sample_are_in_the_datas_order(crew: ShapesCrew, tmp_path: Path) -> None:
    trained = crew.train("varying_told", [("1x2", 2)], tmp_path)
    found = [answer.evaluation for answer in trained.commits if answer.evaluation is not None]
    totals = totals_of(found)
    assert totals is not None
    job = load_job(spec_of("varying_told"))
    model = cut(export_job(job), num_sections=NUM_SECTIONS, micro_batch_size=MICRO_BATCH_SIZE)
    assert Evaluator(job, model, torch.device("cpu")).finish(totals).values == {"right": 1.0}


@pytest.mark.slow
def test_nested_items_train_as_a_plain_loop_over_whole_mini_batches(tmp_path: Path) -> None:
    weights = trained_alone("nested", NUM_STEPS, tmp_path)
    job = load_job(spec_of("nested"))
    order, recipe, data = order_of(job), recipe_of(job), job.dataset()
    for name, value in plain_loop(job, lambda step: batch_of(recipe, data, order.mini_batch(step))).items():
        assert torch.allclose(weights[name], value, rtol=1e-6, atol=1e-6), name


@pytest.mark.slow
def test_texts_of_varying_length_train_as_a_plain_loop_over_whole_mini_batches(tmp_path: Path) -> None:
    by_hand = trained_alone("varying_by_hand", NUM_STEPS, tmp_path / "by_hand")
    weights = trained_alone("varying", NUM_STEPS, tmp_path / "varying")
    assert all(torch.equal(value, by_hand[name]) for name, value in weights.items())
    check_varying(weights, "varying")


@pytest.mark.slow
def test_texts_of_varying_length_in_shards_train_alike_in_every_shape(crew: ShapesCrew, tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    texts = [Texts()[index]["tokens"].tolist() for index in range(len(Texts()))]
    for begin in range(0, len(texts), 6):
        lines = "".join(f"{json.dumps(tokens)}\n" for tokens in texts[begin : begin + 6])
        (folder / f"{begin:03d}.jsonl").write_text(lines)
    job = spec_of(f"texts_in_shards(folder='{folder}')")
    handed = cut_for_workers(job, NUM_SECTIONS, MICRO_BATCH_SIZE)
    alone = crew.train(job, [("1x1", NUM_STEPS)], tmp_path / "alone", cut=handed)
    shapes = crew.train(job, [("2x2", 2), ("1x3", 4), ("2x1", NUM_STEPS)], tmp_path / "shapes", lose=True, cut=handed)
    assert shapes.digests == alone.digests
    assert shapes.losses == alone.losses
    check_varying(parameters_of(alone.manifest, tmp_path / "alone"), job)


def check_varying(weights: dict[str, torch.Tensor], name: str) -> None:
    """Check that weights equal those of a plain loop over whole mini-batches, padded by hand."""
    job = load_job(spec_of(name))
    order, texts = order_of(job), job.dataset()
    plain = plain_loop(job, lambda step: padded_by_hand([texts[index] for _, index in order.mini_batch(step)]))
    for parameter, value in plain.items():
        assert torch.allclose(weights[parameter], value, rtol=1e-6, atol=1e-6), parameter


@pytest.mark.slow
def test_packed_texts_train_as_a_plain_loop_over_texts_by_themselves(tmp_path: Path) -> None:
    weights = trained_alone("packed", NUM_STEPS, tmp_path)
    job, order = load_job(spec_of("packed")), order_of(load_job(spec_of("packed")))
    texts, packs_of = Texts(), packs(lengths(Texts()), 16)

    def batch(step: int) -> list[dict[str, torch.Tensor]]:
        return [texts[number] for _, index in order.mini_batch(step) for number in packs_of[index]]

    for name, value in plain_loop(replace(job, loss=loss_of_texts), batch, job).items():
        assert torch.allclose(weights[name], value, rtol=1e-6, atol=1e-6), name


def loss_of_texts(model: torch.nn.Module, batch: list[dict[str, torch.Tensor]]) -> Loss:
    """Return the sum of the losses of single texts."""
    parts = [next_token_loss(model, {name: entry[None] for name, entry in text.items()}) for text in batch]
    return Loss(sum(part.total for part in parts), sum(part.weight for part in parts))  # type: ignore[arg-type]


def batch_of(recipe: Any, data: Any, places: Any) -> Any:
    return recipe.nest(recipe.read(data, places), places, "dataset()")


def plain_loop(job: Any, batch: Any, as_trained: Any = None) -> dict[str, torch.Tensor]:
    """Return the weights after ``NUM_STEPS`` steps of a loop over whole mini-batches.

    ``as_trained``: the job whose initial weights the loop takes.
    """
    model = job.model()
    model.load_state_dict(dict(export_job(as_trained or job).initial_parameters), strict=False)
    optimizer = job.optimizer(list(model.named_parameters()))
    for step in range(NUM_STEPS):
        result = job.loss(model, batch(step))
        optimizer.zero_grad()
        (result if isinstance(result, torch.Tensor) else result.mean()).backward()
        optimizer.step()
    return dict(model.named_parameters())


@pytest.mark.parametrize("name", ["nested", "collated", "varying_with_dropout", "varying_by_hand", "packed"])
def test_such_data_passes_the_checks(name: str) -> None:
    check_data(load_job(spec_of(name)))
