"""Autocast around a section: the type in which suitable operations run.

A section is a graph of ATen operations, and autocast acts where those are dispatched, so it works on sections as on
the user's own code. Weights are cast once per run of a section; the backward follows the types of the forward.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from morph.job import Precision

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: Precision, device_type: str) -> AbstractContextManager[object]:
    """The context in which sections run forward, in the forward pass and in the recompute alike."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device_type, dtype=_TYPES[precision])
