"""A loss that returns metrics: cut, run, reported."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manager.report.means import EvaluationReader, mean_loss, mean_metrics
from morph.contract.errors import JobError
from morph.contract.messages import Evaluation, MicroBatchLoss
from morph.cutting import cut, export_job
from morph.data import MicroBatchLoader
from morph.runtime.step.stage import Stage
from morph.runtime.step.sums import MicroBatchSums, told_losses
from tests.training.training_jobs import MICRO_BATCH_SIZE, NUM_SECTIONS, Net, loss_with_metrics, measured, plain

pytestmark = pytest.mark.slow

NAMES = ("close", "early", "inputs", "loss_again", "shift")


@pytest.mark.parametrize("num_sections", [1, 2, NUM_SECTIONS])
def test_metrics_come_out_of_the_last_section_as_the_users_code_makes_them(num_sections: int) -> None:
    job = replace(measured, model=_without_dropout)
    exported = export_job(job)
    model = cut(exported, num_sections=num_sections, micro_batch_size=MICRO_BATCH_SIZE)
    assert model.metric_names == NAMES
    loader = MicroBatchLoader(job.dataset(), job.seed, job.batch_size, MICRO_BATCH_SIZE)
    parameters = {name: value.clone().requires_grad_() for name, value in exported.initial_parameters.items()}
    stage = Stage(
        model,
        range(num_sections),
        recompute=False,
        parameters=parameters,
        load_batch=lambda micro_batch, keys: loader.load(0, micro_batch, keys),
        seed=0,
        step=0,
    )
    (told,) = told_losses({2: stage.forward(2, ())}, model.metric_names)
    found: dict[str, Tensor] = {}
    seeds = (torch.ones(()), *(None for _ in NAMES))
    sink = MicroBatchSums(lambda _, name, gradient: found.update({name: gradient + found.get(name, 0)}), lambda _: None)
    stage.backward(2, seeds, sink)

    whole = _without_dropout()
    whole.load_state_dict(dict(exported.initial_parameters), strict=False)
    loss, metrics = loss_with_metrics(whole, loader.load(0, 2, ("x", "y")))
    loss.backward()
    assert told.loss == loss.item()
    assert told.metrics == {name: metrics[name].item() for name in NAMES}
    for name, parameter in whole.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(found[name], parameter.grad, rtol=1e-6)


def _without_dropout() -> Net:
    net = Net()
    net.dropout.p = 0.0
    return net


def test_metrics_do_not_change_the_gradient() -> None:
    with_metrics, without = (cut(export_job(job), num_sections=2, micro_batch_size=2) for job in (measured, plain))
    assert without.metric_names == ()
    assert [unit.parameters for unit in with_metrics.units] == [unit.parameters for unit in without.units]
    assert [spec.requires_grad for spec in with_metrics.sections[-1].outputs] == [True, *(False for _ in NAMES)]


def returning(result: Any) -> Any:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        error = (model(batch["x"]) - batch["y"]).square().mean()
        return result(error)

    return loss


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda error: (error, {"a": error.item}), "metric 'a' is not a scalar"),
        (
            lambda error: (error, {"a": error.expand(2)}),
            "metric 'a' is not a scalar (got (2,)); allowed: (loss, {name:",
        ),
        (lambda error: (error, {3: error}), "metric 3 is not a scalar"),
        (lambda error: (error, [error]), "returns no dict of metrics (got 'list')"),
        (lambda error: (error, {}, {}), "does not return a scalar (got 'tuple')"),
        (lambda error: ({}, error), "does not return a scalar"),
    ],
)
def test_metrics_of_another_kind_are_refused(result: Any, message: str) -> None:
    with pytest.raises(JobError) as caught:
        export_job(replace(plain, loss=returning(result)))
    assert message in str(caught.value)


def entry(number: int, loss: float, **metrics: float) -> MicroBatchLoss:
    return MicroBatchLoss(micro_batch=number, loss=loss, metrics=metrics)


def test_means_count_each_micro_batch_once_and_keep_only_numbers() -> None:
    entries = [entry(0, 1.0, a=2.0, b=1.0), entry(1, 2.0, a=4.0, b=float("nan")), entry(0, 1.0, a=2.0, b=1.0)]
    assert mean_loss(entries) == 1.5
    assert mean_metrics(entries) == {"a": 3.0}
    assert mean_loss([entry(0, float("inf"))]) is None
    assert mean_metrics([]) == {}


def test_an_evaluation_counts_once_all_of_its_micro_batches_are_there() -> None:
    reader = EvaluationReader()
    reader.take(None)
    reader.take(Evaluation(version=2, num_micro_batches=2, losses=(entry(1, 3.0, a=1.0),)))
    assert reader.all() == ()
    reader.take(Evaluation(version=4, num_micro_batches=1, losses=(entry(0, 7.0),)))
    reader.take(Evaluation(version=2, num_micro_batches=2, losses=(entry(0, 1.0, a=2.0),)))
    assert [(found.version, found.loss, found.metrics) for found in reader.all()] == [
        (2, 2.0, {"a": 1.5}),
        (4, 7.0, {}),
    ]
