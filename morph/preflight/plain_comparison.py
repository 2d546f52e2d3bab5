"""Checks before training that a job's sections compute the same loss, gradients and next weights as the plain model.

Both get the same weights, samples and random numbers, and attention's plain kernel, since others round and draw
differently where a trace has an ``attention_mask``. The only remaining difference is the order of the same sums: see
``_check``; for accumulators and optimizers see ``step_comparison``.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from morph.contract.errors import ExportError, JobError, MorphError
from morph.cutting import CutModel, ExportedJob, cut, export_job
from morph.cutting.cuts.analysis import REFERENCE_SAMPLES, analyse
from morph.cutting.exporting.exported_job import GraphJob, MarkedJob
from morph.cutting.source.locate import user_line
from morph.cutting.source.refusal import OR_MARK, first_line
from morph.cutting.trial_run.trial import example_batch, move_weights, rms
from morph.data import MicroBatchLoader
from morph.data.loader import form_of
from morph.data.seeding import kept_generators
from morph.jobs.job import Job
from morph.losses import values_of
from morph.preflight.own_program import NUM_STEPS as PROGRAM_STEPS
from morph.preflight.own_program import check_padding, compare_with_program
from morph.preflight.plain_model import plain_model, shortened
from morph.preflight.step_comparison import NUM_STEPS, StepTrial, Sums
from morph.runtime.step.stage import AddGradient, run_step
from morph.words import listed

NUM_SEEDS = 3
NUM_SAMPLES = 2
QUICK_FLOPS = 1e12
"""FLOP that take one core about ten seconds."""
PATIENT_FLOPS = 1e13
"""FLOP that take one core a minute or two."""
_SHARE_OF_MEMORY = 0.6
_COPIES, _COPIES_OF_A_STEP = 3, 11
"""Copies of all weights in memory: with both sides' gradients; and with sums, optimizer states and own weights too."""
_COPIES_WITH_PROGRAM = 14
"""Copies with the user's own program, its optimizer's state and its gradients beside those of a step."""
_FLOPS_OF_A_STEP = 1e4
"""FLOP per weight that take as long as the steps of both sides."""
_RUNS = 6.0
"""Cost of forward and backward of both sides, in forwards."""
_RELATIVE = 1e-3
_BESIDE_THE_LARGEST = 1e-6
_ROUNDINGS = 8.0
"""Tolerated rounding errors of weights of fewer than 32 bits."""
_SHOWN = 5
_LACKING = re.compile(r"cuda|nvidia|triton|backend|not enough memory|out of memory", re.IGNORECASE)


@dataclass(frozen=True)
class Limits:
    """The limits of a comparison; ``flops``: of all runs together, see ``QUICK_FLOPS`` and ``PATIENT_FLOPS``.

    ``shorten``: whether a model that is too large may be compared with fewer of its equal blocks.
    """

    available_bytes: int
    flops: float
    device: torch.device
    shorten: bool = True
    steps: bool = True


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison: ``whole``, ``shortened`` (two of each kind of equal blocks) or ``none``.

    ``num_seeds``: comparisons, each with other samples. ``num_steps``: steps before weights were compared. ``largest``:
    the largest relative difference, see ``_check``. ``reason``: why not whole. ``program``: what was compared with the
    user's program, or why nothing was; None: there is none.
    """

    how: str
    num_seeds: int
    num_samples: int
    num_steps: int
    largest: float = 0.0
    reason: str | None = None
    no_steps: str | None = None
    program: str | None = None
    with_program: bool = False


def comparison_note(comparison: Comparison) -> str:
    """Return one sentence on what was compared."""
    return _plain_note(comparison) if comparison.program is None else f"{comparison.program}; {_plain_note(comparison)}"


def _plain_note(comparison: Comparison) -> str:
    if comparison.how == "none":
        return f"loss, gradients and weights were not compared with the plain model: {comparison.reason}"
    what = "the plain model's" if comparison.how == "whole" else "the plain model's, both with fewer equal blocks"
    apart = "are equal to" if comparison.largest == 0 else f"are within {comparison.largest:.0e} of"
    compared = f"loss, every gradient and the weights after {comparison.num_steps} steps"
    text = f"{compared if comparison.num_steps else 'loss and every gradient'} {apart} {what}"
    text += f" ({comparison.num_seeds} x {comparison.num_samples} samples)" + (
        f": {comparison.reason}" if comparison.reason else ""
    )
    return text if comparison.num_steps else f"{text}; weights after steps were not compared: {comparison.no_steps}"


@dataclass(frozen=True)
class _Size:
    """``no_steps``: why weights are not compared."""

    num_seeds: int
    num_samples: int
    no_steps: str | None = None

    @property
    def num_steps(self) -> int:
        return 0 if self.no_steps else NUM_STEPS


@dataclass(frozen=True)
class _Step:
    """Loss and gradients of one side; a parameter without a gradient is left out."""

    loss: Tensor
    gradients: Mapping[str, Tensor]


class _DoesNotRun(Exception):
    """The plain model fails, or this machine cannot run it."""


def compare_with_plain(job: Job, exported: ExportedJob, num_sections: int | None, limits: Limits) -> Comparison:
    """Compare once, and return the result; see the module's text."""
    comparison = _compare_whole_or_shortened(job, exported, num_sections, limits)
    if job.own_program is None:
        return comparison
    most_samples = _most_samples(job, exported, limits)
    if most_samples:
        check_padding(job)
    was_compared, program = compare_with_program(job.own_program, most_samples)
    return replace(comparison, program=program, with_program=was_compared)


def _most_samples(job: Job, exported: ExportedJob, limits: Limits) -> int:
    """Return how many samples a step of the user's own program may have."""
    if not limits.steps:
        return 0
    specs = exported.initial_parameters.specs.values()
    parameters = sum(math.prod(shape) * dtype.itemsize for shape, dtype in specs)
    memory = _SHARE_OF_MEMORY * limits.available_bytes - _COPIES_WITH_PROGRAM * parameters
    if memory < 0 or not isinstance(exported, GraphJob):
        return NUM_SAMPLES * NUM_SEEDS if memory >= 0 else 0
    analysis = analyse(exported)
    activations = sum(analysis.bytes_of(node) for node in analysis.sequence) / REFERENCE_SAMPLES
    flops = _RUNS * PROGRAM_STEPS * analysis.total_cost / REFERENCE_SAMPLES
    return int(min(job.batch_size, memory / max(activations, 1), limits.flops / max(flops, 1)))


def _compare_whole_or_shortened(
    job: Job, exported: ExportedJob, num_sections: int | None, limits: Limits
) -> Comparison:
    size = _size(exported, limits, job.batch_size)
    if isinstance(size, _Size):
        try:
            largest = _compare(job, exported, num_sections, size, limits.device)
        except _DoesNotRun as error:
            return _nothing(str(error))
        return _found("whole", size, largest)
    if not limits.shorten:
        return _nothing(size)
    return _compare_shortened(job, size, limits)


def _compare_shortened(job: Job, reason: str, limits: Limits) -> Comparison:
    try:
        twin = replace(job, model=partial(shortened, job.model), cut_points=(), num_sections=None)
        exported = export_job(twin)
        size = _size(exported, limits, job.batch_size)
    except MorphError as error:
        return _nothing(f"{reason}, and it cannot be shortened: {first_line(error)}")
    if not isinstance(size, _Size):
        return _nothing(f"with fewer blocks, {size}")
    try:
        largest = _compare(twin, exported, None, size, limits.device)
    except (_DoesNotRun, JobError) as error:
        return _nothing(f"{reason}, and with fewer blocks it does not run: {error}")
    return _found("shortened", size, largest, reason)


def _nothing(reason: str) -> Comparison:
    return Comparison("none", 0, 0, 0, reason=reason)


def _found(how: str, size: _Size, largest: float, reason: str | None = None) -> Comparison:
    return Comparison(how, size.num_seeds, size.num_samples, size.num_steps, largest, reason, size.no_steps)


def _size(exported: ExportedJob, limits: Limits, batch_size: int) -> _Size | str:
    """Return how much to compare, or why nothing can be compared."""
    largest = min(NUM_SAMPLES, batch_size)
    specs = exported.initial_parameters.specs.values()
    parameters = sum(math.prod(shape) * dtype.itemsize for shape, dtype in specs)
    no_steps = _no_steps(parameters, sum(math.prod(shape) for shape, _ in specs), limits)
    if not isinstance(exported, GraphJob):  # its cut runs the whole model anyway, and its size is not known
        return _Size(NUM_SEEDS, largest, no_steps)
    analysis = analyse(exported)
    constants = sum(math.prod(shape) * dtype.itemsize for shape, dtype in exported.initial_constants.specs.values())
    flops = _RUNS * analysis.total_cost / REFERENCE_SAMPLES
    activations = sum(analysis.bytes_of(node) for node in analysis.sequence) / REFERENCE_SAMPLES
    reason = ""
    for num_seeds, num_samples in ((NUM_SEEDS, largest), (NUM_SEEDS - 1, largest), (1, 1)):
        size = _Size(num_seeds, num_samples, no_steps)
        needed = _COPIES * parameters + 2 * constants + 2 * size.num_samples * activations
        if needed > _SHARE_OF_MEMORY * limits.available_bytes:
            reason = f"it may take {needed / 2**30:.1f} GiB, and {limits.available_bytes / 2**30:.1f} GiB are free"
        elif size.num_seeds * size.num_samples * flops > limits.flops:
            reason = f"one sample takes {flops / 1e12:.1f} TFLOP"
        else:
            return size
    return reason


def _no_steps(num_bytes: int, num_weights: int, limits: Limits) -> str | None:
    """Return why the weights after a step are not compared; None if they are."""
    if not limits.steps:
        return "one optimizer for all of them differs from one for each parameter unit"
    needed = _COPIES_OF_A_STEP * num_bytes
    if needed > _SHARE_OF_MEMORY * limits.available_bytes:
        return f"they may take {needed / 2**30:.1f} GiB, and {limits.available_bytes / 2**30:.1f} GiB are free"
    if num_weights * _FLOPS_OF_A_STEP > limits.flops:
        return f"there are {num_weights / 1e6:.0f} million of them"
    return None


def _compare(job: Job, exported: ExportedJob, num_sections: int | None, size: _Size, device: torch.device) -> float:
    """Return the largest difference of a gradient or a step. Raises _DoesNotRun if there is nothing to compare with."""
    exported = replace(exported, boundary="same")  # its rounding is intended, and would hide differences
    keys = sorted(example_batch(job))
    loader = MicroBatchLoader.of(job, size.num_samples)
    fewer = {loader.size(seed, 0)[1] for seed in range(size.num_seeds)} - {size.num_samples}
    model = cut(exported, num_sections=num_sections, micro_batch_size=size.num_samples, fewer=sorted(fewer))
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call] # only generators of devices in use are kept
    with kept_generators(), warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
        warnings.simplefilter("ignore")
        plain = _plain_model(job, exported, device)
        trial = StepTrial.of(job, model, plain, device, size.num_seeds) if size.num_steps else None
        both = _Sides(job, plain, trial, exported.model_line)
        for seed in range(size.num_seeds):
            batch = {key: entry.to(device) for key, entry in loader.load(seed, 0, keys).items()}
            both.compare(seed, batch, model.at(*loader.size(seed, 0)))
        return both.largest()


class _Sides:
    """The plain model and the sections, with the same weights, run on one micro-batch after the other."""

    def __init__(self, job: Job, plain: nn.Module, trial: StepTrial | None, source: str) -> None:
        self._job, self._plain, self._trial, self._source = job, plain, trial, source
        self._buffers = {name: buffer.clone() for name, buffer in plain.named_buffers()}
        self._sums = Sums(trial) if trial is not None else None
        self._total: dict[str, Tensor] = {}
        self._batches: dict[int, tuple[Mapping[str, Tensor], CutModel]] = {}
        self._largest = 0.0

    def compare(self, seed: int, batch: Mapping[str, Tensor], model: CutModel) -> None:
        """Compare loss and gradients of a micro-batch, unless its loss is not finite; ``model``: cut for its length."""
        torch.manual_seed(seed)
        expected = _run_plain(self._job, self._plain, batch)
        for name, buffer in self._plain.named_buffers():
            buffer.data.copy_(self._buffers[name])
        if not expected.loss.isfinite():
            return
        self._batches[seed] = batch, model
        step = self._run_sections(seed)
        which = f"{len(next(iter(batch.values())))} samples, seed {seed}"
        self._largest = max(self._largest, _check(expected, step, self._source, which))
        for name, gradient in expected.gradients.items():
            wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
            self._total[name] = self._total[name] + wide if name in self._total else wide

    def largest(self) -> float:
        """Also compare a run's sums and steps; return the largest difference. _DoesNotRun: no finite loss."""
        if not self._batches:
            raise _DoesNotRun("its loss is not a finite number")
        if self._trial is None or self._sums is None:
            return self._largest
        while not self._sums.reduce(len(self._batches)):
            self._sums = Sums(self._trial)
            for seed in self._batches:
                self._run_sections(seed)
        self._sums = None
        loss = torch.zeros(())
        weights = dict(self._plain.named_parameters())
        expected = {name: (total / len(self._batches)).to(weights[name].dtype) for name, total in self._total.items()}
        which = f"the mean of {len(self._batches)} micro-batches, accumulation {self._job.accumulation!r}"
        _check(_Step(loss, expected), _Step(loss, self._trial.means()), self._source, which)
        return max(self._largest, self._trial.largest_difference(expected, self._source))

    def _run_sections(self, seed: int) -> _Step:
        torch.manual_seed(seed)
        given = {**dict(self._plain.named_buffers()), **dict(self._plain.named_parameters())}
        add = self._sums.add if self._sums is not None else lambda _name, _gradient: None
        try:
            batch, model = self._batches[seed]
            return _run_sections(model, given, batch, add)
        except MorphError:
            raise
        except Exception as error:
            _raise_if_lacking(error)
            raise ExportError(
                f"the traced model fails on real samples: {type(error).__name__}: {first_line(error)}",
                source=self._source,
                field="model",
                allowed="operations that torch.export records" + OR_MARK,
            ) from error


def _plain_model(job: Job, exported: ExportedJob, device: torch.device) -> nn.Module:
    """Return the plain model with slightly moved initial weights, because initial zeros would hide gradients."""
    model = plain_model(job, device)
    with torch.no_grad():
        if isinstance(exported, MarkedJob):  # its cut model has its own constants, which a run reads
            held = exported.whole.model.state_dict(keep_vars=True)
            for name, value in model.state_dict(keep_vars=True).items():
                if not value.requires_grad:
                    value.copy_(held[name])
    move_weights(model, job.seed)
    return model


def _run_plain(job: Job, model: nn.Module, batch: Mapping[str, Tensor]) -> _Step:
    try:
        result = job.loss(model, form_of(job).build(batch))
        loss, _ = values_of(result)
        loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
    except Exception as error:
        _raise_if_lacking(error)
        line = user_line(error, job, model)
        raise JobError(
            f"loss failed on real samples: {type(error).__name__}: {first_line(error)}", source=line
        ) from error
    gradients = {name: p.grad.to_dense() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return _Step(loss.detach(), gradients)


def _raise_if_lacking(error: Exception) -> None:
    if isinstance(error, NotImplementedError | MemoryError) or _LACKING.search(str(error)) is not None:
        raise _DoesNotRun(f"this machine cannot run it: {first_line(error)}") from error


def _run_sections(
    model: CutModel, given: Mapping[str, Tensor], batch: Mapping[str, Tensor], more: AddGradient
) -> _Step:
    """Run the sections. ``more`` gets the values that a run sums: contributions of sections, and changes of buffers."""
    gradients: dict[str, Tensor] = {}

    def add(name: str, gradient: Tensor) -> None:
        more(name, gradient)
        if name in model.parameter_specs:
            gradients[name] = gradients[name] + gradient if name in gradients else gradient

    values = run_step(model.sections, batch, given, add)
    return _Step(values[0].detach(), {name: gradient.to_dense() for name, gradient in gradients.items()})


def _check(expected: _Step, cut: _Step, source: str, which: str) -> float:
    """Return the largest relative difference: a gradient may differ by a thousandth of its own norm.

    A millionth of the largest of any weight is added, because a gradient near zero consists of rounding.
    """
    largest_rms = max((rms(gradient) for gradient in expected.gradients.values()), default=0.0)
    differences = {}
    for name in expected.gradients.keys() | cut.gradients.keys():
        plain, ours = expected.gradients.get(name), cut.gradients.get(name)
        difference = rms(ours if plain is None else plain if ours is None else plain - ours)  # type: ignore[arg-type]
        of = (rms(plain) if plain is not None else 0.0) + _BESIDE_THE_LARGEST / _RELATIVE * largest_rms
        differences[name] = difference / of if difference else 0.0
    worst = sorted(differences, key=lambda name: -differences[name])
    apart = abs(float(cut.loss - expected.loss)) / max(abs(float(expected.loss)), _RELATIVE)
    types = {gradient.dtype for side in (expected, cut) for gradient in side.gradients.values()}
    allowed = max((_RELATIVE, *(_ROUNDINGS * torch.finfo(dtype).eps for dtype in types)))
    wrong = [name for name in worst if not differences[name] <= allowed]
    if apart <= allowed and not wrong:
        return differences[worst[0]] if worst else 0.0
    shown = listed([f"{name} by {differences[name]:.2%}" for name in wrong], _SHOWN)
    raise ExportError(
        f"sections would not train the model as it is written ({which}): the loss differs by {apart:.2%}, "
        f"{len(wrong)} of {len(worst)} gradients" + (f": {shown}" if wrong else ""),
        source=source,
        field="model",
        allowed="operations that torch.export records: no state kept in Python, no hooks; a backward of its own in "
        "a torch.autograd.Function" + OR_MARK,
    )
