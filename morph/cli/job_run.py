"""From a job file to what ``morph run`` needs, everything checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from morph.contract.job_file import JobFile
    from morph.contract.profile import Profile


@dataclass(frozen=True)
class JobRun:
    """A job file with its profile read and its paths resolved."""

    file: JobFile
    code: str
    profile_path: Path
    profile: Profile
    run_dir: Path


def resolve(path: Path, file: JobFile) -> JobRun:
    """Resolve what a job file names against its folder.

    Raises:
        ConfigError: the code file is not there, or the batch is another one.
        ProfileError: the profile cannot be read.
    """
    from morph.contract.errors import ConfigError
    from morph.contract.profile import load_profile

    folder = path.resolve().parent
    code, _, name = file.job.code.rpartition(":")
    if not (folder / code).is_file():
        raise ConfigError(
            "there is no such file", source=str(path), field="job.code", value=code, allowed=f"a file below {folder}"
        )
    profile_path = folder / file.job.profile
    profile = load_profile(profile_path)
    if file.job.batch_size not in (None, profile.job.batch_size):
        raise ConfigError(
            "is not the profile's",
            source=str(path),
            field="job.batch_size",
            value=file.job.batch_size,
            allowed=str(profile.job.batch_size),
        )
    return JobRun(
        file=file,
        code=f"{folder / code}:{name}",
        profile_path=profile_path,
        profile=profile,
        run_dir=folder / file.job.run_dir if file.job.run_dir else Path("runs") / profile.job.name,
    )


def check_job_file(path: Path, file: JobFile) -> str:
    """Check everything that a run checks before it starts; returns what would run, as a sentence.

    Raises:
        InputError: what is wrong.
    """
    from manager.preparation import constant_trace, controller_config
    from morph.cli.checks import check_device, check_job
    from morph.cli.errors import places

    run = resolve(path, file)
    check_device(file, str(path))
    where = {
        "memory_bytes": (str(path), "vms.memory_bytes"),
        "micro_batch_size": (str(run.profile_path), "job.micro_batch_size"),
    }
    with places(where):
        check_job(run.code, run.profile)
        config = controller_config(
            run.profile,
            file.vms,
            file.policy,
            constant_trace(file.vms),
            file.job.steps,
            None,
            schedule=file.job.schedule,
            recompute=file.job.recompute,
        )
    largest = max(config.plans)
    plan = config.plans[largest]
    return (
        f"{run.profile.job.name} fits its profile; {file.job.steps} steps, with {largest} VMs in shape {plan.shape}, "
        f"with {config.fewest_workers} at least"
    )
