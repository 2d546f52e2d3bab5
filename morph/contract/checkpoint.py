"""The manifest that makes a set of unit files a checkpoint. Written last, atomically."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from morph.contract.base import Value


class UnitFile(Value):
    """One safetensors file: a parameter unit's parameters, optimizer state and accumulation scales."""

    unit: str
    file: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")
    size_bytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Manifest(Value):
    """A complete checkpoint of one version."""

    schema_version: Literal[1] = 1
    fingerprint: str
    version: int = Field(ge=0)
    units: tuple[UnitFile, ...] = Field(min_length=1)
