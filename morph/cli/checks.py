"""Checks that need the model itself, made before anything is started or written."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from morph.contract.cluster import ClusterConfig
    from morph.contract.data_facts import JobFacts
    from morph.contract.errors import InputError
    from morph.contract.profile import Profile
    from morph.cutting import ExportedJob
    from morph.job import Job

TRIED_ONCE = 200_000_000
"""Parameters of the largest model that is run on two samples where a job is looked at: some seconds."""
TRIED_BEFORE_RUNS = 20_000_000
"""The same where a run may have to be taken over."""


@contextmanager
def users_code(job_path: str) -> Iterator[None]:
    """Around code that imports or exports a job: the process does not end in it, and a refusal stays one line.

    torch logs and prints whole graphs when it refuses a model. So standard error is held back until the block ends,
    and forgotten when an ``ExportError`` ends it, which says what a user needs of it.

    Raises:
        JobError: when the job's code ends the process.
    """
    from morph.contract.errors import ExportError, JobError

    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    held = io.StringIO()
    try:
        with redirect_stderr(held):
            yield
    except ExportError:
        held = io.StringIO()
        raise
    except SystemExit as error:
        raise JobError(
            "its code ends the process", source=job_path, value=f"exit({error.code!r})", allowed="code that returns"
        ) from error
    finally:
        logging.disable(before)
        sys.stderr.write(held.getvalue())


def warn_of_loss(job: Job, num_parameters: int, most_parameters: int) -> None:
    """Tell on standard error if the loss is not the mean over samples that it is taken for.

    Args:
        job: Its model is built and run, without gradients, on some samples.
        num_parameters: Elements of the model.
        most_parameters: A larger model is not tried.
    """
    if num_parameters <= most_parameters:
        from morph.cutting.mean_trial import loss_warnings

        for sentence in loss_warnings(job):
            print(f"warning: {sentence}", file=sys.stderr)


def check_output(path: Path, error_type: type[InputError]) -> None:
    """Refuse a file that cannot be written, before there is anything to write.

    Raises:
        InputError: of ``error_type``, naming the path.
    """
    if path.is_dir():
        raise error_type("cannot be written: it is a folder", source=str(path), allowed="a file name")
    if not path.parent.is_dir():
        raise error_type(
            "cannot be written: its folder does not exist", source=str(path), allowed="a file in an existing folder"
        )
    if not os.access(path.parent, os.W_OK):
        raise error_type("cannot be written: its folder is not writable", source=str(path))


def check_device(cluster: ClusterConfig, source: str) -> None:
    """Refuse a device that this machine lacks, where VMs share its devices, or a library that their TLS wants.

    Raises:
        ConfigError: naming the cluster file.
    """
    from morph.contract.cluster import LocalVms
    from morph.contract.errors import ConfigError

    if cluster.vms.tls and find_spec("cryptography") is None:
        raise ConfigError(
            "certificates need a library that is not installed",
            source=source,
            field="vms.tls",
            value=True,
            allowed="pip install -e '.[tls]' in the clone of Morph, or false",
        )
    if isinstance(cluster.vms, LocalVms) and cluster.vms.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError(
                "this machine has no such device", source=source, field="vms.device", value="cuda", allowed="cpu"
            )


def check_job(job_path: str, profile: Profile) -> JobFacts:
    """Cut the job and hold it against the profile; returns by what it is known.

    Raises:
        JobError: a wrong job file, or one with an unhandled dependency between sections.
        ExportError: a model that torch.export refuses, or whose sections do not compute what it does by itself.
        ProfileError: a profile of another model, or of another batch size.
    """
    import torch

    from morph.cli.plain_check import agreement_note, compare_once
    from morph.contract.data_facts import JobFacts
    from morph.contract.errors import ProfileError
    from morph.cutting import cut, export_job
    from morph.cutting.data_trial import check_data
    from morph.cutting.report import num_elements
    from morph.data.fingerprint import data_facts
    from morph.job import load_job
    from morph.runtime.job_checks import check_training

    torch.set_num_threads(1)
    with users_code(job_path):
        job = load_job(job_path)
    if job.batch_size != profile.job.batch_size:
        raise ProfileError(
            "was made for another global batch; calibrate again",
            source=job_path,
            field="batch_size",
            value=job.batch_size,
            allowed=str(profile.job.batch_size),
        )
    smallest = profile.micro_batch_sizes[0]
    with users_code(job_path):
        exported = export_job(job)
        model = cut(exported, num_sections=profile.num_sections, micro_batch_size=smallest)
    if model.fingerprint != profile.job.fingerprint:
        raise ProfileError(
            "the profile belongs to another model; calibrate again",
            source=job_path,
            field="fingerprint",
            value=model.fingerprint[:12],
            allowed=profile.job.fingerprint[:12],
        )
    units = {unit.id: unit.sections for unit in model.units}
    known = {unit.id: unit.sections for unit in profile.units}
    if units != known:
        raise ProfileError(
            "the profile names other parameter units than the model has; calibrate again",
            source=job_path,
            field="units",
            value=", ".join(sorted(known)) or "none",
            allowed=", ".join(sorted(units)),
        )
    with users_code(job_path):
        settings = check_training(job, model)
        check_data(job)
        warn_of_loss(job, num_elements(model), TRIED_BEFORE_RUNS)
        compared = compare_once(job, exported, model)
        if compared.how != "whole":
            print(f"note: {agreement_note(compared)}", file=sys.stderr)
        _check_dependencies(job, exported, profile, job_path)
        return JobFacts(data=data_facts(job), settings=settings)


def _check_dependencies(job: Job, exported: ExportedJob, profile: Profile, job_path: str) -> None:
    """Refuse a job whose optimizer mixes parameter units (``morph trace-deps``)."""
    from morph.tracing import check_dependencies, require_no_violation

    report = check_dependencies(
        job,
        num_sections=profile.num_sections,
        micro_batch_size=profile.micro_batch_sizes[0],
        exported=exported,
    )
    for note in report.notes:
        print(f"note: {note}", file=sys.stderr)
    require_no_violation(report, job_path)
