"""``morph import``: a run directory whose version 0 comes from a plain state_dict, or from another run."""

from __future__ import annotations

import re
import shutil
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from morph.cli.reading.options import JobArgument, MicroBatchOption
from morph.cli.reading.progress import doing

if TYPE_CHECKING:
    from morph.jobs.job import Job
    from morph.runtime.state.model_state import StoredRun


def import_command(
    job: JobArgument,
    weights: Annotated[
        Path,
        typer.Argument(metavar="WEIGHTS", help="A safetensors file, a folder of them, or another run's directory."),
    ],
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A new or empty directory.")],
    m: MicroBatchOption = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(metavar="REGEX=TEXT", help="What matches in a name of WEIGHTS becomes TEXT; may be repeated."),
    ] = None,
    skip: Annotated[
        list[str] | None, typer.Option(metavar="REGEX", help="Entries of WEIGHTS with such a name are left out.")
    ] = None,
    fresh: Annotated[
        list[str] | None,
        typer.Option(metavar="REGEX", help="Parameters that WEIGHTS may lack: they begin as the job makes them."),
    ] = None,
    optimizer_state: Annotated[
        bool, typer.Option("--optimizer-state", help="Take what the other run's optimizer keeps, too.")
    ] = False,
) -> None:
    """Begin a run from given weights: `morph run` with the same RUN_DIR trains on from them.

    Names, shapes and types must be those of the job's model; a tied weight needs one of its names only. Frozen weights
    and buffers of WEIGHTS that the job's model makes otherwise are kept once for the run, beside its checkpoints. Of
    another run the newest checkpoint is taken.

    \b
    Example:
      morph import my_job.py:job pretrained.safetensors runs/tuned
      morph import my_job.py:job llama/ runs/tuned --rename '^model\\.=backbone.' --skip 'lm_head.*' --fresh 'score.*'
      morph import wider_job.py:job runs/tuned runs/wider --fresh 'layers\\.12\\..*' --optimizer-state
      morph run my_job.py:job --profile profile.json --cluster cluster.yaml --run-dir runs/tuned
    """
    doing(f"loading PyTorch and {job}")
    from manager.run_dir import RunDir, RunFacts, is_run
    from morph.checkpoint.frozen_weights import write_frozen_weights
    from morph.checkpoint.plain_file import PlainFile
    from morph.contract.errors import InputError, JobError, RunDirError
    from morph.cutting import cut, export_job
    from morph.jobs.job import load_job
    from morph.runtime.state.checkpoint_writer import write_initial_checkpoint
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
        allowed = "a run directory: files of weights hold no state of an optimizer"
        raise InputError("has none", source=str(weights), field="--optimizer-state", allowed=allowed)
    file = _stored_run(weights) if is_run(weights) else PlainFile(weights)
    loaded = load_job(job)
    micro_batch_size = loaded.micro_batch_size if m is None else m
    if micro_batch_size is None or micro_batch_size not in _possible(loaded):
        allowed = ", ".join(map(str, _possible(loaded)))
        raise JobError("the run needs a micro-batch size", source=job, field="--m", value=m, allowed=allowed)
    doing("tracing the model")
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
    # made beside its place and then moved: half an import never looks like a run
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
    try:
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
        print(f"not in it, so they begin as the job makes them: {', '.join(parameters.fresh)}")
    if parameters.frozen:
        print(f"frozen, and kept once for the run: {', '.join(parameters.frozen)}")
    if parameters.unused:
        print(f"not taken over, for the loss does not depend on them: {', '.join(parameters.unused)}")


def _stored_run(path: Path) -> StoredRun:
    from manager.run.checkpoint_location import stored_at, with_newest
    from morph.runtime.state.model_state import StoredRun

    stored = stored_at(str(path))
    return with_newest(stored, lambda manifest: StoredRun(str(path), stored.url, manifest))[1]


def _rename(text: str) -> tuple[re.Pattern[str], str]:
    from morph.contract.errors import InputError

    pattern, equals, new = text.rpartition("=")
    if not equals:
        raise InputError("does not say what becomes of a name", field="--rename", value=text, allowed="REGEX=TEXT")
    return _pattern("--rename", pattern), new


def _pattern(option: str, text: str) -> re.Pattern[str]:
    from morph.contract.errors import InputError

    try:
        return re.compile(text)
    except re.error as error:
        allowed = "a regular expression, as Python's re has them"
        raise InputError(f"cannot be read: {error}", field=option, value=text, allowed=allowed) from error


def _possible(job: Job) -> list[int]:
    """Micro-batch sizes that the job allows."""
    if job.micro_batch_size is not None:
        return [job.micro_batch_size]
    return [size for size in range(1, job.batch_size + 1) if job.batch_size % size == 0]
