"""``morph profile``: shows what calibration measured; ``morph.cli.main`` names the commands that add to it."""

from __future__ import annotations

from typing import Annotated

import typer

from morph.cli.reading.options import PngOption, ProfileArgument
from morph.contract.files import check_output

profile_app = typer.Typer(
    help="Show a profile, add to it, or correct it by a run.\n\n\b\nExample:\n  morph profile show profile.json",
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
