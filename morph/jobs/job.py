"""Defines :class:`Job`, which the user writes, and loads one from ``path/to/file.py:name``.

Importing this module loads no torch; the job file itself does.
"""

from __future__ import annotations

import ast
import inspect
import json
import math
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from morph.contract.errors import JobError, wrong_job
from morph.contract.job_facts import EpochEnd
from morph.contract.kinds import mistaken
from morph.jobs.files import JOB_PREFIX, held, split_job

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.nn import Parameter
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from morph.losses import Loss, PerSample, Sum

    LossResult = Tensor | Loss | tuple[Tensor | Loss, Mapping[str, Tensor | Loss | Sum | PerSample]]

Accumulation = Literal["exact", "fast"]
Precision = Literal["fp32", "bf16", "fp16"]
OptimizerDevice = Literal["same", "cpu"]
Boundary = Literal["same", "bf16"]
MOST_DATA_WORKERS = 64
_MOST_TRIED, _MOST_SHOWN = 100_000, 40
_CALLED = {
    "model": (0, "lambda: MyModel(), which builds a new one"),
    "loss": (2, "loss(model, batch), which calls the model"),
    "dataset": (0, "lambda: MyDataset(), which builds it"),
    "optimizer": (1, "lambda parameters: torch.optim.SGD([p for _, p in parameters], lr=0.1)"),
    "lr_scheduler": (1, "lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10), or None"),
    "eval_data": (0, "lambda: MyDataset(), which builds it, or None"),
    "sample": (2, "lambda model, step: generate(model, 'Once upon a time'), or None"),
    "eval_metrics": (1, "lambda values: {'perplexity': math.exp(values['loss'])}, or None"),
    "collate_fn": (1, "collate_fn of torch's DataLoader, which makes a batch of a list of samples, or None"),
    "sampler": (3, "lambda dataset, seed, epoch: numpy.arange(len(dataset)), or None"),
    "lengths": (1, "lambda dataset: [len(text) for text in dataset.texts], or None"),
}
_OPTIONAL = frozenset({"lr_scheduler", "eval_data", "eval_metrics", "sample", "collate_fn", "sampler", "lengths"})
"""Fields that are functions: the number of arguments they are called with, and an example."""
MOST_BUCKETS = 32
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class OwnSteps:
    """Steps that the user's own program made, and a job that makes the same ones.

    ``job`` trains the same samples from the same weights with the same settings; dropout is off in both. ``losses``:
    one for each step. ``weights``: the trained parameters after the steps, by their names in the job's model.
    """

    job: Job
    losses: tuple[float, ...]
    weights: Mapping[str, Tensor]


@dataclass(frozen=True)
class OwnProgram:
    """The program that a job was made of, for a comparison before the job starts: see ``morph.preflight.own_program``.

    ``call``: the call that the job replaces, such as ``trainer.train()``. ``run``: ``run(num_steps, most_samples)``
    makes some of the program's steps, each of at most so many samples, on a copy, and leaves the program itself, files
    and random generators as they were. It returns the reason, as text, if the steps cannot be compared.
    """

    call: str
    run: Callable[[int, int], OwnSteps | str]


class MapDataset(Protocol):
    """A map-style data set: every item is a nest of tensors of equal names, shapes and dtypes."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitem__(self, index: int) -> Any:
        """Return one sample, without a batch dimension."""
        ...


@dataclass(frozen=True, kw_only=True)
class LossScaling:
    """Dynamic loss scaling, as in ``torch.amp.GradScaler`` with factors 2 and 1/2. A bad field raises a JobError.

    Args:
        initial: The first scale, a power of two.
        growth_steps: The number of good steps in a row after which the scale is doubled.
    """

    initial: float = 65536.0
    growth_steps: int = 2000

    def __post_init__(self) -> None:
        number = isinstance(self.initial, int | float) and not isinstance(self.initial, bool)
        power = number and 1 <= self.initial <= 2.0**64 and math.frexp(self.initial)[0] == 0.5
        _require(power, "loss_scaling.initial", self.initial, "a power of two from 1 to 2**64")
        _require_count("loss_scaling.growth_steps", self.growth_steps)


@dataclass(frozen=True, kw_only=True)
class Best:
    """Defines which evaluated version of a job is the best, and when training ends early. A bad field raises a
    JobError.

    The checkpoint of the best version is kept, and ``morph export --best`` writes it.

    Args:
        metric: ``loss``, or the name of a metric of the evaluation.
        mode: Whether the smallest (``min``) or the largest (``max``) value is the best.
        patience: Training ends after this many evaluations in a row that were not better; None: never.
        min_delta: The least improvement of the metric that counts as better.
    """

    metric: str = "loss"
    mode: Literal["min", "max"] = "min"
    patience: int | None = None
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        _require(isinstance(self.metric, str) and bool(self.metric), "best.metric", self.metric, "a metric's name")
        _require(self.mode in ("min", "max"), "best.mode", self.mode, "'min' or 'max'")
        if self.patience is not None:
            _require_count("best.patience", self.patience)
        delta = self.min_delta
        number = isinstance(delta, int | float) and not isinstance(delta, bool)
        _require(number and 0 <= delta < math.inf, "best.min_delta", delta, "a number, 0 or more")


@dataclass(frozen=True, kw_only=True)
class ShortStep:
    """The short last step of an epoch as loops with gradient accumulation divide it; for ``Job.epoch_end``.

    Each micro-batch is one of the loop's batches, and all count alike, also the last one, which has fewer samples. With
    ``"short"``, each sample counts alike instead.

    Args:
        of_whole: Whether gradients are divided by the number of micro-batches of a whole step, as Lightning does, and
            not by that of the step itself.
    """

    of_whole: bool = False


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training job, written as for a single GPU.

    Args:
        model: Builds the model with fresh random weights.
        loss: ``loss(model, batch)`` calls the model and returns the scalar mean loss over the samples of ``batch`` (the
            first dimension of every entry is the samples), or a :class:`morph.Loss` of a total and its weight, for
            example for a mean over tokens; or ``(loss, {"name": scalar, ...})`` with metrics that are also means over
            the samples.
        dataset: Builds the data set. Order and contents must be the same in every process; the global generators of
            torch, numpy and Python are seeded for each item. Items are nests (dicts, tuples, dataclasses) of tensors,
            arrays and numbers, or what ``collate_fn`` takes.
        optimizer: Builds the optimizer for some named parameters; it is called once per parameter unit.
        batch_size: Global batch M: samples per optimizer step, in every shape of the job.
        name: Short name, used in files and logs.
        micro_batch_size: m, a divisor of M. None: the planner picks it from the profile.
        num_sections: K. None: chosen from the model's narrow places.
        cut_points: Names of modules (``model.named_modules()``). The model is cut before these modules and nowhere
            else.
        seed: Seeds the weights, the sample order and all randomness of training. Weights that ``model`` draws after it
            has seeded a generator itself (``torch.manual_seed``) are those of plain PyTorch with that seed.
        accumulation: ``exact`` sums gradients in 64-bit fixed point, so that the result is bit-identical in every
            shape; ``fast`` sums in floating point.
        lr_scheduler: Builds the learning-rate schedule of one optimizer; stepped once per applied step.
        clip_grad_norm: Largest 2-norm of the whole model's gradient; ``math.inf`` reports the norm and clips nothing.
        precision: The type in which autocast runs suitable operations; parameters and optimizer keep their own types.
        boundary: The type in which wider floating-point tensors and gradients cross cut-points; ``same``: their own
            type.
        master_weights: Whether the optimizer works on fp32 copies of parameters in fewer bits (bf16, fp16).
        loss_scaling: Dynamic loss scaling. None: no scaling, except ``fp16``, which then uses its defaults.
        compile: Whether sections are compiled by torch.compile.
        optimizer_device: ``cpu`` keeps the optimizer's state and its step in host memory.
        collate_fn: Makes the batch of a micro-batch's samples, as in torch's DataLoader: a nest of tensors that have
            the samples as their first dimension. None: tensors are stacked. The global generators are seeded for it as
            for items.
        sampler: ``sampler(dataset, seed, epoch)`` returns the numbers of an epoch's samples, in order; see
            ``morph.data.order``. None: each sample once, shuffled.
        epoch_end: What happens to an epoch's last samples if they do not fill a step: ``fill``: the next epoch's first
            samples fill it; ``short``: the step has only these, and is divided by their own number or weight; ``drop``:
            they are left out.
        lengths: ``lengths(dataset)`` returns the length of each sample, if lengths vary. Given with ``buckets``.
        buckets: Lengths to which micro-batches are padded, ascending: each to the smallest that holds its samples;
            samples of similar length share micro-batches.
        padding: Values with which entries are padded, by name; default 0, and -100 for entries named ``labels``.
        data_workers: Processes beside each worker that read its next micro-batches while it computes: ``num_workers``
            of torch's DataLoader; each builds the data set for itself. 0: the worker reads them between its tasks.
        eval_data: Builds the data set to evaluate on.
        eval_every_steps: Evaluate each time this many steps have been applied.
        eval_every_epochs: Evaluate each time this many epochs of ``dataset`` are over, at the end of the step that has
            the last of their samples; in addition to ``eval_every_steps`` if both are given.
        eval_samples: How many of the first samples to use; None: all.
        eval_metrics: Computes metrics that are not means, once per evaluation: it is called with ``loss``, the
            metrics (means), every :class:`morph.Sum` (a number) and every :class:`morph.PerSample` (a numpy array with
            one row per sample, in order) by name, and returns numbers by name.
        step_entry: Name of an entry of the batch, a whole number in each sample, that is replaced by the number of the
            step; the loss may need it for annealing. In an evaluation it is the number of applied steps.
        best: Defines which evaluated version is kept as the best, and when training ends early.
        sample: ``sample(model, step)`` is called beside the run with the model of a checkpoint in evaluation mode
            (``samples`` in the YAML file, or ``morph sample``); the text, numbers, lists or dicts it returns are kept.
        allowed_dependencies: Ids of findings of ``morph trace-deps`` that are accepted: each parameter unit is then
            stepped by itself.
        own_program: Set by ``morph.hf.job`` and ``morph.lightning.job`` only: the program whose steps are compared with
            Morph's before the job starts.

    Raises:
        JobError: a field has a value that is not allowed; the message says what is allowed.
    """

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], LossResult]
    dataset: Callable[[], MapDataset]
    optimizer: Callable[[Iterable[tuple[str, Parameter]]], Optimizer]
    batch_size: int
    name: str
    micro_batch_size: int | None = None
    num_sections: int | None = None
    cut_points: tuple[str, ...] = ()
    seed: int = 0
    accumulation: Accumulation = "exact"
    lr_scheduler: Callable[[Optimizer], LRScheduler] | None = None
    clip_grad_norm: float | None = None
    precision: Precision = "fp32"
    boundary: Boundary = "same"
    master_weights: bool = False
    loss_scaling: LossScaling | None = None
    compile: bool = False
    optimizer_device: OptimizerDevice = "same"
    collate_fn: Callable[[list[Any]], Any] | None = None
    sampler: Callable[[Any, int, int], Any] | None = None
    epoch_end: EpochEnd | ShortStep = "fill"
    lengths: Callable[[Any], Any] | None = None
    buckets: tuple[int, ...] = ()
    padding: Mapping[str, float] = field(default_factory=dict)
    data_workers: int = 0
    eval_data: Callable[[], MapDataset] | None = None
    eval_every_steps: int | None = None
    eval_samples: int | None = None
    eval_every_epochs: int | None = None
    eval_metrics: Callable[[dict[str, Any]], Mapping[str, float]] | None = None
    best: Best | None = None
    step_entry: str | None = None
    sample: Callable[[nn.Module, int], Any] | None = None
    allowed_dependencies: tuple[str, ...] = ()
    own_program: OwnProgram | None = None

    @property
    def effective_loss_scaling(self) -> LossScaling | None:
        """The given scaling, or the default of ``fp16``."""
        return LossScaling() if self.loss_scaling is None and self.precision == "fp16" else self.loss_scaling

    @property
    def short_step(self) -> ShortStep | None:
        """How a short step counts micro-batches alike; None: it counts samples alike, or there are no short steps."""
        return self.epoch_end if isinstance(self.epoch_end, ShortStep) else None

    def __post_init__(self) -> None:
        for name, called in _CALLED.items():
            if getattr(self, name) is not None or name not in _OPTIONAL:
                _require_function(name, getattr(self, name), *called)
        _require(
            isinstance(self.name, str) and _NAME.fullmatch(self.name) is not None,
            "name",
            self.name,
            "letters, digits, '.', '_' and '-', beginning with a letter or digit",
        )
        _require_count("batch_size", self.batch_size)
        if self.num_sections is not None:
            _require_count("num_sections", self.num_sections)
        names = isinstance(self.cut_points, tuple | list) and all(isinstance(name, str) for name in self.cut_points)
        _require(names, "cut_points", self.cut_points, "a list of module names, such as 'transformer.h.1'")
        object.__setattr__(self, "cut_points", tuple(self.cut_points))
        _require(_is_int(self.seed) and 0 <= self.seed < 2**63, "seed", self.seed, "an integer from 0 to 2**63 - 1")
        _require(self.accumulation in get_args(Accumulation), "accumulation", self.accumulation, "'exact' or 'fast'")
        if self.micro_batch_size is not None:
            _require_count("micro_batch_size", self.micro_batch_size)
            _require(
                self.batch_size % self.micro_batch_size == 0,
                "micro_batch_size",
                self.micro_batch_size,
                f"a divisor of batch_size {self.batch_size}: {_divisors(self.batch_size)}",
            )
        self._check_training()
        self._check_evaluation()
        self._check_lengths()
        allowed = self.allowed_dependencies
        texts = isinstance(allowed, tuple) and all(isinstance(entry, str) for entry in allowed)
        _require(texts, "allowed_dependencies", allowed, "a tuple of ids that `morph trace-deps` prints")

    def _check_training(self) -> None:
        norm, scaling = self.clip_grad_norm, self.loss_scaling
        if norm is not None:
            is_number = isinstance(norm, int | float) and not isinstance(norm, bool)
            _require(is_number and norm > 0, "clip_grad_norm", norm, "a number above 0, or None")
        _require(self.precision in get_args(Precision), "precision", self.precision, "'fp32', 'bf16' or 'fp16'")
        _require(self.boundary in get_args(Boundary), "boundary", self.boundary, "'same' or 'bf16'")
        for name in ("master_weights", "compile"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        allowed = "a morph.LossScaling, or None"
        _require(scaling is None or isinstance(scaling, LossScaling), "loss_scaling", scaling, allowed)
        where = self.optimizer_device
        _require(where in get_args(OptimizerDevice), "optimizer_device", where, "'same' or 'cpu'")
        entry = self.step_entry
        named = entry is None or (isinstance(entry, str) and entry != "")
        _require(named, "step_entry", entry, "a name, or None")
        end = self.epoch_end
        known = isinstance(end, ShortStep) or end in get_args(EpochEnd)
        _require(known, "epoch_end", end, "'fill', 'short' or 'drop'")
        few = _is_int(self.data_workers) and 0 <= self.data_workers <= MOST_DATA_WORKERS
        _require(few, "data_workers", self.data_workers, f"a whole number from 0 to {MOST_DATA_WORKERS}")

    def _check_evaluation(self) -> None:
        data, samples = self.eval_data, self.eval_samples
        times = {name: getattr(self, name) for name in ("eval_every_steps", "eval_every_epochs")}
        for name, every in times.items():
            if every is not None:
                _require_count(name, every)
        given = next((name for name, every in times.items() if every is not None), "eval_every_steps")
        together = "to be given together with eval_data"
        _require((data is None) == (set(times.values()) == {None}), given, times[given], together)
        if samples is not None:
            _require(data is not None, "eval_samples", samples, together)
            _require_count("eval_samples", samples)
        _require(self.best is None or isinstance(self.best, Best), "best", self.best, "a morph.Best, or None")
        for name in ("best", "eval_metrics"):
            _require(data is not None or getattr(self, name) is None, name, getattr(self, name), together)

    def _check_lengths(self) -> None:
        buckets, padding = self.buckets, self.padding
        right = isinstance(buckets, tuple | list) and all(_is_int(bucket) and bucket > 0 for bucket in buckets)
        right = right and list(buckets) == sorted(set(buckets)) and len(buckets) <= MOST_BUCKETS
        _require(right, "buckets", buckets, f"up to {MOST_BUCKETS} whole numbers from 1, ascending")
        object.__setattr__(self, "buckets", tuple(buckets))
        _require(bool(buckets) == (self.lengths is not None), "buckets", buckets, "to be given together with lengths")
        numbers = isinstance(padding, Mapping) and all(
            isinstance(name, str) and isinstance(value, int | float) for name, value in padding.items()
        )
        _require(numbers, "padding", padding, "numbers by the names of entries, such as {'input_ids': 3}")
        _require(bool(buckets) or not padding, "padding", padding, "to be given together with buckets")


def load_job(spec: str) -> Job:
    """Import ``path/to/file.py:name`` and return the Job it names (or that the function it names returns).

    ``path/to/file.py:name(width=512, text="a")`` calls the function with these arguments. A function without parameters
    finds them on its command line (``--width 512 --text a`` in ``sys.argv``), as a script with a parser expects them.

    The file's folder is put on ``sys.path``, so that the file can import its neighbours. If ``JobFiles`` that include
    the file are in use, the file and its neighbours are imported from them.
    """
    path_text, name = split_job(spec)
    if not path_text:
        raise JobError(mistaken(Path(spec), "names no job"), source=spec, allowed="path/to/file.py:name")
    attribute, given, _ = name.partition("(")
    arguments = _arguments(name) if given else {}
    path = Path(path_text)
    if not path.is_file() and held(path) is None:
        raise JobError("no such file", source=path_text, allowed="path/to/file.py:name")
    module = _import_file(path)
    if not hasattr(module, attribute):
        defined = sorted(name for name, value in vars(module).items() if isinstance(value, Job))
        raise JobError(
            f"defines no {attribute!r}",
            source=path_text,
            allowed=", ".join(defined) or "the file defines no Job at all",
        )
    value = getattr(module, attribute)
    if not isinstance(value, Job) and callable(value):
        value = _call(value, arguments, path, attribute)
    elif arguments:
        raise JobError(
            "takes no arguments", source=path_text, field=attribute, value=name, allowed="a function that returns a Job"
        )
    if not isinstance(value, Job):
        raise JobError(
            "is not a Job",
            source=path_text,
            field=attribute,
            value=type(value).__name__,
            allowed="a morph.Job, or a function without arguments that returns one",
        )
    return value


def _arguments(call: str) -> dict[str, Any]:
    """Return the arguments of ``name(width=512, text="a")``."""
    try:
        parsed = ast.parse(call, mode="eval").body
        if isinstance(parsed, ast.Call) and not parsed.args and all(keyword.arg for keyword in parsed.keywords):
            return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in parsed.keywords}
    except (SyntaxError, ValueError):
        pass
    allowed = "name(width=512, text='a'): numbers, texts in quotes, True, False, None, and lists of these"
    raise JobError("cannot be read", source="job", field="arguments", value=call, allowed=allowed)


def _import_file(path: Path) -> ModuleType:
    resolved = path.resolve()
    folder = str(resolved.parent)
    if folder not in sys.path:
        sys.path.append(folder)
    module_name = JOB_PREFIX + re.sub(r"[^A-Za-z0-9_]", "_", resolved.stem)
    began = held(resolved)
    spec = began.main(module_name, resolved) if began else spec_from_file_location(module_name, resolved)
    if spec is None or spec.loader is None:
        raise JobError("is not a Python file", source=str(path), allowed="path/to/file.py:name")
    module = module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except JobError as error:
        sys.modules.pop(module_name, None)
        raise _placed(error, path) from error
    except Exception as error:
        sys.modules.pop(module_name, None)
        raise JobError(
            f"cannot be imported: {type(error).__name__}: {error}", source=f"{path}:{_line_in(error, resolved)}"
        ) from error
    return module


def _call(function: Callable[..., Any], arguments: Mapping[str, Any], path: Path, attribute: str) -> Any:
    """Call a function with its arguments; one without parameters finds them on its command line."""
    reads_line = inspect.isfunction(function) and not inspect.signature(function).parameters
    line = _CommandLine([str(path), *_options(arguments if reads_line else {})])
    before, sys.argv = sys.argv, line
    try:
        value = function() if reads_line else function(**arguments)
    except SystemExit as error:
        raise JobError(
            f"calling it ended the process with {error.code}: its parser says why above",
            source=str(path),
            field=attribute,
            value=" ".join(line[1:]) or "no arguments",
            allowed=f"{attribute}(name=value) with the options of its parser",
        ) from error
    except JobError as error:
        raise _placed(error, path) from error
    except Exception as error:
        raise JobError(
            f"calling it failed: {type(error).__name__}: {error}",
            source=f"{path}:{_line_in(error, path.resolve())}",
            field=attribute,
        ) from error
    finally:
        sys.argv = before
    if len(line) > 1 and not line.was_read:
        given = " ".join(arguments)
        raise JobError("takes no arguments", source=str(path), field=attribute, value=given, allowed=f"{attribute}()")
    return value


class _CommandLine(list[str]):
    """Stands for ``sys.argv``, and knows whether its options were read."""

    was_read = False

    def __getitem__(self, place: Any) -> Any:
        self.was_read = self.was_read or place != 0
        return super().__getitem__(place)


def _options(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Return arguments as options of a command line; ``True`` is an option without a value, ``None`` is left out."""
    for name, value in arguments.items():
        if value is None:
            continue
        yield f"--{name}"
        if isinstance(value, list | tuple):
            yield from map(str, value)
        elif value is not True:
            yield json.dumps(value) if isinstance(value, dict) else str(value)


def _placed(error: JobError, path: Path) -> JobError:
    """Return an error that names the line of the job's file, for an error that names only a field of a Job."""
    if error.source != "Job":
        return error
    source = f"{path}:{_line_in(error, path.resolve())}"
    return JobError(error.message, source=source, field=error.field, value=error.value, allowed=error.allowed)


def _line_in(error: BaseException, path: Path) -> int:
    """Return the deepest line of ``path`` in the error's traceback (a syntax error has a line of its own)."""
    if isinstance(error, SyntaxError) and error.filename == str(path) and error.lineno is not None:
        return error.lineno
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == str(path) and frame.lineno
    ]
    return lines[-1] if lines else 1


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _divisors(number: int) -> str:
    small = [m for m in range(1, min(math.isqrt(number), _MOST_TRIED) + 1) if number % m == 0]
    found = sorted({*small, *(number // m for m in small)})
    return (
        ", ".join(map(str, found)) if len(found) <= _MOST_SHOWN else f"{', '.join(map(str, found[:_MOST_SHOWN]))} ..."
    )


def _require_function(field: str, value: Any, num_given: int, hint: str) -> None:
    """Check that a field is a function that accepts its arguments, and not the value that it ought to return."""
    torch = sys.modules.get("torch")
    is_module = torch is not None and isinstance(value, torch.nn.Module)
    of_torch = str(getattr(value, "__module__", "")).startswith("torch.nn.")  # a loss function of outputs and targets
    if not callable(value) or (is_module and field == "model") or (of_torch and field == "loss"):
        raise wrong_job(
            field,
            "is not a function of the job's own" if callable(value) and field == "loss" else "is not a function",
            value if isinstance(value, int | float | str) else getattr(value, "__name__", type(value).__name__),
            f"a function, such as {hint}",
        )
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # a function in C
        return
    try:
        signature.bind(*[None] * num_given)
    except TypeError as error:
        name = getattr(value, "__name__", type(value).__name__)
        raise wrong_job(field, f"cannot be called as it is: {error}", name, f"a function, such as {hint}") from error


def _require(holds: bool, field: str, value: object, allowed: str) -> None:
    if not holds:
        raise wrong_job(field, "is not right", value, allowed)


def _require_count(field: str, value: int) -> None:
    _require(_is_int(value) and value > 0, field, value, "a whole number from 1")
