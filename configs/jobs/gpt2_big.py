"""GPT-2 with 2.5, 8.3 and 20 billion parameters (the sizes of Megatron-LM and of Varuna's evaluation), random weights.

``morph cut configs/jobs/gpt2_big.py:gpt2_8_3b`` cuts one on a laptop: no weight takes memory until a worker needs it.
The text is synthetic; put your own data set in its place.

On V100s take ``gpt2_2_5b_fp16``: their tensor cores know fp16 alone, neither bf16 nor float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

from morph import Job

LENGTH = 1024
VOCABULARY = 50304  # GPT-2's 50257, padded as Megatron-LM does
NUM_SAMPLES = 1 << 20


class CountingText(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences that count upwards in a step of 1 to 7, modulo the vocabulary."""

    def __len__(self) -> int:
        """Return the number of samples."""
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return ``input_ids``, [length]: they are their own labels."""
        return {"input_ids": (index // 7 + (index % 7 + 1) * torch.arange(LENGTH)) % VOCABULARY}


def model(num_layers: int, width: int, num_heads: int) -> nn.Module:
    """Return the model, with GPT-2's usual dropout of 0.1 and tied embeddings."""
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=width,
        n_layer=num_layers,
        n_head=num_heads,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross entropy of the next token."""
    logits = model(input_ids=batch["input_ids"]).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def optimizer(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Return AdamW with weight decay on matrices alone."""
    named = list(parameters)
    groups = [
        {"params": [parameter for _, parameter in named if parameter.ndim >= 2], "weight_decay": 0.01},
        {"params": [parameter for _, parameter in named if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=1.5e-4)


def _job(name: str, num_layers: int, width: int, num_heads: int) -> Job:
    return Job(
        name=name,
        model=partial(model, num_layers, width, num_heads),
        loss=loss,
        dataset=CountingText,
        optimizer=optimizer,
        batch_size=8192,
        num_sections=num_layers,
    )


gpt2_2_5b = _job("gpt2-2.5b", num_layers=54, width=1920, num_heads=20)
gpt2_2_5b_fp16 = replace(gpt2_2_5b, name="gpt2-2.5b-fp16", precision="fp16")
gpt2_8_3b = _job("gpt2-8.3b", num_layers=72, width=3072, num_heads=24)
gpt2_20b = _job("gpt2-20b", num_layers=96, width=4160, num_heads=32)
