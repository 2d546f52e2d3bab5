from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from morph.contract.errors import ExportError
from morph.cutting import cut, export_job
from morph.cutting.cuts.analysis import analyse
from morph.cutting.exporting.exported_job import GraphJob
from morph.cutting.exporting.user_functions import UserFunction
from morph.tracing import check_dependencies

pytestmark = pytest.mark.slow

ITEMS = [
    {
        "x": torch.randn(6, generator=torch.Generator().manual_seed(index)),
        "y": torch.randn(1, generator=torch.Generator().manual_seed(100 + index)),
    }
    for index in range(8)
]


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return functional.mse_loss(model(batch["x"]), batch["y"])


class Reverse(torch.autograd.Function):
    """A gradient reversal, as in domain adversarial training; its result is a view of its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return -ctx.scale * gradient, None


class StraightThrough(torch.autograd.Function):
    """A function in the newer form, with a default value and a result without gradient."""

    @staticmethod
    def forward(x: Tensor, step: float = 0.5) -> tuple[Tensor, Tensor]:
        rounded = torch.round(x / step) * step
        return rounded, x - rounded

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Any:
        return gradient, None


class Joined(torch.autograd.Function):
    """Takes None, a list and a dtype; returns None and tensors; calls another function; its backward has a bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, masks: list[Tensor], to: torch.dtype) -> Any:
        ctx.save_for_backward(x, weight)
        out = Reverse.apply(x, 1.0) @ weight.t() * masks[0]
        return (out if bias is None else out + bias).to(to), None, torch.argmax(out, dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight * 3.0, gradient.t() @ x, None, None, None


reverse = Reverse.apply


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(self.between(self.first(x)))))

    def between(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Reversed(Layers):
    def between(self, x: Tensor) -> Tensor:
        return reverse(x, 0.5)


class ReversedByBatch(Layers):
    def between(self, x: Tensor) -> Tensor:
        return Reverse.apply(x, 2 / x.shape[0]) + Reverse.apply(x, x.shape[0])


class Rounded(Layers):
    def between(self, x: Tensor) -> Tensor:
        rounded, rest = StraightThrough.apply(x)
        return rounded + rest * self.second(x)


class RoundedWithoutGradient(Layers):
    def between(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target, _ = StraightThrough.apply(x, 0.25)
        return x * target


class Together(Layers):
    def between(self, x: Tensor) -> Tensor:
        mask = (x.detach() > 0).to(x.dtype)
        out, _, chosen = Joined.apply(x, self.second.weight, None, [mask], torch.float32)
        return out + Joined.apply(x, self.second.weight, self.second.bias, [mask], x.dtype)[0] * chosen[:, None]


KEPT = [Reversed, ReversedByBatch, Rounded, RoundedWithoutGradient, Together]


@pytest.mark.parametrize("num_sections", [1, 3])
@pytest.mark.parametrize("model", KEPT)
def test_a_function_with_its_own_backward_gives_the_gradients_of_the_plain_model(
    tools: Any, model: Callable[[], nn.Module], num_sections: int
) -> None:
    job = tools.make_job(model, loss, ITEMS)
    exported = export_job(job)
    batch = tools.stack(ITEMS, 4)
    expected_loss, expected = tools.run_whole(job, exported.initial_parameters, batch)
    model_in_sections = cut(exported, num_sections=num_sections, micro_batch_size=4)
    found_loss, found = tools.run_sections(model_in_sections, exported.initial_parameters, batch)
    assert torch.equal(found_loss, expected_loss)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-6, atol=0)


def test_a_reversed_gradient_has_the_opposite_sign_of_the_traced_one(tools: Any) -> None:
    class Plain(Reversed):
        def between(self, x: Tensor) -> Tensor:
            return x

    batch = tools.stack(ITEMS, 4)
    gradients = []
    for model in (Reversed, Plain):
        exported = export_job(tools.make_job(model, loss, ITEMS))
        one = cut(exported, num_sections=1, micro_batch_size=4)
        gradients.append(tools.run_sections(one, exported.initial_parameters, batch)[1]["first.weight"])
    torch.testing.assert_close(gradients[0], -0.5 * gradients[1])


def test_the_call_is_one_node_that_is_named_counted_and_never_computed_twice(tools: Any) -> None:
    texts = []
    for model in (Together, Together, Reversed):
        exported = export_job(tools.make_job(model, loss, ITEMS))
        assert isinstance(exported, GraphJob)
        analysis = analyse(exported)
        calls = [node for node in analysis.sequence if isinstance(node.target, UserFunction)]
        texts.append([str(node.target) for node in calls])
        costs = [analysis.costs[analysis.order[node]] for node in calls]
        flops = 2 * 16 * 6 * 6 if model is Together else 0
        assert all(flops <= cost < flops + 32 * 16 * 20 for cost in costs)
    assert texts[0] == texts[1]
    assert texts[0][0].endswith("test_user_functions.Joined(tensor, tensor, None, tensor, torch.float32)")
    assert texts[2][0].endswith("test_user_functions.Reverse(tensor, 0.5)")


def test_an_argument_changes_the_fingerprint(tools: Any) -> None:
    class Stronger(Reversed):
        def between(self, x: Tensor) -> Tensor:
            return reverse(x, 0.75)

    prints = [
        cut(export_job(tools.make_job(model, loss, ITEMS)), num_sections=2, micro_batch_size=m).fingerprint
        for model, m in ((Reversed, 1), (Reversed, 4), (Stronger, 1))
    ]
    assert prints[0] == prints[1] != prints[2]


class WritesWhatItIsGiven(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class ReadsAnotherWeight(torch.autograd.Function):
    weight: Tensor

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * ReadsAnotherWeight.weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ReadsAnotherWeight.weight


class TakesAModule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        return module(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class Writing(Layers):
    def between(self, x: Tensor) -> Tensor:
        return WritesWhatItIsGiven.apply(x * 1.0)


class Reading(Layers):
    def between(self, x: Tensor) -> Tensor:
        ReadsAnotherWeight.weight = self.second.bias
        return ReadsAnotherWeight.apply(x)


class Wrapping(Layers):
    def between(self, x: Tensor) -> Tensor:
        return TakesAModule.apply(x, self.second)


@pytest.mark.parametrize(
    ("model", "function", "what"),
    [
        (Writing, WritesWhatItIsGiven, "changes a tensor that it is given"),
        (Reading, ReadsAnotherWeight, "reads a tensor that it is not given"),
        (Wrapping, TakesAModule, "is given a module"),
    ],
)
def test_a_function_that_a_section_could_not_run_is_refused_with_its_line(
    tools: Any, model: type, function: type, what: str
) -> None:
    with pytest.raises(ExportError) as caught:
        export_job(tools.make_job(model, loss, ITEMS))
    _, line = inspect.getsourcelines(function.forward)  # type: ignore[attr-defined]
    assert str(caught.value).startswith(f"{__file__}:{line}: {function.__name__}, an autograd.Function, {what}")
    assert "give every tensor that it reads to `apply`" in str(caught.value.allowed)


class ByDevice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, place: torch.device) -> Tensor:
        return x + torch.ones(x.shape[-1], device=place)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class OnItsDevice(Layers):
    def between(self, x: Tensor) -> Tensor:
        return ByDevice.apply(x, x.device)


def test_a_function_with_a_device_argument_runs_on_its_sections_device(tools: Any) -> None:
    exported = export_job(tools.make_job(OnItsDevice, loss, ITEMS))
    (section,) = cut(exported, num_sections=1, micro_batch_size=2).sections
    far = torch.device("meta")
    parameters = {name: tensor.to(far) for name, tensor in exported.initial_parameters.all_at_once().items()}
    batch = {key: entry.to(far) for key, entry in tools.stack(ITEMS, 2).items()}
    assert section((), batch, parameters)[0].device == far


def test_trace_deps_runs_a_function_with_and_without_numbers(tools: Any) -> None:
    job = tools.make_job(Together, loss, ITEMS, num_sections=2)
    exported = export_job(job)
    for max_real_elements in (1_000_000, 1):
        report = check_dependencies(job, exported=exported, max_real_elements=max_real_elements)
        assert report.violations == ()


@torch.library.custom_op("morph_tests::jitter", mutates_args=())
def jitter(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


@jitter.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_an_operation_of_the_users_library_is_not_drawn_again_in_each_section(tools: Any) -> None:
    class Jittered(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 512), nn.Linear(512, 6)  # compared with this, jitter costs little

        def forward(self, x: Tensor) -> Tensor:
            noisy = jitter(x)
            return self.last(torch.tanh(self.second(self.first(noisy)) + noisy))

    exported = export_job(tools.make_job(Jittered, loss, ITEMS))
    assert isinstance(exported, GraphJob)
    analysis = analyse(exported)
    assert [str(node.target) for node in analysis.sequence].count("morph_tests.jitter.default") == 1
