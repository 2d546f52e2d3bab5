"""``morph profile``: look at what calibration measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from morph.cli.checks import check_output

profile_app = typer.Typer(
    help="Look at a profile that `morph calibrate` wrote.", no_args_is_help=True, rich_markup_mode=None
)


@profile_app.callback()
def profile_root() -> None:
    """Keep ``show`` a command of its own."""


@profile_app.command("show")
def show_command(
    profile: Annotated[
        Path, typer.Argument(help="Profile that `morph calibrate` wrote.", metavar="PROFILE", show_default=False)
    ],
    node_type: Annotated[
        str | None, typer.Option("--node-type", help="Show it as it is on this type of node.", show_default=False)
    ] = None,
    png: Annotated[Path | None, typer.Option("--png", help="Draw its curves into this PNG file.")] = None,
) -> None:
    """Show a profile as tables, and its curves as a picture.

    \b
    Example:
      morph profile show profile.json
      morph profile show profile.json --png profile.png
    """
    from morph.cli import profile_tables as tables
    from morph.cli.errors import places
    from morph.contract.errors import ProfileError
    from morph.contract.profile import load_profile

    if png is not None:
        check_output(png, ProfileError)
    shown = load_profile(profile)
    if node_type is not None:
        with places({"node_types": (str(profile), "--node-type")}):
            shown = shown.for_node_type(node_type)
    if png is not None:
        from morph.cli.profile_picture import draw_profile

        draw_profile(shown, png)
    console = tables.console()
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
