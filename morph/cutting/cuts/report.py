"""The findings of cutting as plain numbers, for the command line and for pictures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from morph.contract.messages import MARKS
from morph.cutting.cuts.analysis import RECURRENT, REFERENCE_SAMPLES, analyse
from morph.cutting.exporting.exported_job import ExportedJob, GraphJob, MarkedJob
from morph.cutting.sections.section import CutModel
from morph.cutting.source.locate import node_line

_UNEVEN = 1.5
_MOST = 0.6


@dataclass(frozen=True)
class SectionFacts:
    """The facts about one section; sections of one ``kind``, numbered by first appearance, do the same work.

    Tied weights count as its parameters, frozen ones as constants. ``num_replicated``: operations that it repeats.
    """

    index: int
    kind: int
    begins_in: str
    source: str | None
    compute_share: float
    num_parameters: int
    batch_keys: tuple[str, ...]
    num_replicated: int
    num_constants: int


@dataclass(frozen=True)
class CutFacts:
    """One cut, in front of section ``before_section``; ``tensors``: name, shape for m samples, and dtype."""

    before_section: int
    module: str
    source: str | None
    share_before: float
    share_after: float
    bytes_per_sample: int
    tensors: tuple[tuple[str, tuple[int, ...], str], ...]


@dataclass(frozen=True)
class CutReport:
    """All findings of cutting a model.

    Attributes:
        num_parameters: Trainable elements that the loss depends on.
        tied_units: Id and parameter names of each unit that several sections use.
        not_recorded: Why every worker must build the whole model; None if that is not necessary.
        refusal: Why torch.export refused the model, so that it is cut at the user's marks or not at all.
        bound_by: Why there are not more sections or more even ones, and how to get them; None if blocks are even.
        curve: For each place of a graph where a cut is possible: compute share before it, bytes per sample across it.
    """

    fingerprint: str
    micro_batch_size: int
    num_parameters: int
    sections: tuple[SectionFacts, ...]
    cuts: tuple[CutFacts, ...]
    tied_units: tuple[tuple[str, tuple[str, ...]], ...]
    written_buffers: tuple[str, ...]
    unused_parameters: tuple[str, ...]
    metrics: tuple[str, ...]
    not_recorded: str | None
    refusal: str | None
    bound_by: str | None
    curve: tuple[tuple[float, int], ...]


def report_cuts(exported: ExportedJob, model: CutModel) -> CutReport:
    """Collect the facts about a cut model; nothing is run."""
    total = sum(section.cost for section in model.sections) or 1.0
    kinds = {signature: number for number, signature in enumerate(dict.fromkeys(s.signature for s in model.sections))}
    return CutReport(
        fingerprint=model.fingerprint,
        micro_batch_size=model.micro_batch_size,
        num_parameters=num_elements(model),
        sections=tuple(
            SectionFacts(
                index=section.index,
                kind=kinds[section.signature],
                begins_in=section.label,
                source=section.source,
                compute_share=section.cost / total,
                num_parameters=num_elements(model, section.parameters),
                batch_keys=section.batch_keys,
                num_replicated=section.num_replicated,
                num_constants=len(section.constants),
            )
            for section in model.sections
        ),
        cuts=_cut_facts(model, total),
        tied_units=tuple((unit.id, unit.names) for unit in model.units if len(unit.sections) > 1),
        written_buffers=tuple(model.buffer_specs),
        unused_parameters=model.unused_parameters,
        metrics=tuple(name for name in model.metric_names if not name.endswith(MARKS)),
        not_recorded=exported.not_recorded,
        refusal=exported.refusal if isinstance(exported, MarkedJob) else None,
        bound_by=_bound_by(exported, model),
        curve=_curve(exported),
    )


def _cut_facts(model: CutModel, total: float) -> tuple[CutFacts, ...]:
    facts: list[CutFacts] = []
    before = 0.0
    for section in model.sections[:-1]:
        before += section.cost / total
        following = model.sections[section.index + 1]
        num_bytes = sum(spec.num_bytes for spec in section.outputs)
        facts.append(
            CutFacts(
                before_section=following.index,
                module=following.label,
                source=following.source,
                share_before=before,
                share_after=1.0 - before,
                bytes_per_sample=-(-num_bytes // model.micro_batch_size),
                tensors=tuple(
                    (spec.name, spec.shape, str(spec.dtype).removeprefix("torch.")) for spec in section.outputs
                ),
            )
        )
    return tuple(facts)


def num_elements(model: CutModel, names: Iterable[str] | None = None) -> int:
    """Count the elements of some parameters, or of all."""
    specs = model.parameter_specs
    return sum(prod(specs[name][0]) for name in (specs if names is None else names))


def _bound_by(exported: ExportedJob, model: CutModel) -> str | None:
    """Return advice on an operation that is most of the largest section, or else on the reason why K is 1."""
    total = sum(section.cost for section in model.sections) or 1.0
    largest = max(section.cost for section in model.sections) / total
    if not isinstance(exported, GraphJob) or largest * len(model.sections) < _UNEVEN <= len(model.sections):
        return None
    analysis = analyse(exported)
    place = max(range(len(analysis.sequence)), key=lambda place: analysis.costs[place])
    node, share = analysis.sequence[place], analysis.costs[place] / total
    if share >= _MOST * largest:
        where = f" ({line})" if (line := node_line(node)) else ""
        advice = "make one module for each layer" if node.target in RECURRENT else "split it into several operations"
        return f"{node.target}{where} is one operation, {share:.0%} of the compute, and cannot be cut: {advice}"
    if len(model.sections) > 1 or exported.num_sections == 1:
        return None
    if not analysis.positions():
        return "a value other than a tensor is needed after every place: compute values of shapes where they are used"
    return (
        "the model repeats no block (modules of one class in a ModuleList or Sequential, called in turn) and is hardly "
        "narrower in one place than in another: choose with num_sections or cut_points"
    )


def _curve(exported: ExportedJob) -> tuple[tuple[float, int], ...]:
    if not isinstance(exported, GraphJob):
        return ()
    analysis = analyse(exported)
    total = analysis.total_cost
    return tuple(
        (place.cost_before / total, -(-place.crossing_bytes // REFERENCE_SAMPLES)) for place in analysis.positions()
    )
