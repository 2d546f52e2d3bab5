"""``morph sample``: call a job's own function with a checkpoint, for example to generate text."""

from __future__ import annotations

import json
import os
import select
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from morph.cli.reading.options import StoredArgument
from morph.cli.reading.progress import doing

if TYPE_CHECKING:
    from collections.abc import Callable

    from manager.run.checkpoint_location import Stored
    from morph.jobs.job import Job

POLL_S = 2.0
LAST_S, HANGS = 120.0, 75
"""The time that a sample may still take once its run is over or its manager dead, and the exit code after that."""


def sample_command(
    context: typer.Context,
    source: StoredArgument,
    job: Annotated[
        str | None,
        typer.Option(
            metavar="JOB", help="path/to/file.py:name; default: the code that the run trains on. Needed for a URL."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder to write to; default: samples in the run directory, or here."),
    ] = None,
    device: Annotated[str, typer.Option(help="Device that runs the model: cpu, cuda or cuda:N.")] = "cpu",
    follow: Annotated[bool, typer.Option("--follow", help="Continue with each new checkpoint, until Ctrl-C.")] = False,
    while_open: Annotated[bool, typer.Option("--while-open", hidden=True)] = False,
) -> None:
    """Call Job.sample with the newest checkpoint: it gets the model, and its result is written to a file.

    With `samples: true` in its YAML file, a run does this by itself. The command runs on any host that reaches the
    checkpoints. If several new checkpoints are complete, only the newest is used; none is used twice.

    \b
    Example:
      morph sample runs/tiny
      morph sample az://container/run --job my_job.py:job --device cuda --follow
    """
    from manager.run.checkpoint_location import no_checkpoint, stored_at
    from morph.contract.errors import wrong_job

    stored = stored_at(source)
    doing(f"loading PyTorch and the job of {source}")
    from manager.commands.export import loaded_job
    from morph.runtime.device.devices import usable_device

    usable_device(device, source="morph sample", field="--device", numbered=True)
    found = loaded_job(context, stored, job)
    if found.sample is None:
        missing = wrong_job("sample", "is not given", allowed="lambda model, step: text")
        if not while_open:
            raise missing
        print(missing)
        return
    folder = output or (Path("samples") if stored.run_dir is None else stored.run_dir / "samples")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (follow or while_open):
        if _newest(stored) is None:
            raise no_checkpoint(stored)
        print(
            sample_newest(stored, found, folder, device)
            or f"the sample of the newest checkpoint is already in {folder}"
        )
        return
    if while_open:
        os.nice(10)
        end_with_the_run(LAST_S)
    failed: set[str] = set()
    is_over = False
    while True:
        wrote, sentence = _tried(lambda: sample_newest(stored, found, folder, device), failed)
        if sentence and not (wrote and while_open):  # the manager hears only of failures
            print(sentence, flush=True)
        if is_over:
            return
        if while_open:
            is_over = bool(select.select([sys.stdin], [], [], POLL_S)[0])
        else:
            time.sleep(POLL_S)


def end_with_the_run(limit_s: float) -> None:
    """End this process this long after standard input has ended, whatever the job's function does then."""

    def watch() -> None:
        select.select([sys.stdin], [], [])
        time.sleep(limit_s)
        print(f"the run is over, and Job.sample did not return within {limit_s:g} s", file=sys.stderr, flush=True)
        os._exit(HANGS)

    threading.Thread(target=watch, name="end-with-the-run", daemon=True).start()


def _tried(sample: Callable[[], str], failed: set[str]) -> tuple[bool, str]:
    """Return whether sampling worked, and a sentence to print: the failure, the first time, or the written file."""
    try:
        return True, sample()
    except Exception as error:  # from storage or the user's function: the next checkpoint is tried
        sentence = f"{type(error).__name__}: {error}"
        if sentence in failed:
            return False, ""
        failed.add(sentence)
        return False, sentence


def _newest(stored: Stored) -> int | None:
    from morph.checkpoint.manifest import complete_versions

    return max(complete_versions(stored.url), default=None)


def sample_newest(stored: Stored, job: Job, folder: Path, device: str) -> str:
    """Call the job's function with the newest checkpoint; return a sentence about it, or "" if this was done before.

    The function's random numbers from global generators depend on the seed and the version. The file appears only
    once it is complete.
    """
    version = _newest(stored)
    path = folder / f"v{version or 0:08d}.json"
    if version is None or path.exists():
        return ""
    import torch

    from morph.checkpoint.manifest import read_manifest
    from morph.contract.files import PRIVATE, write_whole
    from morph.cutting.deferred_init.construct import build_really
    from morph.data.seeding import own_generators, seed_of
    from morph.runtime.state.model_state import export_state

    state = export_state(job, stored.url, read_manifest(stored.url, version))
    model = build_really(job.model, job.seed)
    model.load_state_dict(state)
    model.to(device).eval()
    assert job.sample is not None
    with own_generators() as seed_all, torch.no_grad():
        seed_all(seed_of(job.seed, "generation", version))
        result = job.sample(model, version)
    text = json.dumps({"step": version, "sample": result}, indent=2, ensure_ascii=False, default=str)
    write_whole(path, text + "\n", PRIVATE)
    return f"wrote {path}"
