"""The cut model: K sections with their borders, and the parameter units that the sections share or own.

Cuts between blocks that a model repeats make equal sections, of which only one is measured.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import median

import torch
from torch.fx import Node

from morph.contract.errors import JobError, wrong_job
from morph.cutting.cuts.analysis import Analysis, analyse
from morph.cutting.cuts.build import BuiltSection, build_section, describe
from morph.cutting.exporting.exported_job import ExportedJob, GraphJob, MarkedJob
from morph.cutting.marked.marked_cut import cut_marked
from morph.cutting.sections.cut_point import CutPoint
from morph.cutting.sections.positions import MAX_DEFAULT_SECTIONS, Position, choose_positions, default_num_sections
from morph.cutting.sections.section import (
    BoundaryTensor,
    Constants,
    CutModel,
    ParameterUnit,
    Section,
    narrowed,
    units_of,
)
from morph.cutting.source.locate import SLICE, module_paths, node_line

_MARK = f"{CutPoint.__module__}.{CutPoint.__qualname__}"
_NARROW = 1.5
_LEAST_SHARE = 0.3
_SHARE_OF_A_FAMILY = 0.1
_OF_A_BLOCK = 0.5


def marked_positions(analysis: Analysis, positions: Sequence[Position]) -> list[Position]:
    """Return the marked positions among all positions, in order; none if nothing is marked."""
    nodes = [*_cut_point_calls(analysis), *(_first_node(analysis, name) for name in analysis.exported.cut_points)]
    by_index = {place.index: place for place in positions}
    marked: dict[int, Position] = {}
    for node in nodes:
        place = analysis.order[node]
        if place not in by_index:
            raise JobError(
                "the model cannot be cut here: nothing precedes it, or a value other than a tensor is needed after it",
                source=node_line(node),
                field="cut_points",
                value=next(reversed(module_paths(node)), None),
                allowed="another place",
            )
        marked[place] = by_index[place]
    return [marked[place] for place in sorted(marked)]


def _cut_point_calls(analysis: Analysis) -> list[Node]:
    return [node for node in analysis.sequence if _innermost_type(node) == _MARK]


def _innermost_type(node: Node) -> str | None:
    stack = node.meta.get("nn_module_stack") or {}
    kinds = [kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}" for _, kind in stack.values()]
    return kinds[-1] if kinds else None


def _first_node(analysis: Analysis, name: str) -> Node:
    """Return the first operation that is inside the module ``name``."""
    for node in analysis.sequence:
        if name in module_paths(node):
            return node
    called = dict.fromkeys(path for node in analysis.sequence for path in module_paths(node))
    raise wrong_job(
        "cut_points",
        "the loss runs no operation in a module of this name",
        name,
        ", ".join(list(called)[:12]) + (", ..." if len(called) > 12 else ""),
    )


__all__ = ["BoundaryTensor", "CutModel", "ParameterUnit", "Section", "cut"]


def cut(
    exported: ExportedJob, *, num_sections: int | None, micro_batch_size: int, fewer: Sequence[int] = ()
) -> CutModel:
    """Cut an exported job into sections, fixed to micro-batches of ``micro_batch_size`` samples.

    ``num_sections``: None chooses it from the graph's narrow places. ``fewer``: ``CutModel.by_samples``. Raises
    ExportError if a size in the graph depends on data, or a value crosses a mark unnoticed.
    """
    if isinstance(exported, MarkedJob):
        model = _cut_marked(exported, num_sections, micro_batch_size)
        others = {size: _cut_marked(exported, len(model.sections), size) for size in fewer}
        if any(not _are_alike(model, other) for other in others.values()):
            raise _cut_elsewhere(exported, "numbers of samples", "micro_batch_size", (micro_batch_size, *fewer))
    else:
        assert isinstance(exported, GraphJob)
        analysis = analyse(exported)
        places = _cut_places(analysis, num_sections)
        model, *rest = (_cut_graph(analysis, places, size) for size in (micro_batch_size, *fewer))
        others = dict(zip(fewer, rest, strict=True))
    model = replace(model, by_samples=others)
    return model if exported.boundary == "same" else narrowed(model, torch.bfloat16)


def _are_alike(model: CutModel, other: CutModel) -> bool:
    return model.fingerprint == other.fingerprint and model.units == other.units


def _cut_elsewhere(exported: MarkedJob, what: str, field: str, value: Sequence[int]) -> JobError:
    return JobError(
        f"the model is cut at different places for different {what}",
        source=exported.model_line,
        field=field,
        value=tuple(value),
        allowed="marks that every forward reaches, and num_sections equal to the number that they make, or 1",
    )


def _cut_marked(exported: MarkedJob, num_sections: int | None, micro_batch_size: int) -> CutModel:
    if not exported.batches:
        return cut_marked(exported, num_sections=num_sections, micro_batch_size=micro_batch_size)
    by_length = {
        bucket: cut_marked(replace(exported, batch=batch), num_sections=num_sections, micro_batch_size=micro_batch_size)
        for bucket, batch in exported.batches.items()
    }
    by_length = {bucket: replace(bucketed, length=bucket) for bucket, bucketed in by_length.items()}
    model = by_length[exported.buckets[-1]]
    if any(not _are_alike(model, bucketed) for bucketed in by_length.values()):
        raise _cut_elsewhere(exported, "lengths", "buckets", exported.buckets)
    return replace(model, by_length=by_length)


def _cut_graph(analysis: Analysis, places: Sequence[int], micro_batch_size: int) -> CutModel:
    """Cut every bucket at the places that were chosen for the longest."""
    exported, model = analysis.exported, _cut_at(analysis, places, micro_batch_size)
    if exported.length_symbol is None:
        return model
    others = {bucket: replace(analysis, exported=replace(exported, length=bucket)) for bucket in exported.buckets[:-1]}
    by_length = {bucket: _cut_at(other, places, micro_batch_size) for bucket, other in others.items()}
    return replace(model, by_length={**by_length, exported.buckets[-1]: model})


def _cut_at(analysis: Analysis, places: Sequence[int], micro_batch_size: int) -> CutModel:
    exported = analysis.exported
    bounds = [0, *places, len(analysis.sequence)]
    borders = [(), *(analysis.alive(place) for place in places), (analysis.output, *analysis.metrics)]
    sections: list[Section] = []
    names = {place: source.name for place, source in exported.sources.items() if source.kind == "constant"}
    constants = Constants(exported.initial_constants, names, exported.initial_constants.specs)
    for index in range(len(bounds) - 1):
        nodes = analysis.sequence[bounds[index] : bounds[index + 1]]
        inputs, outputs = borders[index], borders[index + 1]
        built = build_section(analysis, nodes, inputs, outputs, micro_batch_size)
        sections.append(_section(analysis, index, nodes, built, inputs, outputs, constants, micro_batch_size))
    used = {name for section in sections for name in section.parameters}
    specs = exported.initial_parameters.specs
    return CutModel(
        sections=tuple(sections),
        units=units_of(sections, tuple(specs), tuple(exported.initial_buffers)),
        fingerprint=_fingerprint(analysis, places),
        micro_batch_size=micro_batch_size,
        parameter_specs={name: spec for name, spec in specs.items() if name in used},
        unused_parameters=tuple(name for name in specs if name not in used),
        metric_names=exported.metric_names,
        buffer_specs=exported.initial_buffers.specs,
        length=exported.length,
    )


def _cut_places(analysis: Analysis, num_sections: int | None) -> tuple[int, ...]:
    positions, total = analysis.positions(), analysis.total_cost
    marked = marked_positions(analysis, positions)
    if marked and num_sections in {None, len(marked) + 1}:
        return tuple(place.index for place in marked)
    if marked:
        positions = marked
    blocks = None if marked else find_blocks(analysis, positions)
    if num_sections is not None:
        wanted = num_sections
    elif blocks is None:
        wanted = default_num_sections(positions, total)
    else:
        wanted = min(MAX_DEFAULT_SECTIONS, blocks.num_sections)
    if blocks is not None and wanted == blocks.num_sections and len(blocks.positions) >= wanted - 1:
        positions = blocks.positions
    try:
        return choose_positions(positions, total, wanted)
    except ValueError as error:
        raise wrong_job("num_sections", str(error), wanted, "fewer sections") from error


def _section(
    analysis: Analysis,
    index: int,
    nodes: Sequence[Node],
    built: BuiltSection,
    inputs: Sequence[Node],
    outputs: Sequence[Node],
    constants: Constants,
    num_samples: int,
) -> Section:
    return Section(
        index=index,
        label=_label(nodes),
        inputs=tuple(_boundary(analysis, node, num_samples) for node in inputs),
        outputs=tuple(_boundary(analysis, node, num_samples) for node in outputs),
        batch_keys=built.batch_keys,
        parameters=built.parameters,
        signature=built.signature,
        code=built.module,
        buffers=built.buffers,
        writes=built.writes,
        constants=built.constants,
        constant_values=constants,
        source=next((line for node in nodes if (line := node_line(node))), None),
        cost=sum(analysis.costs[analysis.order[node]] for node in nodes),
        num_replicated=built.num_replicated,
    )


def _boundary(analysis: Analysis, node: Node, num_samples: int) -> BoundaryTensor:
    (shape,) = analysis.shapes(node, num_samples)
    return BoundaryTensor(node.name, tuple(shape), node.meta["val"].dtype, node in analysis.carries_gradient)


def _label(nodes: Sequence[Node]) -> str:
    """Return the path of the module of the section's first operation."""
    return next((max(paths, key=len) for node in nodes if (paths := module_paths(node))), "loss")


def _fingerprint(analysis: Analysis, places: Sequence[int]) -> str:
    exported = analysis.exported
    lines = [f"places {tuple(places)}"]
    lines += describe(exported.graph_module.graph.nodes)
    lines += [f"{source.kind} {source.name}" for source in exported.sources.values()]
    lines += [f"{name} {shape} {dtype}" for name, (shape, dtype) in exported.initial_parameters.specs.items()]
    lines += [f"buckets {exported.buckets}"] if exported.buckets else []
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@dataclass(frozen=True)
class Block:
    """One run of one module: places ``start`` to ``end`` (exclusive) of an analysis' sequence."""

    path: str
    start: int
    end: int


@dataclass(frozen=True)
class Blocks:
    """The places where a model's blocks, and code after them, begin, in order.

    ``num_sections``: one for each block, and for each stretch outside with at least half a block's compute.
    """

    positions: list[Position]
    num_sections: int


def find_blocks(analysis: Analysis, positions: Sequence[Position]) -> Blocks | None:
    """Return the model's repeated blocks; None if they are less than 30 % of its compute.

    Of blocks within blocks, the smaller ones are used, unless crossing them costs over 50 % more.
    """
    by_index = {place.index: place for place in positions}
    before = [0.0, *accumulate(analysis.costs)]

    def cost_of(family: Sequence[Block]) -> float:
        return sum(before[block.end] - before[block.start] for block in family)

    families = [
        family
        for family in _families(analysis)
        if cost_of(family) >= _SHARE_OF_A_FAMILY * before[-1] and sum(block.start in by_index for block in family) > 1
    ]
    crossing = {
        id(family): median(by_index[block.start].crossing_bytes for block in family if block.start in by_index)
        for family in families
    }
    taken: list[Block] = []
    for family in sorted(families, key=len, reverse=True):
        rivals = [other for other in families if _overlap(family, other)]
        narrow = crossing[id(family)] <= _NARROW * min(crossing[id(other)] for other in rivals)
        if narrow and not _overlap(family, taken):
            taken += family
    taken.sort(key=lambda block: block.start)
    if cost_of(taken) < _LEAST_SHARE * before[-1]:
        return None
    block_cost = median(before[block.end] - before[block.start] for block in taken)
    starts = [block.start for block in taken] + [len(analysis.sequence)]
    ends = [0] + [block.end for block in taken]
    between = [before[start] - before[end] for end, start in zip(ends, starts, strict=True)]
    num_others = sum(cost >= _OF_A_BLOCK * block_cost for cost in between)
    borders = sorted({*starts, *ends} & by_index.keys())
    return Blocks([by_index[place] for place in borders], len(taken) + num_others)


def _families(analysis: Analysis) -> list[list[Block]]:
    """Return blocks by the class of their module, each family in order and without overlaps."""
    first: dict[tuple[str, str], int] = {}
    last: dict[tuple[str, str], int] = {}
    paths: dict[tuple[str, str], str] = {}
    for place, node in enumerate(analysis.sequence):
        for key, path, kind in _numbered_modules(node):
            first.setdefault((kind, key), place)
            last[kind, key] = place + 1
            paths[kind, key] = path
    families: dict[str, list[Block]] = {}
    for (kind, key), start in sorted(first.items(), key=lambda item: item[1]):
        family = families.setdefault(kind, [])
        if not family or family[-1].end <= start:
            family.append(Block(paths[kind, key], start, last[kind, key]))
    return list(families.values())


def _numbered_modules(node: Node) -> Iterator[tuple[str, str, str]]:
    """Yield (key of the call, path, class) of each module around the node that is a numbered member of another."""
    for key, (path, kind) in (node.meta.get("nn_module_stack") or {}).items():
        plain = SLICE.sub("", path)
        if plain.rpartition(".")[2].isdigit():
            yield key, plain, kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"


def _overlap(some: Sequence[Block], others: Sequence[Block]) -> bool:
    return any(stretch.start < other.end and other.start < stretch.end for stretch in some for other in others)
