"""``morph profile``: shows and estimates; ``morph.cli.main`` names the commands that add to a profile."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from morph.cli.reading.options import JobArgument, PngOption, ProfileArgument
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
    from morph.contract.profile import load_profile
    from morph.tables import table, wide_console

    check_output(png, read=[profile])
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
        console.print(table("not measured here", ("field", "source"), sorted(shown.sources.items()), left=2))
    if png is not None:
        print(f"drawn: {png}")


@profile_app.command("estimate")
def estimate_command(
    job: JobArgument,
    device: Annotated[
        list[str],
        typer.Option("--device", help="h100, a100, v100, t4, l4, ... Repeat it for further types of node."),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="File of the profile.")] = Path("profile.json"),
    reach: Annotated[
        str | None,
        typer.Option(
            "--reach",
            metavar="NAME=SHARE,...",
            help="Shares of the data sheets' speeds that are reached: compute, memory, links, network. "
            "Default: compute=0.8,memory=0.9,links=0.65,network=0.9.",
        ),
    ] = None,
    gbit_per_s: Annotated[
        float | None,
        typer.Option("--gbit-per-s", help="Bandwidth between nodes for each GPU. Default: the data sheet's."),
    ] = None,
    micro_batch: Annotated[
        list[int] | None,
        typer.Option("--micro-batch", "-m", min=1, help="As of `morph calibrate`. Repeatable."),
    ] = None,
) -> None:
    """Make a profile without a GPU, from the job's operations and the data sheets of GPUs.

    No weights are read. The profile and every plan say that its times were estimated; `morph calibrate` measures them.

    \b
    Example:
      morph profile estimate configs/jobs/llama.py:llama_8b --device h100
      morph profile estimate job.py:job --device v100 --device t4 -o two.json
    """
    from calibrate.commands.calibrate import PLACES
    from calibrate.estimating.data_sheets import Reached, sheet_of
    from calibrate.render import tables
    from morph.cli.reading.errors import places
    from morph.cli.reading.progress import doing, progress
    from morph.contract.profile import estimates, write_profile

    check_output(output)
    reached = Reached.parse(reach)
    for name in device:
        sheet_of(name)
    doing(f"loading PyTorch and {job}")
    from calibrate.estimating.estimate import estimate_profile
    from morph.preflight.checks import users_code

    with progress() as advance, users_code(job), places(PLACES):
        made = estimate_profile(
            job, device, reached=reached, gbit_per_s=gbit_per_s, micro_batch_sizes=micro_batch, progress=advance
        )
    write_profile(made, output)
    for line in (*tables.whole_model_lines(made), *estimates(made, device)):
        print(line)
    print(f"written: {output}")
