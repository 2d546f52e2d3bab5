from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn import functional
from torch.nn.modules.module import register_module_full_backward_hook
from torch.utils.checkpoint import checkpoint

from morph.contract.errors import ExportError, JobError
from morph.cutting import cut, export_job
from morph.cutting.sections.cut_point import CutPoint
from morph.cutting.source.guards import replaced

ITEMS = [{"x": torch.randn(6, generator=torch.Generator().manual_seed(index))} for index in range(8)]


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return functional.mse_loss(model(batch["x"]), batch["x"][:, :1])


def doubled(gradient: Tensor) -> Tensor:
    return gradient * 2


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(self.between(self.first(x)))))

    def between(self, x: Tensor) -> Tensor:
        return x

    def block(self, x: Tensor) -> Tensor:
        return self.drop(torch.relu(self.second(x)))


class TensorHook(Layers):
    def between(self, x: Tensor) -> Tensor:
        x.register_hook(doubled)  # here
        return x


class HookOnSeveral(Layers):
    def between(self, x: Tensor) -> Tensor:
        register_multi_grad_hook([x], lambda gradients: None)  # here
        return x


class ModuleHook(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.second.register_full_backward_hook(lambda module, given, out: (given[0] * 2,))  # here


class ModulePreHook(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.second.register_full_backward_pre_hook(lambda module, out: (out[0] * 2,))  # here


class ParameterHook(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.second.weight.register_hook(lambda gradient: gradient * 2)  # here


class HookBehindTheSum(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.second.weight.register_post_accumulate_grad_hook(lambda parameter: None)  # here


def line_with(module: type, text: str) -> str:
    lines, start = inspect.getsourcelines(module)
    return f"{inspect.getsourcefile(module)}:{start + next(i for i, line in enumerate(lines) if text in line)}"


@pytest.mark.parametrize(
    ("model", "error", "what"),
    [
        (TensorHook, ExportError, "a hook on a gradient (register_hook) would not run"),
        (HookOnSeveral, ExportError, "a hook on a gradient (register_hook) would not run"),
        (ModuleHook, ExportError, "the backward hook of second would not run"),
        (ModulePreHook, ExportError, "the backward hook of second would not run"),
        (ParameterHook, JobError, "a hook on the gradient of second.weight would not run"),
        (HookBehindTheSum, JobError, "a hook on the gradient of second.weight would not run"),
    ],
)
def test_a_hook_that_would_be_dropped_is_refused_with_its_line(
    tools: Any, model: type, error: type[Exception], what: str
) -> None:
    with pytest.raises(error) as caught:
        export_job(tools.make_job(model, loss, ITEMS))
    assert str(caught.value).startswith(line_with(model, "# here"))
    assert what in str(caught.value)
    assert "torch.library.custom_op with register_autograd" in str(caught.value)


@pytest.fixture
def hook_everywhere() -> Iterator[None]:
    handle = register_module_full_backward_hook(lambda module, given, out: None)
    yield
    handle.remove()


@pytest.mark.usefixtures("hook_everywhere")
def test_a_hook_on_all_modules_is_refused(tools: Any) -> None:
    with pytest.raises(ExportError, match=r"test_gradient_hooks\.py:\d+: a backward hook of all modules"):
        export_job(tools.make_job(Layers, loss, ITEMS))


class Reentrant(Layers):
    def between(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=True)


class NotReentrant(Layers):
    def between(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


class NoGradientThroughTheFirst(Layers):
    """A reentrant checkpoint whose inputs have no gradient does not train what is inside it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.first, x, use_reentrant=True) + self.second(x))


def gradients_of_both(tools: Any, model: Callable[[], nn.Module], num_sections: int | None, **fields: Any) -> Any:
    job = tools.make_job(model, loss, ITEMS, **fields)
    exported = export_job(job)
    batch = tools.stack(ITEMS, 4)
    whole = tools.build_whole(job, exported.initial_parameters)
    torch.manual_seed(3)
    job.loss(whole, batch).backward()
    expected = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    model_in_sections = cut(exported, num_sections=num_sections, micro_batch_size=4)
    states: dict[int, Tensor] = {}

    def before(index: int) -> None:
        """Let the first run of a section draw as the whole model does, and let its rerun repeat the draws."""
        if not states:
            torch.manual_seed(3)
        if index in states:
            torch.set_rng_state(states[index])
        states[index] = torch.get_rng_state()

    found = tools.run_sections(model_in_sections, exported.initial_parameters, batch, before)[1]
    return found, expected


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("model", [Reentrant, NotReentrant, NoGradientThroughTheFirst])
def test_a_checkpoint_is_a_plain_call_with_the_plain_gradients(tools: Any, model: type) -> None:
    found, expected = gradients_of_both(tools, model, 2)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name]), name


def marked(model: type[Layers]) -> type[Layers]:
    """Return a marked model with Python code before its mark that no export accepts."""

    class Marked(model):  # type: ignore[misc,valid-type]  # the class is a parameter
        def __init__(self) -> None:
            super().__init__()
            self.cut = CutPoint()

        def forward(self, x: Tensor) -> Tensor:
            x = self.cut(self.first(x))
            if float(x.detach().sum()) > 1e9:
                raise ValueError
            return self.last(torch.tanh(self.second(self.between(x))))

    return Marked


@pytest.mark.parametrize("model", [Reentrant, NotReentrant, TensorHook, ModuleHook, ModulePreHook])
def test_cut_at_marks_hooks_and_checkpoints_act_as_in_the_plain_model(tools: Any, model: type[Layers]) -> None:
    found, expected = gradients_of_both(tools, marked(model), None)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-6, atol=0)


def test_cut_at_marks_a_hook_on_a_parameter_is_refused(tools: Any) -> None:
    with pytest.raises(JobError, match=r"a hook on the gradient of second\.weight would not run"):
        export_job(tools.make_job(marked(ParameterHook), loss, ITEMS))


def test_replaced_functions_are_restored() -> None:
    class Base:
        @classmethod
        def name(cls) -> str:
            return cls.__name__

    class Below(Base):
        pass

    with replaced(Base, "name", lambda: "another"), replaced(Below, "name", lambda: "third"):
        assert (Base.name(), Below.name()) == ("another", "third")
    assert (Base.name(), Below.name(), "name" in vars(Below)) == ("Base", "Below", False)
