"""A GAN: two losses and two optimizers, which step in turn."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import morph


def dataset():
    x = torch.randn(256, 2, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x @ torch.tensor([[1.0, 2.0], [0.0, 1.0]]))


class GAN(nn.Module):
    """Generator and discriminator."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1))


def losses(model, batch):
    (real,) = batch
    fake = model.generator(torch.randn(real.shape[0], 4))
    judged, told = model.discriminator(real), model.discriminator(fake.detach())
    of_discriminator = functional.softplus(-judged).mean() + functional.softplus(told).mean()
    return of_discriminator, functional.softplus(-model.discriminator(fake)).mean()


def train(batches):
    net = GAN()
    optims = [torch.optim.Adam(part.parameters(), lr=1e-3) for part in (net.discriminator, net.generator)]
    for batch in batches:
        for place, optim in enumerate(optims):
            net.zero_grad()
            losses(net, batch)[place].backward()
            optim.step()
    return net


def job():
    return morph.Job(
        name="gan",
        model=GAN,
        loss=losses,
        dataset=dataset,
        batch_size=32,
        optimizer=lambda named: torch.optim.Adam([p for _, p in named], lr=1e-3),
    )


if __name__ == "__main__":
    torch.save(train(DataLoader(dataset(), 32, shuffle=True)).state_dict(), "gan.pt")
