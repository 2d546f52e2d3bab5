"""``morph import``: a run directory whose version 0 comes from a plain state_dict."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from morph.cli.reading.options import JobArgument, MicroBatchOption
from morph.cli.reading.progress import doing

if TYPE_CHECKING:
    from morph.jobs.job import Job


def import_command(
    job: JobArgument,
    weights: Annotated[Path, typer.Argument(metavar="WEIGHTS", help="A state_dict in a safetensors file.")],
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A new or empty directory.")],
    m: MicroBatchOption = None,
) -> None:
    """Begin a run from given weights: `morph run` with the same RUN_DIR trains on from them.

    Names, shapes and types must be those of the job's model; a tied weight needs one of its names only.

    \b
    Example:
      morph import my_job.py:job pretrained.safetensors runs/tuned
      morph run my_job.py:job --profile profile.json --cluster cluster.yaml --run-dir runs/tuned
    """
    doing(f"loading PyTorch and {job}")
    from manager.run_dir import RunDir, RunFacts
    from morph.checkpoint.plain_file import PlainFile
    from morph.contract.errors import JobError, RunDirError
    from morph.cutting import cut, export_job
    from morph.jobs.job import load_job
    from morph.runtime.state.checkpoint_writer import write_initial_checkpoint
    from morph.runtime.state.model_state import ImportedParameters

    target = run_dir.resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RunDirError("is not a new or empty directory", source=str(run_dir))
    file = PlainFile(weights)
    loaded = load_job(job)
    micro_batch_size = loaded.micro_batch_size if m is None else m
    if micro_batch_size is None or micro_batch_size not in _possible(loaded):
        allowed = ", ".join(map(str, _possible(loaded)))
        raise JobError("the run needs a micro-batch size", source=job, field="--m", value=m, allowed=allowed)
    doing("tracing the model")
    exported = export_job(loaded)
    model = cut(exported, num_sections=loaded.num_sections, micro_batch_size=micro_batch_size)
    parameters = ImportedParameters(loaded, model, file, exported.initial_buffers)
    facts = RunFacts(
        job=job,
        fingerprint=model.fingerprint,
        micro_batch_size=micro_batch_size,
        batch_size=loaded.batch_size,
        num_sections=len(model.sections),
    )
    # made beside its place and then moved: half an import never looks like a run
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
    try:
        with RunDir(partial, facts) as opened:
            write_initial_checkpoint(loaded, model, parameters, opened.checkpoint_url)
        partial.replace(target)
    except OSError as error:
        raise RunDirError(f"cannot be written: {error}", source=str(run_dir)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(f"{run_dir} begins with the weights of {weights}: {len(model.parameter_specs)} parameters")
    if parameters.unused:
        print(f"not taken over, for the loss does not depend on them: {', '.join(parameters.unused)}")


def _possible(job: Job) -> list[int]:
    """Micro-batch sizes that the job allows."""
    if job.micro_batch_size is not None:
        return [job.micro_batch_size]
    return [size for size in range(1, job.batch_size + 1) if job.batch_size % size == 0]
