"""From the URL of a run's checkpoints to a new run directory, in which it is gone on with."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from manager.run.recovery import read_recovery, recover
from manager.run.request import FILE_NAME, IfChanged, RunRequest, absolute_job, kept_request
from manager.run_dir import is_run, read_facts
from morph.checkpoint.newest import find_whole
from morph.checkpoint.stored import RECOVERY
from morph.cli.reading.stored import no_checkpoint, stored_at
from morph.cli.runs.prepare import folder_of
from morph.contract.errors import ConfigError


def is_stored(source: str) -> bool:
    """Whether a user names checkpoints, not a run directory."""
    return "://" in source or (not is_run(Path(source)) and (Path(source) / RECOVERY).is_file())


@contextmanager
def recovered(
    source: str, job: str | None, run_dir: Path | None, cluster: Path | None, if_changed: IfChanged
) -> Iterator[tuple[RunRequest, Path]]:
    """Make the run directory that a run left beside its checkpoints says; yields the request, and the directory.

    Where the run does not begin in it while the block runs, because something is wrong, it is removed again. One that
    was made by the same command is gone on with.

    Raises:
        InputError: what is stored there, or what is given, is not enough to go on with.
        CheckpointError: storage does not answer, or no checkpoint there is whole.
    """
    stored = stored_at(source)
    recovery = read_recovery(stored.url)
    if job is None:
        known = recovery.command.job
        raise ConfigError("is not given", field="--job", allowed=f"path/to/file.py:name of this machine's {known}")
    made = run_dir or folder_of(recovery.profile, Path(f"{stored.url}/{RECOVERY}"))
    if is_run(made) and read_facts(made).checkpoint_url == stored.url:  # the same command, given again
        given = {"job": absolute_job(job), **({} if cluster is None else {"cluster": cluster})}
        yield kept_request(made).model_copy(update=given), made
        return
    manifest, _ = find_whole(stored.url)
    if manifest is None:
        raise no_checkpoint(stored)
    request = recover(recovery, stored.url, job, made, cluster, if_changed)
    print(f"the run of {stored.url} goes on in {made}, from version {manifest.version}", file=sys.stderr)
    try:
        yield request, made
    finally:
        if not (made / FILE_NAME).exists():
            shutil.rmtree(made, ignore_errors=True)
