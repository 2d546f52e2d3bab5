"""Checks that the loss is a mean over samples, as Morph assumes, by running it on samples together and alone.

The pairs are chosen to be unlike: by filled elements of each entry, and by rare and common labels.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from morph.contract.errors import JobError, MorphError
from morph.contract.messages import SAMPLES, SUM, WEIGHT
from morph.cutting.deferred_init.construct import build_really, training_mode
from morph.cutting.trial_run.trial import example_batch, move_weights, run_really
from morph.data.loader import data_of, num_at_hand, order_of, recipe_of
from morph.data.seeding import kept_generators
from morph.jobs.job import Job
from morph.losses import values_of
from morph.preflight.equal_draws import EqualDraws
from morph.preflight.unlike_pairs import Look, look, unlike_pairs
from morph.words import counted

_FEWEST_READ, _MOST_READ, _READ_AT_ONCE = 32, 512, 32
_READING_S = 1.0
_RUNNING_S = 3.0
"""Processor time of this thread, in seconds; one pair is tried however long it takes."""
_MOST_TOGETHER = 16
_TOLERANCE = 2e-5
_ROUNDINGS = 4.0
"""Tolerance of a value, in rounding errors of the least precise type that took part."""
_GRADIENT_TOLERANCE, _GRADIENT_ROUNDINGS = 1e-4, 1e3
_LEAST_SIZE = 1e-4
"""Gradients smaller than this share of the largest parameter's are judged as if they had its size: mere rounding."""


class LossFailed(Exception):
    """Reading samples or the loss failed; the cause says how."""


@dataclass(frozen=True)
class LossTrial:
    """A loss to be tried, which returns a scalar or (scalar, metrics), on samples that ``read`` returns by number.

    ``part``, ``setting``: names of the parts into which Morph divides a batch, and of their size. ``gradients``:
    whether these are compared too. ``num_left``: samples of a short step whose last part has one; 0: there is none.
    """

    loss: Callable[[Any], Any]
    model: nn.Module
    num_samples: int
    read: Callable[[Sequence[int]], Sequence[Any]]
    collate: Callable[[Sequence[Any]], Any]
    part: str = "micro-batch"
    setting: str = "micro_batch_size"
    gradients: bool = False
    num_left: int = 0


def loss_warnings(job: Job) -> tuple[str, ...]:
    """Try a job's loss, on a really built model; see ``mean_warnings``. No warnings if the trial fails.

    Weights are moved a little, because a last layer of zeros would give all samples the same loss. Raises JobError if
    the loss fails on real numbers; an export on fake tensors does not show every error.
    """
    try:
        return _job_warnings(job)
    except LossFailed:
        try:
            run_really(job, example_batch(job))
        except JobError as error:
            if not isinstance(error.__cause__, NotImplementedError):  # an operation that only other devices have
                raise
        return ()


@kept_generators()
def _job_warnings(job: Job) -> tuple[str, ...]:
    dataset, recipe = data_of(job), recipe_of(job)

    def read(indices: Sequence[int]) -> list[Any]:
        return recipe.read(dataset, [(0, index) for index in indices])

    def tried(widen: Callable[[Tensor], Tensor]) -> tuple[str, ...]:
        model = training_mode(build_really(job.model, job.seed))
        move_weights(model, job.seed)
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = widen(tensor.data)

        def collate(samples: Sequence[Any]) -> Any:
            made = recipe.batch(samples, [(0, 0)] * len(samples), "dataset()")
            return made.form.build({key: widen(entry) for key, entry in made.entries.items()})

        epochs, m = order_of(job).epochs, job.micro_batch_size or job.batch_size
        left = epochs.num_left if epochs.end == "short" and epochs.num_left % m == 1 else 0
        size = num_at_hand(dataset)
        return mean_warnings(
            LossTrial(partial(job.loss, model), model, size, read, collate, gradients=True, num_left=left)
        )

    try:
        return tried(_widened)
    except LossFailed:  # the model may be written for narrow types
        return tried(lambda tensor: tensor)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() and tensor.dtype.itemsize < torch.float32.itemsize else tensor


def mean_warnings(trial: LossTrial, *, running_s: float = _RUNNING_S) -> tuple[str, ...]:
    """Run a loss on pairs of unlike samples together and alone, with equal draws and no gradients.

    A model that refuses a single sample (batch norm over one value) is given each sample twice. No further pair is
    tried after ``running_s`` of processor time. Returns a sentence for the loss, and each metric, that is no mean over
    samples, and one on samples without a finite loss. Raises LossFailed.
    """
    runs, looks = _SampleLosses(trial), _look_over(trial)
    sets: list[tuple[int, ...]] = []
    with kept_generators(), torch.no_grad():
        for pair in unlike_pairs(looks):
            if sets and runs.spent_s > running_s:
                break
            if all(runs.is_finite(index) for index in pair):
                sets.append(pair)
        finite = [index for index in runs.tried if runs.is_finite(index)][:_MOST_TOGETHER]
        if len(finite) > 2 and runs.spent_s < running_s:
            sets.append(tuple(finite))
        sets += [(finite[0], index) for index in runs.tried if finite and not runs.is_finite(index)]
        names = list(runs.of((runs.tried[0],)))
        warnings = [sentence for name in names if (sentence := _by_values(runs, name, sets)) is not None]
        if trial.gradients and sets and not warnings:
            warnings += _by_gradients(runs, [those for those in (sets[0], sets[-1]) if all(map(runs.is_finite, those))])
    return tuple(warnings + _left_out(runs))


def _by_gradients(runs: _SampleLosses, sets: Sequence[tuple[int, ...]]) -> list[str]:
    """Compare each parameter's gradients of samples together and alone; return a sentence on the worst, if any.

    A small term, such as load balancing times 1e-4, is lost in the loss's rounding, but not in a router's gradients.
    """
    worst, shown = 0.0, ""
    for indices in sets:
        try:
            whole, *alone = (runs.gradients(those) for those in (indices, *((index,) for index in indices)))
        except Exception:  # some operations have no derivative on this device, or under the equal draws
            return []
        size = max((float(gradient.norm()) for gradient in whole.values()), default=0.0)
        for name, gradient in whole.items():
            total = sum(own[name] for own in alone if name in own)
            off = float((gradient - total / (1 if "" in runs.totals else len(indices))).norm())
            relative = off / max(float(gradient.norm()), _LEAST_SIZE * size, 1e-30)
            if relative > worst:
                worst, numbers = relative, ", ".join(map(str, indices))
                shown = f"samples {numbers} together: the gradient of {name} is {100 * relative:.2g}% off"
    if worst <= max(_GRADIENT_TOLERANCE, _GRADIENT_ROUNDINGS * runs.precision):
        return []
    return [f"the gradients of samples run together are not the mean of their separate ones ({shown}): {_why(runs)}"]


def _why(runs: _SampleLosses) -> str:
    part, setting = runs.trial.part, runs.trial.setting
    return (
        "samples are weighed, by class (cross_entropy(weight=...)) or by token, or affect each other, by negatives of "
        "the same batch (contrastive losses), statistics or load balancing over a batch; in Morph only the m samples "
        f"of a {part} run together, so the result changes with {setting}, though not with the shape; for weights, "
        "return morph.Loss(total, weight), which is divided by the weight of the whole mini-batch"
    )


class _SampleLosses:
    """Losses (named ``""``) and metrics of sets of samples that are batched together, each set computed once."""

    def __init__(self, trial: LossTrial) -> None:
        self.trial = trial
        self.spent_s = 0.0
        self.copies = 1
        self.fails_alone = False
        self.totals: set[str] = set()
        """Names of totals and weights, whose value for samples together is the sum of the separate values."""
        self.precision = 0.0
        """The largest ``eps`` of the types that took part."""
        self._values: dict[tuple[int, ...], Mapping[str, float]] = {}
        self._samples: dict[int, Any] = {}
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in trial.model.buffers()]
        self._places = [(module, dict(module._buffers)) for module in trial.model.modules() if module._buffers]

    @property
    def tried(self) -> list[int]:
        """The samples that were run alone, in order."""
        return [indices[0] for indices in self._values if len(indices) == 1]

    def is_finite(self, index: int) -> bool:
        """Whether a sample's own loss is a finite number."""
        return math.isfinite(self.of((index,))[""])

    def of(self, indices: tuple[int, ...]) -> Mapping[str, float]:
        """Return the values of these samples together, by name."""
        if indices not in self._values:
            self._values[indices] = self._run(indices) if self._values else self._first_run(indices)
        return self._values[indices]

    def _first_run(self, indices: tuple[int, ...]) -> Mapping[str, float]:
        """Run the first samples, and find out whether one sample can be run alone."""
        values: Mapping[str, float] | None = None
        try:
            values = self._run(indices)
            if math.isfinite(values[""]):
                return values
        except LossFailed:
            self.copies = 2
            values = self._run(indices)
            self.fails_alone = True
            return values
        self.copies = 2  # statistics of one sample may be NaN
        twice = self._run(indices)
        if math.isfinite(twice[""]):
            return twice
        self.copies = 1
        return values

    def _run(self, indices: tuple[int, ...]) -> Mapping[str, float]:
        begun_s = time.thread_time()
        samples = [self._sample(index) for index in indices for _ in range(self.copies)]
        try:
            with EqualDraws() as draws:
                result = self.trial.loss(self.trial.collate(samples))
            loss, metrics = values_of(result)
            metrics = {name: value for name, value in metrics.items() if not name.endswith(SAMPLES)}
            values = {"": float(loss), **{name: float(value) for name, value in metrics.items()}}
            self.totals |= {name.removesuffix(WEIGHT) for name in metrics if name.endswith(WEIGHT)}
            self.totals |= {name for name in metrics if name.endswith((WEIGHT, SUM))}
        except MorphError:
            raise
        except Exception as error:
            raise LossFailed from error
        finally:
            self._restore()
        self.precision = max(self.precision, draws.coarsest)
        self.spent_s += time.thread_time() - begun_s
        return values

    def gradients(self, indices: tuple[int, ...]) -> dict[str, Tensor]:
        """Return the loss's gradients (float64) by parameter. Raises LossFailed for batch norm and most draws."""
        trained = {name: value for name, value in self.trial.model.named_parameters() if value.requires_grad}
        samples = [self._sample(index) for index in indices for _ in range(self.copies)]
        try:
            with torch.enable_grad(), EqualDraws() as draws:
                loss, _ = values_of(self.trial.loss(self.trial.collate(samples)))
                if draws.has_other_backward:
                    raise LossFailed
                gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        finally:
            self._restore()
        pairs = zip(trained, gradients, strict=True)
        return {
            name: gradient.to(torch.promote_types(gradient.dtype, torch.float64))
            for name, gradient in pairs
            if gradient is not None
        }

    def _sample(self, index: int) -> Any:
        if index not in self._samples:
            (self._samples[index],) = _read(self.trial, [index])
        return self._samples[index]

    def _restore(self) -> None:
        """Restore the model's initial buffers: counters, running statistics and vectors of spectral norm."""
        for buffer, value in self._buffers:
            if not torch.equal(buffer, value):
                buffer.copy_(value)
        for module, buffers in self._places:
            module._buffers.update(buffers)


def _look_over(trial: LossTrial) -> list[Look]:
    """Read a few samples from all over the data set, and more while reading is quick."""
    order = random.Random(0).sample(range(trial.num_samples), min(trial.num_samples, _MOST_READ))
    begun_s, looks = time.monotonic(), list[Look]()
    for first in range(0, len(order), _READ_AT_ONCE):
        if len(looks) >= _FEWEST_READ and time.monotonic() - begun_s > _READING_S:
            break
        indices = order[first : first + _READ_AT_ONCE]
        looks += map(look, indices, _read(trial, indices))
    return looks


def _read(trial: LossTrial, indices: Sequence[int]) -> Sequence[Any]:
    try:
        return trial.read(indices)
    except MorphError:
        raise
    except Exception as error:
        raise LossFailed from error


@dataclass(frozen=True)
class _Seen:
    """One value of samples that were run together, and their separate values."""

    indices: tuple[int, ...]
    whole: float
    parts: tuple[float, ...]
    is_total: bool = False

    @property
    def is_known(self) -> bool:
        """Whether each sample has a value of its own."""
        return all(map(math.isfinite, self.parts))

    @property
    def off(self) -> float:
        """The distance of the value from the mean, or the sum, of the separate values."""
        return abs(self.whole - sum(self.parts) / (1 if self.is_total else len(self.parts)))

    def is_wrong(self, error: float) -> bool:
        """Whether the value contradicts a mean. Samples without finite losses of their own must have none together."""
        return not self.off <= error if self.is_known else math.isfinite(self.whole)

    def shown(self, copies: int) -> str:
        twice = ", each twice" if copies > 1 else ""
        if len(self.indices) > 2:
            kind, num = ("sum", 1) if self.is_total else ("mean", len(self.parts))
            of_own = f"the {kind} of their own: {sum(self.parts) / num:.6g}"
            return f"{len(self.indices)} samples together{twice}: {self.whole:.6g}; {of_own}"
        numbers = " and ".join(map(str, self.indices))
        own = " and ".join(f"{value:.6g}" for value in self.parts)
        return f"samples {numbers} together{twice}: {self.whole:.6g}; alone: {own}"


def _by_values(runs: _SampleLosses, name: str, sets: Sequence[tuple[int, ...]]) -> str | None:
    """Return a sentence if one value, the loss or a metric, is not a mean over samples, or a total is not a sum."""

    def value(indices: tuple[int, ...]) -> float:
        return runs.of(indices).get(name, math.nan)

    is_total = name in runs.totals
    seen = [_Seen(those, value(those), tuple(value((index,)) for index in those), is_total) for those in sets]
    seen = [one for one in seen if not name or one.is_known]
    sizes = (abs(number) for one in seen for number in (one.whole, *one.parts) if math.isfinite(number))
    error = max(_TOLERANCE, _ROUNDINGS * runs.precision) * max(sizes, default=0.0)
    wrong = [one for one in seen if one.is_wrong(error)]
    if not wrong:
        return None
    telling = max(wrong, key=lambda one: (math.isfinite(one.off), len(one.indices) == 2, one.off))
    shown, part, setting = telling.shown(runs.copies), runs.trial.part, runs.trial.setting
    bare = name.removesuffix(WEIGHT).removesuffix(SUM)
    what = f"metric {bare!r}" if bare else "the loss"
    if is_total:
        return (
            f"the {'weight' if name.endswith(WEIGHT) else 'total'} of {what} of samples run together is not the sum of "
            f"their separate ones ({shown}): Morph adds up one value for each {part}, so the result changes with "
            f"{setting}, though not with the shape"
        )
    known = [one for one in seen if one.is_known]
    if any(one.is_known for one in wrong) and all(
        abs(one.whole - sum(one.parts)) <= error * len(one.parts) for one in known
    ):
        return (
            f"{what} is a sum over the samples, not their mean ({shown}): Morph averages one value for each {part}, so "
            f"it comes out m/M of the value in a plain loop over M samples, and changes with {setting}; divide by the "
            "number of samples"
        )
    return f"{what} of samples run together is not the mean of their separate ones ({shown}): {_why(runs)}"


def _left_out(runs: _SampleLosses) -> list[str]:
    """Return sentences on a step that one sample alone will fail, and on the samples that could not be judged."""
    if runs.fails_alone and runs.trial.num_left:
        return [
            "the model fails on one sample alone, as BatchNorm does on one value, and the last step of each epoch has "
            f"{counted(runs.trial.num_left, 'sample')}, so its last {runs.trial.part} has one: choose a batch_size or "
            f"{runs.trial.setting} for which none does, or epoch_end='drop'"
        ]
    lost = {index: runs.of((index,))[""] for index in runs.tried if not runs.is_finite(index)}
    if not lost:
        return []
    values = " and ".join(sorted({f"{value:g}" for value in lost.values()}))
    if len(lost) == len(runs.tried):
        return [f"the loss is {values} for all samples tried, so whether it is a mean over samples is not known"]
    numbers = ", ".join(map(str, sorted(lost)))
    which = f"sample {numbers} alone" if len(lost) == 1 else f"each of the samples {numbers} alone"
    return [f"the loss of {which} is {values}: left out of the check whether the loss is a mean over samples"]
