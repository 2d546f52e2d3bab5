"""How a worker takes the job's files that its setup brought: proved, and imported in place of what lies on the disk."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import io
import os
import shutil
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

from morph.contract.errors import JobError
from morph.contract.messages import JobCode
from morph.jobs.files import JobFiles, imported_once


def files_of(code: JobCode) -> dict[str, bytes]:
    """The files by their path below the job's folder.

    Raises:
        JobError: it is not what its digest says, or a file would lie outside of the folder.
    """
    if hashlib.sha256(code.archive).hexdigest() != code.sha256:
        raise JobError("is not the code that the run began with: its digest differs", source=code.job_path)
    with zipfile.ZipFile(io.BytesIO(code.archive)) as archive:
        for name in archive.namelist():
            inside = PurePosixPath(name)
            if inside.is_absolute() or ".." in inside.parts:
                raise JobError("would be written outside of the job's folder", source=name)
        return {name: archive.read(name) for name in archive.namelist()}


def use(code: JobCode) -> str:
    """Import the job from these files from now on; returns the job's path.

    A worker of the manager's machine finds data beside them in the folder they came from. Elsewhere they are written
    into a new folder of this user's alone, removed at exit.

    Raises:
        JobError: as ``files_of``.
    """
    files, folder = files_of(code), Path(code.folder)
    if code.unpack:
        folder = Path(tempfile.mkdtemp(prefix="morph-job-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    JobFiles(folder, files).install()
    return str(folder / code.job_path)


def imported_for_forks(job_path: str) -> bool:
    """Import what a job does; say whether this process can still be forked: no thread, and children may use CUDA.

    A worker that cannot load the job says what is wrong with it.
    """
    import torch  # the manager, which reads files alone, does without

    from morph.jobs.job import load_job

    # torch.cuda.is_available() then asks NVML, not the driver, after which children may still use CUDA
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    with imported_once(job_path), contextlib.suppress(JobError, SystemExit):
        load_job(job_path)
    has_cuda = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call] # torch ships no types
    return not has_threads() and (not has_cuda or _child_may_use_cuda())


def _child_may_use_cuda() -> bool:
    """Try it: a call as harmless as ``torch.cuda.device_count()`` ends that, and ``is_initialized()`` does not tell."""
    import torch

    child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call] # torch ships no types
            code = 0
        except (RuntimeError, AssertionError) as error:
            code = int("fork" in str(error))  # without a device, or with a broken driver, workers say so themselves
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return status == 0


def has_threads() -> bool:
    """Whether this process has threads; Linux alone."""
    return len(os.listdir("/proc/self/task")) > 1  # noqa: PTH208
