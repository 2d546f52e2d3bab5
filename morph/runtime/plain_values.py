"""Hyperparameters and counters of optimizers and schedulers as JSON, and back: the same types and bits."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import torch
from torch import Tensor

_KIND = "~"


def to_plain(value: Any) -> Any:
    """Write a value with what JSON has; tuples, dicts, counters and tensors of one number are marked.

    Raises:
        ValueError: naming the type of what cannot be written.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [to_plain(item) for item in value]
    if isinstance(value, tuple):
        return {_KIND: "tuple", "items": [to_plain(item) for item in value]}
    if isinstance(value, Tensor) and value.numel() == 1 and not value.dtype.is_complex:
        return {_KIND: str(value.dtype).removeprefix("torch."), "shape": list(value.shape), "number": value.item()}
    if type(value) in (dict, Counter, defaultdict):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {_KIND: kind, "items": [[to_plain(key), to_plain(item)] for key, item in value.items()]}
    raise ValueError(type(value).__name__)


def from_plain(value: Any) -> Any:
    """The inverse of ``to_plain``; a defaultdict comes back as a dict."""
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value[_KIND]
    if kind == "tuple":
        return tuple(from_plain(item) for item in value["items"])
    if kind in ("dict", "counter"):
        pairs = {from_plain(key): from_plain(item) for key, item in value["items"]}
        return Counter(pairs) if kind == "counter" else pairs
    dtype: torch.dtype = getattr(torch, kind)
    return torch.tensor(value["number"], dtype=dtype).reshape(value["shape"])
