"""Builds the user's model as it is written, with real weights, for comparison with its trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

from morph.contract.errors import JobError
from morph.cutting.deferred_init.construct import LazyTensors
from morph.cutting.trial_run.trial import built_model
from morph.jobs.job import Job

_LEAST_BLOCKS = 3
"""A list with fewer modules of one kind is left as it is."""


def plain_model(job: Job, device: torch.device) -> nn.Module:
    """Return the job's model in training mode, with the initial weights of a run; only the weights take memory."""
    built = built_model(job)
    model, tape = built.model, built.tape
    if tape is None:
        return model.to(device)
    real: dict[int, Tensor] = {}

    def realise(value: Any) -> Any:
        if not isinstance(value, FakeTensor):
            return value
        if id(value) not in real:
            made = LazyTensors({"": value}, tape)[""].to(device)
            real[id(value)] = nn.Parameter(made, value.requires_grad) if isinstance(value, nn.Parameter) else made
        return real[id(value)]

    for module in model.modules():
        for name, held in vars(module).items():
            if name != "_modules" and any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(held)):
                vars(module)[name] = tree_map(realise, held)
    return model


def shortened(make: Callable[[], nn.Module]) -> nn.Module:
    """Return the model with the first and last module of each kind in lists of three or more; else JobError."""
    model = make()
    left_out = 0
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module in inside or not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        inside.update(module.modules())
        kept = _first_and_last_of_each_kind(list(module))
        left_out += len(module) - len(kept)
        module._modules = {str(place): child for place, child in enumerate(kept)}
    if left_out == 0:
        raise JobError("it has no list of three equal blocks")
    return model


def _first_and_last_of_each_kind(children: list[nn.Module]) -> list[nn.Module]:
    places: dict[str, list[int]] = {}
    for place, child in enumerate(children):
        kind = f"{child!r} {[tuple(parameter.shape) for parameter in child.parameters()]}"
        places.setdefault(kind, []).append(place)
    kept: set[int] = set()
    for blocks in places.values():
        kept.update(blocks if len(blocks) < _LEAST_BLOCKS else (blocks[0], blocks[-1]))
    return [children[place] for place in sorted(kept)]
