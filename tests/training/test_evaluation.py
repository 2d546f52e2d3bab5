"""A loss that returns metrics: cut, run, reported."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from manager.controller.state.evaluations import mean_loss, mean_metrics
from manager.report.figures import EvaluationReader
from morph.contract.errors import JobError
from morph.contract.messages import Committed, Evaluation, MicroBatchLoss
from morph.contract.plan import shares
from morph.cutting import CutModel, cut, export_job
from morph.data import MicroBatchLoader
from morph.data.evaluation import EvaluationLoader
from morph.jobs.job import Job
from morph.runtime.step.stage import Stage
from morph.runtime.step.sums import MicroBatchSums, told_losses
from morph.runtime.workloads.evaluation import EvaluationStage, evaluation_sections
from morph.runtime.workloads.job_workload import check_training
from tests.training.training_jobs import (
    MICRO_BATCH_SIZE,
    NUM_SECTIONS,
    WIDTH,
    Net,
    Points,
    loss_with_metrics,
    measured,
    plain,
    warm_up,
)

pytestmark = pytest.mark.slow


def cut_job(job: Job) -> CutModel:
    return cut(export_job(job), num_sections=job.num_sections, micro_batch_size=MICRO_BATCH_SIZE)


def evaluate(job: Job, *, seed: int) -> tuple[Tensor, Tensor]:
    """Return the loss of one micro-batch without dropout, and that of the user's model in evaluation mode."""
    exported = export_job(job)
    model = cut(exported, num_sections=job.num_sections, micro_batch_size=MICRO_BATCH_SIZE)
    loader = EvaluationLoader(Points(500, 6), 0, job.dataset()[0], MICRO_BATCH_SIZE, None)
    parameters = {name: value.clone().requires_grad_() for name, value in exported.initial_parameters.items()}
    sections = evaluation_sections(model)
    stage = EvaluationStage(lambda _: sections, parameters, loader.load, "fp32", seed, 4)
    (loss,) = stage.forward(1, ())
    whole = job.model().eval()
    whole.load_state_dict({name: value.detach() for name, value in parameters.items()}, strict=False)
    with torch.no_grad():
        expected = job.loss(whole, loader.load(1, ("x", "y")))
    assert isinstance(expected, Tensor)
    return loss, expected


class Attention(Net):
    """Dropout of several kinds, also inside attention."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [samples, width] to the same shape."""
        x = nn.functional.alpha_dropout(torch.tanh(self.first(x)), 0.3, self.training)
        heads = self.second(x).view(-1, 1, 2, WIDTH // 2)
        probability = 0.4 if self.training else 0.0
        x = nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=probability).reshape(-1, WIDTH)
        x = nn.functional.dropout1d(x.unsqueeze(-1), 0.2, self.training).squeeze(-1)
        x = nn.functional.rrelu(x, training=self.training)
        out: Tensor = self.last(self.dropout(self.third(x)) + self.shift)
        return out


@pytest.mark.parametrize("model", [Net, Attention])
def test_dropout_of_every_kind_is_off(model: type[Net]) -> None:
    job = replace(plain, model=model)
    for seed in (0, 1):
        loss, expected = evaluate(job, seed=seed)
        assert torch.equal(loss, expected)


def test_training_sections_keep_their_dropout() -> None:
    model = cut_job(plain)
    before = [str(section.code.code) for section in model.sections]  # type: ignore[attr-defined]
    quiet = evaluation_sections(model)
    assert [str(section.code.code) for section in model.sections] == before  # type: ignore[attr-defined]
    assert [section.outputs for section in quiet] == [section.outputs for section in model.sections]
    assert [section.parameters for section in quiet] == [section.parameters for section in model.sections]


class InPlace(Net):
    """Writes into a view, so that the whole graph is rewritten, dropout included."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [samples, width] to the same shape."""
        x = nn.functional.alpha_dropout(torch.tanh(self.first(x)), 0.3, self.training)
        half = x[:, :2]
        half.mul_(2.0)
        out: Tensor = self.last(self.third(self.second(x)) + self.shift)
        return out


class Branching(Net):
    """A model that cannot be exported: the number of layers depends on the data."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [samples, width] to the same shape."""
        x = self.dropout(torch.tanh(self.first(x)))
        if x.detach().isfinite().all():
            x = self.dropout(torch.tanh(self.second(x)))
        x = self.dropout(torch.tanh(self.third(x))) + self.shift
        out: Tensor = self.last(x)
        return out


def test_a_model_cut_at_marks_is_evaluated_in_evaluation_mode() -> None:
    job = replace(plain, model=Branching, num_sections=2, cut_points=("third",))
    for seed in (0, 1):
        loss, expected = evaluate(job, seed=seed)
        assert torch.equal(loss, expected)
    model = cut_job(job)
    evaluation_sections(model)
    assert model.sections[0].code.whole.training  # type: ignore[attr-defined]


def test_dropout_that_cannot_be_switched_off_is_refused() -> None:
    with pytest.raises(JobError, match=r"eval_data: the dropout in section \d .* cannot be switched off"):
        check_training(
            replace(plain, model=InPlace, eval_data=Points, eval_every_steps=1), cut_job(replace(plain, model=InPlace))
        )


class Shaped(Points):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {key: value[:3] for key, value in super().__getitem__(index).items()}


class Keyless(Points):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": super().__getitem__(index)["x"]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"eval_data": Shaped}, "eval_data()[0]['x']: differs from the others (got '(3,) torch.float32')"),
        ({"eval_data": Keyless}, "eval_data()[0]['y']: differs from the others (got 'nothing')"),
        ({"eval_data": Points, "eval_samples": 99}, "eval_samples: is too large (got 99); allowed: 40"),
        ({"optimizer": lambda named: optim.LBFGS([p for _, p in named])}, "whose step needs a closure"),
        ({"lr_scheduler": optim.lr_scheduler.ReduceLROnPlateau}, "whose step needs a value"),
        ({"lr_scheduler": lambda o: None}, "lr_scheduler: does not return a scheduler"),
        (
            {"step_entry": "x"},
            "step_entry: names an entry of the batch for the number of the step, which is (8,) torch.float32 "
            "in a sample (got 'x'); allowed: a whole number in each sample, such as 0",
        ),
    ],
)
def test_settings_that_cannot_be_used_are_refused_before_anything_starts(fields: dict[str, Any], message: str) -> None:
    every = {"eval_every_steps": 2} if "eval_data" in fields else {}
    job = replace(plain, **fields, **every)
    with pytest.raises(JobError) as caught:
        check_training(job, cut_job(plain))
    assert message in str(caught.value)


def test_settings_that_can_be_used_pass() -> None:
    job = replace(plain, eval_data=Points, eval_every_steps=2, eval_samples=5, lr_scheduler=warm_up)
    check_training(job, cut_job(job))


@pytest.mark.parametrize(("total", "replicas"), [(5, 2), (1, 3), (6, 3), (4, 1)])
def test_each_micro_batch_is_evaluated_once(total: int, replicas: int) -> None:
    dealt = shares(total, replicas)
    assert len(dealt) == replicas
    assert [index for share in dealt for index in share] == list(range(total))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


def test_samples_that_do_not_fill_a_micro_batch_are_evaluated_in_a_smaller_one() -> None:
    loader = EvaluationLoader(Points(0, 7), 0, Points()[0], 2, None)
    assert [loader.size(number) for number in range(loader.num_micro_batches)] == [(None, 2)] * 3 + [(None, 1)]
    assert loader.shares == (1, 1, 1, 0.5)
    assert torch.equal(loader.load(3, ("x",))["x"], Points()[6]["x"][None])
    assert loader.load(3, ()) == {}
    assert EvaluationLoader(Points(0, 7), 0, Points()[0], 2, 4).shares == ()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"eval_data": Points}, "eval_every_steps: is not right; allowed: to be given together with eval_data"),
        ({"eval_every_steps": 3}, "eval_every_steps: is not right (got 3); allowed: to be given together"),
        ({"eval_samples": 3}, "eval_samples: is not right (got 3); allowed: to be given together with eval_data"),
        (
            {"eval_data": 3, "eval_every_steps": 1},
            "eval_data: is not a function (got 3); allowed: a function, such as lambda: MyDataset()",
        ),
        ({"clip_grad_norm": 0}, "clip_grad_norm: is not right (got 0); allowed: a number above 0, or None"),
        ({"clip_grad_norm": float("nan")}, "clip_grad_norm: is not right (got nan)"),
        ({"precision": "fp8"}, "precision: is not right (got 'fp8'); allowed: 'fp32', 'bf16' or 'fp16'"),
        ({"optimizer_device": "cuda"}, "optimizer_device: is not right (got 'cuda'); allowed: 'same' or 'cpu'"),
        ({"data_workers": -1}, "data_workers: is not right (got -1); allowed: a whole number from 0 to 64"),
        ({"data_workers": True}, "data_workers: is not right (got True); allowed: a whole number from 0 to 64"),
        ({"data_workers": 1.0}, "data_workers: is not right (got 1.0); allowed: a whole number from 0 to 64"),
        ({"data_workers": 65}, "data_workers: is not right (got 65); allowed: a whole number from 0 to 64"),
        (
            {"lr_scheduler": 0.1},
            "lr_scheduler: is not a function (got 0.1); allowed: a function, such as lambda optimizer: ",
        ),
        ({"loss_scaling": 65536.0}, "loss_scaling: is not right (got 65536.0); allowed: a morph.LossScaling, or None"),
    ],
)
def test_a_wrong_field_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError) as caught:
        replace(plain, **fields)
    assert message in str(caught.value)


NAMES = ("close", "early", "inputs", "loss_again", "shift")


@pytest.mark.parametrize("num_sections", [1, 2, NUM_SECTIONS])
def test_metrics_leave_the_last_section_as_the_code_makes_them(num_sections: int) -> None:
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
    (told,) = told_losses({2: stage.forward(2, ())}, model.metric_names, {})
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
        (lambda error: (error, [error]), "returns something other than a dict of metrics (got 'list')"),
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

    def take(share: Evaluation | None) -> None:
        reader.take(Committed(worker="w0", generation=1, version=4, evaluation=share))

    take(None)
    take(Evaluation(version=2, num_micro_batches=2, losses=(entry(1, 3.0, a=1.0),)))
    assert reader.all() == ()
    take(Evaluation(version=4, num_micro_batches=1, losses=(entry(0, 7.0),)))
    take(Evaluation(version=2, num_micro_batches=2, losses=(entry(0, 1.0, a=2.0),)))
    assert [(found.version, found.loss, found.metrics) for found in reader.all()] == [
        (2, 2.0, {"a": 1.5}),
        (4, 7.0, {}),
    ]
