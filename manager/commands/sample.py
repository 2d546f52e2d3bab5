"""``morph sample``: call a job's own function with a checkpoint, for example to generate text."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from morph.cli.reading.options import StoredArgument
from morph.cli.reading.progress import doing

if TYPE_CHECKING:
    from collections.abc import Callable

    from manager.run.checkpoint_location import Stored
    from morph.contract.errors import InputError
    from morph.jobs.job import Job

POLL_S = 2.0


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

    stored = stored_at(source)
    doing(f"loading PyTorch and the job of {source}")
    from manager.commands.export import loaded_job
    from morph.runtime.device.devices import usable_device

    usable_device(device, source="", field="--device", numbered=True)
    loaded = loaded_job(context, stored, job)
    if loaded.sample is None and not while_open:
        raise _missing()
    folder = output or (Path("samples") if stored.run_dir is None else stored.run_dir / "samples")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if while_open:
        raise typer.Exit(beside_a_run(lambda: sample_newest(stored, loaded, folder, device)))
    if not follow:
        if _newest(stored) is None:
            raise no_checkpoint(stored)
        written = sample_newest(stored, loaded, folder, device)
        print(written or f"the sample of the newest checkpoint is already in {folder}")
        return
    failed: set[str] = set()
    while True:
        if sentence := _tried(lambda: sample_newest(stored, loaded, folder, device), failed):
            print(sentence, flush=True)
        time.sleep(POLL_S)


def beside_a_run(sample: Callable[[], object]) -> int:
    """Call the job's function with each new checkpoint, as a helper of the run's manager; return the exit code."""
    from manager.trackers.process import main
    from manager.trackers.sinks import CallbackFailed, Sink
    from morph.contract.happenings import CheckpointDone, Happening

    class Samples(Sink):
        is_due = True  # a checkpoint may have been completed before

        def tell(self, happening: Happening) -> None:
            self.is_due = self.is_due or isinstance(happening, CheckpointDone)

        def flush(self) -> None:
            if self.is_due:
                self.is_due = False
                self.close()

        def close(self) -> None:
            try:
                sample()
            except Exception as error:  # from storage or the user's function: the next checkpoint is tried
                raise CallbackFailed(f"{type(error).__name__}: {error}") from error

    return main(lambda _: Samples())


def _tried(sample: Callable[[], str], failed: set[str]) -> str:
    """Return a sentence to print: the written file, or the failure, the first time."""
    try:
        return sample()
    except Exception as error:  # from storage or the user's function: the next checkpoint is tried
        sentence = f"{type(error).__name__}: {error}"
        is_new = sentence not in failed
        failed.add(sentence)
        return sentence if is_new else ""


def _missing() -> InputError:
    from morph.contract.errors import wrong_job

    return wrong_job("sample", "is not given", allowed="lambda model, step: text")


def _newest(stored: Stored) -> int | None:
    from morph.checkpoint.manifest import complete_versions

    return max(complete_versions(stored.url), default=None)


def sample_newest(stored: Stored, job: Job, folder: Path, device: str) -> str:
    """Call the job's function with the newest checkpoint; return a sentence about it, or "" if this was done before.

    The function's random numbers from global generators depend on the seed and the version. The file appears only
    once it is complete.
    """
    if job.sample is None:
        raise _missing()
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
    with own_generators() as seed_all, torch.no_grad():
        seed_all(seed_of(job.seed, "generation", version))
        result = job.sample(model, version)
    text = json.dumps({"step": version, "sample": result}, indent=2, ensure_ascii=False, default=str)
    write_whole(path, text + "\n", PRIVATE)
    return f"wrote {path}"
