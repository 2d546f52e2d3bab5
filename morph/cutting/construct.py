"""Build the user's model without memory for its weights, and make single tensors of it when they are asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from morph.cutting.recordable import recordable
from morph.cutting.tape import CannotRecord, RecordTape, Tape, TensorRef

log = logging.getLogger(__name__)


class LazyTensors(Mapping[str, Tensor]):
    """Named tensors on CPU; one of a recorded constructor is made anew each time it is asked for."""

    def __init__(self, tensors: Mapping[str, Tensor], tape: Tape | None) -> None:
        self._tape = tape
        self._entries = {name: _entry(tensor, tape) for name, tensor in tensors.items()}
        self.specs = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        """Shape and dtype of each, without making any."""

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        if isinstance(entry, Tensor):
            return entry
        assert self._tape is not None
        return self._tape.materialise([entry])[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def all_at_once(self) -> dict[str, Tensor]:
        """Make every tensor in one replay."""
        references = {name: entry for name, entry in self._entries.items() if isinstance(entry, TensorRef)}
        made = self._tape.materialise(list(references.values())) if self._tape is not None else []
        found = dict(zip(references, made, strict=True))
        return {name: entry if isinstance(entry, Tensor) else found[name] for name, entry in self._entries.items()}


@dataclass(frozen=True, eq=False)
class BuiltModel:
    """The user's model, fake where it could be recorded.

    Attributes:
        model: In training mode.
        tape: What its constructor did; None when it was really built.
        fake_mode: Of its tensors.
        not_recorded: Why it was really built, in one line; None when it was recorded.
    """

    model: nn.Module
    tape: Tape | None
    fake_mode: FakeTensorMode | None
    not_recorded: str | None

    def running(self) -> AbstractContextManager[object]:
        """Return the context in which the model's code may be run: what it makes and keeps goes on the tape."""
        if self.tape is None or self.fake_mode is None:
            return nullcontext()
        stack = ExitStack()
        if self.fake_mode.shape_env is not None:  # sizes that depend on data, seen here, are not part of the export
            stack.enter_context(self.fake_mode.shape_env.ignore_fresh_unbacked_symbols())
        stack.enter_context(self.fake_mode)
        stack.enter_context(RecordTape(self.tape))
        return stack

    def tracing(self) -> AbstractContextManager[object]:
        """Return the context in which torch.export takes the model's tensors as they are."""
        return nullcontext() if self.fake_mode is None else tracing(TracingContext(self.fake_mode))

    def like(self, tensor: Tensor) -> Tensor:
        """Return a tensor that the model can be called with: a fake one for a fake model."""
        return tensor if self.fake_mode is None else self.fake_mode.from_tensor(tensor, static_shapes=True)


def build_model(make: Callable[[], nn.Module], seed: int) -> BuiltModel:
    """Record the constructor; really run it where that is not possible, which a warning says.

    Raises:
        Exception: whatever ``make`` raises when it is really run.
    """
    reason = "the function returns no module"
    try:
        built = _record(make, seed)
        if isinstance(built.model, nn.Module):
            named = dict(built.model.named_parameters()) | dict(built.model.named_buffers())
            LazyTensors(named, built.tape)
            return built
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
    model = build_really(make, seed)
    if isinstance(model, nn.Module):
        log.warning("the model's constructor cannot be recorded, so every worker builds the whole model: %s", reason)
    return BuiltModel(model, None, None, reason)


def build_really(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build the model with its weights, all random numbers drawn from the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def _record(make: Callable[[], nn.Module], seed: int) -> BuiltModel:
    tape = Tape(seed)
    # as torch.export makes its own: it takes over a mode that it finds, and asks for these
    shapes = ShapeEnv(tracked_fakes=[], prefer_deferred_runtime_asserts_over_guards=False, trace_asserts=True)
    fake_mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True, export=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with recordable(tape), fake_mode, RecordTape(tape):
            model = make()
    return BuiltModel(model, tape, fake_mode, None)


def _entry(tensor: Tensor, tape: Tape | None) -> TensorRef | Tensor:
    if not isinstance(tensor, FakeTensor):
        return tensor.detach()
    if tape is None:
        raise CannotRecord("a tensor comes from outside the constructor")
    return tape.reference(tensor)
