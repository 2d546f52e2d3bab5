"""Frozen weights that ``morph import`` gave to a run: stored once for the run, beside its checkpoints.

They are a checkpoint of their own, ``frozen/v00000000`` below the run's, with one file per tensor, so that a worker
reads only those of its own sections. Checkpoints of steps do not include them, but each has their digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import Tensor

from morph.checkpoint.manifest import complete_versions, read_manifest, write_manifest
from morph.checkpoint.unit_files import read_unit, write_unit
from morph.contract.checkpoint import Manifest, UnitFile

_VALUE = "value"


def frozen_url(checkpoint_url: str) -> str:
    """Return the URL of a run's frozen weights."""
    return f"{checkpoint_url.rstrip('/')}/frozen"


class FrozenWeights(Mapping[str, Tensor]):
    """The weights that a run was given, by name in the job's model; each is read and checked when it is requested."""

    def __init__(self, checkpoint_url: str) -> None:
        self._url = frozen_url(checkpoint_url)
        self._manifest = read_manifest(self._url, 0) if 0 in complete_versions(self._url) else None
        self._names = [] if self._manifest is None else [entry.unit for entry in self._manifest.units]

    @property
    def digest(self) -> str:
        """The digest of all frozen weights; empty if the run was given none."""
        return "" if self._manifest is None else self._manifest.fingerprint

    def __getitem__(self, name: str) -> Tensor:
        if self._manifest is None or name not in self._names:
            raise KeyError(name)
        return read_unit(self._url, self._manifest, name)[_VALUE]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def write_frozen_weights(checkpoint_url: str, names: Iterable[str], read: Callable[[str], Tensor]) -> str:
    """Write the weights that ``read`` returns for these names, one at a time, and return a digest of all."""
    files: list[UnitFile] = []
    for name in sorted(names):
        written = write_unit(frozen_url(checkpoint_url), 0, name, "import", {_VALUE: read(name).contiguous()})
        files.append(UnitFile(**written.model_dump(exclude={"worker", "version", "stall_s"})))
    digest = hashlib.sha256("".join(f"{file.unit} {file.sha256}\n" for file in files).encode()).hexdigest()
    write_manifest(
        frozen_url(checkpoint_url), Manifest(fingerprint=digest, version=0, units=tuple(files), kind="imported")
    )
    return digest
