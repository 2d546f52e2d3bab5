"""Models whose forward, or a hook, keeps a tensor are cut, and train as the whole model does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from morph.cutting import cut, export_job
from morph.cutting.exporting.exported_job import GraphJob

pytestmark = pytest.mark.slow

ITEMS = [{"x": torch.randn(6, generator=torch.Generator().manual_seed(index))} for index in range(8)]
OF_HOOKS: dict[str, Tensor] = {}


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        self.keep(h, x)
        return self.third(torch.tanh(self.second(h)))

    def keep(self, h: Tensor, x: Tensor) -> None:
        pass


class Attribute(Layers):
    def keep(self, h: Tensor, x: Tensor) -> None:
        self.features = h  # where no constructor has set one


class Containers(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.kept = {"inner": [], "object": SimpleNamespace()}

    def keep(self, h: Tensor, x: Tensor) -> None:
        self.kept["inner"][:] = [h.detach(), x]
        self.kept["object"].features = h
        self.last = SimpleNamespace(features=(h, {"x": x}))


class ReallyBuilt(Attribute):
    def __init__(self) -> None:
        super().__init__()
        self.first.bias.data = torch.from_numpy(self.first.bias.detach().numpy() * 1)  # which no tape records


class Auxiliary(Layers):
    def keep(self, h: Tensor, x: Tensor) -> None:
        self.kept = h.square().mean()


def hooked_into_an_attribute() -> nn.Module:
    model = Layers()

    def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
        model.kept = output.square().mean()

    model.first.register_forward_hook(hook)
    return model


def hooked_into_a_global() -> nn.Module:
    model = Layers()
    model.first.register_forward_hook(lambda module, inputs, output: OF_HOOKS.update(first=output))
    return model


def of_result(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().mean()


def of_attribute(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return of_result(model, batch) + 0.3 * model.kept


def of_global(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return of_result(model, batch) + 0.3 * OF_HOOKS["first"].square().mean()


@pytest.mark.parametrize(("model", "loss"), [
    (Attribute, of_result), (Containers, of_result), (ReallyBuilt, of_result), (Auxiliary, of_attribute),
    (hooked_into_an_attribute, of_attribute), (hooked_into_a_global, of_global),
])  # fmt: skip
def test_kept_tensors_change_no_gradient_in_sections(tools: Any, model: Any, loss: Any) -> None:
    job = tools.make_job(model, loss, ITEMS, num_sections=2)
    exported = export_job(job)
    assert isinstance(exported, GraphJob)
    batch, initial = tools.stack(ITEMS, 5), exported.initial_parameters
    found, gradients = tools.run_sections(cut(exported, num_sections=2, micro_batch_size=5), initial, batch)
    plain, plain_gradients = tools.run_whole(job, initial, batch)
    assert torch.equal(found, plain)
    assert gradients.keys() == plain_gradients.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, plain_gradients[name]), name
