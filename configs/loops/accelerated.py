"""A loop of Accelerate, with accumulated batches and clipping."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import morph


def dataset():
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(5))
    return TensorDataset(x, x[:, :4].sin().prod(1, keepdim=True) + x[:, 4:5])


def model():
    set_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))


def loss(model, batch):
    x, y = batch
    return functional.mse_loss(model(x), y)


def train(batches):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net, optim = accelerator.prepare(net := model(), torch.optim.AdamW(net.parameters(), lr=1e-2))
    for batch in batches:
        for half in zip(*(part.chunk(2) for part in batch)):
            with accelerator.accumulate(net):
                accelerator.backward(loss(net, half))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), 0.5)
                optim.step()
                optim.zero_grad()
    return accelerator.unwrap_model(net)


def job():
    return morph.Job(
        name="accelerated",
        model=model,
        loss=loss,
        dataset=dataset,
        batch_size=16,
        clip_grad_norm=0.5,
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2),
    )


if __name__ == "__main__":
    torch.save(train(DataLoader(dataset(), 16, shuffle=True)).state_dict(), "accelerated.pt")
