"""Jobs made from LightningModules: the losses and the weights of Lightning's own loop, and refusals by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import morph
from morph.contract.errors import InputError, JobError
from morph.cutting import export_job
from morph.preflight.own_program import compare_with_program
from morph.trainers.lightning_rules import METHODS, TRAINER
from tests.training.shapes import trained_alone

lightning = pytest.importorskip("pytorch_lightning")

from tests.trainers import lightning_job  # noqa: E402 (it needs Lightning)
from tests.trainers.lightning_job import (  # noqa: E402
    BATCH_SIZE,
    CASES,
    CLIP,
    CLIPPED,
    PADDING,
    QUIET,
    Case,
    Classifier,
    points,
    text_loader,
)

# On a machine with Slurm, Lightning warns that the tests were not started by it.
pytestmark = pytest.mark.filterwarnings("ignore:The `srun` command is available")
NUM_STEPS = 6


def trained_by_lightning(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses by step and the weights of Lightning's own loop."""
    losses: list[list[float]] = []

    class Heard(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, _module: Any, outputs: Any, *_: Any) -> None:
            accumulated = trainer.accumulate_grad_batches
            losses.append([*(losses.pop() if losses and len(losses[-1]) < accumulated else [])])
            losses[-1].append(float(outputs["loss"].detach()) * accumulated)
            trainer.should_stop = trainer.global_step == NUM_STEPS

    module = lightning_job.module(case.kind)
    case.trainer(callbacks=[Heard()]).fit(module, case.loader())
    weights = {name: value.detach() for name, value in module.named_parameters()}
    return [sum(some) / len(some) for some in losses], weights


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:.*does not have many workers", "ignore:.*LeafSpec:FutureWarning", "ignore:The `srun` command is available"
)
@pytest.mark.parametrize("name", CASES)
def test_losses_and_weights_are_those_of_lightning(tmp_path: Path, name: str) -> None:
    """Texts are padded to the longest of a batch there, and to a bucket here."""
    losses, weights = trained_by_lightning(CASES[name])
    found: list[float] = []
    job = f"{lightning_job.__file__}:case(name={name!r})"
    parameters = trained_alone(job, NUM_STEPS, tmp_path / "morph", found.append, num_sections=2, micro_batch_size=2)
    assert found == pytest.approx(losses, abs=1e-6)
    for name, value in parameters.items():
        assert torch.allclose(value, weights[name], rtol=1e-5, atol=1e-6), name


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_steps_of_fit_are_compared_before_a_run(name: str) -> None:
    """Over an epoch of two steps, of which the second one is short, and the beginning of another epoch."""
    program = lightning_job.case(name).own_program
    assert program is not None
    compared, text = compare_with_program(program, 100)
    assert compared, text
    assert text.startswith("equal to Trainer.fit over 3 steps")


@pytest.mark.parametrize(
    "change",
    [
        lambda job: {"loss": lambda model, batch: job.loss(model, batch) * 1.001},
        lambda _: {"step_entry": None},
        lambda _: {"epoch_end": "fill"},
        lambda job: {"lr_scheduler": None},
    ],
)
def test_a_job_that_trains_otherwise_than_fit_is_refused(change: Callable[[Any], dict[str, Any]]) -> None:
    program = lightning_job.case("counters").own_program
    own = program.run(3, 100)
    assert not isinstance(own, str)
    wrong = replace(own, job=replace(own.job, **change(own.job)))
    with pytest.raises(JobError, match=r"Trainer\.fit: its job trains otherwise"):
        compare_with_program(replace(program, run=lambda *_: wrong), 100)


class AutoEncoder(lightning.LightningModule):
    """The first example of Lightning's documentation."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(28 * 28, 128), nn.ReLU(), nn.Linear(128, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 128), nn.ReLU(), nn.Linear(128, 28 * 28))

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        x = x.view(x.size(0), -1)
        loss = nn.functional.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class ImageClassifier(lightning.LightningModule):
    """Lightning's example of images: its network, loss and optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3, 1), nn.Conv2d(32, 64, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(self.conv2(self.conv1(x).relu()).relu(), 2)
        x = self.fc1(torch.flatten(self.dropout1(x), 1)).relu()
        return nn.functional.log_softmax(self.fc2(self.dropout2(x)), dim=1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.nll_loss(self(x), y.long())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.nll_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adadelta(self.parameters(), lr=1.0)


def words() -> Dataset[Any]:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(*(torch.randint(0, 50, (12, 8), generator=generator) for _ in range(2)))


def images() -> Dataset[Any]:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.rand(12, 1, 28, 28, generator=generator), torch.arange(12) % 10)


@pytest.mark.long
@pytest.mark.parametrize(
    ("module", "data", "refused"),
    [
        (AutoEncoder, images, None),
        (ImageClassifier, images, None),
        (lambda: demos("transformer").LightningTransformer(50), words, r"transformer\.py:\d+: .*cannot be exported"),
        (lambda: demos("lstm").LightningLSTM(50), words, "LightningLSTM.on_train_epoch_end"),
        (lambda: demos("boring_classes").BoringModel(), images, "configure_optimizers.*a schedule by 1 epoch"),
    ],
)
def test_examples_of_lightning_train_as_fit_does_or_are_refused_by_name(
    module: Callable[[], Any],
    data: Callable[[], Any],
    refused: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # one of them writes into the current folder
    torch.manual_seed(0)
    with pytest.raises(InputError, match=refused) if refused else nullcontext():
        program = morph.lightning.job(module(), DataLoader(data(), batch_size=4), num_sections=2).own_program
        assert program is not None
        compared, text = compare_with_program(program, 8)
        assert compared, text


def demos(name: str) -> Any:
    return import_module(f"pytorch_lightning.demos.{name}")


def test_what_a_step_logs_are_metrics() -> None:
    job = lightning_job.job()
    batch = job.collate_fn([(torch.randn(5), torch.tensor(index)) for index in (0, 2)])
    loss, metrics = job.loss(job.model(), batch)
    assert loss.ndim == 0
    assert metrics.keys() == {"accuracy"}
    assert (job.batch_size, job.clip_grad_norm, job.eval_every_steps) == (2 * BATCH_SIZE, CLIP, 2)


def test_a_metric_of_evaluations_is_not_named_after_training() -> None:
    class Named(Classifier):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log_dict({"train_acc": loss * 2, "train/right": loss, "training": loss, "train_loss": loss})
            return loss

    job = morph.lightning.job(Named(), text_loader(), trainer=lightning.Trainer(**QUIET), lengths=None)
    _, metrics = job.loss(job.model(), (torch.randn(4, 5), torch.tensor([0, 1, 2, 0])))
    assert metrics.keys() == {"accuracy", "acc", "right", "training"}


def test_lengths_follow_from_a_collate_fn_that_pads() -> None:
    job, data = lightning_job.case("texts"), text_loader().dataset
    assert (job.buckets, dict(job.padding)) == ((8, 16, 20), {"0": PADDING})
    assert job.lengths is not None
    assert job.lengths(data).tolist() == [len(x) for x, _ in data]  # type: ignore[attr-defined]
    with pytest.raises(JobError, match=r"loader\.collate_fn.*default_collate.*pads samples"):
        morph.lightning.job(lightning_job.module(), DataLoader(data, batch_size=4))


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Hooked(Classifier):
    def on_train_batch_start(self, *_: Any) -> None: ...


class TwoOptimizers(Classifier):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.layers[0], self.layers[2])]


class ByEpoch(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3)]


class Branches(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, 0) * (2.0 if self.current_epoch >= 1 else 1.0)


class Skips(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 2 else super().training_step(batch, 0)


class Never(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


class ReadsOptimizer(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, 0) * self.optimizers().param_groups[0]["lr"]


class ReadsTrainer(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, 0) * self.trainer.datamodule.weight


class CountsBatches(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, 0) * (1 + batch_idx)


class Stopped(Classifier):
    def configure_callbacks(self) -> Any:
        return [lightning.callbacks.EarlyStopping("accuracy")]


class Transferred(Classifier):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


class Judged(Classifier):
    def val_dataloader(self) -> Any:
        return DataLoader(points())

    def on_validation_epoch_end(self) -> None: ...


class OwnTrainer(lightning.Trainer):
    pass


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(points())


callbacks = lightning.callbacks


@pytest.mark.parametrize(
    ("module", "settings", "named"),
    [
        (Manual, {}, "automatic_optimization"),
        (Hooked, {}, "Hooked.on_train_batch_start"),
        (Transferred, {}, "Transferred.on_after_batch_transfer"),
        (Judged, {}, "Judged.on_validation_epoch_end"),
        (TwoOptimizers, {}, "configure_optimizers.*one optimizer"),
        (ByEpoch, {}, "configure_optimizers.*a schedule by 1 epoch"),
        (Stopped, {}, "callbacks.*EarlyStopping.*best=morph.Best"),
        (Classifier, {"precision": "64-true"}, "precision.*bf16-mixed"),
        (Classifier, {"gradient_clip_algorithm": "value"}, "gradient_clip_algorithm"),
        (Classifier, {"fast_dev_run": True}, "fast_dev_run"),
        (Classifier, {"overfit_batches": 2}, "overfit_batches"),
        (Classifier, {"max_time": {"hours": 1}}, "callbacks.*Timer.*--steps"),
        (Classifier, {"num_nodes": 2}, "num_nodes.*one device"),
        (Classifier, {"devices": 2}, "strategy.*DDP|devices.*2.*one device"),
        (Classifier, {"strategy": "ddp"}, "strategy.*DDP"),
        (Classifier, {"plugins": [lightning.plugins.DoublePrecision()]}, "precision.*64-true"),
        (Classifier, {"callbacks": [callbacks.StochasticWeightAveraging(0.1)]}, "callbacks.*StochasticWeightAver"),
        (Classifier, {"callbacks": [callbacks.GradientAccumulationScheduler({0: 8})]}, "callbacks.*constant accum"),
        (Classifier, {"callbacks": [lightning.Callback()]}, "callbacks.*'Callback'"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_name(
    module: Callable[[], nn.Module], settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(JobError, match=named):
        morph.lightning.job(module(), DataLoader(points(), batch_size=2), trainer=lightning.Trainer(**QUIET | settings))


@pytest.mark.parametrize(
    "loader",
    [DataLoader(Stream(), batch_size=2), DataLoader(points(), batch_sampler=[[0, 1], [2]]), [DataLoader(points())]],
)
def test_other_loaders_are_refused(loader: Any) -> None:
    with pytest.raises(JobError, match="loader: cannot be honoured"):
        morph.lightning.job(Classifier(), loader)


def test_other_trainers_are_refused() -> None:
    for trainer in (OwnTrainer(**QUIET), object()):
        with pytest.raises(JobError, match=f"trainer: cannot be honoured .got '{type(trainer).__name__}'"):
            morph.lightning.job(Classifier(), DataLoader(points(), batch_size=2), trainer=trainer)


@pytest.mark.parametrize(
    ("module", "settings", "named"),
    [
        (Branches, {}, r"test_lightning\.py:\d+.*branch.*self\.current_epoch \(.*test_lightning\.py:\d+\)"),
        (Skips, {}, r"test_lightning\.py:\d+.*branch.*batch_idx"),
        (Never, {}, r"Never\.training_step: returns None"),
        (ReadsOptimizer, {}, r"test_lightning\.py:\d+: self\.optimizers\(\).*configure_optimizers"),
        (ReadsTrainer, {}, r"test_lightning\.py:\d+: self\.trainer\.datamodule"),
        (CountsBatches, CLIPPED, r"test_lightning\.py:\d+: batch_idx: .*accumulate_grad_batches=1"),
    ],
)
def test_what_a_step_must_not_read_is_refused_at_its_line(
    module: Callable[[], nn.Module], settings: dict[str, Any], named: str
) -> None:
    loader, trainer = DataLoader(points(), batch_size=4), lightning.Trainer(**QUIET | settings)
    with pytest.raises(InputError, match=named):
        export_job(morph.lightning.job(module(), loader, trainer=trainer))


def test_every_argument_of_the_installed_lightning_is_in_the_table() -> None:
    assert {*signature(lightning.Trainer.__init__).parameters} - {"self"} <= TRAINER.keys()


def test_arguments_and_methods_of_a_newer_lightning_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    loader, trainer = DataLoader(points(), batch_size=4), lightning.Trainer(**QUIET)
    monkeypatch.delitem(TRAINER, "max_steps")
    morph.lightning.job(Classifier(), loader, trainer=trainer)
    with pytest.raises(JobError, match=r"max_steps: .*does not know this argument"):
        morph.lightning.job(Classifier(), loader, trainer=lightning.Trainer(**QUIET, max_steps=3))
    monkeypatch.delitem(METHODS, "configure_optimizers")
    with pytest.raises(JobError, match=r"Classifier\.configure_optimizers: .*overridden"):
        morph.lightning.job(Classifier(), loader)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"max_epochs": 3}, 48),
        ({"max_epochs": 3, "accumulate_grad_batches": 5}, 12),
        ({"max_epochs": 3, "max_steps": 7}, 7),
        ({"max_epochs": 2, "limit_train_batches": 0.25}, 8),
        ({"max_steps": 7}, 7),
        ({"max_epochs": None}, 16000),
    ],
)
def test_the_number_of_steps_is_that_of_the_trainer(settings: dict[str, Any], steps: int) -> None:
    loader, trainer = DataLoader(points(), batch_size=4), lightning.Trainer(**QUIET | settings)
    assert morph.lightning.num_steps(trainer, loader) == steps
