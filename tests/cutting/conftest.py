from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from morph.cutting import CutModel, Section
from morph.cutting.deferred_init.construct import training_mode
from morph.jobs.job import Job

Result = tuple[Tensor, dict[str, Tensor]]


class Samples(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self, items: list[dict[str, Tensor]]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.items[index]


def sgd(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in parameters], lr=0.1)


def make_job(model: Callable[[], nn.Module], loss: Any, items: list[dict[str, Tensor]], **fields: Any) -> Job:
    values = {"name": "test", "batch_size": 12, **fields}
    return Job(model=model, loss=loss, dataset=lambda: Samples(items), optimizer=sgd, **values)


def stack(items: list[dict[str, Tensor]], num_samples: int) -> dict[str, Tensor]:
    return {key: torch.stack([item[key] for item in items[:num_samples]]) for key in items[0]}


def run_sections(
    cut_model: CutModel,
    initial: Mapping[str, Tensor],
    batch: dict[str, Tensor],
    before: Callable[[int], object] = lambda index: None,
) -> Result:
    """Run forward, recompute and backward of each section, with detached inputs; return loss and gradients."""
    parameters = {name: initial[name].clone().requires_grad_() for name in cut_model.parameter_specs}
    state = {**parameters, **{name: initial[name].clone() for name in cut_model.buffer_specs}}
    stored: list[tuple[Tensor, ...]] = [()]
    for section in cut_model.sections:
        before(section.index)
        with torch.enable_grad():  # as in the runtime: otherwise attention may use another kernel
            outputs = section(_leaves(section, stored[-1]), batch, state)[: len(section.outputs)]
        stored.append(tuple(output.detach() for output in outputs))
    gradients: list[Tensor | None] = [torch.ones(()), *(None for _ in cut_model.metric_names)]
    for section in reversed(cut_model.sections):
        inputs = _leaves(section, stored[section.index])
        before(section.index)
        with torch.enable_grad():
            outputs = section(inputs, batch, state)[: len(section.outputs)]
        for output, again, spec in zip(stored[section.index + 1], outputs, section.outputs, strict=True):
            assert torch.equal(output, again)
            assert tuple(again.shape) == spec.shape
            assert again.dtype == spec.dtype
            assert again.requires_grad == spec.requires_grad
            assert again.is_contiguous()
        pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad]
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        gradients = [value.grad for value in inputs]
    return stored[-1][0], {name: value.grad for name, value in parameters.items() if value.grad is not None}


def _leaves(section: Section, values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(
        value.detach().requires_grad_(spec.requires_grad) for value, spec in zip(values, section.inputs, strict=True)
    )


def build_whole(job: Job, initial: Mapping[str, Tensor]) -> nn.Module:
    model = training_mode(job.model())
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if name in initial and not (isinstance(value, nn.Parameter) and not value.requires_grad):
                value.copy_(initial[name])
    return model


def run_whole(job: Job, initial: Mapping[str, Tensor], batch: dict[str, Tensor]) -> Result:
    """Return the loss and the gradients of the model in one piece."""
    model = build_whole(job, initial)
    loss = job.loss(model, batch)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tools() -> ModuleType:
    """This module's functions."""
    return sys.modules[__name__]
