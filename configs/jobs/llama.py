"""Llama 3 with 8 and 70 billion parameters and Mixtral 8x7B, made from their configurations, with random weights.

``morph profile estimate configs/jobs/llama.py:llama_8b --device h100`` says what they would take on GPUs that you do
not have yet. No weight takes memory until a worker needs it. The text is synthetic; put your own data set in its place.

``llama_8b_small`` is for GPUs of 15 to 24 GB, some of which compute in float16 only: Adam works in host memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from morph import Job

NUM_SAMPLES = 1 << 20


class CountingText(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences that count upwards in a step of 1 to 7, modulo 32,000 words."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        """Return the number of samples."""
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return ``input_ids``, [length]: they are their own labels."""
        return {"input_ids": (index // 7 + (index % 7 + 1) * torch.arange(self._length)) % 32_000}


def llama(width: int, inner_width: int, num_layers: int, num_heads: int) -> nn.Module:
    """Return Llama 3 (Dubey et al. 2024, table 3): 128,256 words, and 8 heads of keys and values."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128_256,
            hidden_size=width,
            intermediate_size=inner_width,
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=8,
            max_position_embeddings=8192,
            rope_theta=500_000.0,
            bos_token_id=None,
            eos_token_id=None,
            use_cache=False,
        )
    )


def mixtral() -> nn.Module:
    """Return Mixtral 8x7B (Jiang et al. 2024, table 1): each token goes to 2 of 8 experts."""
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=32_000,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            num_local_experts=8,
            num_experts_per_tok=2,
            max_position_embeddings=32_768,
            sliding_window=None,
            bos_token_id=None,
            eos_token_id=None,
            use_cache=False,
        )
    )


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross entropy of the next token."""
    logits = model(input_ids=batch["input_ids"]).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def optimizer(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Return AdamW; only matrices decay."""
    named = list(parameters)
    return torch.optim.AdamW(
        [
            {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=3e-4,
        betas=(0.9, 0.95),
    )


llama_8b = Job(
    name="llama-3-8b",
    model=partial(llama, 4096, 14336, 32, 32),
    loss=loss,
    dataset=partial(CountingText, 4096),
    optimizer=optimizer,
    batch_size=1024,
    precision="bf16",
    clip_grad_norm=1.0,
    num_sections=66,
)
llama_8b_small = replace(
    llama_8b,
    name="llama-3-8b-small",
    dataset=partial(CountingText, 2048),
    precision="fp16",
    optimizer_device="cpu",
)
llama_70b = replace(llama_8b, name="llama-3-70b", model=partial(llama, 8192, 28672, 80, 64), num_sections=82)
mixtral_8x7b = replace(llama_8b, name="mixtral-8x7b", model=mixtral)
