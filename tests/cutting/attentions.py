"""The attention calls of transformers, in a traced model and in the plain one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.nn import functional

from morph.cutting import ExportedJob
from morph.cutting.exporting.exported_job import GraphJob

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def traced(exported: ExportedJob) -> list[tuple[Any, ...]]:
    """Return of each traced attention whether it is masked, causal and grouped, and its heads of queries and keys."""
    assert isinstance(exported, GraphJob)
    return [_told(node) for node in exported.graph_module.graph.nodes if node.target is ATTENTION]


def _told(node: Node) -> tuple[Any, ...]:
    arguments = node.normalized_arguments(nn.Module(), normalize_to_only_use_kwargs=True)
    values = arguments.kwargs
    heads = [values[name].meta["val"].shape[1] for name in ("query", "key")]
    return values["attn_mask"] is not None, values["is_causal"], values["enable_gqa"], *heads


def plainly(model: Callable[[], nn.Module], loss: Any, batch: dict[str, Tensor]) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    real = functional.scaled_dot_product_attention

    def told(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
        heads = query.shape[1], key.shape[1]
        mask = given.get("attn_mask") is not None
        found.append((mask, given.get("is_causal", False), given.get("enable_gqa", False), *heads))
        return real(query, key, value, **given)

    with mock.patch.object(functional, "scaled_dot_product_attention", told):
        loss(model(), batch)
    return found
