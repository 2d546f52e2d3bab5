"""A job in bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from morph import Job


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows of ones."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((4,), float(index))}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean of the outputs."""
    found: Tensor = model(batch["x"]).mean()
    return found


job = Job(
    name="rows",
    model=lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
    loss=loss,
    dataset=Rows,
    optimizer=lambda parameters: torch.optim.SGD([value for _, value in parameters], lr=0.1),
    batch_size=4,
    precision="bf16",
)
