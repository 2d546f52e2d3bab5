"""A job with dropout whose steps take next to no time, for runs of very many steps."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from morph import Job

WIDTH = 16


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = hidden + self.dropout(self.linear(hidden).tanh())
        return found


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class Samples(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random vectors; the target of each is the reversed vector."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return ``given`` and ``wanted``, each [WIDTH]."""
        given = torch.sin(torch.arange(WIDTH) * (index % 17 + 1.0))
        return {"given": given, "wanted": given.flip(0)}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch["given"]), batch["wanted"])


def optimizer(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in parameters], lr=1e-3)


job = Job(
    name="cheap",
    model=Small,
    loss=loss,
    dataset=Samples,
    optimizer=optimizer,
    batch_size=6,
    micro_batch_size=2,
    seed=0,
    cut_points=("layers.1", "layers.2"),
)
