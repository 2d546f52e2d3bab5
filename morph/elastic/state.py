"""What a member needs to train like the others, as bytes. Nothing is unpickled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from morph.elastic.strategy import S_SGD, Pace


@dataclass
class TrainingState:
    """One member's. ``num_steps``: how many steps it has. ``exponents``: scales of exact sums, by name.

    ``differs``: the others' replicas may not be equal to this one. ``met_at``: steps that it had at the last meeting.
    """

    model: Module
    optimizer: torch.optim.Optimizer
    num_steps: int = 0
    loss: float = 0.0
    exponents: dict[str, int] = field(default_factory=dict)
    pace: Pace = field(default_factory=lambda: Pace(S_SGD))
    differs: bool = False
    met_at: int = 0

    def parameters(self) -> dict[str, Parameter]:
        """The parameters that are trained, by name; tied ones once."""
        return {name: one for name, one in self.model.named_parameters() if one.requires_grad}

    def pack(self) -> Tensor:
        """Return everything as uint8 [bytes]."""
        tensors, numbers = self._model_tensors(), list[dict[str, Any]]()
        for index, parameter in enumerate(self._optimized()):
            values = self.optimizer.state.get(parameter, {})
            numbers.append({key: value for key, value in values.items() if not isinstance(value, Tensor)})
            for key, value in sorted(values.items()):
                if isinstance(value, Tensor):
                    tensors[f"optimizer/{index}/{key}"] = value
        return _packed(tensors, {**self._facts(), "numbers": numbers})

    def pack_gradients(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return the mean gradients of a step, before it is applied, as uint8 [bytes]."""
        return _packed(gradients, {})

    def pack_applied(self) -> Tensor:
        """Return what else the step is that was applied last, as uint8 [bytes]."""
        return _packed(self.buffers(), self._facts())

    def unpack_step(self, packed: Tensor) -> None:
        """Apply the step that another member packed, first what it applied and then gradients, to the state before it.

        The result is its state, bit for bit.

        Raises:
            ValueError, KeyError, RuntimeError: it is of another model or optimizer.
        """
        size = _size_of(packed)
        buffers, facts = _unpacked(packed[:size])
        gradients, _ = _unpacked(packed[size:].clone() if size % 8 else packed[size:])
        self._take_facts(facts)
        for name, parameter in self.parameters().items():
            parameter.grad = gradients[name].to(parameter.device)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, one in self.buffers().items():
                one.copy_(buffers[name])

    def _facts(self) -> dict[str, Any]:
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        return {
            "num_steps": self.num_steps,
            "loss": self.loss,
            "exponents": self.exponents,
            "pace": asdict(self.pace),
            "differs": self.differs,
            "met_at": self.met_at,
            "groups": [{k: float(v) if isinstance(v, Tensor) else v for k, v in group.items()} for group in groups],
        }

    def _take_facts(self, facts: Mapping[str, Any]) -> None:
        for group, given in zip(self.optimizer.param_groups, facts["groups"], strict=True):
            for key, value in given.items():
                group[key] = type(group[key])(value) if isinstance(group.get(key), tuple) else value
        self.num_steps, self.loss, self.exponents = facts["num_steps"], facts["loss"], facts["exponents"]
        self.pace = Pace(**{**facts["pace"], "rates": tuple(facts["pace"]["rates"])})
        self.differs, self.met_at = facts["differs"], facts["met_at"]

    def unpack(self, packed: Tensor) -> None:
        """Become what another member packed.

        Raises:
            ValueError, KeyError, RuntimeError: it is of another model or optimizer.
        """
        tensors, facts = _unpacked(packed)
        with torch.no_grad():
            for name, one in self._model_tensors().items():
                one.copy_(tensors[name])
        parameters = self._optimized()
        found: dict[int, dict[str, Any]] = {index: dict(facts["numbers"][index]) for index in range(len(parameters))}
        for name, value in tensors.items():
            kind, _, rest = name.partition("/")
            if kind == "optimizer":
                number, _, key = rest.partition("/")
                like = parameters[int(number)]
                found[int(number)][key] = value.to(like.device, copy=True) if value.dim() else value.clone()
        self.optimizer.state.clear()
        for index, values in found.items():
            if values:
                self.optimizer.state[parameters[index]] = values
        self._take_facts(facts)

    def buffers(self) -> dict[str, Tensor]:
        """The model's buffers, by name."""
        return dict(self.model.named_buffers())

    def weights(self) -> list[Tensor]:
        """What is averaged while replicas differ: parameters and floating-point buffers."""
        return [one for one in self._model_tensors().values() if one.is_floating_point()]

    def tensors(self) -> list[Tensor]:
        """All of the model and the optimizer, in the same order at every member."""
        values = [self.optimizer.state.get(parameter, {}) for parameter in self._optimized()]
        of_optimizer = [value[key] for value in values for key in sorted(value) if isinstance(value[key], Tensor)]
        return [*self._model_tensors().values(), *of_optimizer]

    def _model_tensors(self) -> dict[str, Tensor]:
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {f"model/{name}": one for name, one in named}

    def _optimized(self) -> list[Parameter]:
        return [one for group in self.optimizer.param_groups for one in group["params"]]


def _packed(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Tensor:
    """Return a safetensors file; made here, for the library would copy each byte three times."""
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))  # so that each lies aligned
    header: dict[str, Any] = {"__metadata__": {"facts": json.dumps(facts)}}
    end = 0
    for name, one in tensors.items():
        first, end = end, end + one.numel() * one.element_size()
        header[name] = {"dtype": _TYPES[one.dtype], "shape": list(one.shape), "data_offsets": [first, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    packed = torch.empty(8 + len(text) + end, dtype=torch.uint8)
    packed[: 8 + len(text)] = torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)
    left = packed[8 + len(text) :]
    for one in tensors.values():
        data = one.detach().contiguous().reshape(-1).view(torch.uint8)
        left[: len(data)].copy_(data)
        left = left[len(data) :]
    return packed


def _header(packed: Tensor) -> tuple[int, dict[str, Any]]:
    size = int(packed[:8].view(torch.int64))
    return 8 + size, json.loads(packed[8 : 8 + size].numpy().tobytes())


def _size_of(packed: Tensor) -> int:
    """Return how many bytes the first of several files has."""
    first, header = _header(packed)
    return first + max((one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"), default=0)


def _unpacked(packed: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors, which lie in ``packed``, and facts."""
    first, header = _header(packed)
    tensors = {}
    for name, one in header.items():
        if name != "__metadata__":
            begin, end = one["data_offsets"]
            tensors[name] = packed[first + begin : first + end].view(_DTYPES[one["dtype"]]).view(one["shape"])
    return tensors, json.loads(header["__metadata__"]["facts"])


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
"""What safetensors calls them."""
_DTYPES = {name: dtype for dtype, name in _TYPES.items()}
