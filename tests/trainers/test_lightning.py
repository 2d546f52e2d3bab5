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
from morph.runtime.process.single import run_single
from tests.training.test_weighted_losses import parameters_of

lightning = pytest.importorskip("pytorch_lightning")

from tests.trainers import lightning_job  # noqa: E402 (it needs Lightning)
from tests.trainers.lightning_job import BATCH_SIZE, CLIP, Classifier, Settings, points  # noqa: E402

NUM_STEPS = 6


def trained_by_lightning(tmp_path: Path) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of Lightning's own loop."""
    losses: list[float] = []

    class Heard(lightning.Callback):
        def on_train_batch_end(self, _trainer: Any, _module: Any, outputs: Any, *_: Any) -> None:
            losses.append(float(outputs["loss"].detach()) * 2)

    module = lightning_job.module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=NUM_STEPS,
        accumulate_grad_batches=2,
        gradient_clip_val=CLIP,
        callbacks=[Heard()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, DataLoader(points(), batch_size=BATCH_SIZE))
    steps = [sum(losses[at : at + 2]) / 2 for at in range(0, len(losses), 2)]
    return steps, {name: value.detach() for name, value in module.named_parameters()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec:FutureWarning")
def test_losses_and_weights_are_those_of_lightning(tmp_path: Path) -> None:
    losses, weights = trained_by_lightning(tmp_path / "lightning")
    found: list[float] = []
    manifest = run_single(
        f"{lightning_job.__file__}:job",
        steps=NUM_STEPS,
        num_sections=2,
        micro_batch_size=2,
        checkpoint_url=str(tmp_path / "morph"),
        on_step=lambda _, loss: found.append(loss),
    )
    assert found == pytest.approx(losses, abs=1e-6)
    for name, value in parameters_of(manifest, tmp_path / "morph").items():
        assert torch.allclose(value, weights[name], rtol=1e-5, atol=1e-6), name


def test_what_a_step_logs_are_metrics() -> None:
    job = lightning_job.job()
    loss, metrics = job.loss(job.model(), (torch.randn(2, 5), torch.tensor([0, 2])))
    assert loss.ndim == 0
    assert metrics.keys() == {"accuracy"}
    assert (job.batch_size, job.clip_grad_norm, job.eval_every_steps) == (2 * BATCH_SIZE, CLIP, 2)


def padded(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    rows = torch.nn.utils.rnn.pad_sequence([x for x, _ in samples], batch_first=True, padding_value=7)
    return rows, torch.tensor([y for _, y in samples])


def test_lengths_follow_from_a_collate_fn_that_pads() -> None:
    data: Any = [(torch.arange(1 + index * 3 % 20), index % 3) for index in range(20)]
    job = morph.lightning.job(lightning_job.module(), DataLoader(data, batch_size=4, collate_fn=padded))
    assert (job.buckets, dict(job.padding)) == ((8, 16, 20), {"0": 7})
    assert job.lengths is not None
    assert job.lengths(data).tolist() == [len(x) for x, _ in data]
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
    given = Settings()
    vars(given).update(settings)
    with pytest.raises(JobError, match=named):
        morph.lightning.job(module(), DataLoader(data(), batch_size=2), trainer=given)
