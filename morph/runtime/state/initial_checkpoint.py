"""Version 0 of a run, written from given parameters instead of the job's seed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from morph.checkpoint.manifest import write_manifest
from morph.checkpoint.unit_files import write_unit
from morph.contract.checkpoint import Manifest, UnitFile
from morph.cutting import CutModel
from morph.jobs.job import Job
from morph.runtime.state.unit_state import UnitState, update_rules


class Parameters(Protocol):
    """Parameters by name, made or read when they are asked for."""

    def __getitem__(self, name: str) -> Tensor:
        """Return one."""
        ...


def write_initial_checkpoint(job: Job, model: CutModel, parameters: Parameters, checkpoint_url: str) -> Manifest:
    """Write every unit with a fresh optimizer, then the manifest; one unit is in memory at a time.

    Raises:
        JobError: an optimizer or schedule that cannot be used.
        OSError: of the storage.
    """
    num_micro_batches = job.batch_size // model.micro_batch_size
    rules = update_rules(job, torch.device("cpu"))
    files: list[UnitFile] = []
    for unit in model.units:
        state = UnitState(
            unit,
            {name: parameters[name] for name in unit.names},
            job.optimizer,
            num_micro_batches=num_micro_batches,
            exact=job.accumulation == "exact",
            rules=rules,
        )
        written = write_unit(checkpoint_url, 0, unit.id, "import", state.tensors())
        files.append(UnitFile(**written.model_dump(exclude={"worker", "version", "stall_s"})))
    manifest = Manifest(fingerprint=model.fingerprint, version=0, units=_sorted(files), kind="imported")
    write_manifest(checkpoint_url, manifest)
    return manifest


def _sorted(files: Iterable[UnitFile]) -> tuple[UnitFile, ...]:
    return tuple(sorted(files, key=lambda entry: entry.unit))
