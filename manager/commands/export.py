"""``morph export``: write a run's weights as one plain state_dict."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from morph.cli.reading.options import StoredArgument
from morph.cli.reading.progress import progress
from morph.words import counted

if TYPE_CHECKING:
    from torch import Tensor, nn

    from manager.run.checkpoint_location import Stored
    from morph.contract.checkpoint import Manifest
    from morph.jobs.job import Job


def export_command(
    context: typer.Context,
    source: StoredArgument,
    output: Annotated[
        Path, typer.Argument(metavar="OUT", help="File (.safetensors, .pt, .pth or .bin) or folder to write.")
    ],
    version: Annotated[
        int | None, typer.Option(min=0, help="Version (steps applied); default: the newest intact checkpoint.")
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="Export the version that evaluations found to be the best (Job.best).")
    ] = False,
    job: Annotated[
        str | None,
        typer.Option(
            metavar="JOB", help="path/to/file.py:name; default: the code that the run trains on. Needed for a URL."
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists.")] = False,
) -> None:
    """Write a run's weights under your model's own names: parameters, tied names, buffers.

    The file holds a plain state_dict for model.load_state_dict. The ending of its name gives the format: .safetensors,
    which transformers' from_pretrained reads too, or .pt, .pth or .bin for the format of torch.save, which torch.load
    reads with weights_only=True. A name without an ending is a folder, written by the save_pretrained of a model of
    transformers or peft: it holds tied tensors once, and of a model with adapters (LoRA) only the adapters. Without
    --version, damaged checkpoints are skipped, with a message each, and the newest intact one is written.

    \b
    Example:
      morph export runs/tiny tiny.safetensors
      morph export runs/tuned adapter
      morph export runs/tiny best.safetensors --best
      morph export az://container/run tiny.safetensors --job my_job.py:job
    """
    from manager.run.checkpoint_location import no_checkpoint, stored_at, unknown_version, with_newest
    from morph.contract.errors import InputError

    if best and version is not None:
        raise InputError("is given with --version", field="--best", allowed="one of the two")
    stored = stored_at(source)
    if output.exists() and not overwrite:
        raise InputError("exists already", source=str(output), allowed="a new file, or --overwrite")
    with progress() as show_progress:
        show_progress(f"loading PyTorch and the checkpoint in {source}", 0.0)
        from morph.checkpoint.manifest import complete_versions, read_manifest
        from morph.checkpoint.plain_file import check_plain_name, write_folder, write_plain_file
        from morph.checkpoint.retention import best_version
        from morph.runtime.state.model_state import export_pretrained, export_state

        as_folder = not output.suffix or output.is_dir()
        if not as_folder:
            check_plain_name(output)
        if best:
            version = best_version(stored.url)
            if version is None:
                allowed = "the checkpoints of a job with Job.best, once an evaluation has found one"
                raise InputError("has no checkpoint that is marked as the best", source=source, allowed=allowed)
        known = complete_versions(stored.url)
        if not known:
            raise no_checkpoint(stored)
        if version is not None and version not in known:
            raise unknown_version(stored, "--version", version, known)
        show_progress("tracing the model", 0.2)
        loaded = loaded_job(context, stored, job)

        def exported(manifest: Manifest) -> tuple[nn.Module | None, dict[str, Tensor]]:
            if as_folder:
                return export_pretrained(loaded, stored.url, manifest)
            return None, export_state(loaded, stored.url, manifest)

        show_progress("reading the weights", 0.5)
        if version is None:
            manifest, (model, tensors) = with_newest(stored, exported)
        else:
            manifest = read_manifest(stored.url, version)
            model, tensors = exported(manifest)
        size_bytes = sum(tensor.nbytes for tensor in tensors.values())
        size = f"{counted(len(tensors), 'tensor')}, {size_bytes / 2**20:.1f} MiB"
        show_progress(f"writing {output}", 0.8)
        if model is None:
            write_plain_file(output, tensors)
        else:
            save: Any = model.save_pretrained
            write_folder(output, lambda folder: _save_folder(save, folder, tensors))
    print(f"wrote version {manifest.version} to {output}: {size}")


def _save_folder(save: Any, folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write tied tensors once if ``from_pretrained`` ties them again, otherwise under each name."""
    from morph.checkpoint.plain_file import apart

    try:
        save(folder, state_dict=tensors)
    except RuntimeError:  # transformers raises it for tensors that are tied, though not by the model's config
        save(folder, state_dict=apart(tensors))


def loaded_job(context: typer.Context, stored: Stored, job: str | None) -> Job:
    """Return the named job, else the job that the run trains, even if its files were changed or removed.

    Its files are in use until the command ends.
    """
    from manager.run.job_code import kept
    from manager.run_dir import read_facts
    from morph.contract.errors import InputError
    from morph.jobs.files import JobFiles, imported_once
    from morph.jobs.job import load_job
    from morph.jobs.snapshot import files_of

    if job is not None:
        context.with_resource(imported_once(job))
        return load_job(job)
    if stored.run_dir is None:
        raise InputError("is not given", field="--job", allowed="path/to/file.py:name; no code is read from storage")
    facts = read_facts(stored.run_dir)
    if facts.code_sha256 is not None:
        code = kept(stored.run_dir, facts.code_sha256, facts.job)
        context.with_resource(JobFiles(Path(code.folder), files_of(code)).in_use())
    return load_job(facts.job)
