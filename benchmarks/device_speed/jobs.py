"""Jobs whose steps are timed: GPT-2 355M, and one like Llama 3.2 1B; random weights, synthetic text."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedConfig

from morph import Job


class CountingText(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self, length: int, vocabulary: int) -> None:
        self._length, self._vocabulary = length, vocabulary

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": (index // 7 + (index % 7 + 1) * torch.arange(self._length)) % self._vocabulary}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["input_ids"]).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def optimizer(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in parameters], lr=3e-4)


def _gpt2(width: int, layers: int, heads: int, length: int, vocabulary: int) -> PreTrainedConfig:
    return GPT2Config(
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        n_positions=length,
        vocab_size=vocabulary,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )


def _llama_1b() -> PreTrainedConfig:
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=True,
        use_cache=False,
    )


def _made(config: PreTrainedConfig) -> nn.Module:
    found: nn.Module = GPT2LMHeadModel(config) if isinstance(config, GPT2Config) else LlamaForCausalLM(config)
    return found


def _job(name: str, config: PreTrainedConfig, length: int, sections: int, batch: int, micro_batch: int) -> Job:
    return Job(
        name=name,
        model=partial(_made, config),
        loss=loss,
        dataset=partial(CountingText, length, config.vocab_size),
        optimizer=optimizer,
        batch_size=batch,
        micro_batch_size=micro_batch,
        num_sections=sections,
        precision="bf16",
    )


gpt2_355m = _job("gpt2-355m", _gpt2(1024, 24, 16, 1024, 50257), 1024, 24, 32, 4)
llama_1b = _job("llama-1b", _llama_1b(), 2048, 16, 16, 2)
