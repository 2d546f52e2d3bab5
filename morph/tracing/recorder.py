"""Collects dependencies, and merges occurrences of one operation on one line into one finding."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from morph.tracing.findings import Finding, Kind, Phase, SourceLocation, Status
from morph.words import counted, listed, size_text

_LISTED = 3
_ALLOW = "if it only lays values side by side or shows them, name its id in Job.allowed_dependencies"
_STATE = "keep it in optimizer.state[parameter], under a name, as a tensor or a number"
_REDUCING = ("norm", "stack", "cat", "add", "sum", "mean", "max", "min", "mul", "dot")
_FIXED = {
    "constant": ("made outside the step and only read, so it is the same on every worker", ""),
    "common": (
        "a tensor that is no parameter's own changes from step to step; each worker would have another, "
        "and a checkpoint has none",
        f"one for each parameter: {_STATE}",
    ),
    "unsaved": ("changes from step to step where a checkpoint or a move to another worker would lose it", _STATE),
    "random": (
        "random numbers in the optimizer would depend on the shape of the job",
        "draw from a generator seeded by the parameter's name and its step count",
    ),
}
_SHOWN_SHAPES = 8
_ORDER: dict[Status, int] = {"violation": 0, "allowed": 1, "handled": 2}
Key = tuple[Kind, str, SourceLocation]


def describe(record: Record) -> tuple[str, str]:
    """Return a sentence on a finding, and the advice on it."""
    fixed = _FIXED.get(record.kind)
    return fixed if fixed else _DESCRIBE[record.kind](record)


def _activation(record: Record) -> tuple[str, str]:
    far = f", some of it through up to {record.detail} sections that do not use it" if record.detail else ""
    return f"crosses cuts with the plan, and its gradient crosses back{far}", ""


def _tied(record: Record) -> tuple[str, str]:
    size = size_text(sum(record.names.values()))
    cost = f"{size} tied: held, with optimizer state, and summed between these sections at every step"
    advice = ""
    if len(record.names) > _LISTED:
        advice = "costly; a weight decay belongs into the optimizer, which adds it unit by unit"
    return f"{listed(list(record.names), _LISTED)}; {cost}", advice


def _morph(record: Record) -> tuple[str, str]:
    return record.detail, ""


def _mixing(record: Record) -> tuple[str, str]:
    if record.handled:
        return "a Python number is computed from several units, but no weight was seen to depend on it", ""
    library = record.place.library or ""
    flow = (
        f"; it flows into {counted(len(record.reached), 'unit')}"
        if record.reached
        else "; it reaches no weight as a tensor"
    )
    if "clip_grad" in library:
        return (
            f"the norm of the gradients of several units{flow}",
            "set Job.clip_grad_norm instead: Morph takes the norm over all units",
        )
    if record.operator.startswith("_amp_") or record.detail == "logical":
        return (
            f"a check over several units, such as for overflow{flow}",
            "leave fp16 loss scaling to Morph, which decides for all units: Job.precision and Job.loss_scaling",
        )
    if record.detail == "number":
        flow = flow if record.reached else "; in trials one optimizer for each unit ended elsewhere"
        return (
            f"a Python number is computed from several units, such as a norm or a step size for all{flow}",
            f"compute it for each parameter by itself, use another optimizer, or train with num_sections=1; {_ALLOW}",
        )
    if all(not shape for shape in record.shapes) and any(word in record.operator for word in _REDUCING):
        return (
            f"a number taken over several units, such as a global norm{flow}",
            f"take it for each parameter, or clip with Job.clip_grad_norm; {_ALLOW}",
        )
    return f"values of several units are mixed{flow}", f"treat each parameter by itself; {_ALLOW}"


def _leaves(record: Record) -> tuple[str, str]:
    if record.detail == "met":
        return "its value is used by Python; the mixing of several units is a separate finding", ""
    if record.handled:
        return "its value is used by Python; in trials one optimizer for each unit gave the same bits", ""
    return (
        "its value is used by Python; in trials one optimizer for each unit ended elsewhere, or none could be made",
        f"keep it a tensor, use it for its own parameter only, and settle other violations first; {_ALLOW}",
    )


def _differs(record: Record) -> tuple[str, str]:
    return (
        f"in trials one optimizer for each unit ended elsewhere ({record.detail}), and no operation shows why",
        "look for numbers taken from the list of parameters (its length, the position in it) or shared by Python",
    )


def _refused(record: Record) -> tuple[str, str]:
    return record.detail, "let the function take any part of the parameters: leave out groups that are empty"


_DESCRIBE = {
    "activation": _activation,
    "tied": _tied,
    "morph": _morph,
    "mixing": _mixing,
    "leaves": _leaves,
    "differs": _differs,
    "refused": _refused,
}


@dataclass
class Record:
    """A finding while it is being collected.

    ``reached``: units whose parameters or state a mixed value was written into. ``names``: the tensors that it
    concerns, with their bytes.
    """

    kind: Kind
    phase: Phase
    operator: str
    place: SourceLocation
    units: set[str] = field(default_factory=set)
    reached: set[str] = field(default_factory=set)
    shapes: tuple[tuple[int, ...], ...] = ()
    count: int = 0
    handled: bool = False
    names: dict[str, int] = field(default_factory=dict)
    detail: str = ""


class Recorder:
    """Collects records by kind, operator and line."""

    def __init__(self) -> None:
        self.records: dict[Key, Record] = {}

    def add(
        self,
        kind: Kind,
        phase: Phase,
        operator: str,
        place: SourceLocation,
        units: Iterable[str],
        tensors: Sequence[Tensor] = (),
        **about: str,
    ) -> Record:
        """Record one occurrence; ``about`` may hold ``detail``."""
        record = self.records.setdefault((kind, operator, place), Record(kind, phase, operator, place))
        if not record.count:
            record.shapes = tuple(tuple(tensor.shape) for tensor in tensors[:_SHOWN_SHAPES])
            record.detail = about.get("detail", "")
        record.units.update(units)
        record.count += 1
        return record

    def of(self, *kinds: Kind) -> list[Record]:
        """Return the records of some kinds."""
        return [record for record in self.records.values() if record.kind in kinds]

    def findings(self, allowed: Iterable[str]) -> tuple[Finding, ...]:
        """Finish every record; ids in ``allowed`` are not violations."""
        accepted = set(allowed)
        taken: dict[str, int] = {}
        finished: list[Finding] = []
        for record in self.records.values():
            name = _id(record)
            taken[name] = taken.get(name, 0) + 1
            finding_id = name if taken[name] == 1 else f"{name}~{taken[name]}"
            message, advice = describe(record)
            status: Status = "handled" if record.handled else "allowed" if finding_id in accepted else "violation"
            finished.append(_finding(finding_id, record, status, message, advice))
        return tuple(sorted(finished, key=lambda found: (_ORDER[found.status], found.kind != "mixing")))


def in_order(units: Iterable[str]) -> tuple[str, ...]:
    """Sort names such as ``s2``, ``s10`` and ``s0+s7`` by their numbers."""
    return tuple(sorted(units, key=lambda name: ([int(number) for number in re.findall(r"\d+", name)], name)))


def _finding(finding_id: str, record: Record, status: Status, message: str, advice: str) -> Finding:
    return Finding(
        id=finding_id,
        kind=record.kind,
        status=status,
        phase=record.phase,
        operator=record.operator,
        place=record.place,
        units=in_order(record.units),
        shapes=record.shapes,
        count=record.count,
        num_bytes=sum(record.names.values()),
        message=message,
        advice=advice,
    )


def _id(record: Record) -> str:
    line = record.place.user or record.place.library
    file = Path(line.rpartition(":")[0]).name if line else "unknown"
    return f"{record.kind}:{record.operator}@{file}:{record.place.function}"
