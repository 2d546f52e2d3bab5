"""The checks of a job before it starts: one list, the cheapest first, for every command that examines a job."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field, replace
from enum import StrEnum
from importlib import metadata
from math import prod

import torch
from torch.nn import Parameter

from morph.contract.errors import ExportError, JobError
from morph.cutting import CutModel, ExportedJob
from morph.cutting.cuts.report import num_elements
from morph.cutting.exporting.attention_masks import needless_masks
from morph.cutting.exporting.exported_job import GraphJob
from morph.cutting.source.locate import node_line
from morph.jobs.job import Job
from morph.optimizers import kind_of, parts_of
from morph.preflight.comparison_cache import compare_once
from morph.preflight.data_check import check_data, epoch_notes, reading_warnings
from morph.preflight.mean_loss import loss_warnings
from morph.preflight.packed_check import check_packed
from morph.preflight.plain_comparison import PATIENT_FLOPS, QUICK_FLOPS, Comparison, Limits, comparison_note
from morph.runtime.state.optimizer_state import build_optimizer
from morph.runtime.workloads.job_workload import check_training
from morph.tracing import DependencyReport, check_dependencies, require_no_violation

TRIED_ONCE = 200_000_000
"""Parameters of the largest model that is run on two samples when a job is examined; such a run takes seconds."""
TRIED_BEFORE_RUNS = 20_000_000
"""The same limit for the examination before a run that may have to be taken over."""


class Needs(StrEnum):
    """What a check needs, and so its cost; each kind costs more than the one before."""

    NOTHING = "only names, shapes and settings"
    DATA = "some samples"
    MODEL = "one step of the model, on shapes alone if it is large"
    TRIALS = "the weights and some samples"


@dataclass(frozen=True)
class CutJob:
    """A job to check, exported and cut. ``path``: path/to/file.py:name."""

    path: str
    job: Job
    exported: ExportedJob
    model: CutModel


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much a command spends on its checks; ``say``: called with a sentence when a check begins.

    The loss of a model with more than ``most_parameters`` is not tried. ``refuse``: a job whose step mixes sections.
    """

    memory_bytes: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    quick: bool = False
    most_parameters: int = TRIED_ONCE
    leave_out: frozenset[str] = frozenset()
    refuse: bool = True
    say: Callable[[str], object] = lambda _sentence: None


@dataclass(frozen=True)
class Report:
    """The result of checking a job that may start; None stands for a check that was not made."""

    settings: dict[str, str] = field(default_factory=dict)
    dependencies: DependencyReport | None = None
    warnings: tuple[str, ...] = ()
    compared: Comparison | None = None

    @property
    def comparison(self) -> str:
        """A sentence on the comparison with the plain model."""
        return "" if self.compared is None else comparison_note(self.compared)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on checks that were less thorough than they could be."""
        compared = self.compared
        is_whole = compared is None or (
            compared.how == "whole" and compared.num_steps > 0 and (compared.program is None or compared.with_program)
        )
        dependencies = () if self.dependencies is None else self.dependencies.notes
        return tuple(f"note: {sentence}" for sentence in (*(() if is_whole else (self.comparison,)), *dependencies))


@dataclass(frozen=True)
class Check:
    """One check of the list. ``carry_out`` adds to a report, and raises ``InputError`` if the job may not start."""

    name: str
    needs: Needs
    finds: str
    carry_out: Callable[[CutJob, Effort, Report], Report]


def check(checked: CutJob, effort: Effort) -> Report:
    """Carry out the checks that a command needs, the cheapest first, and return the report.

    Raises JobError, or ExportError if the sections do not compute the same as the plain model.
    """
    report = Report()
    for entry in CHECKS:
        if entry.name not in effort.leave_out:
            effort.say(f"checking {entry.finds}")
            report = entry.carry_out(checked, effort, report)
    return report


def _settings(checked: CutJob, _effort: Effort, report: Report) -> Report:
    report = replace(report, settings=check_training(checked.job, checked.model))
    specs = checked.model.parameter_specs.items()
    parameters = {name: Parameter(torch.empty(shape, dtype=dtype, device="meta")) for name, (shape, dtype) in specs}
    optimizer = build_optimizer(checked.job.optimizer, parameters)
    if len(list(parts_of(optimizer))) < 2:
        return report
    sentence = (
        f"note: all optimizers of morph.Optimizers ({kind_of(optimizer)}) step on the gradients of the whole loss; two "
        'players with losses of their own (GAN) need `morph elastic` (docs/guides/elastic.md, "Several optimizers")'
    )
    return replace(report, warnings=(*report.warnings, sentence))


def _data(checked: CutJob, _effort: Effort, report: Report) -> Report:
    check_data(checked.job)
    slow = (f"warning: {text}" for text in reading_warnings(checked.job))
    return replace(report, warnings=(*report.warnings, *slow, *(f"note: {text}" for text in epoch_notes(checked.job))))


def _dependencies(checked: CutJob, effort: Effort, report: Report) -> Report:
    model = checked.model
    dependencies = check_dependencies(
        checked.job,
        num_sections=len(model.sections),
        micro_batch_size=model.micro_batch_size,
        exported=checked.exported,
    )
    if effort.refuse:
        require_no_violation(dependencies, checked.path)
    return replace(report, dependencies=dependencies)


def _masks(checked: CutJob, _effort: Effort, report: Report) -> Report:
    if not isinstance(checked.exported, GraphJob):
        return report
    masks = list(needless_masks(checked.exported.graph_module))
    if not masks:
        return report
    where = node_line(masks[0])
    sentence = (
        f"warning: {where + ': ' if where else ''}a mask given to attention hides nothing, or no more than "
        f"is_causal=True does, and keeps flash kernels out ({len(masks)} calls)"
    )
    if "transformers" in sys.modules:
        version = metadata.version("transformers")
        sentence += f". Morph removes masks made by transformers 5.0 to 5.23; version {version} is installed"
    return replace(report, warnings=(*report.warnings, sentence))


def _loss(checked: CutJob, effort: Effort, report: Report) -> Report:
    frozen = sum(prod(shape) for held in checked.model.constants for shape, _ in held.specs.values())
    if num_elements(checked.model) + frozen > effort.most_parameters:
        return report
    check_packed(checked.job)
    warnings = (f"warning: {sentence}" for sentence in loss_warnings(checked.job))
    return replace(report, warnings=(*report.warnings, *warnings))


def _comparison(checked: CutJob, effort: Effort, report: Report) -> Report:
    dependencies = report.dependencies
    limits = Limits(
        effort.memory_bytes,
        QUICK_FLOPS if effort.quick else PATIENT_FLOPS,
        effort.device,
        shorten=not effort.quick,
        steps=dependencies is None or not dependencies.violations,
    )
    return replace(report, compared=compare_once(checked.job, checked.exported, checked.model, limits))


CHECKS = (
    Check("settings", Needs.NOTHING, "that optimizer, schedule and evaluation data can be used", _settings),
    Check("masks", Needs.NOTHING, "that attention has no mask where it needs none", _masks),
    Check("data", Needs.DATA, "that samples are the same when read again", _data),
    Check("dependencies", Needs.MODEL, "that a training step mixes no sections", _dependencies),
    Check("loss", Needs.TRIALS, "that the loss is a mean over samples, or a total and a weight", _loss),
    Check("comparison", Needs.TRIALS, "that the cut model trains as the plain one does", _comparison),
)


@contextmanager
def users_code(job_path: str) -> Iterator[None]:
    """Run code that imports or exports a job: it cannot end the process, and a refusal stays one line.

    Standard error, where torch prints graphs, is held back, and dropped if an ``ExportError`` ends the block.
    """
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    held = io.StringIO()
    try:
        with redirect_stderr(held):
            yield
    except ExportError:
        held = io.StringIO()
        raise
    except SystemExit as error:
        raise JobError(
            "its code ends the process", source=job_path, value=f"exit({error.code!r})", allowed="code that returns"
        ) from error
    finally:
        logging.disable(before)
        sys.stderr.write(held.getvalue())
