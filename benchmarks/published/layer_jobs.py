"""The decoders whose layers Sailor's authors measured, as jobs of a few layers: attention writes its whole matrix.

Sizes as in the artifact (``training_config_*.json``); float32, with products in TF32 where the GPU has it, which is the
default of the container that the artifact names.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from morph import Job

LENGTH = 2048
torch.set_float32_matmul_precision("high")


class Text(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences of counted tokens."""

    def __len__(self) -> int:
        """Return the number of samples."""
        return 1024

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return ``input_ids``, [length]."""
        return {"input_ids": (index + torch.arange(LENGTH)) % 1000}


class Layer(nn.Module):
    """Attention without a fused kernel, and two linear layers, each behind a norm."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return [samples, length, width]."""
        normed = self.norms[0](x)
        query, key, value = (
            one(normed).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for one in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(-2, -1) / key.shape[-1] ** 0.5
        mixed = (functional.softmax(scores, dim=-1) @ value).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        added: Tensor = x + self.down(functional.relu(self.up(self.norms[1](x))))
        return added


class Decoder(nn.Module):
    """An embedding, layers, and a head that is small, because only layers are compared."""

    def __init__(self, width: int, num_heads: int, num_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, width)
        self.layers = nn.Sequential(*(Layer(width, num_heads) for _ in range(num_layers)))
        self.head = nn.Linear(width, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return a number for each token."""
        found: Tensor = self.head(self.layers(self.embedding(tokens)))
        return found


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return a mean."""
    found: Tensor = model(batch["input_ids"]).mean()
    return found


def _job(width: int, num_heads: int, num_layers: int) -> Job:
    return Job(
        name="layers",
        model=partial(Decoder, width, num_heads, num_layers),
        loss=loss,
        dataset=Text,
        optimizer=lambda parameters: torch.optim.AdamW([value for _, value in parameters], lr=1e-4),
        batch_size=128,
        accumulation="fast",
        num_sections=2,
    )


def opt_350(num_layers: int) -> Job:
    """Return OPT-350."""
    return _job(1024, 16, num_layers)


def gpt_neo_2_7(num_layers: int) -> Job:
    """Return GPT-Neo 2.7B."""
    return _job(2560, 32, num_layers)
