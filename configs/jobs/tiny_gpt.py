"""A very small GPT in plain PyTorch (tied embedding, dropout) on synthetic text: for tests and first tries.

One step takes some milliseconds and nothing but torch is imported.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from morph import Job

VOCABULARY = 32
LENGTH = 16
WIDTH = 32
NUM_HEADS = 4
NUM_LAYERS = 3
NUM_SAMPLES = 96


class Block(nn.Module):
    """Pre-norm attention and MLP, each with a residual."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.norm_mlp = nn.LayerNorm(WIDTH)
        self.widen = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden states [samples, length, width] to the same shape."""
        samples, length, width = hidden.shape
        heads = self.query_key_value(self.norm_attention(hidden)).view(samples, length, 3, NUM_HEADS, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended = attended.transpose(1, 2).reshape(samples, length, width)
        hidden = hidden + self.dropout(self.project(attended))
        return hidden + self.dropout(self.narrow(functional.gelu(self.widen(self.norm_mlp(hidden)))))


class TinyGPT(nn.Module):
    """Token and position embedding, blocks, and an output layer that shares the token embedding's weight."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(NUM_LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.1)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [samples, length, vocabulary] for tokens [samples, length]."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.dropout(self.tokens(tokens) + self.positions(places))
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


class CountingText(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences that count upwards in a step of 1 to 3, modulo the vocabulary: learnt within some dozen steps."""

    def __len__(self) -> int:
        """Return the number of samples."""
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return ``tokens`` and ``targets``, each [length]."""
        start, stride = index // 3, index % 3 + 1
        text = (start + stride * torch.arange(LENGTH + 1)) % VOCABULARY
        return {"tokens": text[:-1].clone(), "targets": text[1:].clone()}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross entropy."""
    logits = model(batch["tokens"])
    return functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def optimizer(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Return AdamW without weight decay."""
    return torch.optim.AdamW([parameter for _, parameter in parameters], lr=3e-3, weight_decay=0.0)


job = Job(
    name="tiny-gpt",
    model=TinyGPT,
    loss=loss,
    dataset=CountingText,
    optimizer=optimizer,
    batch_size=12,
    micro_batch_size=2,
    num_sections=6,
    seed=0,
)
