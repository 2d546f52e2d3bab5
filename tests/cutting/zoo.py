"""Models of well-known designs in tiny configurations with random weights, each with a loss and samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.models.language import DECODER, LENGTH, QUIET, VOCABULARY, causal_loss, made, own_loss, texts, tokens
from tests.models.vision import hf_picture_loss, picture_loss, pictures


def padded_texts() -> list[dict[str, Tensor]]:
    """Return texts with attention masks of different lengths, as for BERT."""
    mask = torch.ones(LENGTH, dtype=torch.long)
    return [
        {"input_ids": tokens(i), "labels": tokens(i + 50), "attention_mask": mask * (torch.arange(LENGTH) < 6 + i)}
        for i in range(6)
    ]


def pairs() -> list[dict[str, Tensor]]:
    return [{"input_ids": tokens(i), "labels": tokens(i + 50)[:8]} for i in range(8)]


def masked_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def denoising_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return functional.mse_loss(model(batch["pixels"]), batch["pixels"])


def gpt2(num_layers: int, dropout: float = 0.0) -> Callable[[], nn.Module]:
    sizes = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 32, "n_layer": num_layers, "n_head": 4}
    drops = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    return made("GPT2LMHeadModel", **sizes, **drops, use_cache=False, bos_token_id=None, eos_token_id=None)


NUM_LAYERS = 2
LLAMA_SIZES: dict[str, Any] = {**DECODER, "num_hidden_layers": NUM_LAYERS}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
llama = made("LlamaForCausalLM", **LLAMA_SIZES)
qwen2 = made("Qwen2ForCausalLM", **LLAMA_SIZES, tie_word_embeddings=True)
qwen3 = made("Qwen3ForCausalLM", **LLAMA_SIZES, head_dim=8)
mixtral = made("MixtralForCausalLM", **LLAMA_SIZES, **EXPERTS)
phimoe = made("PhimoeForCausalLM", **LLAMA_SIZES, **EXPERTS)
"""A model whose routers draw random numbers and have a backward of their own (an autograd.Function)."""
_ENCODER = {
    "hidden_size": 32,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    **QUIET,
}
bert = made("BertForMaskedLM", **_ENCODER, vocab_size=VOCABULARY, max_position_embeddings=16)
vit = made("ViTForImageClassification", **_ENCODER, image_size=16, patch_size=4, num_labels=4)
t5 = made(
    "T5ForConditionalGeneration",
    vocab_size=VOCABULARY,
    d_model=32,
    d_kv=8,
    d_ff=48,
    num_layers=1,
    num_decoder_layers=2,
    num_heads=4,
    dropout_rate=0.0,
    use_cache=False,
    decoder_start_token_id=0,
)


class Residual(nn.Module):
    """Two convolutions parallel to an identity or a 1x1 convolution."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm_first = nn.GroupNorm(4, after)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm_second = nn.GroupNorm(4, after)
        self.relu = nn.ReLU(inplace=True)
        self.beside = nn.Conv2d(before, after, 1, stride) if stride > 1 or before != after else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.norm_first(self.first(x)))
        out = self.norm_second(self.second(out))
        out += self.beside(x)
        return self.relu(out)


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(inplace=True),
        Residual(8, 8, 1),
        Residual(8, 16, 2),
        Residual(16, 16, 1),
        Residual(16, 32, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 4),
    )


class UNet(nn.Module):
    """A U-Net: activations of the way down are joined on the way up."""

    def __init__(self) -> None:
        super().__init__()
        widths = (8, 16, 32)
        self.enter = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.ModuleList(self._block(w // 2 if w > 8 else 8, w) for w in widths)
        self.middle = self._block(32, 32)
        self.up = nn.ModuleList(self._block(2 * w, w // 2 if w > 8 else 8) for w in reversed(widths))
        self.leave = nn.Conv2d(8, 3, 1)

    @staticmethod
    def _block(before: int, after: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.SiLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = functional.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat([x, skips.pop()], dim=1))
        return self.leave(x)


hf_resnet = made(
    "ResNetForImageClassification",
    embedding_size=8,
    hidden_sizes=[8, 16],
    depths=[1, 2],
    layer_type="basic",
    num_labels=4,
)
"""A model with BatchNorm."""

Entry = tuple[Callable[[], nn.Module], Callable[[nn.Module, dict[str, Tensor]], Tensor], list[dict[str, Tensor]]]
ZOO: dict[str, Entry] = {
    "gpt2": (gpt2(NUM_LAYERS), causal_loss, texts()),
    "llama": (llama, causal_loss, texts()),
    "qwen2 tied": (qwen2, causal_loss, texts()),
    "qwen3": (qwen3, causal_loss, texts()),
    "mixtral": (mixtral, causal_loss, texts()),
    "bert": (bert, masked_loss, padded_texts()),
    "vit": (vit, hf_picture_loss, pictures()),
    "t5": (t5, own_loss, pairs()),
    "resnet": (resnet, picture_loss, pictures()),
    "resnet with BatchNorm": (hf_resnet, hf_picture_loss, pictures()),
    "unet": (UNet, denoising_loss, pictures()),
}
