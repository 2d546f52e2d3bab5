"""``morph profile``: show what calibration measured, or correct it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from morph.cli.reading.options import PngOption, ProfileArgument
from morph.contract.files import check_output

profile_app = typer.Typer(
    help="Show a profile, or correct it by a run's times.\n\n\b\nExample:\n  morph profile show profile.json",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@profile_app.callback()
def profile_root() -> None:
    """Group the commands."""


@profile_app.command("show")
def show_command(
    profile: ProfileArgument,
    node_type: Annotated[
        str | None, typer.Option("--node-type", help="Show the times of this type of node.", show_default=False)
    ] = None,
    png: PngOption = None,
) -> None:
    """Show a profile as tables, and its curves as a picture.

    \b
    Example:
      morph profile show profile.json
      morph profile show profile.json --png profile.png
    """
    from calibrate.render import tables
    from morph.cli.reading.errors import places
    from morph.contract.errors import ProfileError
    from morph.contract.profile import load_profile
    from morph.tables import wide_console

    if png is not None:
        check_output(png, ProfileError)
    shown = load_profile(profile)
    if node_type is not None:
        with places({"node_types": (str(profile), "--node-type")}):
            shown = shown.for_node_type(node_type)
    if png is not None:
        from calibrate.render.picture import draw_profile

        draw_profile(shown, png)
    console = wide_console(tables.WIDTH)
    console.print(tables.fact_table(shown))
    console.print(tables.section_table(shown))
    for line in tables.whole_model_lines(shown):
        console.print(line, highlight=False)
    console.print(tables.link_table(shown))
    if shown.all_reduce:
        console.print(tables.all_reduce_table(shown))
    if shown.node_types and node_type is None:
        console.print(tables.node_type_table(shown))
    if shown.sources:
        console.print(tables.source_table(shown))
    if png is not None:
        console.print(f"Drew {png}.", soft_wrap=True)


@profile_app.command("refine")
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
    from manager.run.request import kept_request
    from manager.run_dir import read_facts
    from morph.contract.errors import ProfileError, RunDirError
    from morph.contract.files import write_output
    from morph.contract.profile import load_profile

    facts = read_facts(run_dir)
    correction = read_report(run_dir).correction
    if correction is None:
        raise RunDirError("has measured nothing that its profile does not say", source=str(run_dir))
    path = profile or kept_request(run_dir).profile
    if path is None:
        raise RunDirError("does not name its profile", source=str(run_dir), allowed="--profile FILE")
    known = load_profile(path)
    if known.job.fingerprint != facts.fingerprint:
        raise ProfileError(
            "belongs to another model than this run", source=str(path), allowed=f"the profile of {run_dir}"
        )
    target = output or run_dir / "profile.json"
    check_output(target, ProfileError)
    factors, types = correction.factors, {name: each.factors for name, each in correction.types.items()}
    if types:  # a type whose name is not among the node types is the profile's own
        added = {node_type.name for node_type in known.node_types}
        own = [each for name, each in types.items() if name not in added]
        factors = own[0] if own else (1.0,) * known.num_sections
    refined = known.corrected(factors, types)
    write_output(target, refined.model_dump_json(indent=2) + "\n", ProfileError)
    print(correction.sentence)
    print(f"written: {target}")
