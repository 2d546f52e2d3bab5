"""Jobs made from LightningModules: the losses and the weights of Lightning's own loop, and refusals by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import morph
from morph.contract.errors import JobError
from tests.training.shapes import trained_alone

lightning = pytest.importorskip("pytorch_lightning")

from tests.trainers import lightning_job  # noqa: E402 (it needs Lightning)
from tests.trainers.lightning_job import (  # noqa: E402
    BATCH_SIZE,
    CASES,
    CLIP,
    PADDING,
    QUIET,
    Case,
    Classifier,
    points,
    text_loader,
)

NUM_STEPS = 6


def trained_by_lightning(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses by step and the weights of Lightning's own loop."""
    losses: list[list[float]] = []

    class Heard(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, _module: Any, outputs: Any, *_: Any) -> None:
            accumulated = trainer.accumulate_grad_batches
            losses.append([*(losses.pop() if losses and len(losses[-1]) < accumulated else [])])
            losses[-1].append(float(outputs["loss"].detach()) * accumulated)

    module = lightning_job.module(case.kind)
    case.trainer(max_steps=NUM_STEPS, callbacks=[Heard()]).fit(module, case.loader())
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


def test_what_a_step_logs_are_metrics() -> None:
    job = lightning_job.job()
    loss, metrics = job.loss(job.model(), (torch.randn(2, 5), torch.tensor([0, 2])))
    assert loss.ndim == 0
    assert metrics.keys() == {"accuracy"}
    assert (job.batch_size, job.clip_grad_norm, job.eval_every_steps) == (2 * BATCH_SIZE, CLIP, 2)


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


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(points())


@pytest.mark.parametrize(
    ("module", "data", "settings", "named"),
    [
        (Manual, points, {}, "automatic_optimization"),
        (Hooked, points, {}, "Hooked.on_train_batch_start"),
        (TwoOptimizers, points, {}, "configure_optimizers.*one optimizer"),
        (ByEpoch, points, {}, "configure_optimizers.*a schedule by 1 epoch"),
        (Classifier, Stream, {}, "loader"),
        (Classifier, points, {"precision": "64-true"}, "precision.*bf16-mixed"),
        (Classifier, points, {"gradient_clip_algorithm": "value"}, "gradient_clip_algorithm"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_name(
    module: Callable[[], nn.Module], data: Callable[[], Any], settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(JobError, match=named):
        morph.lightning.job(module(), DataLoader(data(), batch_size=2), trainer=lightning.Trainer(**QUIET, **settings))
