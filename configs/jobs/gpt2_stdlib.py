"""A GPT-2 from transformers (8 layers, random weights) learns Python's own standard library, byte by byte."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

from morph import Job

LENGTH = 64
MAX_TEXT_BYTES = 4_000_000


class StandardLibraryText(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Consecutive windows of ``LENGTH`` bytes of the top-level files of the standard library, in order of name.

    The text is read at the first access.
    """

    @cached_property
    def text(self) -> NDArray[np.uint8]:
        """All bytes, in one array."""
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        joined = b"\n".join(file.read_bytes() for file in files)
        return np.frombuffer(joined[:MAX_TEXT_BYTES], dtype=np.uint8)

    def __len__(self) -> int:
        """Return the number of windows."""
        return len(self.text) // LENGTH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return ``input_ids`` and ``labels``, both [length]: the loss shifts the labels."""
        window = torch.from_numpy(self.text[index * LENGTH : (index + 1) * LENGTH].astype(np.int64))
        return {"input_ids": window, "labels": window}


def model(num_layers: int = 8, width: int = 128, dropout: float = 0.1) -> nn.Module:
    """Return the model, with GPT-2's usual dropout."""
    config = GPT2Config(
        vocab_size=256,
        n_positions=128,
        n_embd=width,
        n_layer=num_layers,
        n_head=4,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross entropy of the next byte."""
    logits = model(input_ids=batch["input_ids"]).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def optimizer(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Return AdamW with weight decay on matrices alone."""
    named = list(parameters)
    groups = [
        {"params": [parameter for _, parameter in named if parameter.ndim >= 2], "weight_decay": 0.01},
        {"params": [parameter for _, parameter in named if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-3, betas=(0.9, 0.98))


job = Job(
    name="gpt2-stdlib",
    model=model,
    loss=loss,
    dataset=StandardLibraryText,
    optimizer=optimizer,
    batch_size=32,
    micro_batch_size=4,
    num_sections=8,
    seed=0,
)
