"""Build the user's model and data and try the loss, before anything is exported: an error here is the job's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from morph.contract.errors import JobError, MorphError
from morph.cutting.construct import BuiltModel, build_model, build_really
from morph.cutting.locate import definition_line, user_line
from morph.cutting.recordable import quiet_fakes
from morph.cutting.refusal import first_line
from morph.data.loader import check_sample, stack_entry
from morph.job import Job

_EXAMPLE_SAMPLES = 3
_MAX_REAL_BYTES = 2 << 30
ResultT = TypeVar("ResultT")


class Whole(nn.Module):
    """The whole step of a micro-batch as one module: the loss of the model, then its metrics by name."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, dict[str, Tensor]], Any]) -> None:
        super().__init__()
        self.model = model
        self._loss = loss
        self.metric_names: list[str] = []
        """Of the latest run."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor | tuple[Tensor, ...]:
        """Return the loss, or (loss, metrics in order of their names)."""
        result = self._loss(self.model, dict(batch))
        if not isinstance(result, tuple):
            loss: Tensor = result
            return loss
        loss, metrics = result
        self.metric_names[:] = sorted(metrics)
        return (loss, *(metrics[name].detach().clone() for name in sorted(metrics)))


def built_model(job: Job) -> BuiltModel:
    """Build the job's model in training mode, fake where that is possible.

    Raises:
        JobError: it cannot be built, or is no module with something to train.
    """
    built = _run_users_code(lambda: build_model(job.model, job.seed), job, None, "model")
    model = built.model
    if not isinstance(model, nn.Module):
        raise JobError(
            "does not return a module",
            source="Job",
            field="model",
            value=type(model).__name__,
            allowed="torch.nn.Module",
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise JobError("has no trainable parameter", source="Job", field="model", allowed="at least one")
    model.train()
    return built


def try_loss(job: Job, built: BuiltModel, batch: dict[str, Tensor]) -> None:
    """Run the loss once: what the model keeps from its first call is there when it is exported.

    On a fake model a failure may be one of fakes alone; then the export decides.
    """
    entries = {key: built.like(entry) for key, entry in batch.items()}
    with torch.random.fork_rng(devices=[]):
        try:
            with built.running(), quiet_fakes():
                loss = job.loss(built.model, entries)
        except Exception as error:
            if built.tape is None:
                raise _users_error(error, job, built.model, "loss") from error
            return
    check_loss(loss)


def example_batch(job: Job) -> dict[str, Tensor]:
    """Stack the first samples; keys sorted, so that the order of graph inputs is known."""
    dataset = _run_users_code(job.dataset, job, None, "dataset")
    if len(dataset) == 0:
        raise JobError("is empty", source="Job", field="dataset", allowed="at least one sample")
    indices = [position % len(dataset) for position in range(_EXAMPLE_SAMPLES)]
    samples = [check_sample(_run_users_code(partial(dataset.__getitem__, i), job, None, "dataset"), i) for i in indices]
    return {key: stack_entry(samples, key) for key in sorted(samples[0])}


def _run_users_code(function: Callable[[], ResultT], job: Job, model: nn.Module | None, field: str) -> ResultT:
    try:
        return function()
    except MorphError:
        raise
    except Exception as error:
        raise _users_error(error, job, model, field) from error


def _users_error(error: Exception, job: Job, model: nn.Module | None, field: str) -> JobError:
    line = user_line(error, job, model) or definition_line(getattr(job, field))
    return JobError(f"{field} failed: {type(error).__name__}: {first_line(error)}", source=line)


def check_loss(result: object) -> None:
    """Refuse what is no scalar loss, or no loss with metrics.

    Raises:
        JobError: saying what was returned.
    """
    loss, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    shown = f"{tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        raise JobError(
            "does not return a scalar", source="Job", field="loss", value=shown, allowed="a tensor of shape ()"
        )
    if not loss.requires_grad:
        raise JobError("does not depend on the model's parameters", source="Job", field="loss")
    _check_metrics(metrics)


def _check_metrics(metrics: object) -> None:
    allowed = "(loss, {name: tensor of shape ()})"
    if not isinstance(metrics, Mapping):
        raise JobError(
            "returns no dict of metrics", source="Job", field="loss", value=type(metrics).__name__, allowed=allowed
        )
    for name, value in metrics.items():
        is_scalar = isinstance(value, Tensor) and value.dim() == 0 and not value.dtype.is_complex
        if not isinstance(name, str) or not is_scalar:
            shown = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise JobError(f"metric {name!r} is no scalar", source="Job", field="loss", value=shown, allowed=allowed)


def blame_the_job(job: Job, built: BuiltModel, batch: dict[str, Tensor]) -> None:
    """Run model and loss on real numbers, where they fit, so that an error of theirs is told as one."""
    if built.tape is None or _parameter_bytes(built.model) > _MAX_REAL_BYTES:
        return
    model = build_really(job.model, job.seed).train()
    with torch.random.fork_rng(devices=[]):
        check_loss(_run_users_code(lambda: job.loss(model, dict(batch)), job, model, "loss"))


def _parameter_bytes(model: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
