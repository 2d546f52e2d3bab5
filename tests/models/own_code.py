"""Code that users write themselves: backwards, state in the forward, losses, data sets, adapters."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional
from torch.nn.utils import parametrizations, rnn
from torch.utils.checkpoint import checkpoint

WIDTH = 16
Batch = dict[str, Tensor]


def points(num_samples: int = 8) -> list[Batch]:
    draw = torch.Generator().manual_seed(3)
    return [{"x": torch.randn(8, generator=draw), "y": torch.tensor(i % 4)} for i in range(num_samples)]


def pictures() -> list[Batch]:
    draw = torch.Generator().manual_seed(3)
    return [{"x": torch.randn(3, 8, 8, generator=draw), "y": torch.tensor(i % 4)} for i in range(8)]


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return functional.cross_entropy(model(batch["x"]), batch["y"])


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def around(*middle: nn.Module) -> nn.Sequential:
    """Build a chain of small blocks with the tested module between them."""
    return nn.Sequential(nn.Linear(8, WIDTH), block(), *middle, block(), nn.Linear(WIDTH, 4))


class Applied(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


# ---- custom backwards ----


class Reversal(torch.autograd.Function):
    """Gradient reversal, as in domain-adversarial training."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * gradient, None


class StraightThrough(torch.autograd.Function):
    """Rounding, which the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 1)


class Quantised(nn.Module):
    """Straight-through rounding written with ``detach``."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (x.round() - x).detach()


@torch.library.custom_op("morph_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


doubled.register_autograd(lambda ctx, gradient: gradient * 3)


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.inner = block()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return result


class Hooked(nn.Module):
    """A module that clips the gradient of an activation."""

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return x * 1.0


def with_parameter_hook() -> nn.Module:
    model = around()
    next(model.parameters()).register_hook(lambda gradient: gradient * 0.5)
    return model


def with_backward_hook() -> nn.Module:
    model = around()
    model[1].register_full_backward_hook(lambda module, given, returned: tuple(g * 2 for g in given if g is not None))
    return model


# ---- state in the forward ----


class MovingAverage(nn.Module):
    """A module that subtracts an average, which it updates under no_grad."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x - self.average


class Assigned(nn.Module):
    latest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("latest", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.latest = x.detach().mean(0)
        return x - self.latest


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1.0 / self.calls)


def numpy_noise(x: Tensor) -> Tensor:
    return x + float(np.random.rand())


def python_noise(x: Tensor) -> Tensor:
    return x * random.uniform(0.9, 1.1)


def frozen_batch_norm() -> nn.Module:
    class Frozen(nn.BatchNorm2d):
        def train(self, mode: bool = True) -> Frozen:
            return super().train(False)

    return nn.Sequential(nn.Conv2d(3, 8, 3), Frozen(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 4))


def batch_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 4)
    )


def spectral() -> nn.Module:
    return around(parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)))


def weight_norm() -> nn.Module:
    return around(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)))


# ---- control flow and shapes ----


class LayerDrop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = block()

    def forward(self, x: Tensor) -> Tensor:
        return x if torch.rand(()) < 0.2 else self.inner(x)


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if (x < 100).all() else x


class MarkedBranch(nn.Module):
    """The same branch, cut by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, WIDTH), Branch())
        self.second = nn.Sequential(block(), nn.Linear(WIDTH, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return out


class Experts(nn.Module):
    """A loop over the chosen experts, as in many mixtures of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, None])
        return x + out


def fixed_samples(x: Tensor) -> Tensor:
    return x.view(2, WIDTH, -1).transpose(0, 1).reshape(-1, WIDTH)


# ---- adapters, frozen and tied weights ----


class Adapted(nn.Module):
    """LoRA: a frozen layer plus a product of two small ones."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Linear(inner.in_features, 2, bias=False)
        self.up = nn.Linear(2, inner.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) + self.up(self.down(x))
        return out


def frozen_backbone() -> nn.Module:
    model = around()
    model[0].requires_grad_(False)
    return model


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.inner, self.leave = nn.Linear(8, WIDTH), block(), nn.Linear(8, WIDTH)
        self.leave.weight = self.enter.weight

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.inner(self.enter(x)), self.leave.weight.t()[:4])


class Complex(nn.Module):
    """A spectral layer, as in Fourier neural operators."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH // 2 + 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.scale, n=WIDTH)


# ---- losses ----


def summed_loss(model: nn.Module, batch: Batch) -> Tensor:
    return functional.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")


def contrastive_loss(model: nn.Module, batch: Batch) -> Tensor:
    features = functional.normalize(model(batch["x"]), dim=-1)
    return functional.cross_entropy(features @ features.t() * 10, torch.arange(features.shape[0]))


def two_losses(model: nn.Module, batch: Batch) -> Any:
    out = model(batch["x"])
    return functional.cross_entropy(out, batch["y"]), out.square().mean()


def loss_with_metric(model: nn.Module, batch: Batch) -> Any:
    out = model(batch["x"])
    return functional.cross_entropy(out, batch["y"]), {"right": (out.argmax(-1) == batch["y"]).float().mean()}


def elbo(model: nn.Module, batch: Batch) -> Tensor:
    """Loss of a VAE whose distributions are from torch.distributions, with default settings."""
    mean, spread = model(batch["x"]).chunk(2, dim=-1)
    latent = Normal(mean, functional.softplus(spread))
    prior = Normal(torch.zeros_like(mean), torch.ones_like(mean))
    return (latent.rsample() - 1).square().mean() + kl_divergence(latent, prior).mean()


def penalised(model: nn.Module, batch: Batch) -> Tensor:
    x = batch["x"].clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    return functional.cross_entropy(out, batch["y"]) + slope.square().mean()


def ctc(model: nn.Module, batch: Batch) -> Tensor:
    steps = model(batch["x"]).log_softmax(-1).expand(3, -1, -1)
    lengths = torch.ones_like(batch["y"])
    return functional.ctc_loss(steps, batch["y"][:, None] % 3 + 1, 3 * lengths, lengths)


def by_sample(model: nn.Module, batch: Batch) -> Tensor:
    return torch.func.vmap(lambda x: model(x).square().mean())(batch["x"]).mean()


def number_as_metric(model: nn.Module, batch: Batch) -> Any:
    out = model(batch["x"])
    return functional.cross_entropy(out, batch["y"]), {"right": (out.argmax(-1) == batch["y"]).float().mean().item()}


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.leave = nn.GRU(1, WIDTH, batch_first=True), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x > 0).sum(1).clamp(min=1).cpu()
        packed = rnn.pack_padded_sequence(x[..., None], lengths, batch_first=True, enforce_sorted=False)
        out: Tensor = self.leave(self.inner(packed)[1][-1])
        return out


class OwnNoise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.draw = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn(x.shape, generator=self.draw)


# ---- data sets ----


class Stream(torch.utils.data.IterableDataset[Batch]):
    def __iter__(self) -> Iterator[Batch]:
        return iter(points())


def loader() -> Any:
    return torch.utils.data.DataLoader(points(), batch_size=2)  # type: ignore[arg-type]


class Cropped(torch.utils.data.Dataset[Batch]):
    """Crops whose labels are a property of the crop, so that both must come from one draw."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Batch:
        start = random.randrange(4)
        whole = torch.randn(12, generator=torch.Generator().manual_seed(index))
        return {"x": whole[start : start + 8] + torch.rand(()), "y": torch.tensor(start)}


class OwnGenerator(Cropped):
    def __init__(self) -> None:
        self.draw = np.random.default_rng(0)

    def __getitem__(self, index: int) -> Batch:
        return {"x": torch.full((8,), float(self.draw.random())), "y": torch.tensor(index % 4)}


class OddLengths(Cropped):
    def __getitem__(self, index: int) -> Batch:
        return {"x": torch.ones(8 + index % 3), "y": torch.tensor(index % 4)}
