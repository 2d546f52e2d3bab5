"""A variational autoencoder, which draws its latent variables in the forward."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import morph


def dataset():
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(torch.sigmoid(torch.randn(256, 4, generator=draw) @ torch.randn(4, 24, generator=draw)))


class VAE(nn.Module):
    """Encoder, draw, decoder."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 24))

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        return self.decoder(z), mean, log_variance


def loss(model, batch):
    (x,) = batch
    y, mean, log_variance = model(x)
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
    return functional.binary_cross_entropy_with_logits(y, x, reduction="none").sum(1).mean() + divergence


def train(batches):
    net = VAE()
    optim = torch.optim.Adam(net.parameters(), lr=1e-3)
    for batch in batches:
        optim.zero_grad()
        loss(net, batch).backward()
        optim.step()
    return net


def job():
    return morph.Job(
        name="vae",
        model=VAE,
        loss=loss,
        dataset=dataset,
        batch_size=32,
        optimizer=lambda named: torch.optim.Adam([p for _, p in named], lr=1e-3),
    )


if __name__ == "__main__":
    torch.save(train(DataLoader(dataset(), 32, shuffle=True)).state_dict(), "vae.pt")
