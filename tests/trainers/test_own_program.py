"""The comparison of a bridge's job with the user's own program: what it finds, and that it leaves the program alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import morph
from morph.contract.errors import JobError
from morph.jobs.job import Job, OwnProgram
from morph.preflight.own_program import compare_with_program
from tests.trainers.test_trainer import small_trainer

pytest.importorskip("transformers")


class Classifier(torch.nn.Module):
    """Has dropout in a module and in a configuration, and a mean loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = torch.nn.Linear(3, 8), torch.nn.Linear(8, 2)
        self.dropout, self.attention_dropout = torch.nn.Dropout(0.5), 0.5

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = torch.nn.functional.dropout(self.first(x).tanh(), self.attention_dropout, self.training)
        return {"loss": torch.nn.functional.cross_entropy(self.second(self.dropout(hidden)), labels)}


def own_program(tmp_path: Path, change: Callable[[Job], dict[str, Any]] | None = None, **given: Any) -> OwnProgram:
    """Return a Trainer's program; ``change`` gives fields that its job has wrongly."""
    settings = {"learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.3, "gradient_accumulation_steps": 2}
    settings |= {"per_device_train_batch_size": 4, "warmup_steps": 1, "max_steps": 20}
    trainer = small_trainer(tmp_path, **{"model": Classifier(), **settings, **given})
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
        return model.state_dict(), torch.get_rng_state(), np.random.get_state()[1].tolist(), held  # type: ignore[index]

    def others() -> Any:
        files = sorted(path.name for path in tmp_path.rglob("*"))
        settings = repr(trainer.args), schedule.state_dict(), model.dropout.p, model.training
        return files, settings, random.getstate(), trainer.state.global_step, trainer.callback_handler.callbacks[:]

    before = deepcopy(tensors()), others()
    assert compare_with_program(program, 8)[0]
    assert str(tensors()) == str(before[0])
    assert others() == before[1]
