"""Packs everything that a member needs to train like the others as bytes. Nothing is unpickled.

Settings are values that a loop's own code may change from step to step: hyperparameters of parameter groups, parameters
that it adds to the optimizer, which parameters are trained (``requires_grad``), and the state of a schedule.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim.lr_scheduler import LRScheduler

from morph.contract.errors import InputError, JobError
from morph.elastic.settings import Settings
from morph.elastic.strategy import S_SGD, Pace
from morph.runtime.state.optimizer_state import (
    from_plain,
    group_numbers,
    load_groups,
    load_scheduler,
    scheduler_numbers,
    to_plain,
)

_IMMUTABLE = (bool, int, float, str, type(None))
_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of types in safetensors."""
_DTYPES = {name: dtype for dtype, name in _TYPES.items()}


@dataclass(frozen=True)
class Arrived:
    """States of the loop's own objects that another member sent, by name.

    ``has_passed``: the sender's loop had already begun its own code for the next step.
    """

    states: dict[str, Any]
    has_passed: bool


@dataclass
class TrainingState:
    """One member's state. ``num_steps``: how many steps it has had. ``exponents``: scales of exact sums, by name.

    ``differs``: the other members' replicas may differ from this one. ``met_at``: ``num_steps`` at the last
    synchronisation. ``scheduler``: stepped with each step. ``summed``: which parameters were trained in the last step
    that all members had together, in the form of ``trained``. ``agreed``: values that must always be the same at all
    members, by name. ``carried``: the loop's own objects whose state travels with this one, by name. Raises InputError
    if the optimizer has parameters that are not the model's, or hyperparameters that are not plain; or one of
    ``carried`` cannot be carried.
    """

    model: Module
    optimizer: torch.optim.Optimizer
    num_steps: int = 0
    loss: float = 0.0
    exponents: dict[str, int] = field(default_factory=dict)
    pace: Pace = field(default_factory=lambda: Pace(S_SGD))
    differs: bool = False
    met_at: int = 0
    scheduler: LRScheduler | None = None
    summed: str = ""
    agreed: dict[str, Any] = field(default_factory=dict)
    carried: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.named = dict(self.model.named_parameters())
        """All parameters of the model by name; tied parameters appear once."""
        self._places = {id(parameter): place for place, parameter in enumerate(self.named.values())}
        self._passed: tuple[int, Settings] | None = None
        self._read_groups: list[dict[str, Any]] = []
        self._groups: list[Any] = []
        self.summed = self.summed or self.trained()
        self._schedule = self.settings()["scheduler"]
        self._arrived: Arrived | None = None
        for name, value in self.carried.items():
            if not (isinstance(value, dict) or (hasattr(value, "state_dict") and hasattr(value, "load_state_dict"))):
                allowed = "objects with state_dict and load_state_dict, or dicts, by name"
                raise InputError("has no state", field=f"state[{name!r}]", value=type(value).__name__, allowed=allowed)
        self._carried_now()

    def trained(self) -> str:
        """Return a 1 for each parameter of the model that now requires a gradient, and a 0 for each other parameter."""
        return "".join("01"[each.requires_grad] for each in self.named.values())

    def parameters(self, trained: str | None = None) -> dict[str, Parameter]:
        """Return the parameters that are trained, or that ``trained`` marks, by name."""
        flags = trained or self.trained()
        return {name: one for flag, (name, one) in zip(flags, self.named.items(), strict=True) if flag == "1"}

    def settings(self) -> Settings:
        """Return the current settings, in types that JSON can hold; ``groups`` is the same object until they change."""
        try:
            if not self._are_groups_as_read():
                numbers = group_numbers(self.optimizer)
                groups = zip(self.optimizer.param_groups, numbers, strict=True)
                self._groups = [
                    {"parameters": [self._places[id(each)] for each in group["params"]], "values": values}
                    for group, values in groups
                ]
                self._read_groups = [
                    {**group, "params": list(group["params"])} for group in self.optimizer.param_groups
                ]
            schedule = None if self.scheduler is None else scheduler_numbers(self.scheduler)
        except JobError as error:
            raise InputError(error.message, field=error.field, value=error.value, allowed=error.allowed) from error
        except KeyError as error:
            allowed = "an optimizer of parameters of the model"
            raise InputError("has a parameter that is not the model's", field="optimizer", allowed=allowed) from error
        return {"groups": self._groups, "trained": self.trained(), "scheduler": schedule}

    def _are_groups_as_read(self) -> bool:
        """Whether no group has changed since it was last read, as far as this is visible without reading it anew."""
        groups = self.optimizer.param_groups
        return len(groups) == len(self._read_groups) and all(
            len(group) == len(read) and all(_is_same(value, read.get(key)) for key, value in group.items())
            for group, read in zip(groups, self._read_groups, strict=True)
        )

    def check_parameters(self) -> None:
        """Compare the model's parameters with its first ones."""
        if [id(each) for each in self.model.parameters()] != list(self._places):
            allowed = "the same parameters as when morph.elastic.Optimizer was created"
            raise InputError("has other parameters than before", field="model", allowed=allowed)

    def check_schedule(self, settings: Settings) -> None:
        """Compare the schedule's state with the state after its last step."""
        if settings["scheduler"] != self._schedule:
            allowed = "no scheduler.step() of your own: morph.elastic.Optimizer steps it after each step"
            raise InputError("was stepped by the loop", field="lr_scheduler", allowed=allowed)

    def pass_boundary(self) -> None:
        """Record that the loop's own code for the next step follows: members that get this state before that step run
        it too.
        """
        self._passed = (self.num_steps, self.settings())

    def advance_schedule(self) -> None:
        """Step the schedule, after each step that is applied."""
        if self.scheduler is not None:
            self.scheduler.step()
            self._schedule = self.settings()["scheduler"]

    def pack(self, *, with_carried: bool = True) -> Tensor:
        """Return the whole state as uint8 [bytes]; the part of the loop's own objects may be left out."""
        tensors, numbers = self.model_tensors(), list[dict[str, Any]]()
        for index, parameter in enumerate(self.optimized()):
            values = self.optimizer.state.get(parameter, {})
            numbers.append({key: value for key, value in values.items() if not isinstance(value, Tensor)})
            for key, value in sorted(values.items()):
                if isinstance(value, Tensor):
                    tensors[f"optimizer/{index}/{key}"] = value
        carried, apart = self._carried_now() if with_carried else (None, {})
        facts = {**self._facts(), **self._settings_to_tell(), "numbers": numbers, "carried": carried}
        return _packed({**tensors, **apart}, facts)

    def pack_facts(self) -> Tensor:
        """Return everything except tensors of model and optimizer as uint8 [bytes]."""
        carried, apart = self._carried_now()
        return _packed(apart, {**self._facts(), **self._settings_to_tell(), "carried": carried})

    def _carried_now(self) -> tuple[Any, dict[str, Tensor]]:
        """Return the state of the loop's own objects: plain values, and tensors by name."""
        tensors: list[Tensor] = []
        facts = {}
        for name, carried in self.carried.items():
            try:
                facts[name] = to_plain(carried if isinstance(carried, dict) else carried.state_dict(), tensors)
            except ValueError as error:
                allowed = "tensors, numbers, texts, None, and lists, tuples and dicts of these"
                raise InputError(
                    "has a state that cannot be sent", field=f"state[{name!r}]", value=str(error), allowed=allowed
                ) from error
        return facts, {f"carried/{place}": tensor for place, tensor in enumerate(tensors)}

    def _receive_carried(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        received = facts["carried"]
        if received is None:
            return
        if set(received) != set(self.carried):
            allowed = f"{', '.join(map(repr, received)) or 'nothing'}, as the other workers have it"
            value = ", ".join(map(repr, self.carried)) or "nothing"
            raise InputError("names other objects than there", field="state", value=value, allowed=allowed)
        num_apart = sum(name.startswith("carried/") for name in tensors)
        apart = [tensors[f"carried/{place}"].clone() for place in range(num_apart)]  # not views of the whole message
        states = {name: from_plain(value, apart) for name, value in received.items()}
        self._arrived = Arrived(states, has_passed=facts["has_passed"])

    def load_carried(self, *, in_step: bool) -> None:
        """Load the sent state of the loop's own objects, once the loop's code here has run as far as the sender's had.

        ``in_step``: the loop's code for the next step has run.
        """
        arrived = self._arrived
        if arrived is None or (arrived.has_passed and not in_step):
            return
        self._arrived = None
        for name, carried in self.carried.items():
            if isinstance(carried, dict):
                carried.clear()
                carried.update(arrived.states[name])
            else:
                carried.load_state_dict(arrived.states[name])

    def pack_gradients(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return the mean gradients of a step, before it is applied, as uint8 [bytes]."""
        return _packed(gradients, {})

    def pack_applied(self, settings: Settings) -> Tensor:
        """Return the rest of the last applied step as uint8 [bytes]; ``settings``: the settings before that step."""
        return _packed(self.buffers(), {**self._facts(), **settings})

    def unpack_step(self, packed: Tensor) -> None:
        """Apply a step that another member packed (``pack_applied``, then ``pack_gradients``) to the state before it.

        The result is that member's state, bit for bit. Raises InputError, ValueError, KeyError or RuntimeError if the
        step is of another model or optimizer.
        """
        size = _size_of(packed)
        buffers, facts = _unpacked(packed[:size])
        gradients, _ = _unpacked(packed[size:].clone() if size % 8 else packed[size:])
        self._take_facts(facts)
        self._take_settings(facts)
        for name, parameter in self.named.items():
            parameter.grad = gradients[name].to(parameter.device) if name in gradients else None
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, buffer in self.buffers().items():
                buffer.copy_(buffers[name])
        self.advance_schedule()

    @staticmethod
    def read(packed: Tensor) -> tuple[int, bool]:
        """Return how many steps a packed state has had, and whether it includes model and optimizer."""
        _, facts = _unpacked(packed)
        return int(facts["num_steps"]), "numbers" in facts

    def unpack_facts(self, packed: Tensor) -> None:
        """Adopt what another member packed without model and optimizer: this member already has these."""
        tensors, facts = _unpacked(packed)
        self._take_facts(facts)
        self._take_settings(facts)
        self._receive_carried(tensors, facts)

    def _facts(self) -> dict[str, Any]:
        return {
            "num_steps": self.num_steps,
            "loss": self.loss,
            "exponents": self.exponents,
            "pace": asdict(self.pace),
            "differs": self.differs,
            "met_at": self.met_at,
            "summed": self.summed,
            "agreed": self.agreed,
            "has_passed": self._has_passed,
        }

    def _take_facts(self, facts: Mapping[str, Any]) -> None:
        self.num_steps, self.loss, self.exponents = facts["num_steps"], facts["loss"], facts["exponents"]
        self.pace = Pace(**{**facts["pace"], "rates": tuple(facts["pace"]["rates"])})
        self.differs, self.met_at, self.summed = facts["differs"], facts["met_at"], facts["summed"]

    def _settings_to_tell(self) -> Settings:
        """Return the settings before the loop's own code for the next step, if that code may have changed them."""
        return self._passed[1] if self._passed is not None and self._has_passed else self.settings()

    @property
    def _has_passed(self) -> bool:
        """Whether the loop's own code for the next step runs already."""
        return self._passed is not None and self._passed[0] == self.num_steps

    def _take_settings(self, facts: Mapping[str, Any]) -> None:
        for name, value in self.agreed.items():
            if facts["agreed"].get(name) != value:
                allowed = f"{facts['agreed'].get(name)!r}, as the other workers have it"
                raise InputError("must be the same at all workers", field=name, value=value, allowed=allowed)
        self._take_groups(facts["groups"])
        for flag, parameter in zip(facts["trained"], self.named.values(), strict=True):
            parameter.requires_grad_(flag == "1")
        if (self.scheduler is None) != (facts["scheduler"] is None):
            given = "not given" if self.scheduler is None else "given"
            allowed = "the same as in the other workers' scripts"
            raise InputError(f"is {given} only at this worker", field="lr_scheduler", allowed=allowed)
        if self.scheduler is not None:
            load_scheduler(self.scheduler, facts["scheduler"])
        self._schedule = facts["scheduler"]

    def _take_groups(self, theirs: list[Any]) -> None:
        named = list(self.named.items())
        for group in theirs[len(self.optimizer.param_groups) :]:
            has_names = "param_names" in self.optimizer.param_groups[0]
            members = [named[place] if has_names else named[place][1] for place in group["parameters"]]
            values = {key: from_plain(value) for key, value in group["values"].items()}
            self.optimizer.add_param_group({"params": members, **values})
        mine = [group["parameters"] for group in self.settings()["groups"]]
        if mine != [group["parameters"] for group in theirs]:
            allowed = "an optimizer of the same parameters, in the same groups, at all workers"
            raise InputError("is not the one with which the other workers train", field="optimizer", allowed=allowed)
        load_groups(self.optimizer, [group["values"] for group in theirs])

    def unpack(self, packed: Tensor) -> None:
        """Adopt the state that another member packed, but keep settings that the loop has set here for the next step.

        Raises InputError, ValueError, KeyError or RuntimeError if the state is of another model or optimizer.
        """
        tensors, facts = _unpacked(packed)
        with torch.no_grad():
            for name, tensor in self.model_tensors().items():
                tensor.copy_(tensors[name])
        if self._passed is None or self._passed[0] != facts["num_steps"]:
            self._take_settings(facts)
        parameters = self.optimized()
        states: dict[int, dict[str, Any]] = {index: dict(facts["numbers"][index]) for index in range(len(parameters))}
        for name, value in tensors.items():
            kind, _, rest = name.partition("/")
            if kind == "optimizer":
                number, _, key = rest.partition("/")
                like = parameters[int(number)]
                states[int(number)][key] = value.to(like.device, copy=True) if value.dim() else value.clone()
        self.optimizer.state.clear()
        for index, values in states.items():
            if values:
                self.optimizer.state[parameters[index]] = values
        self._take_facts(facts)
        self._receive_carried(tensors, facts)

    def buffers(self) -> dict[str, Tensor]:
        """The model's buffers, by name."""
        return dict(self.model.named_buffers())

    def weights(self) -> list[Tensor]:
        """Return values that are averaged while replicas differ: parameters and buffers except integers, complex as
        reals.
        """
        return [as_real(tensor) for tensor in self.model_tensors().values() if is_averaged(tensor)]

    def layout(self) -> dict[str, Any]:
        """Return the optimizer's state: (parameter, key, type, shape) of tensors, (parameter, key, value) of others.

        Members whose replicas differ may have different entries, because a parameter without a gradient has no state.
        """
        kept = [
            (index, key, value)
            for index, parameter in enumerate(self.optimized())
            for key, value in sorted(self.optimizer.state.get(parameter, {}).items())
        ]
        tensors = [(index, key, value) for index, key, value in kept if isinstance(value, Tensor)]
        return {
            "tensors": [
                (index, key, str(each.dtype).partition(".")[2], list(each.shape)) for index, key, each in tensors
            ],
            "numbers": [each for each in kept if not isinstance(each[2], Tensor)],
        }

    def model_tensors(self) -> dict[str, Tensor]:
        """The model's parameters and buffers, in the same order at every member."""
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {f"model/{name}": tensor for name, tensor in named}

    def optimized(self) -> list[Parameter]:
        """Return the optimizer's parameters, in its order."""
        return [each for group in self.optimizer.param_groups for each in group["params"]]


def _is_same(value: Any, read: Any) -> bool:
    """Whether a group's value is still the one that was read; false for values that can be changed in place."""
    if type(value) is list:  # its parameters
        return type(read) is list and len(value) == len(read) and all(map(operator.is_, value, read))
    if type(value) is tuple:
        return value is read and all(isinstance(item, _IMMUTABLE) for item in value)
    return value is read and isinstance(value, _IMMUTABLE)


def is_averaged(tensor: Tensor) -> bool:
    """Whether replicas' values have a mean."""
    return tensor.is_floating_point() or tensor.is_complex()


def as_real(tensor: Tensor) -> Tensor:
    """Return complex numbers viewed as pairs of real numbers."""
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor


def _packed(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Tensor:
    """Return a safetensors file as uint8 [bytes]; built here because the library would copy each byte three times."""
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))  # so that each tensor is aligned
    wide = [name for name, tensor in tensors.items() if tensor.dtype == torch.complex128]  # safetensors lacks the type
    tensors = {name: as_real(tensor) if name in wide else tensor for name, tensor in tensors.items()}
    header: dict[str, Any] = {"__metadata__": {"facts": json.dumps(facts), "complex": json.dumps(wide)}}
    end = 0
    for name, tensor in tensors.items():
        first, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [first, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    packed = torch.empty(8 + len(text) + end, dtype=torch.uint8)
    packed[: 8 + len(text)] = torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)
    left = packed[8 + len(text) :]
    for tensor in tensors.values():
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        left[: len(data)].copy_(data)
        left = left[len(data) :]
    return packed


def _header(packed: Tensor) -> tuple[int, dict[str, Any]]:
    size = int(packed[:8].view(torch.int64))
    return 8 + size, json.loads(packed[8 : 8 + size].numpy().tobytes())


def _size_of(packed: Tensor) -> int:
    """Return the size of the first of several concatenated files, in bytes."""
    first, header = _header(packed)
    ends = (entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    return first + max(ends, default=0)


def _unpacked(packed: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors, which share the memory of ``packed``, and the facts."""
    first, header = _header(packed)
    metadata = {key: json.loads(text) for key, text in header.pop("__metadata__").items()}
    tensors = {}
    for name, described in header.items():
        begin, end = described["data_offsets"]
        tensor = packed[first + begin : first + end].view(_DTYPES[described["dtype"]]).view(described["shape"])
        tensors[name] = torch.complex(*tensor.unbind(-1)) if name in metadata["complex"] else tensor
    return tensors, metadata["facts"]
