"""State of one unit: parameters, written buffers, optimizer, schedule, accumulation scales, loss scale, version."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from morph.contract.decided import Decided, LossScale
from morph.contract.errors import CheckpointError, NonFiniteGradient
from morph.cutting.sections.section import ParameterUnit
from morph.jobs.job import Job
from morph.runtime.device.staging import Ready, fill, moved, to_host
from morph.runtime.state.accumulators import (
    Accumulator,
    ExactAccumulator,
    FastAccumulator,
    Reduced,
    apply_change,
    change_like,
)
from morph.runtime.state.fixed_point import first_exponent
from morph.runtime.state.optimizer_state import (
    MakeOptimizer,
    MakeScheduler,
    build_both,
    group_numbers,
    is_aligned,
    kernels_of,
    load_optimizer_state,
    load_settings,
    optimizer_state,
    says_otherwise,
    scheduler_numbers,
    step_together,
)
from morph.runtime.state.parts import Memory, reals

# A copy of a unit's state, made during training and before the state changes.

_HOST = torch.device("cpu")
_NUMBERS = "numbers"
_CLIP_EPSILON = 1e-6
"""As in ``torch.nn.utils.clip_grad_norm_``."""
STEP_NUMBER = "step_number"
"""Key of a parameter group for the number of the step, if the job's optimizer uses it."""
AT_ONCE = 1 << 24
"""Least elements of a common step of optimizers, and elements folded at once, on a device: 128 MiB."""
_CHUNK = 1 << 20


class StateCopy:
    """Tensors to be copied to host memory by the first thread that requests them; other threads wait for it.

    The thread that is about to change the ``tensors`` calls ``finish``, and waits only for the remaining copies. A
    device's are copied while it computes, through pieces of pinned memory.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._lock = threading.Lock()
        self._tensors: Mapping[str, Tensor] | None = tensors
        self._ready = Ready(tensors.values())
        self._is_wanted = True
        self.num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self._copied: dict[str, Tensor] | None = None
        self.waited_s = 0.0
        """Time for which training waited in ``finish``."""

    def take(self) -> dict[str, Tensor] | None:
        """Return the copies, made now if necessary; None: they were cancelled."""
        with self._lock:
            if self._tensors is not None and self._is_wanted:
                self._copied = to_host(self._tensors, self._ready)
            self._tensors = None
            return self._copied

    def lend(self) -> Mapping[str, Tensor]:
        """Return the tensors themselves, for a use that ends before they change; then nothing is copied."""
        with self._lock:
            tensors, self._tensors = self._tensors, None
            assert tensors is not None, "the tensors have already been copied"
            return tensors

    def finish(self) -> None:
        """Return once the tensors, which are about to change, are copied."""
        start_s = time.perf_counter()
        self.take()
        self.waited_s += time.perf_counter() - start_s

    def leave(self) -> None:
        """Cancel the copies; returns at once. A copy that is under way is completed."""
        self._is_wanted = False

    def drop(self) -> None:
        """Cancel the copies, and return once no thread reads the tensors, which are about to change."""
        self.leave()
        with self._lock:
            self._tensors = None


@dataclass(frozen=True)
class UpdateRules:
    """See the fields of the same names in ``Job``; ``loss_scale`` is the one of version 0.

    ``optimizer_in_host_memory`` and ``master_weights`` (in fp32): the optimizer works on such copies of parameters.
    ``code``, ``frozen``: digests of the job's code, and of frozen weights that the run was given.
    """

    make_scheduler: MakeScheduler | None = None
    clip_grad_norm: float | None = None
    loss_scale: LossScale | None = None
    optimizer_in_host_memory: bool = False
    master_weights: bool = False
    code: str = ""
    frozen: str = ""


def update_rules(job: Job, device: torch.device, code: str = "", frozen: str = "") -> UpdateRules:
    """Return a job's rules, with these digests of its code and its frozen weights, for one kind of device."""
    scaling, scale = job.effective_loss_scaling, None
    if scaling is not None:
        _, bits = math.frexp(scaling.initial)
        scale = LossScale(exponent=bits - 1, growth_steps=scaling.growth_steps)
    return UpdateRules(
        make_scheduler=job.lr_scheduler,
        clip_grad_norm=job.clip_grad_norm,
        loss_scale=scale,
        optimizer_in_host_memory=job.optimizer_device == "cpu" and device.type != "cpu",
        master_weights=job.master_weights,
        code=code,
        frozen=frozen,
    )


class UnitState:
    """A worker's state of one unit, with an optimizer of its own; ``tensors`` are copied, unless ``for_good``.

    ``num_micro_batches`` (N) and the number of sections bound the contributions.
    """

    def __init__(
        self,
        unit: ParameterUnit,
        tensors: Mapping[str, Tensor],
        make_optimizer: MakeOptimizer,
        *,
        num_micro_batches: int,
        exact: bool,
        rules: UpdateRules = UpdateRules(),
        for_good: bool = False,
    ) -> None:
        self.unit = unit
        self.version = 0
        own = {name: tensors[name].detach() if for_good else tensors[name].detach().clone() for name in unit.names}
        self.parameters = {name: Parameter(own[name]) for name in unit.parameters}
        self.buffers = {name: own[name] for name in unit.buffers}
        self._updated = {name: _updated(parameter, rules) for name, parameter in self.parameters.items()}
        """The tensors that the optimizer updates: the parameters, or copies of them."""
        self._make_optimizer, self._rules, self.num_applied = make_optimizer, rules, 0
        self._build_optimizer()
        self.reduced: Reduced | None = None
        self._scales_before: dict[str, int] | None = None
        self._copies: list[StateCopy] = []
        self.loss_scale = rules.loss_scale
        self._exact = exact
        self._num_contributions = num_micro_batches * len(unit.sections)
        self.exponents = dict.fromkeys(unit.names, first_exponent(self._num_contributions)) if exact else {}
        self._summed = self._all_summed()
        self._home: torch.device | None = None
        self._offload_to: torch.device | None = None
        """Where the state returns after an update; None: it stays where it is."""
        self._applied: Reduced | None = None

    def _build_optimizer(self) -> None:
        self.optimizer, self.scheduler, said, self._is_elementwise = build_both(
            self._make_optimizer, self._rules.make_scheduler, self._updated
        )
        self._kernels: Any = None
        scale = self._rules.loss_scale
        self._said = {
            **said,
            "code": self._rules.code
            if self.scheduler
            else "",  # a schedule may be a function, which has no visible numbers
            "loss_scale": None if scale is None else scale.exponent,
        }

    def _all_summed(self) -> Mapping[str, Tensor]:
        changes = {name: change_like(buffer, exact=self._exact) for name, buffer in self.buffers.items()}
        return {**self._updated, **changes}

    @property
    def values(self) -> dict[str, Tensor]:
        """The parameters and buffers that sections read."""
        return {**self.parameters, **self.buffers}

    @property
    def device(self) -> torch.device:
        """The device on which sections read the unit, and on which its gradients are."""
        return next(iter(self.values.values())).device

    @property
    def master_bytes(self) -> int:
        """Return the bytes of fp32 copies that the optimizer updates."""
        return sum(
            updated.numel() * updated.element_size()
            for name, updated in self._updated.items()
            if updated.dtype != self.parameters[name].dtype
        )

    @property
    def learning_rates(self) -> list[float]:
        """Return the numeric learning rates of the groups in which the unit has parameters."""
        rates = [group.get("lr") for group in self.optimizer.param_groups if group["params"] and self.unit.parameters]
        numbers = [float(rate) for rate in rates if isinstance(rate, int | float | Tensor)]
        return [number for number in numbers if math.isfinite(number)]

    def new_accumulator(self) -> Accumulator:
        """Return a new accumulator at the current scales."""
        changes = frozenset(self.buffers)
        if self._exact:
            sums = self._summed, self.exponents, self._num_contributions
            return ExactAccumulator(*sums, self.loss_scale, changes, Memory(self.device))
        return FastAccumulator(self._summed, self.loss_scale, changes, Memory(self.device))

    def rescale(self, reduced: Reduced) -> None:
        """Set scales that fit an overflowed step, before it is run again."""
        if self._scales_before is None:
            self._scales_before = self.exponents
        self.exponents = dict(reduced.exponents)

    def offload(self) -> None:
        """Keep the state in host memory from now on, except during updates, because no section computes with it."""
        if self._home is None:
            self._home = self.device
            self._move(self._home, _HOST)

    def reload(self) -> None:
        """Move the state back to its device permanently."""
        if self._home is not None:
            home, self._home = self._home, None
            self._move(_HOST, home)

    def _move(self, source: torch.device, target: torch.device) -> None:
        """Move tensors on one device to another; the optimizer's tensors elsewhere stay there."""

        def there(tensor: Tensor) -> Tensor:
            return moved(tensor, target) if tensor.device == source else tensor

        stays_here = {id(copy) for copy in self._updated.values() if self._rules.optimizer_in_host_memory}
        for parameter in {id(each): each for each in (*self.parameters.values(), *self._updated.values())}.values():
            if id(parameter) not in stays_here:
                parameter.data = there(parameter.data)
        self.buffers = {name: there(buffer) for name, buffer in self.buffers.items()}
        if not stays_here:
            for kept in self.optimizer.state.values():
                kept.update({key: there(value) for key, value in kept.items() if isinstance(value, Tensor)})
        self._summed = self._all_summed()
        if self.reduced is not None:
            at = {name: moved(value, self._summed[name].device) for name, value in self.reduced.gradients.items()}
            self.reduced = replace(self.reduced, gradients=at)

    def drop_step(self) -> None:
        """Abandon the current, undecided step: the state is as it was when the step began."""
        self.reduced = None
        if self._scales_before is not None:
            self.exponents, self._scales_before = self._scales_before, None

    def take_over(self, reduced: Reduced, exponents: Mapping[str, int]) -> None:
        """Hold gradients, with their scales, that another worker reduced for the present version."""
        gradients = {name: moved(value, self._summed[name].device) for name, value in reduced.gradients.items()}
        self.reduced = replace(reduced, gradients=gradients)
        if self._scales_before is None:
            self._scales_before = self.exponents
        self.exponents = dict(exponents)

    @property
    def gradients_of_norm(self) -> list[Tensor] | None:
        """Return the held gradients if the job needs their norm; None if it does not, or they are not finite."""
        reduced = self.reduced
        if self._rules.clip_grad_norm is None or reduced is None or reduced.non_finite or reduced.overflowed:
            return None
        return [reduced.gradients[name] for name in self._updated if name in reduced.gradients]

    def apply(self, decided: Decided | None = None) -> None:
        """Apply the held gradients as decided; a skipped step changes only the version and the loss scale."""
        if self.begin_step(decided):
            self.optimizer.step()
            if self.joins and self._is_elementwise:
                self._kernels = kernels_of(self.optimizer)
        self.end_step(decided)

    joins = True
    """Whether its optimizer may ever step together with others."""

    @property
    def kernels(self) -> Any:
        """Return all on which the kernels of its next step depend; units with equal ones step together, None alone."""
        return self._kernels if self._home is None else None

    def begin_step(self, decided: Decided | None) -> bool:
        """Give the optimizer its gradients; return whether it must step before ``end_step``."""
        for copy in self._copies:
            copy.finish()
        self._copies.clear()
        self._offload_to = self._home
        self.reload()
        reduced, self.reduced = self.reduced, None
        self._scales_before = None
        assert reduced is not None
        if decided is not None and decided.skipped:
            return False
        assert not reduced.non_finite, "a step without gradients was not decided as skipped"
        self._applied = reduced
        factor = self._factor(decided)
        given = [reduced.gradients[name] for name in self._updated if name in reduced.gradients]
        if factor != 1.0 and given:
            torch._foreach_mul_(given, factor)
        for name, parameter in self._updated.items():
            parameter.grad = reduced.gradients.get(name)
        for group in self.optimizer.param_groups:
            if STEP_NUMBER in group:
                group[STEP_NUMBER] = self.version
        return True

    def end_step(self, decided: Decided | None) -> None:
        """Complete the step after the optimizer has stepped, if it had to."""
        reduced, self._applied = self._applied, None
        if reduced is not None:
            self.optimizer.zero_grad(set_to_none=True)
            if self.scheduler is not None:
                self.scheduler.step()
            self.num_applied += 1
            self._publish()
            for name, buffer in self.buffers.items():
                apply_change(name, buffer, reduced.gradients[name])
            self.exponents = dict(reduced.exponents)
        if self.loss_scale is not None:
            none_said = Decided(version=self.version + 1, skipped=reduced is None)
            self.loss_scale = (decided or none_said).next_scale(self.loss_scale)
        self.version += 1
        if self._offload_to is not None:
            self._offload_to = None
            self.offload()

    def _factor(self, decided: Decided | None) -> float:
        """Return the factor of the gradients, from the weights of losses and the bound on the norm."""
        most, factor = self._rules.clip_grad_norm, 1.0 if decided is None else decided.gradient_factor
        if most is None:
            return factor
        assert decided is not None
        assert decided.gradient_norm is not None, "the gradient norm was not decided"
        return factor * min(1.0, most / (decided.gradient_norm + _CLIP_EPSILON))

    def _publish(self) -> None:
        """Copy updated parameters to those that sections read, if the optimizer updates copies."""
        updated = {name: tensor for name, tensor in self._updated.items() if tensor is not self.parameters[name]}
        there = [name for name, tensor in updated.items() if tensor.device == self.parameters[name].device]
        with torch.no_grad():
            if there:
                torch._foreach_copy_([self.parameters[name] for name in there], [updated.pop(name) for name in there])
            for name, tensor in updated.items():
                fill(self.parameters[name], tensor)

    def tensors(self) -> dict[str, Tensor]:
        """Copy the whole state as named CPU tensors (``param/..``, ``buffer/..``, ``optim/../..``) and numbers."""
        return to_host(self._own_tensors())

    def copy_later(self) -> StateCopy:
        """Return the same state, to be copied while others read it; changes wait until the copy is done."""
        self._copies.append(StateCopy(self._own_tensors()))
        return self._copies[-1]

    def _own_tensors(self) -> dict[str, Tensor]:
        """Return the state's tensors by name, without copies, and its numbers as one more tensor."""
        tensors: dict[str, Tensor] = {f"param/{name}": parameter for name, parameter in self._updated.items()}
        tensors |= {f"buffer/{name}": buffer for name, buffer in self.buffers.items()}
        optimizer_tensors, plain = optimizer_state(self.optimizer, self._updated)
        tensors |= {f"optim/{name}/{key}": value for (name, key), value in optimizer_tensors.items()}
        numbers: dict[str, Any] = {
            "version": self.version,
            "num_applied": self.num_applied,
            "said": self._said,
            "exponents": self.exponents,
            "optimizer": plain,
            "groups": group_numbers(self.optimizer),
            "scheduler": None if self.scheduler is None else scheduler_numbers(self.scheduler),
            "loss_scale": None if self.loss_scale is None else self.loss_scale.model_dump(),
        }
        if self._rules.frozen:
            numbers["frozen"] = self._rules.frozen
        text = json.dumps(numbers, sort_keys=True).encode()
        tensors[_NUMBERS] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return tensors

    def load(self, tensors: Mapping[str, Tensor], *, for_good: bool = False) -> None:
        """Load a state made by ``tensors``; ``for_good``: use its memory, which nothing else uses.

        Raises ValueError for a missing or other tensor, CheckpointError for other frozen weights.
        """
        for copy in self._copies:  # the held gradients belong to a discarded history
            copy.drop()
        self._copies.clear()
        numbers = json.loads(bytes(moved(tensors[_NUMBERS], _HOST).tolist()))
        if numbers.get("frozen", "") != self._rules.frozen:
            raise CheckpointError(
                f"unit {self.unit.id} was trained with other frozen weights: the folder 'frozen' beside the run's"
                " checkpoints, which `morph import` wrote, is missing or is another run's"
            )
        stored: dict[tuple[str, str], Tensor] = {}
        with torch.no_grad():
            for name, parameter in self._updated.items():
                _take(parameter, self._saved(tensors, "param", name, parameter), for_good=for_good)
                prefix = f"optim/{name}/"
                stored |= {(name, key.removeprefix(prefix)): v for key, v in tensors.items() if key.startswith(prefix)}
            for name, buffer in self.buffers.items():
                fill(buffer, self._saved(tensors, "buffer", name, buffer))
        self._publish()
        if says_otherwise(numbers, self._said):
            self._build_optimizer()
        load_optimizer_state(self.optimizer, self._updated, stored, numbers["optimizer"], for_good=for_good)
        self._kernels = None
        self._load_numbers(numbers)
        self.reduced = self._scales_before = None

    def take_optimizer_state(self, tensors: Mapping[tuple[str, str], Tensor], plain: Mapping[str, Any]) -> None:
        """Load optimizer state by (parameter, key) from another run."""
        load_optimizer_state(self.optimizer, self._updated, tensors, plain)

    def _saved(self, tensors: Mapping[str, Tensor], kind: str, name: str, like: Tensor) -> Tensor:
        saved = tensors.get(f"{kind}/{name}")
        if saved is None or saved.shape != like.shape or saved.dtype != like.dtype:
            raise ValueError(f"unit {self.unit.id}: saved state does not fit {kind} {name}")
        return saved

    def _load_numbers(self, numbers: Mapping[str, Any]) -> None:
        """Apply this job's settings where they differ from the saved ones, or where the state lacks them."""
        self.version = int(numbers["version"])
        self.num_applied = int(numbers.get("num_applied", self.version))
        self.exponents = {name: int(numbers["exponents"].get(name, first)) for name, first in self.exponents.items()}
        load_settings(self.optimizer, self.scheduler, numbers, self._said)
        began = numbers.get("said", self._said)["loss_scale"]
        if began != self._said["loss_scale"]:
            self.loss_scale = self._rules.loss_scale
        elif self.loss_scale is not None and numbers.get("loss_scale"):
            saved = LossScale.model_validate(numbers["loss_scale"])
            self.loss_scale = saved.model_copy(update={"growth_steps": self.loss_scale.growth_steps})


def _updated(parameter: Parameter, rules: UpdateRules) -> Parameter:
    values: Tensor = parameter
    if rules.master_weights and values.dtype.to_real().itemsize < torch.float32.itemsize:
        values = values.detach().to(torch.promote_types(values.dtype, torch.float32))
    if rules.optimizer_in_host_memory:
        values = to_host({"": values})[""]
    return parameter if values is parameter else Parameter(values)


def _take(parameter: Parameter, saved: Tensor, *, for_good: bool) -> None:
    at_home = parameter.device == saved.device and parameter.is_contiguous()
    if for_good and at_home and is_aligned(saved):
        parameter.data = saved
    else:
        fill(parameter, saved)


def apply_all(states: Iterable[UnitState], decided: Decided | None) -> None:
    """Apply the gradients that the units of a worker hold, those of optimizers with the same settings in one call.

    A call has at most the elements of the largest unit, so that it needs no more memory.
    """
    together: dict[Any, list[UnitState]] = {}
    for state in states:
        if state.kernels is None:
            state.apply(decided)
        else:
            together.setdefault(state.kernels, []).append(state)
    for some in together.values():
        sizes = [sum(parameter.numel() for parameter in state.parameters.values()) for state in some]
        most, joined, num = max([AT_ONCE, *sizes]), list[UnitState](), 0
        for state, size in zip(some, sizes, strict=True):
            if num + size > most:
                _apply_together(joined, decided)
                joined, num = [], 0
            joined.append(state)
            num += size
        _apply_together(joined, decided)


def _apply_together(states: Sequence[UnitState], decided: Decided | None) -> None:
    begun = [state.optimizer for state in states if state.begin_step(decided)]
    lacking = [
        optimizer
        for optimizer in begun
        if any(entry.grad is None for group in optimizer.param_groups for entry in group["params"])
    ]
    for optimizer in lacking:
        optimizer.step()
    step_together([optimizer for optimizer in begun if optimizer not in lacking])
    for state in states:
        state.end_step(decided)


def norms_sq(states: Mapping[str, UnitState]) -> dict[str, float]:
    """Return the squared norms of held gradients, of units whose step needs them. Raises NonFiniteGradient."""
    wanted = {unit: state.gradients_of_norm for unit, state in states.items()}
    norms = squared_norms({unit: gradients for unit, gradients in wanted.items() if gradients is not None})
    for unit, norm_sq in norms.items():
        if not math.isfinite(norm_sq):
            raise NonFiniteGradient(f"step {states[unit].version}: the gradient of unit {unit} has no finite norm")
    return norms


def squared_norm(tensors: Iterable[Tensor]) -> float:
    """See ``squared_norms``."""
    return squared_norms({"": tensors})[""]


def squared_norms(tensors_of: Mapping[str, Iterable[Tensor]]) -> dict[str, float]:
    """Return the sums of squares over all elements of each unit's tensors, in float64, by one wait for the device.

    Chunks are folded in halves and added by ``fsum``: ``torch.sum`` adds in an order that depends on the processor.
    """
    alike: dict[tuple[torch.device, torch.dtype, int], list[tuple[str, Tensor]]] = {}
    for key, tensors in tensors_of.items():
        for chunk in (chunk for tensor in tensors for chunk in torch.split(reals(tensor), _CHUNK) if chunk.numel()):
            alike.setdefault((chunk.device, chunk.dtype, len(chunk)), []).append((key, chunk))
    folded: dict[torch.device, list[Tensor]] = {}
    owners: dict[torch.device, list[str]] = {}
    for (device, _, size), chunks in alike.items():
        num = max(1, (_CHUNK if device.type == "cpu" else AT_ONCE) // size)
        for first in range(0, len(chunks), num):
            rows = torch.stack([chunk for _, chunk in chunks[first : first + num]])
            folded.setdefault(device, []).append(_folded(rows.to(torch.float64).square_()))
        owners.setdefault(device, []).extend(key for key, _ in chunks)
    squares: dict[str, list[float]] = {key: [] for key in tensors_of}
    for device, tensors in folded.items():
        for key, square in zip(owners[device], torch.cat(tensors).tolist(), strict=True):
            squares[key].append(square)
    return {key: math.fsum(partial_sums) for key, partial_sums in squares.items()}


def _folded(rows: Tensor) -> Tensor:
    """Return the sum of each row; the rows are overwritten."""
    while (size := rows.shape[1]) > 1:
        half = (size + 1) // 2
        rows[:, : size - half].add_(rows[:, half:])
        rows = rows[:, :half]
    return rows[:, 0].clone()
