"""Collects occurrences and merges those of one operation on one line into one finding."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from morph.tracing.advice import describe
from morph.tracing.findings import Finding, Kind, Phase, Place, Status

_SHOWN_SHAPES = 8
_ORDER: dict[Status, int] = {"violation": 0, "allowed": 1, "handled": 2}
Key = tuple[Kind, str, Place]


@dataclass
class Draft:
    """A finding while it is being collected.

    Attributes:
        reached: Units whose parameters or state a mixed value was written into.
        handled: Whether Morph takes care of it.
        names: Tensors it is about, with their bytes.
    """

    kind: Kind
    phase: Phase
    operator: str
    place: Place
    units: set[str] = field(default_factory=set)
    reached: set[str] = field(default_factory=set)
    shapes: tuple[tuple[int, ...], ...] = ()
    count: int = 0
    handled: bool = False
    names: dict[str, int] = field(default_factory=dict)
    detail: str = ""


class Recorder:
    """Collects drafts by kind, operator and line."""

    def __init__(self) -> None:
        self.drafts: dict[Key, Draft] = {}

    def add(
        self,
        kind: Kind,
        phase: Phase,
        operator: str,
        place: Place,
        units: Iterable[str],
        tensors: Sequence[Tensor] = (),
        **about: str,
    ) -> Draft:
        """Note one occurrence; ``about`` may hold ``detail``."""
        draft = self.drafts.setdefault((kind, operator, place), Draft(kind, phase, operator, place))
        if not draft.count:
            draft.shapes = tuple(tuple(tensor.shape) for tensor in tensors[:_SHOWN_SHAPES])
            draft.detail = about.get("detail", "")
        draft.units.update(units)
        draft.count += 1
        return draft

    def of(self, *kinds: Kind) -> list[Draft]:
        """Return the drafts of some kinds."""
        return [draft for draft in self.drafts.values() if draft.kind in kinds]

    def findings(self, allowed: Iterable[str]) -> tuple[Finding, ...]:
        """Finish every draft; ids in ``allowed`` are not violations."""
        accepted = set(allowed)
        taken: dict[str, int] = {}
        finished: list[Finding] = []
        for draft in self.drafts.values():
            name = _id(draft)
            taken[name] = taken.get(name, 0) + 1
            finding_id = name if taken[name] == 1 else f"{name}~{taken[name]}"
            message, advice = describe(draft)
            status: Status = "handled" if draft.handled else "allowed" if finding_id in accepted else "violation"
            finished.append(_finding(finding_id, draft, status, message, advice))
        return tuple(sorted(finished, key=lambda found: (_ORDER[found.status], found.kind != "mixing")))


def in_order(units: Iterable[str]) -> tuple[str, ...]:
    """Sort names such as ``s2``, ``s10`` and ``s0+s7`` by their numbers."""
    return tuple(sorted(units, key=lambda name: ([int(number) for number in re.findall(r"\d+", name)], name)))


def _finding(finding_id: str, draft: Draft, status: Status, message: str, advice: str) -> Finding:
    return Finding(
        id=finding_id,
        kind=draft.kind,
        status=status,
        phase=draft.phase,
        operator=draft.operator,
        place=draft.place,
        units=in_order(draft.units),
        shapes=draft.shapes,
        count=draft.count,
        num_bytes=sum(draft.names.values()),
        message=message,
        advice=advice,
    )


def _id(draft: Draft) -> str:
    line = draft.place.user or draft.place.library
    file = Path(line.rpartition(":")[0]).name if line else "unknown"
    return f"{draft.kind}:{draft.operator}@{file}:{draft.place.function}"
