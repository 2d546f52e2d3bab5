"""Models of pictures and sound, from transformers and in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.models.language import LENGTH, QUIET, VOCABULARY, Items, made, tokens


def _draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pictures() -> Items:
    return [{"pixels": _draw(i, 3, 16, 16), "label": torch.tensor(i % 4)} for i in range(8)]


def big_pictures() -> Items:
    return [{"pixels": _draw(i, 3, 32, 32), "label": torch.tensor(i % 4)} for i in range(8)]


def captioned() -> Items:
    return [{"pixel_values": _draw(i, 3, 16, 16), "input_ids": tokens(i)} for i in range(8)]


def sounds() -> Items:
    return [{"input_features": _draw(i, 8, 24), "labels": tokens(i, 8)} for i in range(8)]


def picture_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch["pixels"]), batch["label"])


def hf_picture_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(model(pixel_values=batch["pixels"]).logits, batch["label"])


def clip_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Loss in which every other sample of the batch is a negative, so that it is not a mean over samples."""
    found = model(**batch).logits_per_text
    places = torch.arange(found.shape[0])
    return (functional.cross_entropy(found, places) + functional.cross_entropy(found.t(), places)) / 2


deit = made(
    "DeiTForImageClassification",
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=48,
    image_size=16,
    patch_size=4,
    num_labels=4,
    **QUIET,
)
swin = made(
    "SwinForImageClassification",
    image_size=16,
    patch_size=2,
    embed_dim=16,
    depths=[2, 1],
    num_heads=[2, 4],
    window_size=4,
    num_labels=4,
    drop_path_rate=0.0,
    **QUIET,
)
convnext = made(
    "ConvNextForImageClassification",
    hidden_sizes=[8, 16, 32, 64],
    depths=[1, 1, 2, 1],
    num_labels=4,
    patch_size=2,
    drop_path_rate=0.0,
)
resnet = made(
    "ResNetForImageClassification",
    embedding_size=8,
    hidden_sizes=[8, 16, 32],
    depths=[1, 2, 1],
    layer_type="basic",
    num_labels=4,
)
whisper = made(
    "WhisperForConditionalGeneration",
    vocab_size=VOCABULARY,
    num_mel_bins=8,
    d_model=32,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=48,
    decoder_ffn_dim=48,
    max_source_positions=12,
    max_target_positions=16,
    dropout=0.0,
    use_cache=False,
    pad_token_id=0,
    bos_token_id=0,
    eos_token_id=1,
    decoder_start_token_id=0,
)
_TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
clip = made(
    "CLIPModel",
    text_config={**_TOWER, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "eos_token_id": 1},
    vision_config={**_TOWER, "image_size": 16, "patch_size": 4},
    projection_dim=16,
)


class Mixer(nn.Module):
    """A block of MLP-Mixer."""

    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.norm, self.norm_again = nn.LayerNorm(width), nn.LayerNorm(width)
        self.across = nn.Sequential(nn.Linear(places, 32), nn.GELU(), nn.Linear(32, places))
        self.within = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.within(self.norm_again(x))


def mixer() -> nn.Module:
    blocks = [Mixer(16, 32) for _ in range(2)]
    return nn.Sequential(nn.Conv2d(3, 32, 4, 4), nn.Flatten(2), _Transposed(), *blocks, _Mean(), nn.Linear(32, 4))


class _Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class _Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)
