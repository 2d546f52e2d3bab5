"""``morph export``: a run's weights as one plain state_dict."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from morph.cli.reading.options import RunDirArgument

if TYPE_CHECKING:
    from manager.run_dir import RunFacts
    from morph.job import Job


def export_command(
    run_dir: RunDirArgument,
    output: Annotated[Path, typer.Argument(metavar="OUT", help="File to write, such as out.safetensors.")],
    version: Annotated[
        int | None, typer.Option(min=0, help="Steps applied; default: of the newest complete checkpoint.")
    ] = None,
    job: Annotated[
        str | None, typer.Option(metavar="JOB", help="path/to/file.py:name; default: the code that the run trains on.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists.")] = False,
) -> None:
    """Write a run's weights under your model's own names: parameters, tied names, buffers.

    The file is a safetensors state_dict: model.load_state_dict and transformers' from_pretrained take it.

    \b
    Example:
      morph export runs/tiny tiny.safetensors
    """
    from manager.run_dir import checkpoint_url, read_facts
    from morph.checkpoint.manifest import complete_versions, read_manifest
    from morph.checkpoint.plain_file import write_plain_file
    from morph.contract.errors import InputError, RunDirError
    from morph.runtime.state.model_state import export_state

    facts = read_facts(run_dir)
    if output.exists() and not overwrite:
        raise InputError("exists already", source=str(output), allowed="a new file, or --overwrite")
    url = checkpoint_url(run_dir, facts)
    versions = complete_versions(url)
    if not versions:
        raise RunDirError("holds no complete checkpoint yet", source=str(run_dir))
    wanted = versions[-1] if version is None else version
    if wanted not in versions:
        allowed = ", ".join(map(str, versions))
        raise RunDirError(
            "has no such checkpoint", source=str(run_dir), field="--version", value=wanted, allowed=allowed
        )
    tensors = export_state(_loaded(run_dir, facts, job), url, read_manifest(url, wanted))
    write_plain_file(output, tensors)
    size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    print(f"wrote version {wanted} to {output}: {len(tensors)} tensors, {size_bytes / 2**20:.1f} MiB")


def _loaded(run_dir: Path, facts: RunFacts, job: str | None) -> Job:
    """The job that is named; else the one that the run trains, whatever became of its files."""
    from manager.engine.run.job_code import kept
    from morph.job import load_job
    from morph.job_files import JobFiles
    from morph.runtime.process.job_code import files_of

    if job is None and facts.code_sha256 is not None:
        code = kept(run_dir, facts.code_sha256, facts.job)
        JobFiles(Path(code.folder), files_of(code)).install()
    return load_job(job or facts.job)
