"""Checks before training that a job made of the user's own program, such as a Trainer, trains what the program trains.

The program makes some of its steps, and Morph the same, as a run does; losses and weights are compared. Dropout is off
in both, because they draw other random numbers.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from morph.contract.decided import decided_step
from morph.contract.errors import JobError, MorphError
from morph.contract.messages import WEIGHT, MicroBatchLoss, weights_of
from morph.cutting import cut, export_job
from morph.cutting.deferred_init.construct import build_really
from morph.cutting.source.refusal import first_line
from morph.cutting.trial_run.trial import rms
from morph.data import MicroBatchLoader
from morph.data.loader import data_of, lengths_of, recipe_of, short_sizes, with_step
from morph.data.seeding import kept_generators
from morph.jobs.job import Job, OwnProgram, OwnSteps
from morph.losses import Loss
from morph.preflight.mean_loss import loss_warnings
from morph.preflight.plain_model import plain_model
from morph.preflight.step_comparison import StepTrial, Sums
from morph.runtime.state.unit_state import apply_all, norms_sq
from morph.runtime.step.stage import run_step
from morph.runtime.step.sums import told_losses
from morph.runtime.workloads.evaluation import batch_keys
from morph.words import listed

NUM_STEPS = 3
"""A schedule that warms up begins with a step of length 0, and only the third loss shows the second's schedule."""
_APART = {"fp32": 1e-4, "bf16": 2e-2}
"""Tolerated difference of a loss, relative to the loss."""
_MOVED = {"fp32": 1e-2, "bf16": 0.3}
"""Tolerated difference of a weight, relative to how far the steps moved its parameter."""
_LEFT_OUT = 0.1
"""Share of a parameter's elements that may differ more: Adam makes whole steps of gradients that are rounding."""
_ROUNDING_ALONE = 1e-5
"""A parameter whose gradient is smaller than this share of the largest has a gradient of rounding alone."""
_ROUNDINGS = 8.0
_SHOWN = 3
_CPU = torch.device("cpu")


@kept_generators()
def compare_with_program(program: OwnProgram, most_samples: int) -> tuple[bool, str]:
    """Compare steps of a program, of at most so many samples each; return whether, and a phrase on them."""
    if most_samples < 1:
        return False, f"not compared with {program.call}: a sample takes too long or too much memory"
    try:
        own = program.run(NUM_STEPS, most_samples)
    except MorphError:
        raise
    except Exception as error:
        own = f"it fails in a copy: {type(error).__name__}: {first_line(error)}"
    if isinstance(own, str):
        return False, f"not compared with {program.call}: {own}"
    small, *larger = _micro_batch_sizes(own.job)
    steps = f"{len(own.losses)} steps of {own.job.batch_size} samples, dropout off"
    difference = _difference(own, trained_steps(own.job, small, len(own.losses)))
    if difference is None:
        return True, f"equal to {program.call} over {steps}: losses by step, and weights"
    remedy = ""
    for size in larger:
        if _difference(own, trained_steps(own.job, size, len(own.losses))) is None:
            remedy = f"micro_batch_size={size}, with which it trains alike; {_why(own.job)}"
    raise JobError(
        f"its job trains otherwise ({steps}, micro-batches of {small}): {difference}",
        source=program.call,
        allowed=remedy or None,
    )


@kept_generators()
def check_padding(job: Job) -> None:
    """Check that a sample has the same loss in the longest bucket as by itself: a program pads to its own batches."""
    lengths = lengths_of(job)
    if lengths is None or job.own_program is None or lengths.min() == job.buckets[-1]:
        return
    shortest, recipe = int(lengths.argmin()), recipe_of(job)
    sample = recipe.read(data_of(job), [(0, shortest)])
    model = build_really(job.model, job.seed).eval()
    losses = []
    for length in (int(lengths[shortest]), job.buckets[-1]):
        made = recipe.batch(sample, [(0, shortest)], "dataset()", length=length)
        with torch.no_grad():
            result: Any = job.loss(model, made.form.build(made.entries))
        result = result[0] if isinstance(result, tuple) else result
        losses.append(float(result.mean()))
    alone, padded = losses
    if abs(alone - padded) > _APART["bf16"] * max(abs(alone), 1e-2):
        raise JobError(
            f"its loss counts padding: {alone:.5g} for sample {shortest} by itself, {padded:.5g} if it is padded from "
            f"{int(lengths[shortest])} to {job.buckets[-1]}",
            source=job.own_program.call,
            allowed="samples that the data set pads to one length, as with --pad_to_max_length; or a loss without them",
        )


def _why(job: Job) -> str:
    """Return why the size of micro-batches matters."""

    def mean(model: nn.Module, batch: Any) -> Any:
        result = job.loss(model, batch)
        return result.mean() if isinstance(result, Loss) else result

    warnings = loss_warnings(replace(job, loss=mean, micro_batch_size=None))
    return warnings[0] if warnings else "the model computes another loss for a part of a batch than for the whole"


def _micro_batch_sizes(job: Job) -> tuple[int, ...]:
    """Return the size to compare, and a larger one, if there is one, that tells whether the size matters."""
    if job.micro_batch_size is not None:
        return (job.micro_batch_size,)
    size = max(m for m in range(1, max(2, job.batch_size // 2 + 1)) if job.batch_size % m == 0)
    return (size,) if size == job.batch_size else (size, job.batch_size)


@dataclass(frozen=True)
class Trained:
    """Losses by step, weights before and after the steps, and the largest mean gradient of each weight (rms)."""

    losses: Sequence[float]
    before: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    gradients: Mapping[str, float]


@kept_generators()
def trained_steps(job: Job, micro_batch_size: int, num_steps: int) -> Trained:
    """Return the result of a job's first steps, trained as a run on one worker does, on the CPU."""
    return _Steps(job, micro_batch_size).train(num_steps)


class _Steps:
    """Trains a job's first steps as a run on one worker does, on the CPU."""

    def __init__(self, job: Job, micro_batch_size: int) -> None:
        self._job, self._whole = job, job.batch_size // micro_batch_size
        fewer = short_sizes(job, micro_batch_size)
        self._model = cut(
            export_job(job), num_sections=job.num_sections, micro_batch_size=micro_batch_size, fewer=fewer
        )
        self._loader = MicroBatchLoader.of(job, micro_batch_size)

    def train(self, num_steps: int) -> Trained:
        losses, largest = [], dict[str, float]()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trial = StepTrial.of(self._job, self._model, plain_model(self._job, _CPU), _CPU, self._whole)
            states = trial.states
            for step in range(num_steps):
                losses_told = self._reduce(trial, step)
                weights = weights_of(losses_told)
                total = sum(weights.values()) if weights else len(losses_told)
                losses.append(self._factor(step) * sum(one.loss for one in losses_told) / total if total else math.nan)
                for state in states.values():
                    for name, gradient in state.reduced.gradients.items() if state.reduced else ():
                        largest[name] = max(largest.get(name, 0.0), rms(gradient))
                apply_all(states.values(), decided_step(step + 1, [norms_sq(states)], [], states, [weights]))
        after = {name: value.detach() for state in states.values() for name, value in state.parameters.items()}
        return Trained(losses, trial.plain, after, largest)

    def _factor(self, step: int) -> float:
        """Return the factor of a step's gradients if they are divided by the micro-batches of a whole step."""
        short = self._job.short_step
        return self._loader.num_micro_batches(step) / self._whole if short is not None and short.of_whole else 1.0

    def _reduce(self, trial: StepTrial, step: int) -> list[MicroBatchLoss]:
        """Set the units' mean gradients of a step; return loss and further values of each micro-batch."""
        given = {
            **trial.plain,
            **{name: value for state in trial.states.values() for name, value in state.values.items()},
        }
        keys, names = sorted(batch_keys(self._model.sections)), self._model.metric_names
        shares = dict(enumerate(self._loader.shares(step) if self._job.short_step is None else ()))
        number = self._loader.num_micro_batches(step)
        while True:
            sums, outputs = Sums(trial), {}
            for place in range(number):
                torch.manual_seed(0)
                batch = with_step(self._loader.load(step, place, keys), self._job, step)
                sections = self._model.at(*self._loader.size(step, place)).sections
                factor = self._factor(step) * (1.0 if WEIGHT in names else shares.get(place, 1.0))
                precision = self._job.precision
                outputs[place] = run_step(sections, batch, given, sums.add, precision=precision, factor=factor)
            if sums.reduce(number, step):
                return told_losses(outputs, names, shares)


def _difference(own: OwnSteps, ours: Trained) -> str | None:
    """Return the first step whose loss differs, or else the weights that differ; None if they agree."""
    precision = own.job.precision
    for number, (theirs, mine) in enumerate(zip(own.losses, ours.losses, strict=True), 1):
        if not abs(theirs - mine) <= _APART[precision] * max(abs(theirs), 1e-2):
            return f"the loss of step {number} is {theirs:.6g} there and {mine:.6g} here"
    largest = max(ours.gradients.values(), default=0.0)
    apart = {}
    for name in own.weights.keys() | ours.weights.keys():
        if name in own.weights and name in ours.weights and ours.gradients.get(name, 0.0) < _ROUNDING_ALONE * largest:
            continue
        before = ours.before[name].detach()
        there, here = own.weights.get(name, before), ours.weights.get(name, before)
        moved = max(rms(there - before), rms(here - before))
        allowed = _MOVED[precision] * moved + _ROUNDINGS * torch.finfo(before.dtype).eps * rms(before)
        far = (there - here).abs().flatten().float().sort().values
        kept = far[: len(far) - int(_LEFT_OUT * len(far))]
        if not rms(kept) <= allowed:
            apart[name] = rms(there - here) / moved if moved else 1.0
    if not apart:
        return None
    worst = sorted(apart, key=lambda name: -apart[name])
    shown = listed([f"{name} by {apart[name]:.1%} of its way" for name in worst], _SHOWN)
    return f"{len(worst)} of {len(own.weights)} weights differ after {len(own.losses)} steps: {shown}"
