"""The comparison of a bridge's job with the user's own program: what it finds, and that it leaves the program alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import morph
from morph.contract.errors import JobError, MorphError
from morph.cutting import export_job
from morph.jobs.job import Job, OwnProgram
from morph.preflight.own_program import compare_with_program, trained_steps
from morph.trainers.arguments import ARGUMENTS, COMPARED
from tests.trainers.test_trainer import small_trainer

transformers = pytest.importorskip("transformers")


class Classifier(torch.nn.Module):
    """Has dropout in a module and in a configuration, and a mean loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = torch.nn.Linear(3, 8), torch.nn.Linear(8, 2)
        self.dropout, self.attention_dropout = torch.nn.Dropout(0.5), 0.5
        self.config = transformers.PretrainedConfig()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden = torch.nn.functional.dropout(self.first(x).tanh(), self.attention_dropout, self.training)
        logits = self.second(self.dropout(hidden))
        loss = {} if labels is None else {"loss": torch.nn.functional.cross_entropy(logits, labels)}
        return {**loss, "logits": logits}


SETTINGS = {"learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.3, "gradient_accumulation_steps": 2}
SETTINGS |= {"per_device_train_batch_size": 4, "warmup_steps": 1, "max_steps": 20}


def own_program(tmp_path: Path, change: Callable[[Job], dict[str, Any]] | None = None, **given: Any) -> OwnProgram:
    """Return a Trainer's program; ``change`` gives fields that its job has wrongly."""
    trainer = small_trainer(tmp_path, **{"model": Classifier(), **SETTINGS, **given})
    program = morph.hf.job(trainer).own_program
    assert program is not None

    def run(num_steps: int, most_samples: int) -> Any:
        own = program.run(num_steps, most_samples)
        if change is None or isinstance(own, str):
            return own
        return replace(own, job=replace(own.job, **change(own.job)))

    return replace(program, run=run)


@pytest.mark.parametrize(
    ("given", "samples"),
    [({}, 8), ({}, 4), ({"optim": "sgd", "lr_scheduler_type": "cosine"}, 8), ({"bf16": True}, 8)],
)
def test_a_job_that_trains_what_its_trainer_does_is_equal(given: dict[str, Any], samples: int, tmp_path: Path) -> None:
    compared, text = compare_with_program(own_program(tmp_path, **given), samples)
    assert compared
    assert text.startswith(f"equal to trainer.train() over 3 steps of {samples} samples, dropout off")


HONOURED_ELSEWHERE = {
    *("warmup_ratio", "fp16", "torch_compile", "torch_compile_backend", "torch_compile_mode", "length_column_name"),
    *("dataloader_num_workers", "eval_strategy", "eval_steps", "load_best_model_at_end", "metric_for_best_model"),
    *("greater_is_better", "run_name"),
}
"""Arguments that change no step, or need lengths or a GPU."""


def test_every_honoured_argument_is_compared_by_step_or_changes_none() -> None:
    honoured = {name for name, rule in ARGUMENTS.items() if rule.how == "honoured"}
    compared = {name for given in COMPARED for name in given}
    assert compared <= honoured
    assert honoured - compared == HONOURED_ELSEWHERE


@pytest.mark.slow
@pytest.mark.parametrize("given", COMPARED)
def test_losses_and_weights_are_the_trainers_by_step(given: dict[str, Any], tmp_path: Path) -> None:
    """Over more than an epoch, whose last step is short."""
    data = [{"x": torch.randn(3), "labels": index % 2} for index in range(19)]
    given = {"per_device_train_batch_size": 4, "num_train_epochs": 3, **given}
    trainer = small_trainer(tmp_path, model=Classifier(), train_dataset=data, **given)
    program = morph.hf.job(trainer).own_program
    own = program.run(morph.hf.num_steps(trainer), 8)
    assert not isinstance(own, str)
    ours = trained_steps(own.job, own.job.micro_batch_size or own.job.batch_size // 2, len(own.losses))
    tolerance = 1e-3 if "bf16" in given else 1e-5
    assert ours.losses == pytest.approx(own.losses, abs=tolerance)
    assert len(set(own.losses)) > 2
    for name, weight in own.weights.items():
        assert torch.allclose(ours.weights[name], weight, atol=tolerance), name


def compute_loss(weigh: Callable[[Any], Any]) -> type:
    """Return a Trainer whose loss depends on its state."""

    def loss(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        found = model(**inputs)
        weight = weigh(self)
        return (found["loss"] * weight, found) if return_outputs else found["loss"] * weight

    return type("Own", (transformers.Trainer,), {"compute_loss": loss})


@pytest.mark.parametrize(
    ("weigh", "named"),
    [
        (lambda trainer: 1 + trainer.state.global_step / 4, None),
        (lambda trainer: min(1.0, (1 + trainer.state.global_step) / 4), None),
        (lambda trainer: 1 + trainer.state.epoch, None),
        (lambda trainer: 1 - trainer.state.global_step / trainer.state.max_steps, None),
        (lambda trainer: sum(p.square().sum() for p in trainer.model.parameters()), None),
        (lambda trainer: trainer.optimizer.param_groups[0]["lr"], r"py:\d+: self\.optimizer: is not known"),
        (lambda trainer: 1 if trainer.state.best_metric is None else 2, r"py:\d+: self\.state\.best_metric: is not"),
        (lambda trainer: 2 if trainer.state.global_step > 2 else 1, r"branch.*self\.state\.global_step .*py:\d+"),
    ],
)
def test_what_the_loss_reads_of_the_trainer_is_live_or_refused(weigh: Any, named: str | None, tmp_path: Path) -> None:
    if named is None:
        assert compare_with_program(own_program(tmp_path, kind=compute_loss(weigh)), 8)[0]
        return
    trainer = small_trainer(tmp_path, model=Classifier(), kind=compute_loss(weigh))
    with pytest.raises(MorphError, match=named):
        export_job(morph.hf.job(trainer))


@pytest.mark.parametrize("weights", [[1.0, 5.0], None])
def test_a_loss_weighted_by_class_is_refused_with_its_remedy(weights: list[float] | None, tmp_path: Path) -> None:
    class Weighted(transformers.Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            labels = inputs.pop("labels")
            logits = model(**inputs)["logits"]
            found = torch.nn.functional.cross_entropy(
                logits, labels, None if weights is None else torch.tensor(weights)
            )
            return (found, logits) if return_outputs else found

    given = {"kind": Weighted, "gradient_accumulation_steps": 1, "warmup_steps": 0}
    program = own_program(tmp_path, **given)
    if weights is None:
        assert compare_with_program(program, 8)[0]
        return
    for size in (8, 2):  # the remedy, also where a step of the comparison is smaller
        remedied = morph.hf.job(
            small_trainer(tmp_path, **{"model": Classifier(), **SETTINGS, **given}), micro_batch_size=4
        ).own_program
        assert remedied is not None
        assert compare_with_program(remedied, size)[0]
    with pytest.raises(JobError, match=r"allowed: micro_batch_size=4, with which it trains alike; .* by class"):
        compare_with_program(program, 8)


def with_group(job: Job, **changed: float) -> Callable[[Any], Any]:
    def optimizer(named: Any) -> Any:
        made = job.optimizer(named)
        for group in made.param_groups:
            group.update(changed)
        return made

    return optimizer


@pytest.mark.parametrize(
    ("change", "given", "named"),
    [
        (lambda job: {"loss": lambda model, batch: job.loss(model, batch) * 0.999}, {}, "loss of step 1"),
        (lambda job: {"sampler": lambda *place: job.sampler(*place)[::-1]}, {}, "loss of step 1"),
        (lambda job: {"lr_scheduler": None}, {}, "loss of step 2"),
        (lambda _: {"clip_grad_norm": None}, {"optim": "sgd"}, "weights differ after 3 steps"),
        (
            lambda job: {"optimizer": with_group(job, weight_decay=0.0)},
            {"learning_rate": 1e-5},
            "weights differ after 3 steps",
        ),
        (
            lambda job: {"optimizer": with_group(job, betas=(0.8, 0.999))},
            {"learning_rate": 1e-5},
            "weights differ after 3 steps",
        ),
    ],
)
def test_a_job_that_trains_otherwise_is_refused(
    change: Callable[[Job], dict[str, Any]], given: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(JobError, match=rf"trainer.train\(\): its job trains otherwise .*{named}"):
        compare_with_program(own_program(tmp_path, change, **given), 8)


def test_a_comparison_leaves_the_trainer_as_it_was(tmp_path: Path) -> None:
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    trainer = small_trainer(tmp_path, model=model, optimizers=(optimizer, schedule), per_device_train_batch_size=8)
    program = morph.hf.job(trainer).own_program
    assert program is not None

    def tensors() -> Any:
        held = (optimizer.state_dict()["param_groups"], list(map(id, optimizer.state)))
        return model.state_dict(), torch.get_rng_state().tolist(), np.random.get_state(legacy=False), held

    def others() -> Any:
        files = sorted(path.name for path in tmp_path.rglob("*"))
        settings = repr(trainer.args), schedule.state_dict(), model.dropout.p, model.training
        return files, settings, random.getstate(), trainer.state.global_step, trainer.callback_handler.callbacks[:]

    def run(*given: int, own: Callable[..., Any] = program.run) -> Any:
        for draw in (np.random.normal, random.random, partial(torch.randn, 1)):
            draw()
        return own(*given)

    before = deepcopy(tensors()), others()
    assert compare_with_program(replace(program, run=run), 8)[0]
    assert str(tensors()) == str(before[0])
    assert others() == before[1]
