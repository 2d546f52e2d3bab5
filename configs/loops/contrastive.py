"""Contrastive learning as in SimCLR: the other samples of a batch are the negatives."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import morph


class Views(Dataset):
    """Two noisy views of a point."""

    def __len__(self):
        return 256

    def __getitem__(self, i):
        x = torch.randn(16, generator=torch.Generator().manual_seed(i))
        return x + 0.3 * torch.randn(16), x + 0.3 * torch.randn(16)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))


def loss(model, batch):
    a, b = batch
    z = functional.normalize(model(torch.cat([a, b], dim=1).view(-1, 16)), dim=1)
    mine = torch.arange(z.shape[0])
    near = (z @ z.T / 0.5).masked_fill(mine[:, None] == mine, float("-inf"))
    return functional.cross_entropy(near, mine ^ 1)


def train(batches):
    net = model()
    optim = torch.optim.AdamW(net.parameters(), lr=3e-3)
    for batch in batches:
        optim.zero_grad()
        loss(net, batch).backward()
        optim.step()
    return net


def job():
    return morph.Job(
        name="contrastive",
        model=model,
        loss=loss,
        dataset=Views,
        batch_size=32,
        micro_batch_size=32,  # the negatives are in the same micro-batch
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=3e-3),
    )


if __name__ == "__main__":
    torch.save(train(DataLoader(Views(), 32, shuffle=True)).state_dict(), "contrastive.pt")
