"""A LightningModule that classifies points, with a schedule by step, and the job that Morph makes of it."""

from __future__ import annotations

from typing import Any

import torch
from pytorch_lightning import LightningModule
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


class Settings:
    """The settings of a Trainer from which a job is made."""

    accumulate_grad_batches = 2
    gradient_clip_val = CLIP
    gradient_clip_algorithm = "norm"
    precision = "32-true"


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
        module(), loader, DataLoader(points()), trainer=Settings(), eval_every_steps=2, cut_points=["layers.2"]
    )


def padded(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    rows = nn.utils.rnn.pad_sequence([x for x, _ in samples], batch_first=True, padding_value=PADDING)
    return rows, torch.tensor([y for _, y in samples])


def text_loader() -> DataLoader[Any]:
    texts: Any = [(torch.arange(1 + index * 3 % 20), index % 3) for index in range(64)]
    return DataLoader(texts, batch_size=BATCH_SIZE, collate_fn=padded)


def text_job() -> morph.Job:
    return morph.lightning.job(module(TextClassifier), text_loader(), trainer=Settings(), cut_points=["layers.2"])
