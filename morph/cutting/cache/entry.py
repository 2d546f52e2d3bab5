"""A cut model and what it starts from, as bytes and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule

from morph.cutting.cache.values import (
    CannotKeep,
    Json,
    read_code,
    read_dtype,
    read_tape,
    read_value,
    write_code,
    write_operation,
    write_value,
)
from morph.cutting.deferred_init.construct import LazyTensors
from morph.cutting.deferred_init.tape import Tape, TensorRef
from morph.cutting.exporting.exported import GraphJob, InitialState
from morph.cutting.sections.section import BoundaryTensor, CutModel, ParameterUnit, Section

_FORM = 2
_SECTION_TEXTS = ("index", "label", "signature", "source", "cost", "num_replicated")
_SECTION_NAMES = ("batch_keys", "parameters", "buffers", "writes", "constants")
Specs = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Entry:
    """What a worker needs of its job's model."""

    model: CutModel
    initial: InitialState


def write_entry(exported: GraphJob, model: CutModel) -> bytes:
    """Return the form of a model that was cut.

    Raises:
        CannotKeep: the model was not recorded, or has something that the form does not hold.
    """
    lazy = (exported.initial_parameters, exported.initial_buffers, exported.initial_constants)
    tape = exported.initial_parameters.tape
    if tape is None:
        raise CannotKeep("a model that was really built")
    places = _needed(tape, lazy)
    form = {
        "form": _FORM,
        "sections": [_write_section(section) for section in model.sections],
        "units": [[unit.id, unit.sections, unit.parameters, unit.buffers] for unit in model.units],
        "fingerprint": model.fingerprint,
        "micro_batch_size": model.micro_batch_size,
        "parameter_specs": _write_specs(model.parameter_specs),
        "unused_parameters": model.unused_parameters,
        "metric_names": model.metric_names,
        "buffer_specs": _write_specs(model.buffer_specs),
        "seed": tape.seed,
        "tape": [write_operation(tape.operations[place]) for place in places],
        "tensors": [_write_tensors(tensors, places) for tensors in lazy],
    }
    content = json.dumps(form, separators=(",", ":")).encode()
    again = read_entry(content).model
    for section, kept in zip(model.sections, again.sections, strict=True):
        if section.code.code != kept.code.code:  # type: ignore[attr-defined]  # of a GraphModule
            raise CannotKeep("a graph that reads back as another")
    return content


def read_entry(content: bytes) -> Entry:
    """Return what ``write_entry`` wrote.

    Raises:
        ValueError, TypeError, KeyError, LookupError, AttributeError, RuntimeError: it is not that.
    """
    form = json.loads(content)
    if form["form"] != _FORM:
        raise ValueError("another form")
    tape = read_tape(form["seed"], form["tape"])
    parameters, buffers, constants = (_read_tensors(tensors, tape) for tensors in form["tensors"])
    model = CutModel(
        sections=tuple(_read_section(section, constants) for section in form["sections"]),
        units=tuple(
            ParameterUnit(name, tuple(sections), tuple(parameters), tuple(buffers))
            for name, sections, parameters, buffers in form["units"]
        ),
        fingerprint=form["fingerprint"],
        micro_batch_size=form["micro_batch_size"],
        parameter_specs=_read_specs(form["parameter_specs"]),
        unused_parameters=tuple(form["unused_parameters"]),
        metric_names=tuple(form["metric_names"]),
        buffer_specs=_read_specs(form["buffer_specs"]),
    )
    return Entry(model, InitialState(parameters, buffers))


def _write_section(section: Section) -> Json:
    if not isinstance(section.code, GraphModule):
        raise CannotKeep("a section that is no graph")
    return {
        **{name: getattr(section, name) for name in (*_SECTION_TEXTS, *_SECTION_NAMES)},
        "inputs": _write_borders(section.inputs),
        "outputs": _write_borders(section.outputs),
        "code": write_code(section.code),
    }


def _read_section(form: Json, constants: LazyTensors) -> Section:
    texts: dict[str, Json] = {name: form[name] for name in _SECTION_TEXTS}
    names: dict[str, Json] = {name: tuple(form[name]) for name in _SECTION_NAMES}
    return Section(
        **texts,
        **names,
        inputs=_read_borders(form["inputs"]),
        outputs=_read_borders(form["outputs"]),
        code=read_code(form["code"]),
        constant_values=constants,
    )


def _write_borders(borders: Sequence[BoundaryTensor]) -> Json:
    return [
        [border.name, border.shape, write_value(border.dtype), border.requires_grad, write_value(border.wide_dtype)]
        for border in borders
    ]


def _read_borders(forms: Json) -> tuple[BoundaryTensor, ...]:
    return tuple(
        BoundaryTensor(name, tuple(shape), read_value(dtype), grad, read_value(wide))
        for name, shape, dtype, grad, wide in forms
    )


def _write_specs(specs: Specs) -> Json:
    return [[name, shape, str(dtype).removeprefix("torch.")] for name, (shape, dtype) in specs.items()]


def _read_specs(forms: Json) -> Specs:
    return {name: (tuple(shape), read_dtype(dtype)) for name, shape, dtype in forms}


def _needed(tape: Tape, lazy: Sequence[LazyTensors]) -> list[int]:
    """Places of the operations that some of the tensors depend on."""
    wanted: set[int] = set()
    for tensors in lazy:
        storages = {entry.storage for entry in tensors.entries.values() if isinstance(entry, TensorRef)}
        wanted |= {id(operation) for operation in tape.needed_for(storages, tensors.num_operations)}
    return [place for place, operation in enumerate(tape.operations) if id(operation) in wanted]


def _write_tensors(tensors: LazyTensors, places: Sequence[int]) -> Json:
    return {
        "entries": [[name, write_value(entry)] for name, entry in tensors.entries.items()],
        "specs": _write_specs(tensors.specs),
        "num_operations": sum(place < tensors.num_operations for place in places),
    }


def _read_tensors(form: Json, tape: Tape) -> LazyTensors:
    entries = {name: read_value(entry) for name, entry in form["entries"]}
    return LazyTensors.of(entries, _read_specs(form["specs"]), tape, form["num_operations"])
