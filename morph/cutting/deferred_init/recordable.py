"""Replaces, during recording, the few torch functions that do not work on fake tensors."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributions import Distribution

from morph.cutting.deferred_init.tape import Tape
from morph.cutting.deferred_init.weight_files import weights_left_in_files
from morph.cutting.source.guards import replaced

TRUNCATED = "_no_grad_trunc_normal_"
"""A function of ``nn.init`` that a tape records as one operation."""


@contextmanager
def recordable(tape: Tape) -> Iterator[None]:
    """Patch torch for one constructor: ``trunc_normal_``, ``Module.to`` and copies of modules; see ``weight_files``."""
    with ExitStack() as stack:
        stack.enter_context(weights_left_in_files(tape))
        stack.enter_context(warnings.catch_warnings())
        # deepcopy reads a tensor's address; a fake tensor returns 0, as expected
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        stack.enter_context(replaced(nn.Module, "_apply", _apply_by_data(nn.Module._apply)))
        truncated = getattr(nn.init, TRUNCATED, None)
        if truncated is not None:
            stack.enter_context(replaced(nn.init, TRUNCATED, _as_one_operation(truncated, tape)))
        yield


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """Keep torch from logging operations that fail on fake tensors; failures are handled elsewhere."""
    torch_log = logging.getLogger("torch._subclasses.fake_tensor")
    before = torch_log.disabled
    torch_log.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch_log.disabled = before


@contextmanager
def unvalidated_distributions() -> Iterator[None]:
    """Switch off checks of torch.distributions during a trace: fake tensors have no values. Results do not change."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def _as_one_operation(original: Callable[..., Tensor], tape: Tape) -> Callable[..., Tensor]:
    """Record as one operation a function that redraws until all numbers are in range: its loop needs values."""

    def write(tensor: Tensor, *numbers: float, generator: torch.Generator | None = None) -> Tensor:
        if not tape.knows(tensor):
            return original(tensor, *numbers, generator=generator)
        tape.write_initialiser(original, tensor, *numbers, generator=generator)
        return tensor

    return write


def _apply_by_data(original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Convert fake parameters as torch does real ones, by new data for the same object; torch would swap objects."""

    def apply(self: nn.Module, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> nn.Module:
        given = [(name, value) for name, value in self._parameters.items() if value is not None]
        fakes = {name: value for name, value in given if isinstance(value, FakeTensor)}
        for value in fakes.values():
            with torch.no_grad():
                value.data = fn(value)
        self._parameters.update(dict.fromkeys(fakes))
        try:
            return original(self, fn, *args, **kwargs)
        finally:
            self._parameters.update(fakes)

    return apply
