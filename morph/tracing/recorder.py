"""Collects occurrences and merges those of one operation on one line into one finding."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from morph.tracing.findings import Finding, Kind, Phase, Place, Status
from morph.words import counted, size_text

_LISTED = 3
_ALLOW = "if it only lays values side by side or shows them, name its id in Job.allowed_dependencies"
_STATE = "keep it in optimizer.state[parameter], under a name, as a tensor or a number"
_REDUCING = ("norm", "stack", "cat", "add", "sum", "mean", "max", "min", "mul", "dot")


def describe(draft: Draft) -> tuple[str, str]:
    """Return (what it is, what to do about it)."""
    fixed = _FIXED.get(draft.kind)
    return fixed if fixed else _DESCRIBE[draft.kind](draft)


def _activation(draft: Draft) -> tuple[str, str]:
    far = f", some of it through up to {draft.detail} sections that do not use it" if draft.detail else ""
    return f"crosses cuts with the plan, and its gradient crosses back{far}", ""


def _tied(draft: Draft) -> tuple[str, str]:
    names = ", ".join(list(draft.names)[:_LISTED])
    more = f" and {len(draft.names) - _LISTED} more" if len(draft.names) > _LISTED else ""
    size = size_text(sum(draft.names.values()))
    cost = f"{size} tied: held, with optimizer state, and summed between these sections at every step"
    advice = ""
    if len(draft.names) > _LISTED:
        advice = "costly; a weight decay belongs into the optimizer, which adds it unit by unit"
    return f"{names}{more}; {cost}", advice


def _morph(draft: Draft) -> tuple[str, str]:
    return draft.detail, ""


def _mixing(draft: Draft) -> tuple[str, str]:
    if draft.handled:
        return "a Python number is computed from several units, but no weight was seen to depend on it", ""
    library = draft.place.library or ""
    flow = (
        f"; it flows into {counted(len(draft.reached), 'unit')}"
        if draft.reached
        else "; it reaches no weight as a tensor"
    )
    if "clip_grad" in library:
        return (
            f"the norm of the gradients of several units{flow}",
            "set Job.clip_grad_norm instead: Morph takes the norm over all units",
        )
    if draft.operator.startswith("_amp_") or draft.detail == "logical":
        return (
            f"a check over several units, such as for overflow{flow}",
            "leave fp16 loss scaling to Morph, which decides for all units: Job.precision and Job.loss_scaling",
        )
    if draft.detail == "number":
        flow = flow if draft.reached else "; in trials one optimizer for each unit ended elsewhere"
        return (
            f"a Python number is computed from several units, such as a norm or a step size for all{flow}",
            f"compute it for each parameter by itself, use another optimizer, or train with num_sections=1; {_ALLOW}",
        )
    if all(not shape for shape in draft.shapes) and any(word in draft.operator for word in _REDUCING):
        return (
            f"a number taken over several units, such as a global norm{flow}",
            f"take it for each parameter, or clip with Job.clip_grad_norm; {_ALLOW}",
        )
    return f"values of several units are mixed{flow}", f"treat each parameter by itself; {_ALLOW}"


def _leaves(draft: Draft) -> tuple[str, str]:
    if draft.detail == "met":
        return "its value is used by Python; the mixing of several units is a separate finding", ""
    if draft.handled:
        return "its value is used by Python; in trials one optimizer for each unit gave the same bits", ""
    return (
        "its value is used by Python; in trials one optimizer for each unit ended elsewhere, or none could be made",
        f"keep it a tensor, use it for its own parameter only, and settle other violations first; {_ALLOW}",
    )


def _differs(draft: Draft) -> tuple[str, str]:
    return (
        f"in trials one optimizer for each unit ended elsewhere ({draft.detail}), and no operation shows why",
        "look for numbers taken from the list of parameters (its length, the position in it) or shared by Python",
    )


def _refused(draft: Draft) -> tuple[str, str]:
    return draft.detail, "let the function take any part of the parameters: leave out groups that are empty"


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
_DESCRIBE = {
    "activation": _activation,
    "tied": _tied,
    "morph": _morph,
    "mixing": _mixing,
    "leaves": _leaves,
    "differs": _differs,
    "refused": _refused,
}


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
