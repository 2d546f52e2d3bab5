"""Converts between checkpoints and the user's state_dict, with its names, tied tensors and untrained entries."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from morph.checkpoint.frozen_weights import FrozenWeights
from morph.checkpoint.plain_file import SAFETENSORS
from morph.checkpoint.unit_files import read_unit
from morph.contract.checkpoint import Manifest
from morph.contract.errors import CheckpointError, InputError, wrong_job
from morph.cutting import CutModel
from morph.cutting.deferred_init.construct import LazyTensors, build_model
from morph.jobs.job import Job
from morph.runtime.state.optimizer_state import group_numbers
from morph.runtime.state.unit_state import UnitState
from morph.words import listed

_SHOWN = 3


@dataclass(frozen=True)
class ModelState:
    """Names of a job's state_dict, and initial ``values`` by kept name, made by the job's model.

    ``kept``: by every name, the first name of the same tensor; ``trainable``: kept names that require a gradient.
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
    """Build the job's model, without memory for its weights where that is possible."""
    built = build_model(job.model, job.seed)
    entries = built.model.state_dict(keep_vars=True)
    for name, value in entries.items():
        if not isinstance(value, Tensor):
            raise wrong_job(f"model state_dict {name!r}", "holds something besides tensors")
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
    """Return a checkpoint's parameters and buffers under all of the user's names, and entries that are not trained."""
    state = model_state(job)
    trained = _trained(job, state, checkpoint_url, manifest)
    return _under_each_name(state, trained, FrozenWeights(checkpoint_url), state.kept)


def export_pretrained(job: Job, checkpoint_url: str, manifest: Manifest) -> tuple[nn.Module, dict[str, Tensor]]:
    """Collect the arguments of ``save_pretrained(folder, state_dict=...)``; for adapters (peft), trained tensors."""
    state = model_state(job)
    if not callable(getattr(state.model, "save_pretrained", None)):
        raise wrong_job(
            "model",
            "has no save_pretrained, which writes a folder",
            type(state.model).__name__,
            f"a model of transformers or peft, or a file whose name ends in {SAFETENSORS}",
        )
    trained = _trained(job, state, checkpoint_url, manifest)
    names = state.kept
    if hasattr(state.model, "peft_config"):
        names = {name: kept for name, kept in names.items() if kept in trained}
    return state.model, _under_each_name(state, trained, FrozenWeights(checkpoint_url), names)


def _under_each_name(
    state: ModelState, trained: Mapping[str, Tensor], frozen: Mapping[str, Tensor], names: Mapping[str, str]
) -> dict[str, Tensor]:
    """Return the tensors kept under these names: trained, given to the run, or made by the job's model."""
    whole: dict[str, Tensor] = {}
    for name in dict.fromkeys(names.values()):
        held = next(group for group in (trained, frozen, state.values) if name in group)[name]
        whole[name] = held.clone().contiguous()
    return {name: whole[kept] for name, kept in names.items()}


def _trained(job: Job, state: ModelState, checkpoint_url: str, manifest: Manifest) -> dict[str, Tensor]:
    """Read a checkpoint's entries of the state_dict, by kept name."""
    trained: dict[str, Tensor] = {}
    for entry in manifest.units:
        for key, tensor in read_unit(checkpoint_url, manifest, entry.unit).items():
            kind, _, name = key.partition("/")
            if kind == "param" or (kind == "buffer" and name in state.buffers):  # otherwise it is not in the state_dict
                trained[name] = tensor
    if job.master_weights:  # a checkpoint has the parameters that the optimizer works on
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
            raise wrong_job(
                f"model {'buffer' if name in state.buffers else 'parameter'} {name!r}",
                "is not the model that was trained",
                have,
                f"{list(tensor.shape)} {tensor.dtype}, as in the checkpoint",
            )
    return trained


@dataclass(frozen=True)
class ImportRules:
    """Rules that map a file's entries to those of a job's model; all patterns are regular expressions.

    Each of ``renames`` in turn replaces every match in an entry's name. ``skip`` and ``fresh`` match whole names: of
    entries to leave out, and of parameters that may be missing.
    """

    renames: tuple[tuple[re.Pattern[str], str], ...] = ()
    skip: tuple[re.Pattern[str], ...] = ()
    fresh: tuple[re.Pattern[str], ...] = ()

    def entries(self, names: Iterable[str]) -> list[tuple[str, str]]:
        """Return, for each imported entry, its name in the job's model and its own name."""
        taken = [name for name in names if not any(pattern.fullmatch(name) for pattern in self.skip)]
        return [(reduce(lambda new, rule: rule[0].sub(rule[1], new), self.renames, name), name) for name in taken]

    def may_be_fresh(self, name: str) -> bool:
        """Whether a parameter may be missing."""
        return any(pattern.fullmatch(name) for pattern in self.fresh)


class Weights(Protocol):
    """Tensors by name; each is read when it is requested."""

    @property
    def path(self) -> Path:
        """Name of the file in errors."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape and dtype of each tensor."""

    def __getitem__(self, name: str) -> Tensor:
        """Read one tensor."""


class CheckpointWeights:
    """The parameters and buffers of a run's checkpoint, with its optimizers' state; one unit is in memory at a time."""

    def __init__(self, source: str, checkpoint_url: str, manifest: Manifest) -> None:
        self.path, self._url, self._manifest = Path(source), checkpoint_url, manifest
        self._last: tuple[str, dict[str, Tensor]] = ("", {})
        self._frozen = FrozenWeights(checkpoint_url)
        self._places: dict[str, tuple[str, str]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {name: tuple(self._frozen[name].shape) for name in self._frozen}
        for entry in manifest.units:
            for key, value in self._unit(entry.unit).items():
                kind, _, name = key.partition("/")
                if kind in ("param", "buffer"):
                    self._places[name], self.shapes[name] = (entry.unit, key), tuple(value.shape)

    def _unit(self, unit: str) -> dict[str, Tensor]:
        if self._last[0] != unit:
            self._last = unit, read_unit(self._url, self._manifest, unit)
        return self._last[1]

    def __getitem__(self, name: str) -> Tensor:
        if name in self._frozen:
            return self._frozen[name]
        unit, key = self._places[name]
        return self._unit(unit)[key]

    def optimizer_state(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any], set[str]]:
        """Return an optimizer's tensors and plain values of a parameter by key, and names of its hyperparameters."""
        if name not in self._places:
            return {}, {}, set()
        unit = self._unit(self._places[name][0])
        numbers, prefix = json.loads(bytes(unit["numbers"].tolist())), f"optim/{name}/"
        tensors = {key.removeprefix(prefix): value for key, value in unit.items() if key.startswith(prefix)}
        return tensors, numbers["optimizer"].get(name, {}), {key for group in numbers["groups"] for key in group}


class ImportedParameters:
    """A file's parameters and buffers for a cut model, checked by names, shapes, types and tied names; read one by one.

    The job's model initialises those that are ``fresh``, and absent buffers that the forward writes. ``unused`` ones
    are left out; ``frozen`` names untrained entries that differ from the job's model.
    """

    def __init__(
        self,
        job: Job,
        model: CutModel,
        file: Weights,
        initial_buffers: Mapping[str, Tensor],
        rules: ImportRules = ImportRules(),
    ) -> None:
        self._initial_buffers = initial_buffers
        self._file, self._state, self._model = file, model_state(job), model
        self._names: dict[str, list[str]] = {}
        entries = rules.entries(file.shapes)
        unknown = [entry for name, entry in entries if name not in self._state.kept]
        if unknown:
            allowed = "entries that --rename turns into the model's names; leave others out with --skip"
            raise self._wrong("are not in the job's model", unknown, None, allowed)
        called = Counter(name for name, _ in entries)
        if len(called) < len(entries):
            twice = [entry for name, entry in entries if called[name] > 1]
            raise self._wrong("become the same name of the job's model", twice)
        for name, entry in entries:
            self._names.setdefault(self._state.kept[name], []).append(entry)
        missing = [name for name in model.parameter_specs if name not in self._names]
        if not all(map(rules.may_be_fresh, missing)):
            allowed = "names that match --fresh, if they are to begin as the job's model makes them"
            absent = [name for name in missing if not rules.may_be_fresh(name)]
            raise self._wrong("are missing, but the job's model trains them", absent, None, allowed)
        self.fresh = tuple(missing)
        self.unused = tuple(name for name in model.unused_parameters if name in self._names)
        self.frozen = tuple(kept for kept, names in self._names.items() if self._differs(kept, names))

    def __getitem__(self, name: str) -> Tensor:
        """Read one parameter or buffer, in its type in the job's model."""
        if name in self._names:
            return self._file[self._names[name][0]].to(self._state.specs[name][1])
        return self._initial_buffers[name] if name in self._initial_buffers else self._state.values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._model.parameter_specs)

    def give_optimizer_state(self, state: UnitState) -> None:
        """Give a unit's optimizer the run's state, as far as it has one. Raises InputError for another optimizer."""
        assert isinstance(self._file, CheckpointWeights)
        tensors: dict[tuple[str, str], Tensor] = {}
        plain: dict[str, Any] = {}
        own = {key for group in group_numbers(state.optimizer) for key in group}
        for name in state.parameters.keys() & self._names.keys():
            entry = self._names[name][0]
            stored, plain[name], settings = self._file.optimizer_state(entry)
            if settings != own:
                allowed = f"one with the settings of the job's: {', '.join(sorted(own))}; or no --optimizer-state"
                raise self._wrong("is trained by another optimizer", [entry], ", ".join(sorted(settings)), allowed)
            tensors |= {(name, key): value for key, value in stored.items()}
        state.take_optimizer_state(tensors, plain)

    def _differs(self, kept: str, names: list[str]) -> bool:
        """Check the entries of a tensor; return whether it is untrained and differs from the job's model."""
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
        if not is_constant or torch.equal(first.to(dtype), self._state.values[kept]):
            return False
        if not all(isinstance(section.code, GraphModule) for section in self._model.sections):
            allowed = "what the job's model makes: it is cut at marks, or not cut, so that each worker builds it"
            raise self._wrong("has other numbers", [names[0]], None, allowed)
        return True

    def _wrong(self, problem: str, names: list[str], value: object = None, allowed: str | None = None) -> InputError:
        field = listed(names, _SHOWN)
        return InputError(problem, source=str(self._file.path), field=field, value=value, allowed=allowed)
