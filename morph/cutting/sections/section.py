"""The result of cutting: sections, the tensors that cross their borders, and the units of their parameters."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

SectionCode = Callable[..., tuple[Tensor, ...]]
Finish = Callable[[SectionCode, torch.device], SectionCode]


@dataclass(frozen=True)
class BoundaryTensor:
    """A tensor that crosses a cut, with its gradient, as ``dtype``; sections may compute it as ``wide_dtype``."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    wide_dtype: torch.dtype | None = None

    @property
    def computed_dtype(self) -> torch.dtype:
        """The type in which sections compute it."""
        return self.wide_dtype or self.dtype

    @property
    def num_bytes(self) -> int:
        """The size of this tensor for m samples, in bytes."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class ParameterUnit:
    """The parameters and written buffers that exactly these sections read; ``id``: ``s3``, or if tied ``s0+s7``."""

    id: str
    sections: tuple[int, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of everything in the unit that changes while training."""
        return (*self.parameters, *self.buffers)


class Constants(Mapping[str, Tensor]):
    """Tensors, made by ``values``, that training does not change; sections on one device share a copy of each."""

    def __init__(
        self,
        values: Mapping[str, Tensor],
        names: Mapping[str, str] | None = None,
        specs: Mapping[str, tuple[tuple[int, ...], torch.dtype]] | None = None,
    ) -> None:
        self._values, self._names, self.specs = values, names or {}, specs or {}
        self._given: Mapping[str, Tensor] = {}
        self._held: dict[tuple[str, torch.device], Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        called = self._names.get(name, "")
        return self._given[called] if called in self._given else self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def num_bytes(self, name: str) -> int:
        """Return the size of a constant in bytes, without making it."""
        shape, dtype = self.specs[name]
        return prod(shape) * dtype.itemsize

    def take(self, given: Mapping[str, Tensor]) -> None:
        """From now on, use these tensors, by their names in the user's model, in place of the model's own."""
        self._given, self._held = given, {}

    def on(self, name: str, device: torch.device) -> Tensor:
        """Return a constant on a device, where it stays until ``keep_only``."""
        key = name, device
        if key not in self._held:
            self._held[key] = self[name].to(device)
        return self._held[key]

    def keep_only(self, names: Collection[str]) -> None:
        """Release all constants but these: a worker keeps only those of its own sections."""
        self._held = {key: value for key, value in self._held.items() if key[0] in names}


@dataclass(frozen=True, eq=False)
class Section:
    """One section: a function of border tensors, batch entries and parameters, which it does not own.

    Attributes:
        index: 0..K-1.
        label: The module of the user's model in which the section begins.
        inputs: The previous section's outputs.
        outputs: Contiguous; the last section returns the scalar loss and the metrics. A tensor that only passes through
            is in both.
        parameters: Those that it reads, including tied ones.
        signature: Equal for sections of equal operations and shapes.
        code: Called with ``*inputs, *batch entries, *parameters, *buffers, *constants``; returns the outputs, then new
            values of ``writes``.
        buffers: Buffers that it reads and some section writes.
        writes: The ``buffers`` that it writes itself.
        constants: Constants that it reads (other buffers, frozen parameters), by their names in ``constant_values``.
        source: The line of code outside torch, ``file:line``, with which the section begins.
        cost: Estimated compute, in the same unit for all sections.
        num_replicated: Number of cheap operations that it computes although other sections compute them too.
        finish: Applied to the code after it was moved to a device, for example to compile it.
    """

    index: int
    label: str
    inputs: tuple[BoundaryTensor, ...]
    outputs: tuple[BoundaryTensor, ...]
    batch_keys: tuple[str, ...]
    parameters: tuple[str, ...]
    signature: str
    code: SectionCode
    buffers: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    constant_values: Constants = field(default_factory=lambda: Constants({}))
    source: str | None = None
    cost: float = 0.0
    num_replicated: int = 0
    finish: Finish | None = None
    _on_device: dict[torch.device, SectionCode] = field(default_factory=dict, repr=False)

    def __call__(
        self, inputs: Sequence[Tensor], batch: Mapping[str, Tensor], parameters: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        """Run the section; autograd records as usual, and random numbers come from torch's generator.

        ``batch``: at least ``self.batch_keys``, each [m, ...]; ``parameters``: with buffers, on one device. Returns one
        tensor per entry of ``self.outputs``, then one per entry of ``self.writes``.
        """
        names = (*self.parameters, *self.buffers)
        given = [*inputs, *(batch[key] for key in self.batch_keys), *(parameters[name] for name in names)]
        device = given[0].device if given else torch.device("cpu")
        if device not in self._on_device:
            code = on_device(self.code, device)
            self._on_device[device] = self.finish(code, device) if self.finish else code
        return self._on_device[device](*given, *(self.constant_values.on(name, device) for name in self.constants))


@dataclass(frozen=True, eq=False)
class CutModel:
    """A model cut into K sections for one micro-batch size.

    Attributes:
        units: Every parameter that a section reads is in exactly one.
        fingerprint: Digest of operations, cut positions and parameters; equal for every m, process and machine.
        unused_parameters: Trainable parameters on which the loss does not depend: in no unit, and never changed.
        metric_names: Names of the last section's outputs after the loss.
        by_length: The same cut for each bucket, if lengths vary; this cut is for the longest.
        length: The bucket of this cut.
        by_samples: The same cut for micro-batches of fewer samples, by their number.
    """

    sections: tuple[Section, ...]
    units: tuple[ParameterUnit, ...]
    fingerprint: str
    micro_batch_size: int
    parameter_specs: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    unused_parameters: tuple[str, ...]
    metric_names: tuple[str, ...] = ()
    buffer_specs: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    by_length: Mapping[int, CutModel] = field(default_factory=dict)
    length: int | None = None
    by_samples: Mapping[int, CutModel] = field(default_factory=dict)

    def at(self, length: int | None, num_samples: int | None = None) -> CutModel:
        """Return the cut for a length (None: unknown, or constant) and number of samples (None: m)."""
        model = self if num_samples in (None, self.micro_batch_size) else self.by_samples[num_samples]
        return model if length is None else model.by_length.get(length, model)

    def every(self) -> dict[tuple[int | None, int], CutModel]:
        """Return all cuts, by length (None if lengths do not vary) and number of samples."""
        models = {self.micro_batch_size: self, **self.by_samples}
        cuts: dict[tuple[int | None, int], CutModel] = {}
        for size, model in models.items():
            cuts |= {(length, size): model.at(length) for length in model.by_length or (None,)}
        return cuts

    def mapped(self, change: Callable[[CutModel], CutModel]) -> CutModel:
        """Return the model with ``change`` applied to this cut and to every other."""
        return replace(
            change(self),
            by_length={length: change(model) for length, model in self.by_length.items()},
            by_samples={size: model.mapped(change) for size, model in self.by_samples.items()},
        )

    @property
    def specs(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """The shape and dtype of everything that changes while training."""
        return {**self.parameter_specs, **self.buffer_specs}

    @property
    def constants(self) -> list[Constants]:
        """The constants of all sections, each object once."""
        return list({id(section.constant_values): section.constant_values for section in self.sections}.values())

    def keep_constants_of(self, sections: range) -> None:
        """Release the constants that none of these sections reads."""
        for held in self.constants:
            held.keep_only({name for index in sections for name in self.sections[index].constants})


def narrowed(model: CutModel, dtype: torch.dtype) -> CutModel:
    """Return a cut model whose wider floating-point tensors cross every cut as ``dtype``, with another fingerprint."""
    return model.mapped(lambda cut: _narrowed(cut, dtype))


def _narrowed(model: CutModel, dtype: torch.dtype) -> CutModel:
    def narrow(borders: tuple[BoundaryTensor, ...]) -> tuple[BoundaryTensor, ...]:
        return tuple(
            replace(border, dtype=dtype, wide_dtype=border.dtype)
            if border.dtype.is_floating_point and border.dtype.itemsize > dtype.itemsize
            else border
            for border in borders
        )

    *before, last = model.sections
    sections = [replace(section, inputs=narrow(section.inputs), outputs=narrow(section.outputs)) for section in before]
    return replace(
        model,
        sections=(*sections, replace(last, inputs=narrow(last.inputs))),
        fingerprint=hashlib.sha256(f"{model.fingerprint} across cuts {dtype}".encode()).hexdigest(),
    )


def units_of(
    sections: Sequence[Section], names: Sequence[str], buffers: Sequence[str] = ()
) -> tuple[ParameterUnit, ...]:
    """Group parameters and written buffers, named in the model's order, by the sections that read them."""
    parameters = _by_readers(names, {section.index: section.parameters for section in sections})
    written = _by_readers(buffers, {section.index: section.buffers for section in sections})
    return tuple(
        ParameterUnit(
            "+".join(f"s{index}" for index in readers),
            readers,
            tuple(parameters.get(readers, ())),
            tuple(written.get(readers, ())),
        )
        for readers in sorted(parameters.keys() | written.keys())
    )


def _by_readers(names: Sequence[str], read: Mapping[int, Sequence[str]]) -> dict[tuple[int, ...], list[str]]:
    members: dict[tuple[int, ...], list[str]] = {}
    for name in names:
        readers = tuple(index for index, entries in read.items() if name in entries)
        if readers:
            members.setdefault(readers, []).append(name)
    return members


def on_device(code: SectionCode, device: torch.device) -> SectionCode:
    """Return a section's code with the device that was written into its graph replaced."""
    if device.type == "cpu" or not isinstance(code, GraphModule):
        return code
    moved = copy.deepcopy(code)
    for module in moved.modules():
        if not isinstance(module, GraphModule):
            continue
        for node in module.graph.nodes:
            node.args = torch.fx.node.map_aggregate(node.args, lambda value: _moved(value, device))
            node.kwargs = torch.fx.node.map_aggregate(node.kwargs, lambda value: _moved(value, device))
        module.recompile()
    return moved


def _moved(value: Any, device: torch.device) -> Any:
    return device if isinstance(value, torch.device) else value
