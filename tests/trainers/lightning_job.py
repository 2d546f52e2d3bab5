"""LightningModules that classify points or texts, and the jobs that Morph makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import ModelSummary
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

import morph

BATCH_SIZE = 4
CLIP = 0.2
PADDING = 20


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        self.log("accuracy", (logits.argmax(-1) == y).float().mean(), prog_bar=True)
        return functional.cross_entropy(logits, y)

    def configure_optimizers(self) -> Any:
        weights = [p for p in self.parameters() if p.ndim > 1]
        biases = [p for p in self.parameters() if p.ndim == 1]
        groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.05}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.2, 0.1], total_steps=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class TextClassifier(Classifier):
    """Classifies texts by the mean of their tokens, in which padding does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(21, 5)

    def forward(self, x: Tensor) -> Tensor:
        counts = (x != PADDING).unsqueeze(-1).float()
        return self.layers((self.embedding(x) * counts).sum(1) / counts.sum(1))


class ClippedSGD(torch.optim.SGD):
    """Has arguments that are in no group, and an attribute that its constructor does not set."""

    def __init__(self, params: Any, lr: float = 0.1, clip: float = 1.0, early: bool = False) -> None:
        super().__init__(params, lr=lr)
        self.clip, self.factor, self.early = clip, 1.0, early

    def step(self, closure: Any = None) -> Any:
        """Clip; ``early``: before the closure computes the gradients, as in torch's own loops."""
        if not self.early and closure is not None:
            closure()
            closure = None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.clamp_(-self.clip, self.clip).mul_(self.factor)
        return super().step(closure)


class WithClippedSGD(Classifier):
    early = False

    def configure_optimizers(self) -> Any:
        optimizer = ClippedSGD(self.parameters(), lr=0.5, clip=1e-3, early=self.early)
        optimizer.factor = 3.0
        return optimizer


class WithEarlySGD(WithClippedSGD):
    early = True


def double_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad.mul_(2.0)


class WithHooks(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(double_gradients)
        optimizer.register_step_post_hook(
            lambda given, *_: [p.data.mul_(0.99) for p in given.param_groups[0]["params"]]
        )
        return optimizer


class WithState(Classifier):
    """Its optimizer has state before the first step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=0.1, initial_accumulator_value=0.3)


class WithParts(Classifier):
    """Its matrices and the rest have optimizers of their own, in one."""

    def configure_optimizers(self) -> Any:
        weights = [p for p in self.parameters() if p.ndim > 1]
        biases = [p for p in self.parameters() if p.ndim == 1]
        optimizer = morph.Optimizers((weights, torch.optim.AdamW), (biases, lambda own: torch.optim.SGD(own, lr=0.1)))
        optimizer.parts[0].register_step_pre_hook(double_gradients)
        return optimizer


class Counting(Classifier):
    """Its loss grows from step to step, in operations that can be traced."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        x, y = batch
        weight = torch.as_tensor(self.global_step / 10).clamp(max=0.3) + self.trainer.current_epoch * 0.1
        return {"loss": functional.cross_entropy(self(x), y) * (1 + weight + 0.01 * batch_idx)}


class Outer(Counting):
    """Counts in a module within it, and has no use for the number of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Counting()

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Any:  # type: ignore[override] # Lightning allows it
        return self.inner.training_step(batch, 0)


class WithSetup(Classifier):
    """Makes a weight before training, and its schedule from the length of training."""

    def setup(self, stage: str) -> None:
        self.scale = {"fit": 3.0}[stage] / self.trainer.max_epochs

    def training_step(self, batch: tuple[Tensor, Tensor], *_: Any) -> Tensor:
        self.print(end="")
        return self.scale * super().training_step(batch, 0)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        length = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=length)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def configure_callbacks(self) -> Any:
        return ModelSummary()


QUIET = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
QUIET |= {"enable_model_summary": False, "max_epochs": -1}
CLIPPED = {"accumulate_grad_batches": 2, "gradient_clip_val": CLIP}


@dataclass(frozen=True)
class Case:
    """What ``Trainer.fit`` gets."""

    kind: type[Classifier] = Classifier
    settings: dict[str, Any] = field(default_factory=dict)
    loader: Callable[[], DataLoader[Any]] = lambda: DataLoader(points(), batch_size=BATCH_SIZE)
    cut_point: str = "layers.2"

    def trainer(self, **more: Any) -> Trainer:
        return Trainer(**QUIET | self.settings | more)


CASES = {
    "plain": Case(),
    "clipped": Case(settings=CLIPPED),
    "arguments of an optimizer": Case(WithClippedSGD),
    "an optimizer that changes gradients too early": Case(WithEarlySGD),
    "hooks of an optimizer": Case(WithHooks),
    "state of an optimizer": Case(WithState),
    "parts of an optimizer": Case(WithParts),
    "counters": Case(Counting, {"limit_train_batches": 2}),
    "counters of accumulated batches": Case(Outer, {**CLIPPED, "limit_train_batches": 4}, cut_point="inner.layers.2"),
    "a share of batches": Case(settings={"limit_train_batches": 0.25, "gradient_clip_algorithm": "norm"}),
    "a loader that shuffles": Case(loader=lambda: shuffled_loader()),
    "setup, and a schedule of the whole length": Case(WithSetup, {"max_epochs": 2, "limit_train_batches": 4}),
}


def case(name: str) -> morph.Job:
    given = CASES[name]
    return morph.lightning.job(
        module(given.kind), given.loader(), trainer=given.trainer(), cut_points=[given.cut_point]
    )


def module(kind: type[Classifier] = Classifier) -> Classifier:
    torch.manual_seed(3)
    return kind()


def points() -> Dataset[Any]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(64, 5, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long() + (x[:, 0] > 1).long())


def job() -> morph.Job:
    loader = DataLoader(points(), batch_size=BATCH_SIZE)
    return morph.lightning.job(
        module(),
        loader,
        DataLoader(points()),
        trainer=Trainer(**QUIET | CLIPPED),
        eval_every_steps=2,
        cut_points=["layers.2"],
    )


def padded(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    rows = nn.utils.rnn.pad_sequence([x for x, _ in samples], batch_first=True, padding_value=PADDING)
    return rows, torch.tensor([y for _, y in samples])


def shuffled_loader() -> DataLoader[Any]:
    return DataLoader(points(), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(7))


def text_loader() -> DataLoader[Any]:
    texts: Any = [(torch.arange(1 + index * 3 % 20), index % 3) for index in range(64)]
    return DataLoader(texts, batch_size=BATCH_SIZE, collate_fn=padded)


CASES["texts"] = Case(TextClassifier, CLIPPED, text_loader)
