"""Compares how a run uses its sections' gradients, with one accumulator and one optimizer per unit, with a plain loop.

Both use the mean gradients from the accumulators: Adam's first step turns rounding into opposite steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from morph.contract.decided import decided_step
from morph.contract.errors import ExportError, wrong_job
from morph.cutting import CutModel
from morph.cutting.trial_run.trial import rms, run_users_code
from morph.jobs.job import Job
from morph.runtime.state.accumulators import Reduced, finish_all
from morph.runtime.state.unit_state import UnitState, apply_all, norms_sq, update_rules
from morph.words import listed

NUM_STEPS = 2
"""Number of optimizer steps to compare: a schedule that warms up may begin with a step of length 0."""
_RELATIVE = 1e-3
_ROUNDINGS = 2.0
_SHOWN = 5


@dataclass(frozen=True)
class StepTrial:
    """The units of a cut model as a run holds them, with the weights of a plain model and no loss scale."""

    job: Job
    model: CutModel
    plain: Mapping[str, Tensor]
    states: Mapping[str, UnitState]

    @classmethod
    def of(cls, job: Job, model: CutModel, plain: nn.Module, device: torch.device, num_micro_batches: int) -> StepTrial:
        """Return a trial with the units' states."""
        held = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
        rules = replace(update_rules(job, device), loss_scale=None)
        exact = job.accumulation == "exact"
        build = partial(
            UnitState,
            tensors=held,
            make_optimizer=job.optimizer,
            num_micro_batches=num_micro_batches,
            exact=exact,
            rules=rules,
        )
        states = {unit.id: run_users_code(partial(build, unit), job, None, "optimizer") for unit in model.units}
        return cls(job, model, held, states)

    def means(self) -> dict[str, Tensor]:
        """Return the mean gradients that were reduced last, by parameter."""
        held = [(state.parameters, state.reduced.gradients) for state in self.states.values() if state.reduced]
        return {name: gradients[name] for names, gradients in held for name in names if name in gradients}

    def largest_difference(self, mean: Mapping[str, Tensor], source: str) -> float:
        """Make steps with the plain model's mean gradients; return the largest difference of a weight, relative to its
        move.

        Raises JobError if one optimizer for all gives other weights than one per unit, or if it fails.
        """
        reduced = {unit: state.reduced for unit, state in self.states.items()}
        means = self.means()
        given = {name: means.get(name, gradient) for name, gradient in mean.items()}
        for step in range(NUM_STEPS):
            run_users_code(partial(self._step, reduced, step), self.job, None, "optimizer")
        names = [name for unit in self.model.units for name in unit.parameters]
        apart = self._apart([names], given)
        wrong = [name for name in apart if not apart[name] <= 1.0]
        if not wrong:
            return _RELATIVE * max(apart.values(), default=0.0)
        alone = self._apart([unit.parameters for unit in self.model.units if unit.parameters], given)
        if any(not value <= 1.0 for value in alone.values()):
            raise ExportError(
                f"sections would not train the model as it is written: the weights after {NUM_STEPS} steps differ, "
                f"{len(wrong)} of {len(apart)}: {listed(wrong, _SHOWN)}",
                source=source,
                field="model",
            )
        if not self.job.allowed_dependencies:
            raise wrong_job(
                "optimizer",
                f"the weights after {NUM_STEPS} steps differ if each parameter unit has its own optimizer, "
                f"{len(wrong)} of {len(apart)}: {listed(wrong, _SHOWN)}; `morph trace-deps` looks for the cause",
                allowed="an optimizer that computes each parameter's step from that parameter and its gradient",
            )
        return _RELATIVE * max(alone.values(), default=0.0)

    def _step(self, reduced: Mapping[str, Reduced | None], step: int) -> None:
        torch.manual_seed(step)
        for unit, state in self.states.items():
            held = reduced[unit]
            assert held is not None
            own = {name: gradient.clone() for name, gradient in held.gradients.items()}
            state.take_over(replace(held, gradients=own), held.exponents)
        decided = decided_step(step + 1, [norms_sq(self.states)], [], self.states)
        apply_all(self.states.values(), decided)

    def _apart(self, groups: Sequence[Iterable[str]], gradients: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the distance of each weight from a plain loop with one optimizer per group, relative to the limit."""
        expected = run_users_code(partial(self._plain_steps, groups, gradients), self.job, None, "optimizer")
        weights = {name: weight for state in self.states.values() for name, weight in state.parameters.items()}
        apart = {}
        for name, weight in weights.items():
            ours, plain = weight.detach(), expected[name].detach().to(weight.dtype)
            difference = torch.where(ours.isnan() & plain.isnan(), torch.zeros_like(ours), ours - plain)
            allowed = _RELATIVE * rms(plain - self.plain[name].detach())
            allowed += _ROUNDINGS * torch.finfo(weight.dtype).eps * rms(plain)
            size = rms(difference)
            apart[name] = size / allowed if size else 0.0
        return apart

    def _plain_steps(self, groups: Sequence[Iterable[str]], gradients: Mapping[str, Tensor]) -> dict[str, Parameter]:
        parameters: dict[str, Parameter] = {}
        for name in (name for names in groups for name in names):
            weight = self.plain[name].detach().clone()
            wide = torch.promote_types(weight.dtype, torch.float32) if self.job.master_weights else weight.dtype
            parameters[name] = Parameter(weight.to(wide))
        optimizers = [self.job.optimizer([(name, parameters[name]) for name in names]) for names in groups]
        make_schedule = self.job.lr_scheduler
        schedules = [make_schedule(optimizer) for optimizer in optimizers] if make_schedule is not None else []
        for step in range(NUM_STEPS):
            torch.manual_seed(step)
            for name, parameter in parameters.items():
                parameter.grad = gradients[name].to(parameter.dtype, copy=True) if name in gradients else None
            if self.job.clip_grad_norm is not None:
                nn.utils.clip_grad_norm_(parameters.values(), self.job.clip_grad_norm)
            for optimizer in optimizers:
                optimizer.step()
            for schedule in schedules:
                schedule.step()
        return parameters


class Sums:
    """Gradients of the sections' micro-batches of one step, summed as in a run."""

    def __init__(self, trial: StepTrial) -> None:
        self._states = trial.states
        self._accumulators = {unit: state.new_accumulator() for unit, state in trial.states.items()}
        self._unit_of = {name: unit.id for unit in trial.model.units for name in unit.names}

    def add(self, name: str, gradient: Tensor) -> None:
        """Add one contribution, or the change of a buffer."""
        self._accumulators[self._unit_of[name]].add(name, gradient)

    def reduce(self, num_micro_batches: int, step: int = 0) -> bool:
        """Set the states' mean gradients; False: sums overflowed, and must be computed again at scales that fit."""
        reduced = finish_all(self._accumulators, num_micro_batches, step)
        overflowed = any(sums.overflowed for sums in reduced.values())
        for unit, state in self._states.items():
            state.reduced = reduced[unit]
            if overflowed:
                state.rescale(reduced[unit])
        return not overflowed
