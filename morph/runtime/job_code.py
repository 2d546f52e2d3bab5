"""Where a worker puts the job's files that its setup brought."""

from __future__ import annotations

import atexit
import io
import shutil
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

from morph.contract.errors import JobError
from morph.contract.messages import JobCode


def unpack(code: JobCode) -> str:
    """Write the files into a new folder of this user's alone, removed at exit; returns the job's path there.

    Raises:
        JobError: a file would lie outside of it.
    """
    folder = Path(tempfile.mkdtemp(prefix="morph-job-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with zipfile.ZipFile(io.BytesIO(code.archive)) as archive:
        for name in archive.namelist():
            inside = PurePosixPath(name)
            if inside.is_absolute() or ".." in inside.parts:
                raise JobError("would be written outside of the job's folder", source=name)
        archive.extractall(folder)
    return str(folder / code.job_path)
