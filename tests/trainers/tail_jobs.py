"""Trainers and loaders whose data sets do not divide into whole steps, and the jobs that are made of them."""

from __future__ import annotations

import tempfile
from typing import Any

import pytorch_lightning as lightning
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainingArguments, set_seed

import morph
from morph import Job

WIDTH, CLASSES = 6, 3


class Rows(Dataset[dict[str, Tensor]]):
    """Rows of tokens, each with a class; some classes do not count."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return ``x`` [4, width] and ``labels`` [4]."""
        generator = torch.Generator().manual_seed(index)
        labels = torch.randint(0, CLASSES, (4,), generator=generator)
        labels[index % 4 + 1 :] = -100
        return {"x": torch.randn(4, WIDTH, generator=generator), "labels": labels}


def stacked(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


class Net(nn.Module):
    """Returns the mean over samples of each sample's mean over its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def logits(self, x: Tensor) -> Tensor:
        """Map [samples, tokens, width] to [samples, tokens, classes]."""
        found: Tensor = self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return found

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.logits(x)
        losses = functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        return {"loss": (losses.sum(1) / (labels != -100).sum(1)).mean(), "logits": logits}


class ByItems(Net):
    """Divides by the number of items that the Trainer counts."""

    def forward(self, x: Tensor, labels: Tensor, num_items_in_batch: Any = None, **_: Any) -> dict[str, Tensor]:
        logits = self.logits(x)
        total = functional.cross_entropy(logits.transpose(1, 2), labels, reduction="sum")
        counted = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
        return {"loss": total / counted, "logits": logits}


class Ignoring(Net):
    """Accepts the number of items and ignores it, so that the Trainer adds up the means of accumulated batches."""

    def forward(self, x: Tensor, labels: Tensor, num_items_in_batch: Any = None, **_: Any) -> dict[str, Tensor]:
        return super().forward(x, labels)


NETS: dict[str, type[Net]] = {"means": Net, "items": ByItems, "sums": Ignoring}


def trainer(net: str, size: int, batch: int, accumulated: int, **given: Any) -> Trainer:
    """Return a Trainer of three epochs of ``size`` rows."""
    set_seed(3)
    model = NETS[net]()
    arguments = {
        **{"num_train_epochs": 3, "learning_rate": 0.1, "optim": "sgd", "logging_steps": 1, "use_cpu": True},
        **{"max_grad_norm": 0.0, "save_strategy": "no", "report_to": [], "disable_tqdm": True},
        **{"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulated},
        **given,
    }
    evaluated = {"eval_dataset": Rows(51), "compute_metrics": counted} if "eval_strategy" in given else {}
    with tempfile.TemporaryDirectory() as folder:  # nothing is written into it
        options = TrainingArguments(folder, **arguments)
        return Trainer(model, options, train_dataset=Rows(size), data_collator=stacked, **evaluated)


def counted(prediction: Any) -> dict[str, float]:
    """Return numbers that tell whether every sample is there, and in order."""
    labels, logits = prediction.label_ids, prediction.predictions
    right = float((logits.argmax(-1) == labels).mean())
    return {"count": float(len(labels)), "last": float(labels[-1, 0]), "right": right}


def trainer_job(*given: Any, **named: Any) -> Job:
    return morph.hf.job(trainer(*given, **named), name="tail")


class Module(lightning.LightningModule):
    """The same network."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: dict[str, Tensor], _index: int) -> Tensor:
        return self.net(**batch)["loss"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD, which unlike Adam depends on the length of a gradient."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def parts(size: int, batch: int, *, drop_last: bool = False) -> tuple[Module, DataLoader[Any]]:
    torch.manual_seed(3)
    return Module(), DataLoader(Rows(size), batch_size=batch, drop_last=drop_last, collate_fn=stacked)


def module_job(size: int, batch: int, accumulated: int, *, drop_last: bool = False) -> Job:
    trainer = lightning.Trainer(
        accelerator="cpu", accumulate_grad_batches=accumulated, max_epochs=-1, logger=False, enable_checkpointing=False
    )
    return morph.lightning.job(*parts(size, batch, drop_last=drop_last), trainer=trainer)
