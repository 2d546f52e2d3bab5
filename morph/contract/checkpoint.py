"""The manifest that makes a set of unit files a checkpoint. Written last, atomically."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from morph.contract.base import Value
from morph.contract.decided import LossTrend
from morph.contract.evaluation import Best, Judged


class UnitFile(Value):
    """One safetensors file: a parameter unit's parameters, optimizer state and accumulation scales."""

    unit: str
    file: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")
    size_bytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    xxh3_128: str | None = Field(
        default=None,
        pattern=r"^[0-9a-f]{32}$",
        exclude_if=lambda given: given is None,  # the signatures of manifests without this field stay valid
        description="128-bit XXH3, compared with the loaded bytes; None: an older manifest, whose SHA-256 is compared",
    )


SaveKind = Literal["periodic", "insurance", "emergency", "evaluated", "final", "imported"]
"""Why a checkpoint was written: it was due; notices could not all be answered otherwise; the only holder of some state
was about to be taken; its version is evaluated and may be the best; the run ended; or a run begins with given
weights."""


class Manifest(Value):
    """A complete checkpoint of one version. Schema 1 has no ``kind``, ``shape`` and ``saved_s``."""

    schema_version: Literal[1, 2] = 2
    fingerprint: str
    version: int = Field(ge=0)
    units: tuple[UnitFile, ...] = Field(min_length=1)
    kind: SaveKind = "periodic"
    shape: str = Field(default="", description="shape PxD that trained it; empty: unknown, or none")
    saved_s: float | None = Field(default=None, description="wall-clock seconds (epoch) when its units were written")
    judged: Judged = Field(
        default=Judged(),
        exclude_if=lambda given: given == Judged(),
        description="outcome of the earlier evaluations, which a run that resumes from here continues",
    )
    losses: LossTrend = Field(
        default=LossTrend(),
        exclude_if=lambda given: given == LossTrend(),
        description="statistics of the losses of its steps, with which the next loss is compared",
    )
    marked: Best | None = Field(
        default=None, exclude_if=lambda given: given is None, description="the best checkpoint at the time of writing"
    )

    @property
    def size_bytes(self) -> int:
        """The size of all files together."""
        return sum(unit.size_bytes for unit in self.units)
