"""A LightningModule with a schedule, accumulated batches and clipping."""

import pytorch_lightning as lightning
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import morph


class LitClassifier(lightning.LightningModule):
    """Classifies points."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.layers(x)
        self.log("accuracy", (logits.argmax(-1) == y).float().mean())
        return functional.cross_entropy(logits, y)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=20)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def parts():
    lightning.seed_everything(3, verbose=False)
    x = torch.randn(64, 5)
    data = TensorDataset(x, (x.sum(1) > 0).long() + (x[:, 0] > 1).long())
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        max_steps=12, accumulate_grad_batches=2, gradient_clip_val=0.2, accelerator="cpu", **quiet
    )
    return LitClassifier(), DataLoader(data, batch_size=4), trainer


def train():
    module, loader, trainer = parts()
    trainer.fit(module, loader)
    return module


def job():
    module, loader, trainer = parts()
    return morph.lightning.job(module, loader, trainer=trainer)


if __name__ == "__main__":
    train()
