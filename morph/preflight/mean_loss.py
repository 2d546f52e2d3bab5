"""Checks that the loss is a mean over samples, as Morph assumes, by running it on samples together and alone.

A mean over samples gives two samples together the mean of their separate losses; any other loss differs for most pairs.
So the pairs are chosen to be unlike: for each entry of the samples, those with the most and the fewest filled elements,
and those with its rarest and its commonest labels.
"""

from __future__ import annotations

import itertools
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
from morph.data.loader import data_of, num_at_hand, recipe_of
from morph.jobs.job import Job
from morph.losses import values_of
from morph.preflight.equal_draws import EqualDraws
from morph.preflight.unlike_pairs import IGNORED, Look, entries, look, num_other, unlike_pairs

_FEWEST_READ, _MOST_READ, _READ_AT_ONCE = 32, 512, 32
_READING_S = 1.0
_RUNNING_S = 3.0
"""Processor time of this thread, in seconds; one pair is tried however long it takes."""
_MOST_TOGETHER = 16
_TOLERANCE = 2e-5
_ROUNDINGS = 4.0
"""Tolerance of a value, in rounding errors of the least precise type that took part."""
_SURE = 10.0
"""A pair must be off the mean by this many tolerances to be used to find the reason."""
_GRADIENT_TOLERANCE, _GRADIENT_ROUNDINGS = 1e-4, 1e3
_LEAST_SIZE = 1e-4
"""Gradients smaller than this share of the largest parameter's are judged as if they had its size: mere rounding."""
_NOTHING = 1e-3
"""A share of the weight up to this counts as 0."""
_TIMES_WEIGHT = "return morph.Loss(total, weight), which is divided by the weight of the whole mini-batch"


class LossFailed(Exception):
    """Reading samples or the loss failed; the cause says how."""


@dataclass(frozen=True)
class LossTrial:
    """A loss to be tried.

    Attributes:
        loss: Returns the loss of a batch: a scalar, or (scalar, metrics by name).
        model: The model of the loss. Changes that the loss makes to its buffers are undone.
        num_samples: The size of the data set.
        read: Returns samples by number: dicts, tuples or lists of tensors and numbers.
        collate: Makes a batch of samples.
        part: The name of the parts into which Morph divides a batch.
        setting: The name of the setting that gives the size of a part.
        gradients: Whether gradients are compared too, where the values of the loss show nothing.
    """

    loss: Callable[[Any], Any]
    model: nn.Module
    num_samples: int
    read: Callable[[Sequence[int]], Sequence[Any]]
    collate: Callable[[Sequence[Any]], Any]
    part: str = "micro-batch"
    setting: str = "micro_batch_size"
    gradients: bool = False

    @property
    def parts(self) -> str:
        """The plural of ``part``."""
        return f"{self.part}es" if self.part.endswith("h") else f"{self.part}s"


def loss_warnings(job: Job) -> tuple[str, ...]:
    """Try a job's loss; see ``mean_warnings``.

    The model is really built. Its weights are moved a little from their initial values, because a last layer of zeros
    would give all samples the same loss; weights of fewer than 32 bits are widened where the model permits that.

    Returns:
        A sentence for the loss, and for each metric, that is not a mean; none if the trial fails.

    Raises:
        JobError: the loss fails on real numbers; an export on fake tensors does not show every error.
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


def _job_warnings(job: Job) -> tuple[str, ...]:
    dataset, recipe = data_of(job), recipe_of(job)

    def read(indices: Sequence[int]) -> list[Any]:
        return recipe.read(dataset, [(0, index) for index in indices])

    def tried(widen: Callable[[Tensor], Tensor]) -> tuple[str, ...]:
        model = training_mode(build_really(job.model, job.seed))
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(job.seed)
            move_weights(model)
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = widen(tensor.data)

        def collate(samples: Sequence[Any]) -> Any:
            made = recipe.batch(samples, [(0, 0)] * len(samples), "dataset()")
            return made.form.build({key: widen(entry) for key, entry in made.entries.items()})

        return mean_warnings(
            LossTrial(partial(job.loss, model), model, num_at_hand(dataset), read, collate, gradients=True)
        )

    try:
        return tried(_widened)
    except LossFailed:  # the model may be written for narrow types
        return tried(lambda tensor: tensor)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() and tensor.dtype.itemsize < torch.float32.itemsize else tensor


def mean_warnings(trial: LossTrial, *, running_s: float = _RUNNING_S) -> tuple[str, ...]:
    """Run a loss on pairs of unlike samples together and alone, with equal draws and no gradients.

    Samples whose own loss is not finite are left out, and a sentence says so. A model that refuses a single sample
    (batch norm over one value) is given each sample twice.

    Args:
        trial: The loss.
        running_s: Processor time after which no further pair is tried.

    Returns:
        A sentence for the loss, and for each metric, that is not a mean over samples.

    Raises:
        LossFailed: reading samples, or computing their loss, raised an error.
    """
    runs, looks = _Runs(trial), _look_over(trial)
    devices = {parameter.device for parameter in trial.model.parameters() if parameter.device.type == "cuda"}
    sets: list[tuple[int, ...]] = []
    with torch.random.fork_rng(devices=sorted(devices, key=str)), torch.no_grad():
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
        found = [sentence for name in names if (sentence := _Judge(runs, looks, name, sets).sentence()) is not None]
        if trial.gradients and sets and not found:
            found += _by_gradients(runs, [those for those in (sets[0], sets[-1]) if all(map(runs.is_finite, those))])
    return tuple(found + _left_out(runs))


def _by_gradients(runs: _Runs, sets: Sequence[tuple[int, ...]]) -> list[str]:
    """Compare gradients of samples together and alone, each parameter's by itself.

    A small term of the loss, such as a load balancing loss with a coefficient of 1e-4, is lost in the rounding of the
    loss's value, but not in the gradients of a router.

    Returns:
        A sentence on the parameter whose gradient differs most, if that is more than rounding; none if gradients cannot
        be computed.
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
    part, setting = runs.trial.part, runs.trial.setting
    return [
        f"the gradients of samples run together are not the mean of their separate ones ({shown}): a small term of the "
        f"loss, such as load balancing, is computed over a batch; in Morph only the m samples of a {part} run "
        f"together, so the result changes with {setting}, though not with the shape"
    ]


class _Runs:
    """Losses (named ``""``) and metrics of sets of samples that are batched together, each set computed once."""

    def __init__(self, trial: LossTrial) -> None:
        self.trial = trial
        self.spent_s = 0.0
        self.copies = 1
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

    def entries(self, index: int) -> dict[str, Tensor]:
        """Return a sample's entries by their names in messages."""
        return entries(self._sample(index))

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
            return self._run(indices)
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
            loss, told = values_of(result)
            told = {name: value for name, value in told.items() if not name.endswith(SAMPLES)}
            values = {"": float(loss), **{name: float(value) for name, value in told.items()}}
            self.totals |= {name.removesuffix(WEIGHT) for name in told if name.endswith(WEIGHT)}
            self.totals |= {name for name in told if name.endswith((WEIGHT, SUM))}
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
        """Return the gradients of these samples' loss, in double precision, by parameter.

        Raises:
            LossFailed: the model has a batch norm, or draws other than those of a dropout.
        """
        trained = {name: value for name, value in self.trial.model.named_parameters() if value.requires_grad}
        samples = [self._sample(index) for index in indices for _ in range(self.copies)]
        try:
            with torch.enable_grad(), EqualDraws() as draws:
                loss, _ = values_of(self.trial.loss(self.trial.collate(samples)))
                if draws.has_other_backward:
                    raise LossFailed
                found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        finally:
            self._restore()
        pairs = zip(trained, found, strict=True)
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

    @property
    def apart(self) -> float:
        """The distance between the two separate values of a pair."""
        return abs(self.parts[-1] - self.parts[0])


class _Judge:
    """Reports how one value, the loss or a metric, differs from a mean over samples."""

    def __init__(self, runs: _Runs, looks: Sequence[Look], name: str, sets: Sequence[tuple[int, ...]]) -> None:
        self._runs, self._looks, self._name = runs, looks, name
        self._seen = [seen for seen in map(self._values, sets) if not name or seen.is_known]
        sizes = (abs(value) for seen in self._seen for value in (seen.whole, *seen.parts) if math.isfinite(value))
        self._error = max(_TOLERANCE, _ROUNDINGS * runs.precision) * max(sizes, default=0.0)
        self._wrong = [seen for seen in self._seen if self._is_wrong(seen)]

    def _values(self, indices: tuple[int, ...]) -> _Seen:
        def value(those: tuple[int, ...]) -> float:
            return self._runs.of(those).get(self._name, math.nan)

        parts = tuple(value((index,)) for index in indices)
        return _Seen(indices, value(indices), parts, self._name in self._runs.totals)

    def _is_wrong(self, seen: _Seen) -> bool:
        """Whether the value contradicts a mean. Samples without finite losses of their own must have none together."""
        if seen.is_known:
            return not seen.off <= self._error
        return math.isfinite(seen.whole)

    def sentence(self) -> str | None:
        """Return the report; None for a mean."""
        if not self._wrong:
            return None
        telling = max(self._wrong, key=lambda seen: (math.isfinite(seen.off), len(seen.indices) == 2, seen.off))
        name = self._name.removesuffix(WEIGHT).removesuffix(SUM)
        what = f"metric {name!r}" if name else "the loss"
        part, parts, setting = self._runs.trial.part, self._runs.trial.parts, self._runs.trial.setting
        shown = self._shown(telling)
        if self._name in self._runs.totals:
            what = f"{'weight' if self._name.endswith(WEIGHT) else 'total'} of {what}"
            return (
                f"the {what} of samples run together is not the sum of their separate ones ({shown}): Morph adds up "
                f"{parts}, so the result changes with {setting}, though not with the shape"
            )
        if self._is_sum():
            return (
                f"{what} is a sum over the samples, not their mean ({shown}): Morph averages {parts}, so it comes out "
                f"m/M of the value in a plain loop over M samples, and changes with {setting}; divide by the number of "
                "samples"
            )
        weighing = self._by_entry(telling) or self._by_class()
        if weighing is not None:
            how, instead = weighing
            return (
                f"{what} weighs samples {how} ({shown}): Morph averages {parts}, so samples count unlike in a "
                f"plain loop, and the result changes with {setting}; {instead}"
            )
        return (
            f"{what} of samples run together is not the mean of their separate ones ({shown}): they are weighed (by "
            "class, by token) or affect each other, by negatives of the same batch (contrastive losses), statistics or "
            f"load balancing over a batch; in Morph only the m samples of a {part} run together, so the result changes "
            f"with {setting}, though not with the shape; morph.Loss(total, weight) is divided by the weight of the "
            "whole mini-batch"
        )

    def _is_sum(self) -> bool:
        known = [seen for seen in self._seen if seen.is_known]
        return any(seen.is_known for seen in self._wrong) and all(
            abs(seen.whole - sum(seen.parts)) <= self._error * len(seen.parts) for seen in known
        )

    def _shown(self, seen: _Seen) -> str:
        twice = ", each twice" if self._runs.copies > 1 else ""
        if len(seen.indices) > 2:
            kind, num = ("sum", 1) if seen.is_total else ("mean", len(seen.parts))
            of_own = f"the {kind} of their own: {sum(seen.parts) / num:.6g}"
            return f"{len(seen.indices)} samples together{twice}: {seen.whole:.6g}; {of_own}"
        numbers = " and ".join(map(str, seen.indices))
        own = " and ".join(f"{value:.6g}" for value in seen.parts)
        return f"samples {numbers} together{twice}: {seen.whole:.6g}; alone: {own}"

    def _by_entry(self, telling: _Seen) -> tuple[str, str] | None:
        """Explain the differences by a number in some entry of the samples, if that explanation fits all values."""
        tokens = "return morph.Loss(total, weight), or average within each sample first"
        best: tuple[str, str] | None = None
        least = math.inf
        for key, entry in self._runs.entries(telling.indices[0]).items():
            ways: list[tuple[str, Callable[[Mapping[str, Tensor]], float], str]] = [
                (
                    f"by their number of entries of {key} other than {ignored} ({{}}), as a mean over tokens does",
                    partial(_num_filled, key, ignored, start),
                    tokens,
                )
                for ignored, start in itertools.product(
                    IGNORED, (0, 1) if entry.dim() else (0,)
                )  # labels may be shifted by one
            ]
            if entry.numel() == 1 and not entry.is_complex():
                ways.append((f"by their entry {key} ({{}})", partial(_value, key), _TIMES_WEIGHT))
            for text, weigh, instead in ways:
                off = self._off(weigh)
                if off < least:
                    weights = " and ".join(f"{weigh(self._runs.entries(index)):g}" for index in telling.indices[:2])
                    best, least = (text.format(weights), instead), off
        return best

    def _off(self, weigh: Callable[[Mapping[str, Tensor]], float]) -> float:
        """Return how far values are off if samples are weighed like this; infinite if this is not the explanation."""
        worst = 0.0
        for seen in self._seen:
            weights = [weigh(self._runs.entries(index)) for index in seen.indices]
            if not (all(weight >= 0 for weight in weights) and 0 < sum(weights) < math.inf):
                return math.inf
            total = sum(weight * part for weight, part in zip(weights, seen.parts, strict=True) if weight)
            off = abs(total / sum(weights) - seen.whole)
            if not off <= self._error:
                return math.inf
            worst = max(worst, off)
        return worst

    def _by_class(self) -> tuple[str, str] | None:
        """Explain the differences by a label, if all samples with the same label have the same weight."""
        pairs = [seen for seen in self._wrong if len(set(seen.indices)) == 2 and seen.is_known]
        pair = max(pairs, key=lambda seen: seen.off, default=None)
        if pair is None or not min(pair.off, pair.apart) > _SURE * self._error:
            return None
        share = _share(pair)
        if not -_NOTHING <= share <= 1 + _NOTHING:
            return None
        for key in self._looks[0].labels:
            labels = [self._label(key, index) for index in pair.indices]
            again = [self._another(key, label, index) for label, index in zip(labels, pair.indices, strict=True)]
            if None in labels or labels[0] == labels[1] or again == list(pair.indices):
                continue
            second = self._values((again[0], again[1]))
            alike = [self._values(both) for both in zip(pair.indices, again, strict=True) if both[0] != both[1]]
            off = abs(second.whole - _mix(second, share))
            if off <= self._error * (2 + 2 * second.apart / pair.apart) and not any(map(self._is_wrong, alike)):
                return f"by class, as cross_entropy(weight=...) does: {_ratio(key, labels, share)}", _TIMES_WEIGHT
        return None

    def _label(self, key: str, index: int) -> float | None:
        entry = self._runs.entries(index)[key]
        return float(entry) if entry.numel() == 1 else None

    def _another(self, key: str, label: float | None, index: int) -> int:
        """Return another sample with a label; the same sample if there is none."""
        having = (look.index for look in self._looks if look.labels.get(key) == frozenset({label}))
        return next((other for other in having if other != index), index)


def _share(pair: _Seen) -> float:
    return (pair.whole - pair.parts[0]) / (pair.parts[1] - pair.parts[0])


def _mix(pair: _Seen, share: float) -> float:
    return pair.parts[0] + (pair.parts[1] - pair.parts[0]) * share


def _ratio(key: str, labels: Sequence[float | None], share: float) -> str:
    """Return a sentence on how much more one label counts than the other."""
    (light, least), (heavy, most) = sorted(zip(labels, (1 - share, share), strict=True), key=lambda entry: entry[1])
    if least <= _NOTHING:
        return f"a sample whose {key} is {light:g} does not count"
    return f"a sample whose {key} is {heavy:g} counts {most / least:.3g} times as much as one whose {key} is {light:g}"


def _num_filled(key: str, ignored: int, start: int, entries: Mapping[str, Tensor]) -> float:
    return num_other(entries[key][start:] if entries[key].dim() else entries[key], ignored)


def _value(key: str, entries: Mapping[str, Tensor]) -> float:
    return float(entries[key])


def _left_out(runs: _Runs) -> list[str]:
    """Return a sentence that names the samples that could not be judged."""
    lost = {index: runs.of((index,))[""] for index in runs.tried if not runs.is_finite(index)}
    if not lost:
        return []
    values = " and ".join(sorted({f"{value:g}" for value in lost.values()}))
    if len(lost) == len(runs.tried):
        return [f"the loss is {values} for all samples tried, so whether it is a mean over samples is not known"]
    numbers = ", ".join(map(str, sorted(lost)))
    which = f"sample {numbers} alone" if len(lost) == 1 else f"each of the samples {numbers} alone"
    return [f"the loss of {which} is {values}: left out of the check whether the loss is a mean over samples"]
