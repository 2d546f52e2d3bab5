from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from morph.cutting import cut, export_job
from morph.jobs.job import load_job
from morph.runtime.step.stage import run_section, section_backward

TINY_GPT = f"{Path(__file__).parents[2]}/configs/jobs/tiny_gpt.py:job"


class Skips(nn.Module):
    """A model that reads the first layer's value, and a rounded one without a gradient, again at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        early = x = self.layers[0](x)
        steps = early.detach().round()
        for layer in self.layers[1:]:
            x = functional.gelu(layer(x)).transpose(0, 1).contiguous().transpose(0, 1)
        return (x * steps + early).mean()


ITEMS = [{"x": torch.randn(8, generator=torch.Generator().manual_seed(index))} for index in range(4)]


@pytest.mark.parametrize("num_sections", [2, 3, 5])
def test_values_that_pass_through_get_their_whole_gradient(tools: Any, num_sections: int) -> None:
    job = tools.make_job(Skips, lambda model, batch: model(batch["x"]), ITEMS)
    batch = tools.stack(ITEMS, 4)
    exported = export_job(job)
    expected_loss, expected = tools.run_whole(job, exported.initial_parameters, batch)
    sections = cut(exported, num_sections=num_sections, micro_batch_size=4).sections
    parameters = {name: tensor.clone().requires_grad_() for name, tensor in exported.initial_parameters.items()}
    runs, values = [], ()
    for section in sections:
        runs.append(run_section(section, values, batch, parameters))
        values = tuple(output.detach() for output in runs[-1].outputs)
    assert torch.equal(values[0], expected_loss)
    found: dict[str, Tensor] = {}
    gradients: tuple[Tensor | None, ...] = (torch.ones(()),)
    for section in reversed(sections):
        gradients = section_backward(section, runs[section.index], gradients, parameters, found.__setitem__)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name])
    flags = [spec.requires_grad for spec in sections[0].outputs]
    assert True in flags
    assert False in flags


@pytest.mark.slow
def test_training_section_by_section_learns() -> None:
    torch.set_num_threads(1)
    job = load_job(TINY_GPT)
    exported = export_job(job)
    model = cut(exported, num_sections=6, micro_batch_size=12)
    parameters = {name: nn.Parameter(tensor.clone()) for name, tensor in exported.initial_parameters.items()}
    optimizer = job.optimizer(parameters.items())
    dataset = job.dataset()
    losses = []
    for step in range(40):
        samples = [dataset[(12 * step + i) % len(dataset)] for i in range(12)]
        values: tuple[Tensor, ...] = ()
        for section in model.sections:
            values = section(values, {key: torch.stack([s[key] for s in samples]) for key in samples[0]}, parameters)
        values[0].backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(values[0].item())
    assert sum(losses[-5:]) < 0.75 * sum(losses[:5])
