"""The user's state_dict: its names, which of them are one tensor, and what training changes of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from morph.checkpoint.plain_file import SAFETENSORS, PlainFile
from morph.checkpoint.unit_files import read_unit
from morph.contract.checkpoint import Manifest
from morph.contract.errors import CheckpointError, InputError, JobError
from morph.cutting import CutModel
from morph.cutting.deferred_init.construct import LazyTensors, build_model
from morph.jobs.job import Job

_SHOWN = 3


@dataclass(frozen=True)
class ModelState:
    """Names of a job's state_dict.

    Attributes:
        model: The job's model, without memory for its weights where that is possible.
        kept: Every name, with the first name of the same tensor: tied parameters are kept under that.
        trainable: Kept names of parameters that require a gradient.
        buffers: Kept names of buffers.
        values: By kept name, as the job's model makes them.
    """

    model: nn.Module
    kept: Mapping[str, str]
    trainable: frozenset[str]
    buffers: frozenset[str]
    values: LazyTensors

    @property
    def specs(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type by kept name."""
        return self.values.specs


def model_state(job: Job) -> ModelState:
    """Build the job's model, without memory for its weights where that is possible.

    Raises:
        JobError: its state_dict holds something besides tensors.
    """
    built = build_model(job.model, job.seed)
    entries = built.model.state_dict(keep_vars=True)
    for name, value in entries.items():
        if not isinstance(value, Tensor):
            raise JobError("holds something besides tensors", source="Job", field=f"model state_dict {name!r}")
    first_names: dict[int, str] = {}
    for name, parameter in built.model.named_parameters(remove_duplicate=False):
        first_names.setdefault(id(parameter), name)
    kept = {name: first_names.setdefault(id(value), name) for name, value in entries.items()}
    first = {name: entries[name] for name in dict.fromkeys(kept.values())}
    trainable = frozenset(name for name, value in first.items() if value.requires_grad)
    buffers = frozenset(name for name, _ in built.model.named_buffers()) & first.keys()
    values = LazyTensors({name: value.detach() for name, value in first.items()}, built.tape)
    return ModelState(built.model, kept, trainable, buffers, values)


def export_state(job: Job, checkpoint_url: str, manifest: Manifest) -> dict[str, Tensor]:
    """Collect a checkpoint's parameters and buffers under all of the user's names, with what training does not change.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged.
        JobError: the job's model is not the one that was trained.
    """
    state = model_state(job)
    return _under_each_name(state, _trained(job, state, checkpoint_url, manifest), state.kept)


def export_pretrained(job: Job, checkpoint_url: str, manifest: Manifest) -> tuple[nn.Module, dict[str, Tensor]]:
    """Collect what the model's own ``save_pretrained(folder, state_dict=...)`` is to be called with.

    Of a model with adapters (peft) these are trained tensors alone: no frozen weight is read.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged.
        JobError: the job's model is not the one that was trained, or has no such method.
    """
    state = model_state(job)
    if not callable(getattr(state.model, "save_pretrained", None)):
        raise JobError(
            "has no save_pretrained, which writes a folder",
            source="Job",
            field="model",
            value=type(state.model).__name__,
            allowed=f"a model of transformers or peft, or a file whose name ends in {SAFETENSORS}",
        )
    trained = _trained(job, state, checkpoint_url, manifest)
    names = state.kept
    if hasattr(state.model, "peft_config"):
        names = {name: kept for name, kept in names.items() if kept in trained}
    return state.model, _under_each_name(state, trained, names)


def _under_each_name(
    state: ModelState, trained: Mapping[str, Tensor], names: Mapping[str, str]
) -> dict[str, Tensor]:
    """Return tensors by these names, of those that are kept; what is not trained, as the job's model makes it."""
    whole = {name: trained[name] if name in trained else state.values[name] for name in dict.fromkeys(names.values())}
    # every name has memory of its own: safetensors stores no tensor twice under two names
    return {name: whole[kept].clone().contiguous() for name, kept in names.items()}


def _trained(job: Job, state: ModelState, checkpoint_url: str, manifest: Manifest) -> dict[str, Tensor]:
    """Read what a checkpoint has of the state_dict, by kept name."""
    trained: dict[str, Tensor] = {}
    for entry in manifest.units:
        for key, tensor in read_unit(checkpoint_url, manifest, entry.unit).items():
            kind, _, name = key.partition("/")
            if kind == "param" or (kind == "buffer" and name in state.buffers):  # else it is not in the state_dict
                trained[name] = tensor
    if job.master_weights:  # a checkpoint has what the optimizer works on
        trained = {
            name: tensor.to(state.specs[name][1]) if name in state.trainable else tensor
            for name, tensor in trained.items()
        }
    if not trained:
        raise CheckpointError(f"{checkpoint_url}: version {manifest.version} holds no parameters")
    for name, tensor in trained.items():
        spec = state.specs.get(name) if name in state.trainable | state.buffers else None
        if spec != (tuple(tensor.shape), tensor.dtype):
            have = "nothing of that name" if spec is None else f"{list(spec[0])} {spec[1]}"
            raise JobError(
                "is not the model that was trained",
                source="Job",
                field=f"model {'buffer' if name in state.buffers else 'parameter'} {name!r}",
                value=have,
                allowed=f"{list(tensor.shape)} {tensor.dtype}, as in the checkpoint",
            )
    return trained


class ImportedParameters:
    """A file's parameters and buffers for a cut model, checked by names, shapes, types and tied names; read one by one.

    Buffers that the forward writes may be absent: then they are as the job's model makes them.

    Args:
        job: The job.
        model: Its cut model.
        file: The file.
        initial_buffers: What the job's model makes.

    Raises:
        InputError: naming the file and the entry that does not fit.
    """

    def __init__(self, job: Job, model: CutModel, file: PlainFile, initial_buffers: Mapping[str, Tensor]) -> None:
        self._initial_buffers = initial_buffers
        self._file, self._state, self._model = file, model_state(job), model
        self._names: dict[str, list[str]] = {}
        for name in file.shapes:
            if name not in self._state.kept:
                raise self._wrong("are not in the job's model", [n for n in file.shapes if n not in self._state.kept])
            self._names.setdefault(self._state.kept[name], []).append(name)
        missing = [name for name in model.parameter_specs if name not in self._names]
        if missing:
            raise self._wrong("are missing, which the job's model trains", missing)
        self.unused = tuple(name for name in model.unused_parameters if name in self._names)
        for kept, names in self._names.items():
            self._check(kept, names)

    def __getitem__(self, name: str) -> Tensor:
        """Read one parameter or buffer, in the type that the job's model has it in."""
        _, dtype = self._model.specs[name]
        if name not in self._names:
            return self._initial_buffers[name]
        return self._file[self._names[name][0]].to(dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._model.parameter_specs)

    def _check(self, kept: str, names: list[str]) -> None:
        shape, dtype = self._state.specs[kept]
        for name in names:
            if self._file.shapes[name] != shape:
                raise self._wrong("has another shape", [name], list(self._file.shapes[name]), f"{list(shape)}")
        first = self._file[names[0]]
        if first.dtype != dtype and torch.promote_types(first.dtype, dtype) != dtype:
            raise self._wrong("has a type that would lose digits", [names[0]], str(first.dtype), str(dtype))
        for name in names[1:]:
            if not torch.equal(self._file[name], first):
                allowed = f"the same numbers as {names[0]!r}: the job's model ties the two"
                raise self._wrong("differs", [name], None, allowed)
        is_constant = kept not in self._state.trainable and kept not in self._model.buffer_specs
        if is_constant and not torch.equal(first.to(dtype), self._state.values[kept]):
            allowed = "what the job's model makes: what training does not change is not part of a run's state"
            raise self._wrong("has other numbers", [names[0]], None, allowed)

    def _wrong(self, problem: str, names: list[str], value: object = None, allowed: str | None = None) -> InputError:
        shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        return InputError(problem, source=str(self._file.path), field=shown, value=value, allowed=allowed)
