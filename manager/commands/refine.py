"""``morph profile refine``: a run's profile with the section times that its workers measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from morph.contract.files import check_output


def refine_command(
    run_dir: Annotated[Path, typer.Argument(help="The run's directory.", metavar="RUN_DIR", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="File of the profile. Default: RUN_DIR/profile.json.")
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option("--profile", help="Profile with which the run planned. Default: the one that its command names."),
    ] = None,
) -> None:
    """Write a run's profile with the section times that its workers measured.

    \b
    Example:
      morph profile refine runs/tiny -o profile.json
    """
    from manager.report.journal_reader import read_report
    from manager.run.request import is_job_file, kept_request
    from manager.run_dir import read_facts
    from morph.contract.errors import ProfileError, RunDirError
    from morph.contract.files import write_output
    from morph.contract.profile import load_profile
    from morph.yaml_files import load_job_file

    facts, target = read_facts(run_dir), output or run_dir / "profile.json"
    check_output(target)
    path = profile
    if path is None:
        request = kept_request(run_dir)
        job, path = Path(request.job), request.profile
        if is_job_file(request.job):
            path = job.parent / load_job_file(job, request.settings).job.profile
    if path is None:
        raise RunDirError("does not name its profile", source=str(run_dir), allowed="--profile FILE")
    known = load_profile(path)
    if known.job.fingerprint != facts.fingerprint:
        raise ProfileError(
            "belongs to another model than this run", source=str(path), allowed=f"the profile of {run_dir}"
        )
    correction = read_report(run_dir).correction
    if correction is None:
        raise RunDirError("has measured no section times that differ from its profile's", source=str(run_dir))
    factors, types = correction.factors, {name: each.factors for name, each in correction.types.items()}
    if types:  # a type whose name is not among the node types is the profile's own
        added = {node_type.name for node_type in known.node_types}
        own = [each for name, each in types.items() if name not in added]
        factors = own[0] if own else (1.0,) * known.num_sections
    refined = known.corrected(factors, types)
    write_output(target, refined.model_dump_json(indent=2) + "\n")
    print(correction.sentence)
    print(f"written: {target}")
