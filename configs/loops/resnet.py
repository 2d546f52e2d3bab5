"""A ResNet with BatchNorm, whose pictures are cropped and flipped at random."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import morph


class Pictures(Dataset):
    """Random crops of pictures of 12 x 12, half of them flipped."""

    def __init__(self):
        self.x = torch.randn(200, 3, 12, 12, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        row, column = torch.randint(0, 5, (2,)).tolist()
        x = self.x[i, :, row : row + 8, column : column + 8]
        return x.flip(2) if torch.rand(()) < 0.5 else x, i % 4


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, channels):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x):
        y = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(x + self.bn2(self.conv2(y)))


def model():
    torch.manual_seed(0)
    stem = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
    return nn.Sequential(*stem, Block(16), Block(16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))


def loss(model, batch):
    x, y = batch
    return functional.cross_entropy(model(x), y, label_smoothing=0.1)


def train(batches):
    net = model()
    optim = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
    for batch in batches:
        optim.zero_grad()
        loss(net, batch).backward()
        optim.step()
    return net


def optimizer(named):
    return torch.optim.SGD([p for _, p in named], lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)


def job():
    return morph.Job(
        name="resnet",
        model=model,
        loss=loss,
        dataset=Pictures,
        optimizer=optimizer,
        batch_size=16,
        micro_batch_size=16,  # BatchNorm normalises over a micro-batch
    )


if __name__ == "__main__":
    torch.save(train(DataLoader(Pictures(), 16, shuffle=True)).state_dict(), "resnet.pt")
