"""Cuts a model that torch.export refuses, only at the user's marks, and checks its sections against the whole model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from morph.contract.errors import ExportError, JobError, MorphError, wrong_job
from morph.cutting.exporting.exported_job import MarkedJob
from morph.cutting.marked.marked_run import Call, Flops, Mark, MarkedCode, Trial, named, run_whole
from morph.cutting.sections.cut_point import CutPoint
from morph.cutting.sections.positions import Position, choose_positions
from morph.cutting.sections.section import BoundaryTensor, CutModel, Section, units_of
from morph.cutting.source.locate import user_line
from morph.cutting.source.refusal import changes_requires_grad, first_line
from morph.cutting.trial_run.repeatable import Forward, require_repeatable
from morph.cutting.trial_run.trial import users_error
from morph.data.seeding import kept_generators

_PREFIX = "model."


@dataclass(frozen=True)
class _Reference:
    """One run in one piece."""

    results: tuple[Tensor, ...]
    gradients: Mapping[str, Tensor | None]
    trial: Trial
    flops: int


def cut_marked(exported: MarkedJob, *, num_sections: int | None, micro_batch_size: int) -> CutModel:
    """Cut at all marks, or at marks that give ``num_sections`` even sections, by two runs on real numbers.

    Raises ExportError if the sections fail, or do not give the loss and gradients of the whole model.
    """
    batch = {key: entry[torch.arange(micro_batch_size) % len(entry)] for key, entry in exported.batch.items()}
    parameters = {
        name: tensor.clone().requires_grad_() for name, tensor in exported.initial_parameters.all_at_once().items()
    }
    with kept_generators():
        reference = _run_in_one_piece(exported, parameters, batch)
        marks = _chosen(reference, num_sections)
        _refuse_choices_between_modules(reference.trial, marks)
        codes = _codes(exported, marks, reference, tuple(parameters), tuple(batch))
        sections = _run_in_sections(exported, codes, marks, reference, parameters, batch)
    used = {name for section in sections for name in section.parameters}
    specs = exported.initial_parameters.specs
    return CutModel(
        sections=tuple(sections),
        units=units_of(sections, tuple(specs)),
        fingerprint=_fingerprint(exported, marks),
        micro_batch_size=micro_batch_size,
        parameter_specs={name: spec for name, spec in specs.items() if name in used},
        unused_parameters=tuple(name for name in specs if name not in used),
        metric_names=tuple(exported.whole.metric_names),
    )


def _run_in_one_piece(exported: MarkedJob, parameters: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> _Reference:
    names = {_PREFIX + name for name in exported.cut_points}
    buffers = {name: buffer.clone() for name, buffer in exported.whole.named_buffers()}
    torch.manual_seed(0)
    with Flops() as flops, _users_errors(exported):
        results, trial = run_whole(
            exported.whole,
            parameters,
            batch,
            lambda name, module: name in names or isinstance(module, CutPoint),
            lambda: flops.total,
        )
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            raise changes_requires_grad(name, exported.model_line)
    changed = [name for name, buffer in exported.whole.named_buffers() if not torch.equal(buffer, buffers[name])]
    if changed:
        raise JobError(
            f"the model changes buffers while training: {', '.join(name.removeprefix(_PREFIX) for name in changed)}",
            source=exported.model_line,
            field="model",
            allowed="no running statistics; use LayerNorm or GroupNorm, or track_running_stats=False",
        )
    _check_marks(exported, trial, names)
    _check_repeatable(exported, parameters, batch)
    gradients = _gradients(results[0], list(parameters.values()))
    return _Reference(results, dict(zip(parameters, gradients, strict=True)), trial, flops.total)


@contextmanager
def _users_errors(exported: MarkedJob, entry: Mark | None = None) -> Iterator[None]:
    """Report errors of the user's code with their line: a JobError if it failed in one piece, else an ExportError."""
    try:
        yield
    except MorphError:
        raise
    except Exception as error:
        job, model = exported.job, exported.whole.model
        if entry is None:
            raise users_error(error, job, model, "loss") from error
        name = entry.call[0].removeprefix(_PREFIX)
        raise ExportError(
            f"after the cut in front of {name}, the model fails if the code before the cut is not run: "
            f"{type(error).__name__}: {first_line(error)}",
            source=user_line(error, job, model) or entry.source,
            allowed="one tensor across each cut, and gradients by torch.autograd.grad only between two cuts; or no "
            "cut: Job(num_sections=1) trains replicas of the whole model",
        ) from error


def _check_repeatable(exported: MarkedJob, parameters: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> None:
    def run() -> object:
        return functional_call(exported.whole, named(parameters), (dict(batch),))

    require_repeatable(Forward(exported.job, exported.whole.model, parameters, batch, run))


def _gradients(output: Tensor, wanted: Sequence[Tensor], given: Tensor | None = None) -> tuple[Tensor | None, ...]:
    """Return dense gradients; None where a tensor is not used."""
    gradients = torch.autograd.grad(output, list(wanted), given, allow_unused=True)
    return tuple(each.to_dense() if each is not None and each.is_sparse else each for each in gradients)


def _check_marks(exported: MarkedJob, trial: Trial, names: set[str]) -> None:
    reached = [mark.call[0] for mark in trial.marks]
    for name in sorted(names):
        if reached.count(name) != 1:
            raise JobError(
                f"the forward calls the module {reached.count(name)} times",
                source=exported.model_line,
                field="cut_points",
                value=name.removeprefix(_PREFIX),
                allowed="modules that are called once; in a loop, call a morph.CutPoint()",
            )
    for mark in trial.marks:
        if not isinstance(mark.value, Tensor):
            raise JobError(
                "a module in front of which to cut takes no tensor as its first argument",
                source=mark.source,
                field="cut_points",
                value=mark.call[0].removeprefix(_PREFIX),
                allowed="one tensor, given by position",
            )


def _chosen(reference: _Reference, num_sections: int | None) -> list[Mark]:
    marks = reference.trial.marks
    if num_sections in {None, len(marks) + 1}:
        return marks
    places = [
        Position(index, float(mark.flops or index + 1), mark.value.numel() * mark.value.element_size())
        for index, mark in enumerate(marks)
    ]
    assert num_sections is not None
    try:
        indices = choose_positions(places, float(reference.flops or len(marks) + 1), num_sections)
    except ValueError as error:
        raise wrong_job("num_sections", str(error), num_sections, "fewer sections, or more marks") from error
    return [marks[index] for index in indices]


def _refuse_choices_between_modules(trial: Trial, marks: Sequence[Mark]) -> None:
    """Refuse random choices between modules: each section reruns that code, and would draw its own numbers."""
    last = trial.marks.index(marks[-1]) if marks else -1
    shared = frozenset[Call]().union(*(mark.enclosing for mark in marks))
    for num_behind, call, line in trial.choices:
        if num_behind <= last and call in shared:
            raise JobError(
                "a random number decides between the modules, in front of a cut: every section would draw its own",
                source=line,
                field="cut_points",
                allowed="choices inside of modules, such as a layer that drops itself: each runs in one section",
            )


def _codes(
    exported: MarkedJob, marks: Sequence[Mark], reference: _Reference, names: tuple[str, ...], keys: tuple[str, ...]
) -> list[MarkedCode]:
    borders = [None, *marks, None]
    every = ((name.removeprefix(_PREFIX), parameter) for name, parameter in exported.whole.named_parameters())
    frozen = tuple((name, parameter) for name, parameter in every if name not in names)
    return [
        MarkedCode(
            whole=exported.whole,
            keys=keys,
            names=names,
            entry=borders[index],
            end=(end := borders[index + 1]),
            returned=reference.trial.returned,
            needs_gradient=end is None or bool(end.value.requires_grad),
            frozen=frozen,
            seeded={mark.call: number for number, mark in enumerate(reference.trial.marks, 1)},
        )
        for index in range(len(marks) + 1)
    ]


def _run_in_sections(
    exported: MarkedJob,
    codes: Sequence[MarkedCode],
    marks: Sequence[Mark],
    reference: _Reference,
    parameters: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
) -> list[Section]:
    torch.manual_seed(0)
    value: tuple[Tensor, ...] = ()
    runs: list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = []
    for index, code in enumerate(codes):
        inputs = tuple(tensor.detach().requires_grad_(codes[index - 1].needs_gradient) for tensor in value)
        with _users_errors(exported, code.entry):
            value = code(*inputs, *batch.values(), *parameters.values())
        expected = marks[index].value if index < len(marks) else reference.results[0]
        if not _equal(value[0], expected):
            raise _goes_past(marks[max(index - 1, 0)] if marks else None)
        runs.append((inputs, value))
    read = _backward(runs, reference, parameters, marks)
    flops = [0, *(mark.flops for mark in marks), reference.flops]
    sections: list[Section] = []
    for index, code in enumerate(codes):
        names = _parameters_of(exported, code.called) | read[index]
        code.names = tuple(name for name in parameters if name in names)
        sections.append(_section(exported, index, code, runs[index], flops[index + 1] - flops[index]))
    for code in codes:
        code.forget_trial()
    return sections


def _backward(
    runs: Sequence[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]],
    reference: _Reference,
    parameters: Mapping[str, Tensor],
    marks: Sequence[Mark],
) -> list[set[str]]:
    """Return, for each section, the parameters with a gradient there; the sum equals the whole model's gradient."""
    total: dict[str, Tensor] = {}
    read: list[set[str]] = []
    gradient: Tensor | None = torch.ones_like(runs[-1][1][0])
    for inputs, (output, *_) in reversed(runs):
        leaves = [tensor for tensor in inputs if tensor.requires_grad]
        wanted = [*leaves, *parameters.values()]
        given = torch.ones_like(output) if gradient is None else gradient  # a later branch may not use the border
        gradients = _gradients(output, wanted, given) if output.requires_grad else (None,) * len(wanted)
        section = {n: g for n, g in zip(parameters, gradients[len(leaves) :], strict=True) if g is not None}
        for name, part in section.items() if gradient is not None else ():
            total[name] = part if name not in total else total[name] + part
        gradient = gradients[0] if leaves and gradient is not None else None
        read.append(set(section))
    for name, expected in reference.gradients.items():
        if expected is not None and (name not in total or not _equal(total[name], expected)):
            raise _goes_past(marks[0] if marks else None, f"the gradient of {name} is not that of the whole model: ")
    return read[::-1]


def _equal(computed: Tensor, expected: Tensor) -> bool:
    return computed.shape == expected.shape and torch.allclose(computed, expected, rtol=1e-4, atol=1e-6)


def _goes_past(mark: Mark | None, what: str = "") -> ExportError:
    if mark is None:
        return ExportError(f"{what}the model gives another result when it is run again", source="Job", field="model")
    module = mark.call[0].removeprefix(_PREFIX)
    return ExportError(
        f"{what}a value other than the marked tensor goes past the cut in front of {module}",
        source=mark.source,
        allowed="one tensor across each cut; after it, only values made from the batch alone",
    )


def _parameters_of(exported: MarkedJob, called: Sequence[str]) -> set[str]:
    kept = exported.aliases
    modules = dict(exported.whole.named_modules())
    names: set[str] = set()
    for name in called:
        for inner, parameter in modules[name].named_parameters(remove_duplicate=False):
            if parameter.requires_grad:
                full = f"{name}.{inner}".removeprefix(_PREFIX)
                names.add(kept.get(full, full))
    return names


def _section(
    exported: MarkedJob,
    index: int,
    code: MarkedCode,
    run: tuple[tuple[Tensor, ...], tuple[Tensor, ...]],
    flops: int,
) -> Section:
    inputs, outputs = run
    return Section(
        index=index,
        label="model" if code.entry is None else code.entry.call[0].removeprefix(_PREFIX),
        inputs=tuple(_border(value, f"border_{index - 1}") for value in inputs),
        outputs=tuple(_border(value, f"border_{index}") for value in outputs),
        batch_keys=code.keys,
        parameters=code.names,
        signature=_signature(exported, code, inputs, outputs),
        code=code,
        source=exported.model_line if code.entry is None else code.entry.source,
        cost=float(max(flops, 1)),
    )


def _border(value: Tensor, name: str) -> BoundaryTensor:
    return BoundaryTensor(name, tuple(value.shape), value.dtype, value.requires_grad)


def _signature(exported: MarkedJob, code: MarkedCode, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> str:
    modules: dict[str, nn.Module] = dict(exported.whole.named_modules())
    specs = exported.initial_parameters.specs
    lines = [repr(modules[name]) for name in code.called]
    lines += [str([(tuple(value.shape), value.dtype) for value in (*inputs, *outputs)])]
    lines += [str([specs[name] for name in code.names]), str((code.entry is None, code.end is None))]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _fingerprint(exported: MarkedJob, marks: Sequence[Mark]) -> str:
    lines = [repr(exported.whole.model), *(str(mark.call) for mark in marks)]
    lines += [f"{name} {shape} {dtype}" for name, (shape, dtype) in exported.initial_parameters.specs.items()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
