"""The tracer's report: plain frozen values that turn into JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Kind = Literal[
    "activation", "tied", "constant", "morph", "mixing", "leaves", "common", "unsaved", "random", "differs", "refused"
]
Status = Literal["handled", "allowed", "violation"]
Phase = Literal["model", "optimizer"]

KINDS: dict[Kind, str] = {
    "activation": "a tensor that one section makes and later ones read",
    "tied": "a weight that several sections read",
    "constant": "a tensor made outside the step and only read",
    "morph": "something that Morph itself does over all units",
    "mixing": "an operation on tensors of several units",
    "leaves": "a tensor becomes a Python number, which cannot be followed",
    "common": "a tensor outside Morph's sight that changes from step to step, for several units",
    "unsaved": "a value that changes from step to step outside optimizer.state[parameter]",
    "random": "random numbers drawn by the optimizer",
    "differs": "one optimizer for each unit gives other results than one optimizer for all",
    "refused": "the optimizer cannot be built or run for one unit alone",
}


@dataclass(frozen=True)
class SourceLocation:
    """The place of an operation in the source, as ``file:line``.

    ``user``: in the user's own files. ``library``: in the library that ran it on the user's behalf. ``function``: the
    name of the function at ``user``, else at ``library``.
    """

    user: str | None
    library: str | None
    function: str

    @property
    def text(self) -> str:
        """Both lines in one text."""
        return " by ".join(line for line in (self.user, self.library) if line) or self.function


@dataclass(frozen=True)
class Finding:
    """One dependency between sections.

    Attributes:
        id: Name for ``Job.allowed_dependencies``, without line numbers and sections.
        kind: See ``KINDS``.
        phase: Whether it is in the model's step or in the optimizer's.
        operator: Name of the operation, without ``aten``.
        units: Sections (model) or parameter units (optimizer) that meet, in order.
        shapes: Shapes of the tensors that met, at the first occurrence; those past the eighth are left out.
        num_bytes: Bytes of tied weights, or of tensors that cross per micro-batch; 0 for other kinds.
        advice: What to do about it; empty if nothing needs to be done.
    """

    id: str
    kind: Kind
    status: Status
    phase: Phase
    operator: str
    place: SourceLocation
    units: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    count: int
    num_bytes: int
    message: str
    advice: str


@dataclass(frozen=True)
class DependencyReport:
    """The result of the dry run of one job: violations first, then allowed findings, then handled ones.

    ``micro_batch_size``: m of the dry run. ``notes``: sentences on parts that were not run as in training, with the
    reasons.
    """

    job: str
    num_sections: int
    micro_batch_size: int
    units: tuple[str, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]

    @property
    def violations(self) -> tuple[Finding, ...]:
        """Findings that keep the job from starting."""
        return tuple(finding for finding in self.findings if finding.status == "violation")

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain dicts, lists, numbers and texts."""
        return {**asdict(self), "num_violations": len(self.violations)}
