"""Builds the user's model without memory for its weights, and makes single tensors on request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from morph.contract.errors import JobError
from morph.cutting.deferred_init.recordable import recordable
from morph.cutting.deferred_init.tape import CannotRecord, RecordTape, Tape, TensorRef
from morph.cutting.sections.statistics import ASSIGNED
from morph.data.seeding import own_generators

log = logging.getLogger(__name__)


class LazyTensors(Mapping[str, Tensor]):
    """Named tensors on the CPU, with their present values; those of a recorded constructor are made on each request.

    ``entries``: each tensor, or its reference on the ``tape``; None: the constructor was really run.
    """

    def __init__(self, tensors: Mapping[str, Tensor], tape: Tape | None) -> None:
        self.tape, self.num_operations = tape, len(tape.operations) if tape is not None else 0
        self.entries = {name: _entry(tensor, tape) for name, tensor in tensors.items()}
        self.specs = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        """The shape and dtype of each tensor, without making any."""

    @classmethod
    def of(
        cls,
        entries: Mapping[str, TensorRef | Tensor],
        specs: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        tape: Tape,
        num_operations: int,
    ) -> LazyTensors:
        """Rebuild the values from their attributes."""
        tensors = cls({}, tape)
        tensors.entries, tensors.specs, tensors.num_operations = dict(entries), dict(specs), num_operations
        return tensors

    def __getitem__(self, name: str) -> Tensor:
        entry = self.entries[name]
        if isinstance(entry, Tensor):
            return entry
        assert self.tape is not None
        return self.tape.materialise([entry], self.num_operations)[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def empty(self, name: str, device: torch.device) -> Tensor:
        """Allocate memory for a tensor that is about to be loaded, in the tensor's layout, without random numbers."""
        entry = self.entries[name]
        if isinstance(entry, TensorRef):
            entry = torch.empty_strided(entry.size, entry.stride, dtype=entry.dtype, device="meta")
        return torch.empty_like(entry, device=device)

    def only(self, names: Sequence[str]) -> LazyTensors:
        """Return some of the tensors, in this order."""
        chosen = copy(self)
        chosen.entries = {name: self.entries[name] for name in names}
        chosen.specs = {name: self.specs[name] for name in names}
        return chosen

    def all_at_once(self) -> dict[str, Tensor]:
        """Make every tensor in one replay."""
        references = {name: entry for name, entry in self.entries.items() if isinstance(entry, TensorRef)}
        made = self.tape.materialise(list(references.values()), self.num_operations) if self.tape is not None else []
        real = dict(zip(references, made, strict=True))
        return {name: entry if isinstance(entry, Tensor) else real[name] for name, entry in self.entries.items()}


@dataclass(frozen=True, eq=False)
class BuiltModel:
    """The user's model, with fake tensors if its constructor could be recorded, or why ``not_recorded``.

    ``buffers``: those after the constructor, by their first names.
    """

    model: nn.Module
    tape: Tape | None
    fake_mode: FakeTensorMode | None
    not_recorded: str | None
    buffers: Mapping[str, Tensor] = field(init=False)
    initial_buffers: LazyTensors = field(init=False)
    """Copies of the buffers' values, which runs of the model do not change."""

    def __post_init__(self) -> None:
        buffers = dict(self.model.named_buffers()) if isinstance(self.model, nn.Module) else {}
        # buffers that are not fake hold data that a run really changes
        copies = {
            name: value if isinstance(value, FakeTensor) else value.detach().clone()
            for name, value in buffers.items()
            if not is_lazy(value)
        }
        object.__setattr__(self, "buffers", buffers)
        object.__setattr__(self, "initial_buffers", LazyTensors(copies, self.tape))

    def drop_results_of_a_run(self) -> None:
        """Restore the buffers that a run has replaced by tensors made from its batch."""
        for name, buffer in self.buffers.items():
            owner, _, last = name.rpartition(".")
            assigned = self.model.get_buffer(name)
            if self.tape is not None and isinstance(assigned, FakeTensor) and not self.tape.knows(assigned):
                self.model.get_submodule(owner)._buffers[last] = buffer

    def running(self) -> AbstractContextManager[object]:
        """Return the context for running the model's code: tensors that it makes and keeps are recorded on the tape."""
        if self.tape is None or self.fake_mode is None:
            return nullcontext()
        stack = ExitStack()
        if self.fake_mode.shape_env is not None:  # data-dependent sizes found here are not part of the export
            stack.enter_context(self.fake_mode.shape_env.ignore_fresh_unbacked_symbols())
        stack.enter_context(self.fake_mode)
        stack.enter_context(RecordTape(self.tape))
        return stack

    def tracing(self) -> AbstractContextManager[object]:
        """Return the context in which torch.export accepts the model's tensors unchanged."""
        return nullcontext() if self.fake_mode is None else tracing(TracingContext(self.fake_mode))

    def like(self, tensor: Tensor) -> Tensor:
        """Return a new tensor, fake for a fake model; a copy, since the mode keeps one fake tensor for each tensor."""
        return tensor if self.fake_mode is None else self.fake_mode.from_tensor(tensor.clone(), static_shapes=True)


def write_assigned_buffers(model: nn.Module, before: Mapping[str, Tensor]) -> None:
    """Write tensors that the forward has assigned in place of buffers into these, for torch.export."""
    for name, buffer in before.items():
        owner, _, last = name.rpartition(".")
        buffers = model.get_submodule(owner)._buffers
        assigned = buffers.get(last)
        if assigned is buffer:
            continue
        if assigned is None or assigned.shape != buffer.shape or assigned.dtype != buffer.dtype:
            shown = None if assigned is None else f"{list(assigned.shape)} {assigned.dtype}"
            allowed = f"{list(buffer.shape)} {buffer.dtype}, as it was registered"
            raise JobError(f"the forward replaces buffer {name}", field="model", value=shown, allowed=allowed)
        buffer.copy_(ASSIGNED(assigned))
        buffers[last] = buffer


def training_mode(model: nn.Module) -> nn.Module:
    """Set training mode, except for frozen normalisation, which stays in evaluation mode and has nothing to train."""
    norms = [module for module in model.modules() if isinstance(module, _NormBase) and not module.training]
    model.train()
    for module in norms:
        if not any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
            module.eval()
    return model


def build_model(make: Callable[[], nn.Module], seed: int) -> BuiltModel:
    """Record the constructor or, with a warning, really run it; then any error of ``make`` is raised."""
    reason = "the function returns no module"
    try:
        built = _record(make, seed)
        if isinstance(built.model, nn.Module):
            LazyTensors(dict(built.model.named_parameters()), built.tape)
            return built
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
    model = build_really(make, seed)
    if isinstance(model, nn.Module):
        log.warning("the model's constructor cannot be recorded, so every worker builds the whole model: %s", reason)
    return BuiltModel(model, None, None, reason)


def build_really(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build the model with its weights; all random numbers depend on the seed."""
    with _seeded(seed):
        return make()


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the generators of a constructor, including numpy's and Python's, which no tape records."""
    with own_generators(seed):
        torch.manual_seed(seed)  # also devices that the constructor is the first to use
        yield


def _record(make: Callable[[], nn.Module], seed: int) -> BuiltModel:
    # not at the top: this loads sympy, a third of all imports of a worker, which only reads records
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    tape = Tape(seed)
    # as in torch.export's own mode: torch.export uses a mode that it finds, and requires these values
    shapes = ShapeEnv(tracked_fakes=[], prefer_deferred_runtime_asserts_over_guards=False, trace_asserts=True)
    fake_mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True, export=True)
    with _seeded(seed), tape.constructing(), recordable(tape), fake_mode, RecordTape(tape):
        model = make()
    return BuiltModel(model, tape, fake_mode, None)


def _entry(tensor: Tensor, tape: Tape | None) -> TensorRef | Tensor:
    if not isinstance(tensor, FakeTensor):
        return tensor.detach()
    if tape is None:
        raise CannotRecord("a tensor comes from outside the constructor")
    return tape.reference(tensor)
