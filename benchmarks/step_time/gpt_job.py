"""A GPT in plain PyTorch on made-up text: the same module trains under Morph and under torch's own machinery.

Blocks as in GPT-2; no dropout, and embedding and output layer share no weight, since torch's pipeline copies tied
weights and does not keep them in step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from morph import Job

VOCABULARY, LENGTH, WIDTH, NUM_HEADS, NUM_LAYERS = 256, 64, 256, 4, 8
BATCH_SIZE, MICRO_BATCH_SIZE = 32, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.norm_mlp = nn.LayerNorm(WIDTH)
        self.widen = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        samples, length, width = hidden.shape
        heads = self.query_key_value(self.norm_attention(hidden)).view(samples, length, 3, NUM_HEADS, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.project(attended.transpose(1, 2).reshape(samples, length, width))
        found: Tensor = hidden + self.narrow(functional.gelu(self.widen(self.norm_mlp(hidden))))
        return found


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


class Text(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Walks through the vocabulary, each with a stride of its own."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        text = (index + (index % 13 + 1) * torch.arange(LENGTH + 1)) % VOCABULARY
        return {"tokens": text[:-1].clone(), "targets": text[1:].clone()}


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return cross_entropy(model(batch["tokens"]), batch["targets"])


def optimizer(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in parameters], lr=1e-3)


exact = Job(
    name="step-time",
    model=GPT,
    loss=loss,
    dataset=Text,
    optimizer=optimizer,
    batch_size=BATCH_SIZE,
    micro_batch_size=MICRO_BATCH_SIZE,
    cut_points=tuple(f"blocks.{index}" for index in range(1, NUM_LAYERS)),
    seed=0,
)
fast = replace(exact, accumulation="fast")
