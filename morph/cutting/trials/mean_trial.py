"""Whether the loss is the mean over samples that Morph takes it for, found by one trial."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from morph.contract.errors import JobError, MorphError
from morph.cutting.making.construct import build_really, training_mode
from morph.cutting.trials.equal_draws import EqualDraws
from morph.cutting.trials.trial import example_batch, run_really
from morph.data.loader import data_of, read_samples, stack_entry
from morph.job import Job

Sample = Mapping[str, Tensor]
_NUM_LOOKED_AT = 32
_TOLERANCE = 2e-5
_IGNORED = (-100, 0, -1, 1)


@dataclass(frozen=True)
class _Part:
    """Samples whose loss was taken by itself; ``values`` are its loss (named ``""``) and metrics."""

    samples: Sequence[Sample]
    values: Mapping[str, float]


def loss_warnings(job: Job) -> tuple[str, ...]:
    """Run the loss of two samples together and alone, with equal draws, and say how they differ.

    The model is really built, and run without gradients. The two samples are those of some that differ most; where one
    cannot stand alone, four are taken, and their halves.

    Returns:
        A sentence for the loss and for each metric that is no mean; none where the trial fails.

    Raises:
        JobError: the loss fails on real numbers; fakes, on which a job is exported, do not see all that may be wrong.
    """
    try:
        samples = _unlike_samples(job)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            parts, together = _trial(job, training_mode(build_really(job.model, job.seed)), samples)
    except MorphError:
        raise
    except Exception:
        try:
            run_really(job, example_batch(job))
        except JobError as error:
            if not isinstance(error.__cause__, NotImplementedError):  # an operation that only another device has
                raise
        return ()
    return tuple(_judge(parts, together))


def _unlike_samples(job: Job) -> list[Sample]:
    """Return up to four samples; the first two have the most different numbers of filled entries."""
    dataset = data_of(job)
    count = len(dataset)
    indices = sorted({count * place // _NUM_LOOKED_AT for place in range(_NUM_LOOKED_AT)})
    samples = read_samples(dataset, job.seed, [(0, index) for index in indices])
    filled = [[_num_other(value, ignored) for value in s.values() for ignored in _IGNORED] for s in samples]
    pairs = [(i, j) for j in range(len(samples)) for i in range(j)]
    first, second = max(pairs, key=lambda pair: sum(map(_distance, filled[pair[0]], filled[pair[1]])))
    others = [sample for place, sample in enumerate(samples) if place not in {first, second}]
    return [samples[first], samples[second], *others[:2]]


def _num_other(entry: Tensor, ignored: int) -> int:
    return int((entry != ignored).sum())


def _distance(one: int, other: int) -> int:
    return abs(one - other)


def _trial(job: Job, model: nn.Module, samples: Sequence[Sample]) -> tuple[list[_Part], _Part]:
    try:
        parts = [_part(job, model, samples[place : place + 1]) for place in range(2)]
        return parts, _part(job, model, samples[:2])
    except Exception:  # one sample cannot stand alone
        halves = [_part(job, model, samples[place::2]) for place in range(2)]
        return halves, _part(job, model, [*samples[::2], *samples[1::2]])


def _part(job: Job, model: nn.Module, samples: Sequence[Sample]) -> _Part:
    with EqualDraws():
        result = job.loss(model, {key: stack_entry(samples, key) for key in samples[0]})
    loss, metrics = result if isinstance(result, tuple) else (result, {})
    return _Part(samples, {"": float(loss), **{name: float(value) for name, value in metrics.items()}})


def _judge(parts: Sequence[_Part], together: _Part) -> Iterator[str]:
    for name, whole in together.values.items():
        values = [part.values[name] for part in parts]
        error = _TOLERANCE * max(abs(value) for value in (whole, *values))
        if math.isfinite(error) and abs(whole - sum(values) / len(values)) > error:
            what = f"metric {name!r}" if name else "the loss"
            alone = "alone" if len(together.samples) == len(parts) else "in halves"
            seen = f"{len(together.samples)} samples together: {whole:.6g}; {alone}: " + " and ".join(
                f"{value:.6g}" for value in values
            )
            yield _sentence(what, seen, _weights(parts, values, whole, error), abs(whole - sum(values)) <= error)


def _sentence(what: str, seen: str, weights: str | None, is_sum: bool) -> str:
    if is_sum:
        return (
            f"{what} is a sum over the samples, not their mean ({seen}): Morph averages micro-batches, so it comes out "
            "m/M of what a plain loop over M samples has, and changes with micro_batch_size; divide by the number of "
            "samples"
        )
    if weights is not None:
        return (
            f"{what} weighs samples by {weights}, as a mean over tokens does ({seen}): Morph averages micro-batches, "
            "so samples count otherwise than in a plain loop, and the result changes with micro_batch_size; average "
            "within each sample first, then over the samples"
        )
    return (
        f"{what} of samples that come together is not the mean of their own ({seen}): they meet in it, as they do in "
        "negatives of the same batch (contrastive losses), in statistics or in load balancing over a batch; with Morph "
        "only the m samples of a micro-batch meet, so the result changes with micro_batch_size, though not with P x D"
    )


def _weights(parts: Sequence[_Part], values: Sequence[float], whole: float, error: float) -> str | None:
    """Say by which numbers of the batch the samples are weighed, if some explain the value."""
    keys = [key for key, entry in parts[0].samples[0].items() if entry.dim()]
    best: str | None = None
    for key, ignored, start in itertools.product(keys, _IGNORED, (0, 1)):  # labels may be shifted by one
        counts = [sum(_num_other(sample[key][start:], ignored) for sample in part.samples) for part in parts]
        if min(counts) > 0 and len(set(counts)) > 1:
            off = abs(sum(map(operator.mul, counts, values)) / sum(counts) - whole)
            if off <= error:
                shown = " and ".join(map(str, counts))
                best, error = f"their number of entries of {key!r} other than {ignored} ({shown})", off
    return best
