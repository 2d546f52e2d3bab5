"""Makes fields of a job from existing objects: a model, its optimizer and schedule, a data loader."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import DataLoader

from morph.contract.errors import wrong_job

_OF_THE_MODEL = ("params", "param_names")


def copied(
    model: nn.Module, clone: Callable[[Tensor], Tensor] = Tensor.clone, memo: dict[int, Any] | None = None
) -> nn.Module:
    """Return a copy of a model, for ``Job.model``: its tensors are cloned, which can be traced, instead of its
    storages.

    ``clone``: makes a new tensor for each tensor, without a graph. ``memo``: receives the copies, as in ``deepcopy``.
    """
    memo = {} if memo is None else memo
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            if isinstance(tensor, Tensor):
                made = clone(tensor.detach())
                is_parameter = isinstance(tensor, Parameter)
                memo[id(tensor)] = Parameter(made, tensor.requires_grad) if is_parameter else made
    return deepcopy(model, memo)


def order_of(loader: DataLoader[Any], batch_size: int) -> Callable[[Any, int, int], list[int]]:
    """Return the order in which a loader reads samples, as ``Job.sampler``; with ``drop_last``, only whole batches."""
    batches: Any = loader.batch_sampler
    while hasattr(batches, "batch_sampler"):  # a wrapper of accelerate
        batches = batches.batch_sampler
    sampler = batches.sampler

    def order(_dataset: Any, _seed: int, epoch: int) -> list[int]:
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        numbers = list(sampler)
        return numbers[: len(numbers) - len(numbers) % batch_size] if batches.drop_last else numbers

    return order


class WholeModel:
    """A ``Job.model`` that copies an existing model, whose weights must be the same in every process.

    Args:
        model: A model that is not trained elsewhere.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self) -> nn.Module:
        """Return a copy of the model."""
        return copied(self._model)

    def digest(self) -> str:
        """Return a digest of the weights, by which workers detect weights other than those with which the run began."""
        state = xxhash.xxh3_128()
        for name, tensor in sorted(self._model.state_dict().items()):
            state.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            state.update(memoryview(flat))
        return state.hexdigest()


class WholeModelOptimizer:
    """Builds optimizers like an existing one, with all of its groups; those without a parameter of the unit are empty.

    Args:
        named: Names and parameters of the model.
        optimizer: An optimizer that has these parameters in its groups, and has made no step.
        scheduler: The optimizer's schedule, at its beginning.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, Parameter]],
        optimizer: Optimizer,
        scheduler: LRScheduler | None = None,
    ) -> None:
        groups = enumerate(optimizer.param_groups)
        group_of = {id(parameter): index for index, group in groups for parameter in group["params"]}
        self._group_of = {name: group_of.get(id(parameter)) for name, parameter in named}
        self._whole, self._scheduler = optimizer, scheduler

    @property
    def has_scheduler(self) -> bool:
        """Whether there is a schedule to copy."""
        return self._scheduler is not None

    def optimizer(self, named: Iterable[tuple[str, Parameter]]) -> Optimizer:
        """Return an optimizer of these parameters, as ``Job.optimizer`` does.

        Raises:
            JobError: the optimizer's class needs more arguments than its defaults and its groups.
        """
        settings = [
            {key: value for key, value in group.items() if key not in _OF_THE_MODEL}
            for group in self._whole.param_groups
        ]
        of_group: list[list[Parameter]] = [[] for _ in settings]
        for name, parameter in named:
            index = self._group_of[name]
            if index is not None:
                of_group[index].append(parameter)
        groups = [
            {**values, "lr": values.get("initial_lr", values.get("lr")), "params": parameters}
            for values, parameters in zip(settings, of_group, strict=True)
        ]
        kind: Any = type(self._whole)
        taken = inspect.signature(kind).parameters
        try:
            made: Optimizer = kind(groups, **{k: v for k, v in self._whole.defaults.items() if k in taken})
        except TypeError as error:
            raise wrong_job(
                "optimizer",
                f"cannot be built for a part of the parameters: {error}",
                kind.__name__,
                "a class whose arguments are the parameters and the values of its groups",
            ) from error
        return made

    def scheduler(self, optimizer: Optimizer) -> LRScheduler:
        """Return a copy of the existing schedule for another optimizer, as ``Job.lr_scheduler`` does."""
        assert self._scheduler is not None, "there is no schedule to copy"
        LambdaLR(optimizer, lambda _step: 1.0)  # makes the optimizer record its steps, which every schedule checks
        for group, whole in zip(optimizer.param_groups, self._whole.param_groups, strict=True):
            group.update({key: value for key, value in whole.items() if key not in _OF_THE_MODEL})
        return deepcopy(self._scheduler, {id(self._whole): optimizer})
