"""Copies of an existing optimizer, one for each layer, beside the optimizer itself; and what cannot be copied."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import morph
from morph.contract.errors import JobError
from morph.jobs.existing import WholeModelOptimizer
from morph.tracing import check_dependencies

NUM_STEPS = 3
Configure = Callable[[nn.Module], Optimizer]


class Trust(SGD):
    """Has settings that are in no group, an object of its own, and state from the beginning."""

    def __init__(self, params: Any, lr: float, limit: float) -> None:
        super().__init__(params, lr=lr, momentum=0.9)
        self.limit, self.rule = limit, Rule(0.5)
        self.register_step_pre_hook(self.limited)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["momentum_buffer"] = torch.full_like(p, 0.25)

    def limited(self, *_: Any) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            p.grad.clamp_(-self.limit, self.limit).mul_(self.rule.factor)


@dataclass
class Rule:
    factor: float


class Forgetful(Rule):
    """Is not copied with its factor."""

    def __deepcopy__(self, _memo: Any) -> Forgetful:
        return Forgetful(1.0)


class Lookahead(Optimizer):
    """Wraps an optimizer, with whose groups and state it works."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base = base
        self.param_groups, self.state = base.param_groups, base.state

    def step(self, closure: Any = None) -> Any:
        before = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        self.base.step(closure)
        for p, old in zip((p for group in self.param_groups for p in group["params"]), before, strict=True):
            p.data.lerp_(old, 0.5)


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def groups(of: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [p for p in of.parameters() if p.ndim == n], "lr": 0.1 * n, "weight_decay": n} for n in (1, 2)]


def changed(optimizer: Optimizer, **given: Any) -> Optimizer:
    vars(optimizer).update(given)
    return optimizer


def hooked(optimizer: Optimizer, hook: Any) -> Optimizer:
    optimizer.register_step_pre_hook(hook)
    return optimizer


def scaled(optimizer: Optimizer, *_: Any) -> None:
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        p.grad.mul_(3.0)


def stepped(of: nn.Module, optimizers: list[Optimizer]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    for _ in range(NUM_STEPS):
        for p in of.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        for optimizer in optimizers:
            optimizer.step()
    return [p.detach() for p in of.parameters()]


@pytest.mark.parametrize(
    "configure",
    [
        lambda of: torch.optim.AdamW(groups(of), lr=1.0),
        lambda of: torch.optim.AdamW(of.named_parameters(), amsgrad=True),
        lambda of: torch.optim.Adagrad(of.parameters(), initial_accumulator_value=0.5),
        lambda of: Trust(of.parameters(), lr=0.5, limit=1e-2),
        lambda of: changed(Trust(groups(of), lr=0.5, limit=1.0), limit=0.1, rule=Rule(0.25)),
        lambda of: hooked(SGD(of.parameters(), lr=0.1), scaled),
        lambda of: Lookahead(hooked(SGD(of.parameters(), lr=0.1), scaled)),
        lambda of: morph.Optimizers((of[0].parameters(), torch.optim.Adam), (of[2].parameters(), SGD)),
    ],
)
def test_copies_for_each_layer_step_as_the_optimizer_itself(configure: Configure) -> None:
    plain, cut_up = model(), model()
    original = model()
    whole = WholeModelOptimizer(original.named_parameters(), configure(original))
    layers = [[(f"{index}.{name}", p) for name, p in cut_up[index].named_parameters()] for index in (0, 2)]
    found = stepped(cut_up, [whole.optimizer(layer) for layer in layers])
    assert all(map(torch.equal, found, stepped(plain, [configure(plain)])))
    assert all(map(torch.equal, original.parameters(), model().parameters()))


@pytest.mark.parametrize(
    ("configure", "named"),
    [
        (
            lambda of: changed(SGD(of.parameters()), rule=Forgetful(0.5)),
            r"is 0.5, and 1.0 in a copy.*SGD\.rule\.factor",
        ),
        (lambda of: changed(SGD(of.parameters()), lock=threading.Lock()), r"cannot be copied: .*lock.*SGD\.lock"),
        (lambda of: changed(SGD(of.parameters()), model=of), r"holds a part of the whole model.*SGD\.model"),
        (lambda of: changed(SGD(of.parameters()), first=of[0].weight), r"whole model.*SGD\.first"),
        (
            lambda of: hooked(SGD(of.parameters()), lambda *_: nn.utils.clip_grad_norm_(of.parameters(), 1.0)),
            r"whole model.*SGD\._optimizer_step_pre_hooks.*lambda",
        ),
        (lambda of: changed(SGD(of.parameters()), step=lambda: of.zero_grad()), r"whole model.*SGD\.step.*lambda"),
    ],
)
def test_what_cannot_be_copied_is_refused_by_its_name(configure: Configure, named: str) -> None:
    original = model()
    with pytest.raises(JobError, match=named):
        WholeModelOptimizer(original.named_parameters(), configure(original)).optimizer(original.named_parameters())


def clipped_together(optimizer: Optimizer, *_: Any) -> None:
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)


def test_a_hook_that_couples_sections_is_a_violation_at_its_line() -> None:
    original = model()
    whole = WholeModelOptimizer(original.named_parameters(), hooked(SGD(original.parameters()), clipped_together))
    job = morph.Job(
        name="coupled",
        model=model,
        loss=lambda net, batch: net(batch["x"]).square().mean(),
        dataset=lambda: [{"x": torch.ones(3)}] * 8,  # type: ignore[arg-type,return-value] # a list is a data set
        optimizer=whole.optimizer,
        batch_size=4,
        cut_points=["2"],
    )
    report = check_dependencies(job)
    assert {finding.place.function for finding in report.violations} == {"clipped_together"}
