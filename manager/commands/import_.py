"""``morph import``: make a run directory whose version 0 comes from a plain state_dict or from another run."""

from __future__ import annotations

import re
import shutil
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from morph.cli.reading.options import JobArgument, MicroBatchOption
from morph.cli.reading.progress import progress

if TYPE_CHECKING:
    from morph.jobs.job import Job
    from morph.runtime.state.model_state import CheckpointWeights


def import_command(
    context: typer.Context,
    job: JobArgument,
    weights: Annotated[
        Path,
        typer.Argument(metavar="WEIGHTS", help="A safetensors file, a folder of them, or another run's directory."),
    ],
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A new or empty directory.")],
    m: MicroBatchOption = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(metavar="REGEX=TEXT", help="Replace matches in names of WEIGHTS with TEXT. Repeatable."),
    ] = None,
    skip: Annotated[
        list[str] | None, typer.Option(metavar="REGEX", help="Leave out entries of WEIGHTS whose names match.")
    ] = None,
    fresh: Annotated[
        list[str] | None,
        typer.Option(metavar="REGEX", help="Parameters that WEIGHTS may lack: the job initialises them."),
    ] = None,
    optimizer_state: Annotated[
        bool, typer.Option("--optimizer-state", help="Also take the state of the other run's optimizer.")
    ] = False,
) -> None:
    """Begin a run from given weights: `morph run` with the same RUN_DIR trains them further.

    Names, shapes and types must be those of the job's model; a tied weight needs only one of its names. Frozen weights
    and buffers of WEIGHTS that differ from the job's are stored once for the run, beside its checkpoints. If WEIGHTS is
    another run, its newest checkpoint is used.

    \b
    Example:
      morph import my_job.py:job pretrained.safetensors runs/tuned
      morph import my_job.py:job llama/ runs/tuned --rename '^model\\.=backbone.' \\
          --skip 'lm_head.*' --fresh 'score.*'
      morph import deeper_job.py:job runs/tuned runs/deeper --optimizer-state \\
          --fresh 'layers\\.12\\..*'
    """
    with progress() as show_progress:
        show_progress(f"loading PyTorch and {job}", 0.0)
        from manager.run_dir import RunDir, RunFacts, is_run
        from morph.checkpoint.frozen_weights import write_frozen_weights
        from morph.checkpoint.plain_file import PlainFile
        from morph.contract.errors import InputError, JobError, RunDirError
        from morph.cutting import cut, export_job
        from morph.jobs.files import imported_once
        from morph.jobs.job import load_job
        from morph.runtime.attendants.checkpoint_writer import write_initial_checkpoint
        from morph.runtime.state.model_state import ImportedParameters, ImportRules

        target = run_dir.resolve()
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise RunDirError("is not a new or empty directory", source=str(run_dir))
        rules = ImportRules(
            tuple(_rename(text) for text in rename or ()),
            tuple(_pattern("--skip", text) for text in skip or ()),
            tuple(_pattern("--fresh", text) for text in fresh or ()),
        )
        if optimizer_state and not is_run(weights):
            allowed = "a run directory: files of weights hold no optimizer state"
            raise InputError("has none", source=str(weights), field="--optimizer-state", allowed=allowed)
        file = _stored_run(weights) if is_run(weights) else PlainFile(weights)
        context.with_resource(imported_once(job))
        loaded = load_job(job)
        micro_batch_size = loaded.micro_batch_size if m is None else m
        if micro_batch_size is None or micro_batch_size not in _possible(loaded):
            allowed = ", ".join(map(str, _possible(loaded)))
            raise JobError("the run needs a micro-batch size", source=job, field="--m", value=m, allowed=allowed)
        show_progress("tracing the model", 0.2)
        exported = export_job(loaded)
        model = cut(exported, num_sections=loaded.num_sections, micro_batch_size=micro_batch_size)
        parameters = ImportedParameters(loaded, model, file, exported.initial_buffers, rules)
        facts = RunFacts(
            job=job,
            fingerprint=model.fingerprint,
            micro_batch_size=micro_batch_size,
            batch_size=loaded.batch_size,
            num_sections=len(model.sections),
        )
        prepare = parameters.give_optimizer_state if optimizer_state else None
        # written beside its place and then moved: an unfinished import never looks like a run
        partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
        try:
            show_progress("writing the first checkpoint", 0.5)
            with RunDir(partial, facts) as opened:
                url, names = opened.checkpoint_url, parameters.frozen
                digest = write_frozen_weights(url, names, parameters.__getitem__) if names else ""
                write_initial_checkpoint(loaded, model, parameters, url, frozen=digest, prepare=prepare)
            partial.replace(target)
        except OSError as error:
            raise RunDirError(f"cannot be written: {error}", source=str(run_dir)) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    print(f"{run_dir} begins with the weights of {weights}: {len(model.parameter_specs)} parameters")
    if parameters.fresh:
        print(f"missing in these weights, so the job initialises them: {', '.join(parameters.fresh)}")
    if parameters.frozen:
        print(f"frozen, and stored once for the run: {', '.join(parameters.frozen)}")
    if parameters.unused:
        print(f"not imported, because the loss does not depend on them: {', '.join(parameters.unused)}")


def _stored_run(path: Path) -> CheckpointWeights:
    from manager.run.checkpoint_location import stored_at, with_newest
    from morph.runtime.state.model_state import CheckpointWeights

    stored = stored_at(str(path))
    return with_newest(stored, lambda manifest: CheckpointWeights(str(path), stored.url, manifest))[1]


def _rename(text: str) -> tuple[re.Pattern[str], str]:
    from morph.contract.errors import InputError

    pattern, equals, new = text.rpartition("=")
    if not equals:
        raise InputError("has no =", field="--rename", value=text, allowed="REGEX=TEXT")
    return _pattern("--rename", pattern), new


def _pattern(option: str, text: str) -> re.Pattern[str]:
    from morph.contract.errors import InputError

    try:
        return re.compile(text)
    except re.error as error:
        allowed = "a regular expression of Python's re"
        raise InputError(f"cannot be read: {error}", field=option, value=text, allowed=allowed) from error


def _possible(job: Job) -> list[int]:
    """Return the micro-batch sizes that the job allows."""
    if job.micro_batch_size is not None:
        return [job.micro_batch_size]
    return [size for size in range(1, job.batch_size + 1) if job.batch_size % size == 0]
