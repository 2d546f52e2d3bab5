"""The name under which a run's VMs are known to their provider: new for each run directory, kept in it."""

from __future__ import annotations

import secrets
from pathlib import Path

from pydantic import Field

from manager.providers.interface.provider import vm_name
from manager.run_dir import VMS, write_in_run_dir
from morph.contract.base import Value, read_json
from morph.contract.errors import RunDirError


class RunName(Value):
    """Whose VMs they are. ``num_starts``: how often the run began anew, each time with VMs of its own."""

    schema_version: int = Field(default=1, ge=1, le=1)
    run: str = Field(pattern=r"^[a-z0-9-]+$")
    job: str
    num_starts: int = Field(default=0, ge=0)

    @property
    def requests(self) -> str:
        """What the names of requests begin with: no VM of an earlier start has one of these."""
        return f"{self.run}-{self.num_starts}"


def name_of(run_dir: Path, job: str) -> RunName:
    """Return the run's name, a new one if it has none; writes nothing.

    Raises:
        RunDirError: the file in the run directory is damaged.
    """
    path = run_dir / VMS
    if path.exists():
        return read_json(path, RunName, RunDirError)
    clean = vm_name(job, 0).rsplit("-", 1)[0][:24].strip("-")
    return RunName(run=f"{clean}-{secrets.token_hex(3)}", job=job)


def write_name(run_dir: Path, name: RunName) -> None:
    """Keep it.

    Raises:
        RunDirError: it cannot be written.
    """
    write_in_run_dir(run_dir / VMS, name.model_dump_json(indent=2) + "\n")
