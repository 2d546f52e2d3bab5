"""Data sets that do not divide into whole steps: bridges train and evaluate them as the user's own loop does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import morph
from morph.contract.errors import JobError
from morph.jobs.job import Job, ShortStep
from tests.training.shapes import ShapesCrew, rows_of, totals_of_all, trained_alone

pytest.importorskip("transformers")
lightning = pytest.importorskip("pytorch_lightning")

from tests.trainers import tail_jobs  # noqa: E402 (it needs both)

JOBS = tail_jobs.__file__
SHAPES = [
    pytest.param("means", 9, 2, 2, id="one batch of one"),
    pytest.param("means", 11, 2, 2, id="a whole batch and one of one"),
    pytest.param("means", 27, 4, 1, id="not accumulated"),
    pytest.param("items", 11, 2, 2, id="by items"),
    pytest.param("sums", 11, 2, 2, id="means that are added up"),
    pytest.param("sums", 9, 2, 3, id="fewer means that are added up", marks=pytest.mark.long),
    pytest.param("means", 10, 3, 3, id="three batches, then one", marks=pytest.mark.long),
]


@pytest.mark.slow
@pytest.mark.parametrize(("net", "size", "batch", "accumulated"), SHAPES)
def test_short_steps_are_the_trainers(net: str, size: int, batch: int, accumulated: int, tmp_path: Path) -> None:
    trainer = tail_jobs.trainer(net, size, batch, accumulated)
    steps, job = morph.hf.num_steps(trainer), morph.hf.job(trainer, name="tail")
    trainer = tail_jobs.trainer(net, size, batch, accumulated)
    trainer.train()
    assert trainer.state.global_step == steps
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    path = f"{JOBS}:trainer_job(net={net!r}, size={size}, batch={batch}, accumulated={accumulated})"
    same_as_alone(job, path, steps, tmp_path, losses if net != "sums" else None, trainer.model)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:.*does not have many workers", "ignore:.*LeafSpec:FutureWarning", "ignore:The `srun` command is available"
)
@pytest.mark.parametrize(
    ("size", "batch", "accumulated", "drop_last"),
    [
        (11, 2, 2, False),
        (27, 4, 1, False),
        pytest.param(9, 2, 2, False, marks=pytest.mark.long),
        pytest.param(8, 2, 2, False, marks=pytest.mark.long),
        (11, 2, 2, True),
    ],
)
def test_short_steps_are_lightnings(size: int, batch: int, accumulated: int, drop_last: bool, tmp_path: Path) -> None:
    module, loader = tail_jobs.parts(size, batch, drop_last=drop_last)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=3,
        accumulate_grad_batches=accumulated,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, loader)
    path = f"{JOBS}:module_job(size={size}, batch={batch}, accumulated={accumulated}, drop_last={drop_last})"
    job = tail_jobs.module_job(size, batch, accumulated, drop_last=drop_last)
    same_as_alone(job, path, trainer.global_step, tmp_path, None, module)


def same_as_alone(
    job: Job, path: str, steps: int, folder: Path, losses: list[float] | None, model: torch.nn.Module
) -> None:
    """Train in Morph, and compare the loss of each step, and the weights at the end."""
    found: list[float] = []
    m = job.micro_batch_size or job.batch_size // 2
    weights = trained_alone(path, steps, folder / "morph", found.append, num_sections=2, micro_batch_size=m)
    if losses is not None:
        assert found == pytest.approx(losses, abs=1e-5)
    expected = dict(model.named_parameters())
    assert weights.keys() == expected.keys()
    for name, value in weights.items():
        assert torch.allclose(value, expected[name], rtol=1e-6, atol=1e-6), name


@pytest.mark.slow
def test_every_sample_is_evaluated_whatever_the_shape(crew: ShapesCrew, tmp_path: Path) -> None:
    """51 samples in micro-batches of 2: loss and metrics are those of the Trainer's own evaluations."""
    given = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 8, "num_train_epochs": 2}
    trainer = tail_jobs.trainer("means", 18, 8, 1, **given)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    arguments = ", ".join(f"{name}={value!r}" for name, value in given.items())
    path = f"{JOBS}:trainer_job(net='means', size=18, batch=8, accumulated=1, {arguments})"
    alone = crew.train(path, [("1x1", 6)], tmp_path / "alone")
    shapes = crew.train(path, [("2x1", 3), ("1x3", 6)], tmp_path / "shapes", lose=True)
    assert shapes.digests == alone.digests
    job, evaluated = morph.hf.job(trainer, name="tail"), [totals_of_all(one) for one in (alone, shapes)]
    assert evaluated[0] == evaluated[1]
    assert [totals.version for totals in evaluated[0]] == [2, 4, 6]
    for totals, entry in zip(evaluated[0], logged, strict=True):
        assert totals.values["loss"] == pytest.approx(entry["eval_loss"], abs=1e-5)
        assert job.eval_metrics is not None
        samples = {name: rows_of(array) for name, array in totals.samples.items()}
        assert job.eval_metrics(samples) == {name: entry[f"eval_{name}"] for name in ("count", "last", "right")}
        assert entry["eval_count"] == 51


def test_batches_of_a_loop_are_micro_batches_only_where_they_have_to_be() -> None:
    whole, short = (tail_jobs.module_job(size, 2, 2) for size in (8, 11))
    assert (whole.epoch_end, whole.micro_batch_size) == ("short", None)
    assert (short.epoch_end, short.micro_batch_size) == (ShortStep(of_whole=True), 2)
    with pytest.raises(JobError, match="epoch_end: is not right"):
        morph.hf.job(tail_jobs.trainer("means", 9, 2, 2), epoch_end="long")
