"""Refuses a forward that differs when it is run again, because a trace would keep one variant forever.

The loss is run twice in the same way, with every operation recorded. A changed attribute or generator, a tensor that
one run leaves to the next, or an operation with another result (a clock) is refused with its line.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from morph.contract.errors import JobError
from morph.cutting.deferred_init.tape import Tape, written_tensors
from morph.cutting.source.guards import line_in_loss
from morph.cutting.source.locate import definition_line, forward_line
from morph.cutting.trial_run.python_state import NUMPY, PYTHON, KeptState, changed
from morph.jobs.job import Job

_WHY = "a trace keeps one value forever, and every worker has its own"
_DRAWS = (
    "torch's random functions, which are seeded for each step and micro-batch; or draw in the data set, and give the "
    "numbers to the model in the batch"
)
_ALONE = "a forward that depends on weights, buffers, batch and torch's random functions alone"
_BUFFER = "keep state in a buffer: self.register_buffer(name, tensor), changed in place by tensor operations"
_COMPARED_ELEMENTS = 1 << 16
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Forward:
    """A loss that can be run repeatedly on one batch, of fake or real tensors; ``model`` has run before."""

    job: Job
    model: nn.Module
    parameters: Mapping[str, Tensor]
    batch: Mapping[str, Tensor]
    run: Callable[[], object]
    tape: Tape | None = None


def require_repeatable(forward: Forward) -> None:
    """Run the loss twice, and a third time to find a line."""
    kept = KeptState(forward.job, forward.model)
    states, runs = [kept.now()], list[_Watch]()
    for _ in range(2):
        runs.append(_Watch(forward, runs[-1].left_behind() if runs else []))
        torch.default_generator.manual_seed(0)
        with runs[-1]:
            result = forward.run()
        runs[-1].result = [leaf.detach() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        del result
        states.append(kept.now())
    first, second = runs
    for name in changed(*states):
        line = kept.line_of_change(name, forward.run)
        if name in {NUMPY, PYTHON}:
            raise _refusal(forward, f"the forward draws {name}", line, _DRAWS)
        raise _refusal(forward, f"the forward changes {name}", line, f"{_ALONE}; {_BUFFER}")
    if any(parameter.grad is not None for parameter in forward.parameters.values()):
        line = definition_line(forward.job.loss)
        raise JobError("the loss runs backward itself", source=line, field="loss", allowed="the loss alone")
    for message, line, allowed in second.refused:
        raise _refusal(forward, message, line, allowed)
    if first.reads_fakes or second.reads_fakes:  # fake tensors lack the numbers for a choice: refused later
        return
    if first.operations != second.operations or not first.comes_out_as(second):
        message = "the forward gives another result when it is run again on the same samples with the same seed"
        line = first.line_of_difference(second)
        raise _refusal(forward, message, line, f"{_ALONE}; no clock, and no other random numbers")


def _refusal(forward: Forward, what: str, line: str | None, allowed: str) -> JobError:
    source = line or forward_line(forward.job, forward.model)
    return JobError(f"{what}: {_WHY}", source=source, field="model", allowed=allowed)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """Records the operations of one run; ``left``: tensors that the previous run has left behind."""

    def __init__(self, forward: Forward, left: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self.operations: list[object] = []
        self.refused: list[tuple[str, str | None, str]] = []
        self.result: list[Tensor] = []
        self.reads_fakes = False
        self._lines: list[str | None] = []
        self._made: dict[int | None, list[weakref.ref[Tensor]]] = {}
        self._tape = forward.tape
        self._parameters = {_storage(parameter): name for name, parameter in forward.parameters.items()}
        self._given = {_storage(tensor) for tensor in (*forward.model.buffers(), *forward.batch.values())}
        self._held = list(left)  # kept alive, so that no new tensor is mistaken for one of them
        self._left = {_storage(tensor) for tensor in self._held} - self._given - {None}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        line = line_in_loss()
        leaves = tree_leaves((args, kwargs))
        self.operations.append((str(func), [self._told(leaf) for leaf in leaves]))
        self._lines.append(line)
        self.reads_fakes |= func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor)
        if any(isinstance(leaf, torch.Generator) and leaf is not torch.default_generator for leaf in leaves):
            self.refused.append(("the forward draws from a torch.Generator of its own", line, _DRAWS))
        if any(isinstance(leaf, Tensor) and self._is_left(leaf) for leaf in leaves):
            message = "the forward reads a tensor that another forward has made and kept"
            self.refused.append((message, line, f"{_ALONE}; {_BUFFER}"))
        for tensor in written_tensors(func, args, kwargs) if isinstance(func, OpOverload) else ():
            if (name := self._parameters.get(_storage(tensor))) is not None:
                self.refused.append((f"the forward changes parameter {name}", line, "changes by the optimizer alone"))
            elif not self._may_change(tensor):
                message = "the forward changes a tensor that existed before"
                self.refused.append((message, line, f"{_ALONE}; {_BUFFER}"))
        result = func(*args, **kwargs)
        others = {_storage(leaf) for leaf in leaves if isinstance(leaf, Tensor) and not self._may_change(leaf)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and (storage := _storage(leaf)) not in others:
                self._made.setdefault(storage, []).append(weakref.ref(leaf))
        return result

    def _may_change(self, tensor: Tensor) -> bool:
        """Whether the forward may change a tensor: a buffer, the batch's, or a living one made by this run."""
        storage = _storage(tensor)
        return storage in self._given or any(made() is not None for made in self._made.get(storage, ()))

    def _is_left(self, tensor: Tensor) -> bool:
        storage = _storage(tensor)
        if storage in self._left:
            return True
        known = self._may_change(tensor) or storage in self._parameters
        return self._tape is not None and isinstance(tensor, FakeTensor) and not (known or self._tape.knows(tensor))

    def left_behind(self) -> list[Tensor]:
        """Return the tensors made by this run that are still referenced."""
        every = (made for those in self._made.values() for made in those)
        return [tensor for made in every if (tensor := made()) is not None]

    def comes_out_as(self, other: _Watch) -> bool:
        """Whether two runs have the same results, as far as tensors have values."""
        pairs = zip(self.result, other.result, strict=True)
        return self._tape is not None or all(
            torch.allclose(first, second, rtol=_TOLERANCE, equal_nan=True) for first, second in pairs
        )

    def line_of_difference(self, other: _Watch) -> str | None:
        for place, operation in enumerate(other.operations):
            if place >= len(self.operations) or self.operations[place] != operation:
                return other._lines[place]
        return self._lines[len(other.operations)] if len(self.operations) > len(other.operations) else None

    def _told(self, value: object) -> object:
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return type(value).__name__
        if not isinstance(value, Tensor):
            return str(value)
        told_elsewhere = isinstance(value, FakeTensor) or self._may_change(value)
        if self._tape is None or told_elsewhere or value.numel() > _COMPARED_ELEMENTS:
            sizes = tuple(size if isinstance(size, int) else None for size in value.shape)
            return str(value.dtype), sizes  # sizes that depend on data have new names each time
        with unset_fake_temporarily():  # the user's numbers are real data among fake tensors
            return str(value.dtype), str(value.tolist())


def _storage(tensor: Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # a sparse tensor has none
        return None
