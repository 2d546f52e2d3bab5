"""A convolutional net for small pictures of digits, as in torch's MNIST example; the pictures are drawn here."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import morph


class Digits(Dataset):
    """Noisy copies of ten patterns of 12 x 12 numbers."""

    def __init__(self):
        self.patterns = torch.randn(10, 1, 12, 12, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return 640

    def __getitem__(self, i):
        noise = torch.randn(1, 12, 12, generator=torch.Generator().manual_seed(i))
        return self.patterns[i % 10] + noise, i % 10


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(16 * 4 * 4, 32), nn.ReLU(), nn.Linear(32, 10)),
    )


def loss(model, batch):
    x, y = batch
    return functional.cross_entropy(model(x), y)


def optimizer(parameters):
    return torch.optim.Adadelta(parameters, lr=1.0)


def schedule(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.7)


def train(batches):
    net = model()
    optim = optimizer(net.parameters())
    scheduler = schedule(optim)
    for batch in batches:
        optim.zero_grad()
        loss(net, batch).backward()
        optim.step()
        scheduler.step()
    return net


def job():
    return morph.Job(
        name="cnn",
        model=model,
        loss=loss,
        dataset=Digits,
        batch_size=32,
        optimizer=lambda named: optimizer([p for _, p in named]),
        lr_scheduler=schedule,
    )


if __name__ == "__main__":
    torch.save(train(DataLoader(Digits(), 32, shuffle=True)).state_dict(), "cnn.pt")
