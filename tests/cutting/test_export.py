from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from morph.contract.errors import ExportError, JobError
from morph.cutting import cut, export_job
from morph.cutting.exporting.functional import _in_place_nodes

ITEMS = [{"x": torch.randn(6, generator=torch.Generator().manual_seed(index))} for index in range(8)]


def mean_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).mean()


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)


class BranchesOnData(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.sum() > 0:  # refused here
            x = x * 2
        return self.second(x)


class FixesTheBatch(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).view(3, 2, 3).flatten(1))


class UsesNumpy(Layers):
    def forward(self, x: Tensor) -> Tensor:
        shift = torch.from_numpy(self.first(x).detach().numpy() * 2)  # refused here
        return self.second(x) + shift


class WritesThroughAView(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        out = torch.zeros_like(x)
        out[:, :3] = x[:, 3:]
        out[:, 3:] = x[:, :3].relu_()
        out += x
        return self.second(out)


class WritesInPlace(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        before = x * 3
        x.add_(1.0).mul_(2.0)
        x += before
        return self.second(x)


def line_with(module: type, text: str) -> str:
    lines, start = inspect.getsourcelines(module)
    return f"{inspect.getsourcefile(module)}:{start + next(i for i, line in enumerate(lines) if text in line)}"


@pytest.mark.parametrize(
    ("model", "place", "reason"),
    [
        (BranchesOnData, "# refused here", "depends on values in a tensor"),
        (UsesNumpy, "# refused here", "cannot be exported"),
        (FixesTheBatch, ".view(3, 2, 3)", "fixes the number of samples"),
    ],
)
def test_a_refused_model_names_the_line_and_a_way_out(tools: Any, model: type, place: str, reason: str) -> None:
    with pytest.raises(ExportError) as caught:
        export_job(tools.make_job(model, mean_loss, ITEMS))
    assert str(caught.value).startswith(line_with(model, place))
    assert reason in str(caught.value)
    assert caught.value.allowed
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("model", [WritesInPlace, WritesThroughAView])
def test_in_place_operations_become_functional(tools: Any, model: Callable[[], nn.Module]) -> None:
    job = tools.make_job(model, mean_loss, ITEMS)
    exported = export_job(job)
    assert list(_in_place_nodes(exported.graph_module)) == []
    batch = tools.stack(ITEMS, 4)
    expected_loss, expected = tools.run_whole(job, exported.initial_parameters, batch)
    loss, gradients = tools.run_sections(
        cut(exported, num_sections=3, micro_batch_size=4), exported.initial_parameters, batch
    )
    assert torch.equal(loss, expected_loss)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name])


def test_a_loss_that_fails_names_its_line(tools: Any) -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["y"]).mean()

    with pytest.raises(JobError, match=r"test_export\.py:\d+: loss failed: KeyError: 'y'"):
        export_job(tools.make_job(UsesNumpy, loss, ITEMS))


def test_a_loss_that_is_not_a_scalar_is_refused(tools: Any) -> None:
    with pytest.raises(JobError, match=r"loss: does not return a scalar \(got '\(3, 6\)'\)"):
        export_job(tools.make_job(WritesInPlace, lambda model, batch: model(batch["x"]), ITEMS))


def test_a_model_that_is_not_a_module_is_refused(tools: Any) -> None:
    with pytest.raises(JobError, match="model: does not return a module"):
        export_job(tools.make_job(lambda: 3, mean_loss, ITEMS))


def test_samples_of_different_shapes_are_refused(tools: Any) -> None:
    items = [{"x": torch.zeros(6)}, {"x": torch.zeros(7)}]
    with pytest.raises(JobError, match="differs between samples"):
        export_job(tools.make_job(WritesInPlace, mean_loss, items))
