"""A small residual network with batch norm on synthetic images: no transformer, gradients summed in floating point.

Its activations weigh more than its weights, its optimizer has one moment, its gradients are clipped, its forward is in
bf16, and its running means are written in each forward.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from morph import Job

WIDTH, SIZE, NUM_CLASSES, NUM_SAMPLES = 48, 16, 10, 64


class Block(nn.Module):
    """Two convolutions with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(WIDTH)
        self.second = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(WIDTH)

    def forward(self, images: Tensor) -> Tensor:
        """Map [samples, width, height, width] to the same shape."""
        hidden = functional.relu(self.first_norm(self.first(images)))
        return functional.relu(images + self.second_norm(self.second(hidden)))


class Net(nn.Module):
    """A stem, six blocks, and a linear head over the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [samples, classes] for images [samples, 3, height, width]."""
        hidden = self.stem(images)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden.mean((2, 3)))
        return logits


class Images(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Noise around one of ten colours."""

    def __len__(self) -> int:
        """Return the number of images."""
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return ``image`` [3, height, width] and ``label``."""
        generator = torch.Generator().manual_seed(index)
        label = torch.tensor(index % NUM_CLASSES)
        return {"image": torch.randn(3, SIZE, SIZE, generator=generator) + label / NUM_CLASSES, "label": label}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross entropy."""
    return functional.cross_entropy(model(batch["image"]), batch["label"])


def optimizer(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD([parameter for _, parameter in parameters], lr=0.01, momentum=0.9)


job = Job(
    name="images",
    model=Net,
    loss=loss,
    dataset=Images,
    optimizer=optimizer,
    batch_size=32,
    micro_batch_size=4,
    num_sections=6,
    accumulation="fast",
    clip_grad_norm=1.0,
    precision="bf16",
)
