"""Builds the user's model and data, and tries the loss before the export: an error here is one of the job itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from morph.contract.errors import JobError, MorphError
from morph.contract.messages import MARKS
from morph.cutting.deferred_init.construct import BuiltModel, build_model, build_really, training_mode
from morph.cutting.deferred_init.recordable import quiet_fakes, unvalidated_distributions
from morph.cutting.source.locate import calling_line, definition_line, user_line
from morph.cutting.source.reads import of_data
from morph.cutting.source.refusal import changes_requires_grad, first_line
from morph.cutting.trial_run.repeatable import Forward, require_repeatable
from morph.data.batches import Form
from morph.data.loader import check_map_style, data_of, form_of, lengths_of, num_at_hand, recipe_of
from morph.data.seeding import kept_generators, own_generators
from morph.jobs.job import Job
from morph.losses import Loss, PerSample, Sum, values_of

_EXAMPLE_SAMPLES = 3
_MAX_REAL_BYTES = 2 << 30
_MAX_SAMPLES_TRIED = 64
_NOISE = 0.1
_NOISE_OF_ZEROS = 0.01
_SETTERS = (Tensor.requires_grad_, vars(torch._C.TensorBase)["requires_grad"].__set__)
_TRAINED = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128}
_LACKS_CUDA = re.compile(r"not compiled with CUDA|not linked with support for cuda|No CUDA GPUs|no NVIDIA driver", re.I)
ResultT = TypeVar("ResultT")


def call_loss(job: Job, model: nn.Module, batch: dict[str, Tensor]) -> object:
    """Call the user's loss, from this file: see ``guards.line_in_loss``."""
    return job.loss(model, form_of(job).build(batch))


def loss_of_entries(
    loss: Callable[[nn.Module, Any], Any], form: Form, model: nn.Module, batch: Mapping[str, Tensor]
) -> Any:
    """Call a loss on the batch with these entries."""
    return loss(model, form.build(batch))


class Whole(nn.Module):
    """The whole step of a micro-batch as one module: the loss of the model, then metrics and weights by name."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, dict[str, Tensor]], Any]) -> None:
        super().__init__()
        self.model = model
        self._loss = loss
        self.metric_names: list[str] = []
        """Names of the metrics of the latest run."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor | tuple[Tensor, ...]:
        """Return the loss, or (loss, metrics in order of their names)."""
        loss, metrics = values_of(self._loss(self.model, dict(batch)))
        self.metric_names[:] = sorted(metrics)
        return (loss, *(metrics[name] for name in sorted(metrics))) if metrics else loss


def built_model(job: Job) -> BuiltModel:
    """Build the job's model in training mode, with fake tensors if possible."""
    built = run_users_code(lambda: build_model(job.model, job.seed), job, None, "model")
    model = built.model
    if not isinstance(model, nn.Module):
        raise JobError(
            "does not return a module",
            source=definition_line(job.model),
            field="model",
            value=type(model).__name__,
            allowed="torch.nn.Module",
        )
    _refuse_kinds(job, model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        line = definition_line(job.model)
        raise JobError("has no trainable parameter", source=line, field="model", allowed="at least one")
    training_mode(model)
    return built


def _refuse_kinds(job: Job, model: nn.Module) -> None:
    """Refuse modules and tensors that no section can hold."""

    def refused(what: str, value: object, allowed: str) -> JobError:
        return JobError(what, source=definition_line(job.model), field="model", value=value, allowed=allowed)

    if isinstance(model, torch.jit.ScriptModule):
        raise refused("is compiled by torch.jit", type(model).__name__, "the module itself; Job(compile=True) compiles")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise refused(
                f"{name} has no shape before the first forward",
                type(model.get_submodule(name.rpartition(".")[0])).__name__,
                "layers with their sizes, or a function that calls the model on one sample before it returns it",
            )
        if tensor.device.type != "cpu" and not (tensor.device.type == "cuda" and torch.cuda.is_available()):
            raise refused(
                f"{name} is on a device that it cannot be built on",
                str(tensor.device),
                "tensors on the CPU: each worker moves its sections to its own device",
            )
        if tensor.requires_grad and tensor.dtype not in _TRAINED:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in sorted(_TRAINED, key=str))
            raise refused(f"{name} is of a type that cannot be trained", str(tensor.dtype), known)


def try_loss(job: Job, built: BuiltModel, batch: dict[str, Tensor]) -> None:
    """Run the loss, so that all that its first call makes exists before the export, which also shows errors."""
    entries = {key: built.like(entry) for key, entry in batch.items()}

    def run() -> object:
        return call_loss(job, built.model, entries)

    with kept_generators():
        try:
            with built.running(), quiet_fakes(), _as_when_exported(built):
                with _NobodyFreezes(built.model):
                    loss = run()
                parameters = dict(built.model.named_parameters())
                again = run if built.tape is not None else _with_the_same_buffers(built.model, run)
                require_repeatable(Forward(job, built.model, parameters, entries, again, built.tape))
        except MorphError:
            raise
        except Exception as error:
            if built.tape is None:
                raise _loss_error(error, job, built.model) from error
            return
    check_loss(job, loss)


class _NobodyFreezes(TorchFunctionMode):
    """Refuses a forward that freezes or unfreezes parameters, because cutting fixes which of them are trained."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Carry out ``func``, unless it changes a parameter's ``requires_grad``."""
        kwargs = kwargs or {}
        if func in _SETTERS and id(args[0]) in self._names:
            wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
            if wanted != args[0].requires_grad:
                raise changes_requires_grad(self._names[id(args[0])], calling_line())
        return func(*args, **kwargs)


def _with_the_same_buffers(model: nn.Module, run: Callable[[], object]) -> Callable[[], object]:
    """Return ``run`` with the buffers reset before each call to their present values, so that runs are comparable."""
    kept = {name: (buffer, buffer.detach().clone()) for name, buffer in model.named_buffers()}

    def run_again() -> object:
        result = run()
        for name, (buffer, value) in kept.items():
            owner, _, last = name.rpartition(".")
            model.get_submodule(owner)._buffers[last] = buffer
            with torch.no_grad():
                buffer.copy_(value)
        return result

    return run_again


@contextmanager
def _as_when_exported(built: BuiltModel) -> Iterator[None]:
    """Let code that checks for an export take its export path on fake tensors; its other path may need values."""
    if built.tape is None:
        yield
        return
    from torch._export.utils import _compiling_state_context  # not at the top: workers do not need it

    with _compiling_state_context(), unvalidated_distributions():
        yield


def example_batch(job: Job, length: int | None = None) -> dict[str, Tensor]:
    """Stack the first samples that fit into ``length``; keys are sorted, to fix the order of graph inputs."""
    return _first_samples(job, _EXAMPLE_SAMPLES, length)


def _first_samples(job: Job, num_samples: int, length: int | None = None) -> dict[str, Tensor]:
    with of_data():
        dataset = run_users_code(lambda: data_of(job), job, None, "dataset")
        run_users_code(lambda: check_map_style(dataset, "dataset"), job, None, "dataset")
        size = num_at_hand(dataset)
        recipe = run_users_code(lambda: recipe_of(job), job, None, "dataset")
        lengths = run_users_code(lambda: lengths_of(job), job, None, "lengths") if job.lengths is not None else None
        numbers = list(range(size))
        if lengths is not None and length is not None:
            numbers = (lengths[:size] <= length).nonzero()[0].tolist() or [int(lengths[:size].argmin())]
        places = [(0, numbers[position % len(numbers)]) for position in range(num_samples)]
        samples = run_users_code(lambda: recipe.read(dataset, places), job, None, "dataset")
        field = "dataset" if job.collate_fn is None else "collate_fn"
        made = run_users_code(lambda: recipe.batch(samples, places, "dataset()", None, length), job, None, field)
        run_users_code(lambda: form_of(job), job, None, field)  # the data is read here, before anything is traced
    return dict(sorted(made.entries.items()))


def run_users_code(function: Callable[[], ResultT], job: Job, model: nn.Module | None, field: str) -> ResultT:
    """Run ``function``, which calls the user's code for the job's ``field``."""
    try:
        return function()
    except JobError as error:
        if error.source != "Job" or not str(error.field).startswith(field):
            raise
        line = definition_line(getattr(job, field))
        raise JobError(
            error.message, source=line, field=error.field, value=error.value, allowed=error.allowed
        ) from error
    except MorphError:
        raise
    except Exception as error:
        raise users_error(error, job, model, field) from error


def users_error(error: Exception, job: Job, model: nn.Module | None, field: str) -> JobError:
    """Return the error for a failure of the user's code for ``field``, with its line."""
    line = user_line(error, job, model) or definition_line(getattr(job, field))
    if _LACKS_CUDA.search(first_line(error)):
        return JobError(
            f"{field} asks for a CUDA device, and this machine has none",
            source=line,
            allowed="tensors on the CPU, without .cuda() or device='cuda': each worker moves its sections and batches "
            "to its own device",
        )
    return JobError(f"{field} failed: {type(error).__name__}: {first_line(error)}", source=line)


def _loss_error(error: Exception, job: Job, model: nn.Module) -> JobError:
    """Return the error of a loss; if another number of samples works, it says that the model fixes this number."""
    reported = users_error(error, job, model, "loss")
    for num_samples in dict.fromkeys((job.micro_batch_size or 1, job.batch_size, 1, 2, 4, 8)):
        if num_samples > _MAX_SAMPLES_TRIED:
            continue
        try:
            call_loss(job, model, _first_samples(job, num_samples))
        except Exception:
            continue
        return JobError(
            f"loss fails with {_EXAMPLE_SAMPLES} samples, but not with {num_samples}: the number of samples is written "
            f"into the model ({type(error).__name__}: {first_line(error)})",
            source=reported.source,
            allowed="any number of samples in a micro-batch; take it from tensor.shape[0] instead of writing it down",
        )
    return reported


def check_loss(job: Job, result: object) -> None:
    """Refuse a result that is neither a scalar loss nor a loss with metrics."""
    line = definition_line(job.loss)
    several = result if isinstance(result, tuple | list) else ()
    if len(several) > 1 and all(isinstance(value, Tensor) and value.dim() == 0 for value in several):
        raise JobError(
            "returns several losses",
            source=line,
            field="loss",
            value=len(several),
            allowed="one loss for one optimizer, such as their sum; values that are only reported go into a dict after "
            "it: (loss, {name: scalar}). Networks trained in turns (GAN) are not supported",
        )
    loss, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if isinstance(loss, Loss):
        _check_weight(line, "the loss", loss.weight)
        loss = loss.total
    shown = f"{tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        allowed = "a tensor of shape ()"
        raise JobError("does not return a scalar", source=line, field="loss", value=shown, allowed=allowed)
    if loss.is_complex():
        allowed = "a real number, such as its absolute value: a complex number cannot be minimised"
        raise JobError("is complex", source=line, field="loss", value=str(loss.dtype), allowed=allowed)
    if not loss.requires_grad:
        raise JobError("does not depend on the model's parameters", source=line, field="loss")
    _check_metrics(line, metrics)


def _check_metrics(line: str, metrics: object) -> None:
    allowed = "(loss, {name: tensor of shape ()})"
    if not isinstance(metrics, Mapping):
        kind = type(metrics).__name__
        raise JobError(
            "returns something other than a dict of metrics", source=line, field="loss", value=kind, allowed=allowed
        )
    for name, value in metrics.items():
        if isinstance(name, str) and name.endswith(MARKS):
            raise JobError("is a metric's name that Morph uses itself", source=line, field="loss", value=name)
        if isinstance(value, Loss):
            _check_weight(line, f"metric {name!r}", value.weight)
            value = value.total
        elif isinstance(value, Sum):
            value = value.total
        elif isinstance(value, PerSample):
            _check_samples(line, name, value.values)
            continue
        if isinstance(value, int | float | torch.SymInt | torch.SymFloat):
            allowed += ", without .item(), float() or int()"
        is_scalar = isinstance(value, Tensor) and value.dim() == 0 and not value.dtype.is_complex
        if not isinstance(name, str) or not is_scalar:
            shown = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise JobError(f"metric {name!r} is not a scalar", source=line, field="loss", value=shown, allowed=allowed)


def _check_samples(line: str, name: object, values: object) -> None:
    if not isinstance(name, str) or not isinstance(values, Tensor) or values.dim() == 0:
        shown = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        allowed = "a tensor of shape (samples, ...)"
        raise JobError(
            f"metric {name!r} has no row for each sample", source=line, field="loss", value=shown, allowed=allowed
        )


def _check_weight(line: str, what: str, weight: object) -> None:
    is_number = isinstance(weight, int | float | torch.SymInt | torch.SymFloat) and not isinstance(weight, bool)
    if not is_number and not (isinstance(weight, Tensor) and weight.dim() == 0 and not weight.dtype.is_complex):
        shown = tuple(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
        allowed = "a number, or a tensor of shape ()"
        raise JobError(f"the weight of {what} is not a scalar", source=line, field="loss", value=shown, allowed=allowed)


def blame_the_job(job: Job, built: BuiltModel, batch: dict[str, Tensor]) -> None:
    """Run model and loss on real numbers, if they fit in memory, so that their own errors are reported as such."""
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in built.model.parameters())
    if built.tape is not None and num_bytes <= _MAX_REAL_BYTES:
        run_really(job, batch)


def run_really(job: Job, batch: dict[str, Tensor]) -> None:
    """Run model and loss on real numbers."""
    with kept_generators():
        model = training_mode(build_really(job.model, job.seed))
        try:
            result = call_loss(job, model, batch)
        except Exception as error:
            raise _loss_error(error, job, model) from error
        check_loss(job, result)


def move_weights(model: nn.Module, seed: int) -> None:
    """Change weights a little from their initial values: initial zeros would hide differences and gradients."""
    with torch.no_grad(), own_generators(seed):
        for parameter in model.parameters():
            if parameter.requires_grad:
                size = rms(parameter)
                parameter.add_(torch.randn_like(parameter), alpha=_NOISE * size if size > 0 else _NOISE_OF_ZEROS)


def rms(tensor: Tensor) -> float:
    """Return the root of the mean square of a tensor's elements."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return float(real.double().square().mean().sqrt())
