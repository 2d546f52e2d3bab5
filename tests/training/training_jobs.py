"""Small jobs, one per training feature; all of them share a model with dropout and a tied weight."""

from __future__ import annotations

import gzip
import json
import math
import random
from collections import UserDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import fsspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from morph import Best, CutPoint, Job, Loss, LossScaling, PerSample, Sum
from morph.data import Packed, document_mask
from morph.data.order import grouped, stratified, weighted
from morph.data.streams import Jsonl, Stream
from morph.jobs.job import ShortStep
from morph.losses import cross_entropy

WIDTH = 8
NUM_SAMPLES = 40
NUM_SECTIONS = 4
MICRO_BATCH_SIZE = 2
BATCH_SIZE = 8


class Net(nn.Module):
    """Four layers; the first and the last share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("shift", torch.full((WIDTH,), 0.25))

    def forward(self, x: Tensor) -> Tensor:
        """Map [samples, width] to the same shape."""
        x = self.dropout(torch.tanh(self.first(x)))
        x = self.dropout(torch.tanh(self.second(x)))
        x = self.dropout(torch.tanh(self.third(x))) + self.shift
        out: Tensor = self.last(x)
        return out


class Points(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random points and their targets; ``first`` distinguishes the samples of two sets."""

    def __init__(self, first: int = 0, count: int = NUM_SAMPLES) -> None:
        self._first, self._count = first, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return ``x`` and ``y``, each [width]."""
        generator = torch.Generator().manual_seed(self._first + index)
        x = torch.randn(WIDTH, generator=generator)
        return {"x": x, "y": x.roll(1)}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean squared error."""
    return functional.mse_loss(model(batch["x"]), batch["y"])


def adamw(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """AdamW with a large step."""
    return torch.optim.AdamW([parameter for _, parameter in parameters], lr=0.01)


def sgd(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """SGD with momentum, which unlike Adam depends on the length of a gradient."""
    return torch.optim.SGD([parameter for _, parameter in parameters], lr=0.2, momentum=0.9, nesterov=True)


def warm_up(optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Three steps of warm-up, then a decay."""
    return LambdaLR(optimizer, lambda step: (step + 1) / 3 if step < 3 else 1 / math.sqrt(step))


plain = Job(
    name="plain",
    model=Net,
    loss=loss,
    dataset=Points,
    optimizer=adamw,
    batch_size=BATCH_SIZE,
    micro_batch_size=MICRO_BATCH_SIZE,
    num_sections=NUM_SECTIONS,
    seed=3,
)
clipped = replace(plain, optimizer=sgd, clip_grad_norm=0.1)
scheduled = replace(plain, lr_scheduler=warm_up)


def breaking_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean squared error of a model that gets the numbers of breaking samples."""
    return functional.mse_loss(model(batch["x"], batch["flag"]), batch["y"])


class BreakingNet(Net):
    """A model with a huge or infinite gradient in one layer for marked samples."""

    def forward(self, x: Tensor, flag: Tensor) -> Tensor:  # type: ignore[override]
        """Map [samples, width] to the same shape; ``flag`` [samples, 1] is a tiny number, or a huge one."""
        x = self.dropout(torch.tanh(self.first(x)))
        # this adds nothing, but multiplies the gradient by 1 + flag; an infinite flag also makes the loss NaN
        x = x + (x - x.detach()) * flag
        x = self.dropout(torch.tanh(self.second(x)))
        x = self.dropout(torch.tanh(self.third(x))) + self.shift
        out: Tensor = self.last(x)
        return out


class BreakingPoints(Points):
    """One sample breaks its step at any loss scale, one only at a large scale, where its loss stays finite."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return ``x``, ``y`` and ``flag``."""
        flag = {5: math.inf, 17: 1e36}.get(index, 0.0)
        return {**super().__getitem__(index), "flag": torch.tensor([flag])}


class BrokenPoints(Points):
    """One sample is not a number, and the target of another is far off."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        return {"x": sample["x"] * (math.nan if index == 5 else 1), "y": sample["y"] * (100 if index == 28 else 1)}


broken = replace(scheduled, dataset=BrokenPoints, clip_grad_norm=1.0)
bf16 = replace(plain, precision="bf16", clip_grad_norm=0.5)
fp16 = replace(plain, precision="fp16", loss_scaling=LossScaling(initial=2.0**30, growth_steps=2))
scaled = replace(
    plain,
    model=BreakingNet,
    loss=breaking_loss,
    dataset=BreakingPoints,
    loss_scaling=LossScaling(initial=2.0**20, growth_steps=2),
    clip_grad_norm=1.0,
    lr_scheduler=warm_up,
)
scaled_fast = replace(scaled, accumulation="fast")


def loss_with_metrics(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean squared error, with metrics computed early, late and from the batch only, and the loss itself."""
    assert isinstance(model, Net)
    early = model.first(batch["x"]).abs().mean()
    out = model(batch["x"])
    error = functional.mse_loss(out, batch["y"])
    return error, {
        "loss_again": error,
        "close": ((out - batch["y"]).abs() < 0.5).float().mean(),
        "early": early,
        "inputs": batch["x"].square().mean(),
        "shift": model.shift.sum(),
    }


measured = replace(plain, loss=loss_with_metrics, loss_scaling=LossScaling(initial=16.0, growth_steps=2))


class WiderNet(Net):
    """Not the model that ``plain`` trains."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.third = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)


class HeadedNet(Net):
    """The model of ``plain`` within another, with one more layer and another constant."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)
        self.shift.fill_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        """Map [samples, width] to the same shape."""
        out: Tensor = self.head(super().forward(x))
        return out


def shifted_net() -> nn.Module:
    """Return the weights of ``plain`` with another constant."""
    net = Net()
    net.shift.fill_(1.0)
    return net


open_size = replace(plain, micro_batch_size=None)
shifted = replace(plain, model=shifted_net)
headed = replace(plain, model=HeadedNet)
headed_sgd = replace(headed, optimizer=sgd)
wider = replace(plain, model=WiderNet)


evaluated = replace(measured, eval_data=lambda: Points(1000, 11), eval_every_steps=2)
evaluated_in_part = replace(evaluated, eval_samples=2, precision="bf16")


def loss_with_answers(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor | Sum | PerSample]]:
    """Mean squared error, with sums of hits, and the model's answer for each sample."""
    out = model(batch["x"])
    said, wanted = out[:, 0] > 0, batch["y"][:, 0] > 0
    return functional.mse_loss(out, batch["y"]), {
        "agree": (said == wanted).float().mean(),
        "hits": Sum((said & wanted).float().sum()),
        "said": PerSample(out[:, 0]),
        "wanted": PerSample(batch["y"][:, :2]),
    }


def f1_score(values: dict[str, Any]) -> dict[str, float]:
    """Compute values that are not means: F1 of all samples, a root, values of each sample, and a draw."""
    said, wanted = values["said"] > 0, values["wanted"][:, 0] > 0
    assert said.shape == (11,)
    assert values["wanted"].shape == (11, 2)
    assert values["hits"] == float((said & wanted).sum())
    denominator = said.sum() + wanted.sum()
    return {
        "f1": 2 * values["hits"] / denominator,
        "root": math.sqrt(values["loss"]),
        "drawn": float(np.random.uniform()),
    }


def spoken(model: nn.Module, step: int) -> dict[str, Any]:
    """Compute something with the model, and draw a random number."""
    assert not model.training
    if step == 3:
        raise ValueError("nothing to say")
    return {"step": step, "said": model(Points()[0]["x"][None])[0].tolist(), "drawn": float(torch.rand(()))}


judged = replace(
    plain,
    dataset=lambda: Points(0, 37),
    epoch_end="short",
    sample=spoken,
    loss=loss_with_answers,
    optimizer=sgd,
    eval_data=lambda: Points(1000, 11),
    eval_every_steps=2,
    eval_metrics=f1_score,
    best=Best(metric="root", patience=3),
)


class Numbered(Points):
    """Points with an entry for the number of the step."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return ``x``, ``y`` and ``now``."""
        return {**super().__getitem__(index), "now": 0}


def annealed_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean squared error to a target that moves with the step."""
    now = batch["now"][0]
    goal = batch["y"] * (1 - 0.9**now)
    return functional.mse_loss(model(batch["x"]), goal), {"now": now.float()}


def annealing(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Move the momentum with the step."""
    for group in optimizer.param_groups:
        group["momentum"] = min(0.9, 0.1 * group["step_number"])


def annealed_sgd(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """SGD whose momentum grows with the number of the step."""
    groups = [{"params": [parameter for _, parameter in parameters], "step_number": 0}]
    optimizer = torch.optim.SGD(groups, lr=0.05)
    optimizer.register_step_pre_hook(annealing)
    return optimizer


annealed = replace(
    plain,
    loss=annealed_loss,
    dataset=Numbered,
    optimizer=annealed_sgd,
    step_entry="now",
    eval_data=lambda: Numbered(1000, 11),
    eval_every_steps=2,
)


class Tables(Net):
    """A model whose first and last sections take long to draw."""

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.Parameter(torch.randn(50_000, WIDTH) * 0.1)
        self.late = nn.Parameter(torch.randn(50_000, WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Map [samples, width] to the same shape."""
        return super().forward(x + self.early[7]) + self.late[7]


tables = replace(plain, model=Tables)


class Crops(Points):
    """One number each, from somewhere in a row and perhaps upside down; the label says whether it is above zero."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return ``x`` and ``y``, each [width]."""
        row = torch.randn(4 * WIDTH, generator=torch.Generator().manual_seed(self._first + index))
        level = row[torch.randint(0, 4 * WIDTH, ())] * np.random.uniform(0.5, 1.0) * random.choice((-1, 1))
        return {"x": level.float().expand(WIDTH), "y": level.sign().float().expand(WIDTH) * 3}


cropped = replace(plain, dataset=Crops, eval_data=lambda: Crops(1000, 11), eval_every_steps=10)
read_beside = replace(cropped, data_workers=2, eval_every_steps=4)
read_by_one = replace(read_beside, data_workers=1)
read_between = replace(read_beside, data_workers=0)


class Counting(Net):
    """A model that counts how often it was trained on each sample: what ``seen`` loses in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(NUM_SAMPLES))

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Map [samples, width] to the same shape; also the counts of the samples."""
        return super().forward(x), self.seen[ids]


def counting_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean squared error, and for each sample's count a gradient of one share of the mini-batch."""
    found, counts = model(batch["x"], batch["id"])
    return functional.mse_loss(found, batch["y"]) + counts.mean()


def counting_sgd(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """SGD that applies the whole gradient to the counts."""
    groups = [{"params": [p], "lr": float(BATCH_SIZE) if name.endswith("seen") else 0.1} for name, p in parameters]
    return torch.optim.SGD(groups, lr=0.1)


def numbered_crop(record: dict[str, Any]) -> dict[str, Tensor]:
    row = torch.randn(4 * WIDTH, generator=torch.Generator().manual_seed(record["id"]))
    begin = int(torch.randint(0, 3 * WIDTH, ()))
    x = row[begin : begin + WIDTH]
    return {"x": x, "y": x.roll(1), "id": torch.tensor(record["id"])}


def shards() -> Stream:
    """Return four packed files in a file system that is not local."""
    for shard in range(4):
        lines = "".join(json.dumps({"id": 10 * shard + place}) + "\n" for place in range(10))
        fsspec.filesystem("memory").pipe_file(f"/shards/{shard}.jsonl.gz", gzip.compress(lines.encode(), mtime=0))
    return Stream(Jsonl("memory://shards/*.jsonl.gz"), numbered_crop, window=2)


class Passing(torch.utils.data.IterableDataset[dict[str, Tensor]]):
    """Samples that can only be read from the first one on."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (numbered_crop({"id": index}) for index in range(NUM_SAMPLES))


streamed = replace(plain, model=Counting, loss=counting_loss, optimizer=counting_sgd, dataset=shards, data_workers=1)
passing = replace(streamed, dataset=Passing)


class Normed(nn.Module):
    """Convolutions with BatchNorm, of which one is frozen and one is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Conv1d(4, 4, 3, padding=1, bias=False)
        self.again = nn.BatchNorm1d(4, affine=False)
        self.third = nn.Conv1d(4, 4, 3, padding=1, bias=False)
        self.frozen = nn.BatchNorm1d(4).requires_grad_(False).eval()
        self.last = nn.Conv1d(4, 1, 1)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        """Map [samples, width] to the same shape."""
        x = torch.tanh(self.norm(self.first(x[:, None])))
        x = self.dropout(torch.tanh(self.again(self.second(x))))
        x = torch.tanh(self.frozen(self.again(self.third(x))))
        out: Tensor = self.last(x)[:, 0]
        return out


class Averaged(Net):
    """A network with moving averages of a weight and of an activation, a counter, a flag and a spectral norm."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.register_buffer("slow", torch.zeros(WIDTH, WIDTH))
        self.register_buffer("centre", torch.zeros(WIDTH))
        self.register_buffer("assigned", torch.ones(WIDTH))
        self.register_buffer("begun", torch.zeros((), dtype=torch.bool))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [samples, width] to the same shape."""
        x = self.dropout(torch.tanh(self.first(x)))
        x = torch.tanh(self.second(x))
        if self.training:
            with torch.no_grad():
                self.steps += 1
                self.slow.mul_(0.9).add_(self.third.weight, alpha=0.1)
                mean = x.mean(0)
                self.centre.copy_(torch.where(self.begun, 0.8 * self.centre + 0.2 * mean, mean))
                self.begun.fill_(True)
                self.assigned = 0.5 * self.assigned + 0.5 * x.square().mean(0)
        x = self.dropout(torch.tanh(self.third(x - self.centre))) / (1 + self.assigned)
        x = x + functional.linear(x, self.slow)
        out: Tensor = self.last(x)
        return out


def mean_absolute(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return functional.l1_loss(model(batch["x"]), batch["y"])


normed = replace(plain, model=Normed, eval_data=lambda: Points(1000, 8), eval_every_steps=3)
averaged = replace(normed, model=Averaged, loss=mean_absolute)
normed_fp16 = replace(fp16, model=Normed)
normed_fast = replace(normed, accumulation="fast", optimizer=sgd, clip_grad_norm=0.1)


narrow = replace(bf16, boundary="bf16")


def narrow_net() -> Net:
    """The network with parameters and buffers in bf16."""
    return Net().bfloat16()


def narrow_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean squared error of a network in bf16."""
    return functional.mse_loss(model(batch["x"].bfloat16()).float(), batch["y"])


masters = replace(plain, model=narrow_net, loss=narrow_loss, optimizer=sgd, clip_grad_norm=0.5, master_weights=True)


compiled = replace(clipped, compile=True)


def decaying(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """SGD that moves a parameter with a zero gradient, by momentum and weight decay."""
    return torch.optim.SGD([parameter for _, parameter in parameters], lr=0.1, momentum=0.9, weight_decay=0.1)


class ComplexNet(nn.Module):
    """Complex layers, one with a conjugated result, a complex moving average, and a real layer behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, dtype=torch.cfloat)
        self.second = nn.Linear(WIDTH, WIDTH, dtype=torch.cfloat)
        self.third = nn.Linear(WIDTH, WIDTH, dtype=torch.cfloat)
        self.last = nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("centre", torch.zeros(WIDTH, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        """Map [samples, width] to the same shape."""
        z = self.first(torch.complex(x, x.roll(1, 1)))
        z = self.second(z / (1 + z.abs())).conj()
        with torch.no_grad():
            self.centre.copy_(0.9 * self.centre + 0.1 * torch.complex(z.real.mean(0), z.imag.mean(0)))
        z = self.third(z - self.centre)
        out: Tensor = self.last(torch.cat([z.real, z.imag], 1))
        return out


class Experts(nn.Module):
    """Layers of which a micro-batch uses only those that its samples name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        """Map [samples, width] to the same shape; ``expert`` [samples] has numbers of layers."""
        out = torch.zeros_like(x)
        for number, layer in enumerate(self.layers):
            rows = (expert == number)[:, None]
            if rows.any():
                out = out + rows * layer(x)
        return x + torch.tanh(out)


class Ends(nn.Module):
    """A layer that continues from its input, or begins anew so that earlier layers get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.usual = nn.Linear(WIDTH, WIDTH)
        self.anew = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, start: Tensor, goes_on: Tensor) -> Tensor:
        """Map [samples, width] to the same shape."""
        out: Tensor = self.usual(x) if goes_on.any() else self.anew(start)
        return out


class Choosing(nn.Module):
    """A network that chooses by its samples, cut at marks, with a shared weight and an unused head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.third = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.third.weight = self.first.weight
        self.experts, self.ends, self.unused = Experts(), Ends(), nn.Linear(WIDTH, 1)
        self.cut = CutPoint()

    def forward(self, start: Tensor, expert: Tensor, goes_on: Tensor) -> Tensor:
        """Map [samples, width] to the same shape."""
        x = self.cut(torch.tanh(self.first(start)))
        x = self.cut(self.experts(x, expert))
        x = self.cut(torch.tanh(self.third(x)))
        out: Tensor = self.ends(x, start, goes_on)
        return out


class Choices(Points):
    """Samples that seldom name an expert or ask to continue, so that some steps have none that do."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return ``x`` and ``y``, each [width], and the choices of the sample."""
        expert = 2 if index % 20 == 8 else index % 2
        return {
            **super().__getitem__(index),
            "expert": torch.tensor(expert),
            "goes_on": torch.tensor(index % 20 in (3, 8)),
        }


def choosing_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean squared error."""
    return functional.mse_loss(model(batch["x"], batch["expert"], batch["goes_on"]), batch["y"])


complex_numbers = replace(
    plain,
    model=ComplexNet,
    optimizer=decaying,
    clip_grad_norm=0.5,
    loss_scaling=LossScaling(initial=16.0, growth_steps=2),
)
complex_fast = replace(complex_numbers, accumulation="fast", optimizer=adamw)
choosing = replace(plain, model=Choosing, loss=choosing_loss, dataset=Choices, optimizer=decaying, clip_grad_norm=0.5)
choosing_adam = replace(choosing, optimizer=adamw)
choosing_fast = replace(choosing, accumulation="fast")


def by_part(parameters: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, list[nn.Parameter]]]:
    """Two groups: the head, and the body, whose learning rate a schedule moves; in a unit, one of them may be empty."""
    groups: dict[bool, list[nn.Parameter]] = {False: [], True: []}
    for name, parameter in parameters:
        groups[name.startswith(("first", "second"))].append(parameter)
    return [{"params": group} for group in groups.values()]


class SkippingAdamW(torch.optim.AdamW):
    """Leaves out groups with learning rate 0, as if their parameters were frozen."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the other groups."""
        for group in self.param_groups:
            if group["lr"] == 0:
                for parameter in group["params"]:
                    parameter.grad = None
        super().step(closure)


def body_until_3(optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Train the body only in the first three steps."""
    return LambdaLR(optimizer, [lambda _step: 1.0, lambda step: float(step < 3)])


def body_from_3(optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Train the body from the fourth step on."""
    return LambdaLR(optimizer, [lambda _step: 1.0, lambda step: float(step >= 3)])


frozen_later = replace(
    plain,
    optimizer=lambda named: torch.optim.SGD(by_part(named), lr=0.1, momentum=0.9, weight_decay=0.1),
    lr_scheduler=body_until_3,
)
frozen_later_adam = replace(frozen_later, optimizer=lambda named: torch.optim.AdamW(by_part(named), lr=0.01))
thawed_plain_sgd = replace(
    plain,
    optimizer=lambda named: torch.optim.SGD(by_part(named), lr=0.1, weight_decay=0.1),
    lr_scheduler=body_from_3,
)
thawed = replace(plain, optimizer=lambda named: SkippingAdamW(by_part(named), lr=0.01), lr_scheduler=body_from_3)
frozen_wrongly = replace(
    plain,
    optimizer=lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=0.1),
    lr_scheduler=lambda optimizer: LambdaLR(
        optimizer,
        lambda step: 1.0 if step < 2 else optimizer.param_groups[0]["params"][0].requires_grad_(False) is None,
    ),
)


class OneSided(torch.autograd.Function):
    """A sum whose second operand gets no gradient."""

    @staticmethod
    def forward(_ctx: object, one: Tensor, other: Tensor) -> Tensor:
        """Add both operands."""
        return one + other

    @staticmethod
    def backward(_ctx: object, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Give the gradient only to the first operand."""
        return gradient, None


class CutOff(Net):
    """A model that reads its first layer, to which a custom backward gives no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [samples, width] to the same shape."""
        aside = torch.tanh(self.second(x))
        x = torch.tanh(self.third(x))
        x = torch.tanh(self.first(x))
        out: Tensor = self.last(OneSided.apply(x, aside))
        return out


cut_off = replace(plain, model=CutOff, optimizer=decaying)


class Sentences(Points):
    """Rows of numbers with a class each, most of which do not count; in some samples none counts."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return ``x`` [length, width] and ``labels`` [length]."""
        generator = torch.Generator().manual_seed(self._first + index)
        labels = torch.randint(0, WIDTH, (6,), generator=generator)
        labels[index % 9 if index % 5 < 3 else 0 :] = -100
        return {"x": torch.randn(6, WIDTH, generator=generator), "labels": labels}


CLASS_WEIGHTS = tuple(0.25 * (1 + number) for number in range(WIDTH))


def token_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Loss, dict[str, Loss | Tensor]]:
    """Mean over the labels that count, and how many of them are predicted correctly."""
    logits, labels = model(batch["x"]), batch["labels"]
    counts = labels != -100
    right = (logits.argmax(-1) == labels) & counts
    told = {"right": Loss(right.sum(), counts.sum()), "size": logits.abs().mean()}
    return cross_entropy(logits, labels), told


def class_loss(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
    """Mean over the labels that count, with class weights."""
    logits = model(batch["x"])
    return cross_entropy(logits, batch["labels"], class_weights=torch.tensor(CLASS_WEIGHTS), label_smoothing=0.1)


def counted_loss(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
    """Mean over the samples, divided by a Python number."""
    x = batch["x"]
    return Loss(model(x).square().mean((1, 2)).sum(), x.shape[0])


def mixed_loss(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
    """A mean over tokens, plus one over the samples of a micro-batch, like a loss that balances experts."""
    logits = model(batch["x"])
    loss = cross_entropy(logits, batch["labels"])
    return Loss(loss.total + 0.1 * logits.square().mean() * loss.weight, loss.weight)


by_token = replace(plain, loss=token_loss, dataset=Sentences, eval_data=lambda: Sentences(1000, 8), eval_every_steps=3)
by_class = replace(by_token, loss=class_loss, optimizer=sgd, clip_grad_norm=0.1, eval_data=None, eval_every_steps=None)
by_token_scaled = replace(by_token, loss_scaling=LossScaling(initial=16.0, growth_steps=2))


def still_net() -> Net:
    """Return the network without dropout, whose loss is the same for a whole mini-batch in one piece."""
    net = Net()
    net.dropout.p = 0.0
    return net


by_token_still = replace(by_token, model=still_net)
by_class_still = replace(by_class, model=still_net)
by_token_fast = replace(by_class_still, loss=token_loss, accumulation="fast")
by_count = replace(by_token_still, loss=counted_loss, eval_data=None, eval_every_steps=None)
mixed = replace(by_token_still, loss=mixed_loss, eval_data=None, eval_every_steps=None)
none_counts = replace(
    by_token_scaled, loss=lambda model, batch: cross_entropy(model(batch["x"]), torch.full_like(batch["labels"], -100))
)


short = replace(
    evaluated, dataset=lambda: Points(0, 27), epoch_end="short", eval_data=lambda: Points(1000, 7), eval_every_steps=3
)
short_still = replace(short, model=still_net, loss=loss, optimizer=sgd, clip_grad_norm=0.1, loss_scaling=None)
short_by_token = replace(by_token_still, dataset=lambda: Sentences(0, 27), epoch_end="short")
short_dropped = replace(short_still, epoch_end="drop")
of_batches = replace(short_still, epoch_end=ShortStep())
of_batches_as_whole = replace(short_still, epoch_end=ShortStep(of_whole=True))


@dataclass
class Row:
    """A sample as a user may have it: nested, with arrays, numbers, text and a mapping of transformers' kind."""

    pair: tuple[np.ndarray, float]
    about: UserDict[str, Tensor]
    title: str


class Rows:
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Row:
        """Return a row with some noise of its own."""
        x = np.random.default_rng(index).random(WIDTH, dtype=np.float32) + np.random.random(WIDTH).astype(np.float32)
        return Row((x, index / NUM_SAMPLES), UserDict({"y": torch.full((WIDTH,), index % 3)}), f"row {index}")


def row_loss(model: nn.Module, batch: Row) -> Tensor:
    """Mean squared error of the entries of a nested sample."""
    x, scale = batch.pair
    assert isinstance(batch, Row)
    return functional.mse_loss(model(x) * scale.float()[:, None], batch.about["y"].float())


def masked(rows: list[Row]) -> dict[str, object]:
    """Collate by hand, and hide some of the inputs."""
    x = torch.as_tensor(np.stack([row.pair[0] for row in rows]))
    y = torch.stack([row.about["y"] for row in rows])
    return {"in": (x * (torch.rand_like(x) > 0.3), y), "titles": [row.title for row in rows], "hidden": 0.3}


def masked_loss(model: nn.Module, batch: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
    """Mean squared error for batches of ``masked``."""
    x, y = batch["in"]
    return functional.mse_loss(model(x), y * batch["hidden"])


nested = replace(
    plain, loss=row_loss, dataset=Rows, sampler=weighted([1.0] * 20 + [3.0] * 20, 26), model=lambda: still_net()
)
collated = replace(
    plain,
    loss=masked_loss,
    dataset=Rows,
    collate_fn=masked,
    sampler=stratified(lambda rows: [i % 3 for i in range(40)]),
)


def length_of(index: int) -> int:
    return 2 + index * 7 % 13


class Texts:
    """Texts of random tokens of varying length, in which each token depends on the one before."""

    def __init__(self, first: int = 0, count: int = NUM_SAMPLES) -> None:
        self._first, self._count = first, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return tokens, which are their own labels."""
        start = torch.tensor([self._first + index])
        tokens = (start + 3 * torch.arange(length_of(index))) % WIDTH
        return {"tokens": tokens, "labels": tokens.clone()}


def lengths(data: Texts) -> list[int]:
    return [length_of(index) for index in range(len(data))]


class Reader(nn.Module):
    """An embedding, layers with causal attention, and an output layer that shares the embedding's weight."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.places = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(WIDTH, WIDTH, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor, mask: Tensor | None = None, places: Tensor | None = None) -> Tensor:
        where = torch.arange(tokens.shape[1])[None] if places is None else places
        x = self.embedding(tokens) + self.places(where)
        for layer in self.layers:
            y = functional.scaled_dot_product_attention(x, x, x, mask, is_causal=mask is None)
            x = x + self.dropout(torch.tanh(layer(y)))
        out: Tensor = self.output(x)
        return out


def next_token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
    return cross_entropy(model(batch["tokens"])[:, :-1], batch["labels"][:, 1:])


def padded_by_hand(texts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pad to the longest text of the batch, as tokenizers do."""
    pad = nn.utils.rnn.pad_sequence
    labels = pad([text["labels"] for text in texts], batch_first=True, padding_value=-100)
    return {"tokens": pad([text["tokens"] for text in texts], batch_first=True), "labels": labels}


varying = replace(
    plain,
    model=Reader,
    loss=next_token_loss,
    dataset=Texts,
    lengths=lengths,
    buckets=(4, 8, 16),
    eval_data=lambda: Texts(5, 9),
    eval_every_steps=2,
)


def texts_in_shards(folder: str) -> Job:
    """Return the same texts as lines of JSON, a few in each shard."""

    def sample(tokens: list[int]) -> dict[str, Tensor]:
        return {"tokens": torch.tensor(tokens), "labels": torch.tensor(tokens)}

    return replace(varying, dataset=lambda: Stream(Jsonl(folder, shard_bytes=100), sample, window=1), data_workers=1)


varying_with_dropout = replace(varying, model=lambda: Reader(0.2), data_workers=1, sampler=grouped(lengths, BATCH_SIZE))


def told_tokens_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Loss, dict[str, PerSample]]:
    """The same loss, with an identification of each sample."""
    tokens = batch["tokens"]
    return next_token_loss(model, batch), {"first": PerSample(tokens[:, 0]), "all": PerSample(batch["labels"])}


def check_order(values: dict[str, np.ndarray]) -> dict[str, float]:
    """Return whether samples come in the order of the data, padded to the longest bucket."""
    data = Texts(5, 9)
    rows = [np.pad(data[i]["labels"].numpy(), (0, 16 - length_of(i)), constant_values=-100) for i in range(9)]
    firsts = [int(data[i]["tokens"][0]) for i in range(9)]
    return {"right": float((values["all"] == np.stack(rows)).all() and values["first"].tolist() == firsts)}


varying_told = replace(varying, loss=told_tokens_loss, eval_metrics=check_order)
varying_by_hand = replace(varying, collate_fn=padded_by_hand)


def packed_loss(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
    """Cross entropy of the next tokens of packed texts, which do not see each other."""
    places = batch["position_ids"]
    logits = model(batch["tokens"], document_mask(places)[:, 0], places)
    return cross_entropy(logits[:, :-1], batch["labels"][:, 1:])


packed = replace(plain, model=Reader, loss=packed_loss, dataset=lambda: Packed(Texts(), 16, lengths))
