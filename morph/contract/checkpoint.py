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
        exclude_if=lambda given: given is None,  # what signed a manifest without it still does
        description="XXH3 of 128 bits, which is held against what is loaded; None: older, and SHA-256 is",
    )


SaveKind = Literal["periodic", "insurance", "emergency", "evaluated", "final", "imported"]
"""Why a checkpoint was written: it was due; notices could not all be answered otherwise; a VM was about to be taken
that held what no other did; its version is evaluated and may be the best; the run ended; it is where a run begins that
was given weights."""


class Manifest(Value):
    """A complete checkpoint of one version. Those of schema 1 said nothing of ``kind``, ``shape`` and ``saved_s``."""

    schema_version: Literal[1, 2] = 2
    fingerprint: str
    version: int = Field(ge=0)
    units: tuple[UnitFile, ...] = Field(min_length=1)
    kind: SaveKind = "periodic"
    shape: str = Field(default="", description="PxD that trained it; empty: not known, or none")
    saved_s: float | None = Field(default=None, description="wall-clock seconds (epoch) when its units were written")
    judged: Judged = Field(
        default=Judged(),
        exclude_if=lambda given: given == Judged(),
        description="what evaluations before it said: where a run goes on from it, it goes on from that too",
    )
    losses: LossTrend = Field(
        default=LossTrend(),
        exclude_if=lambda given: given == LossTrend(),
        description="what the losses of its steps were like, against which the next one is held",
    )
    marked: Best | None = Field(
        default=None, exclude_if=lambda given: given is None, description="the best checkpoint when it was written"
    )

    @property
    def size_bytes(self) -> int:
        """Of all its files."""
        return sum(unit.size_bytes for unit in self.units)
