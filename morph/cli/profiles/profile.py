"""``morph profile``: show what calibration measured, add to it, or correct it."""

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
    from calibrate.estimating.data_sheets import Reached, sheet_of
    from calibrate.render import tables
    from morph.cli.reading.progress import doing, progress
    from morph.contract.errors import ProfileError
    from morph.contract.profile import estimates, write_profile

    check_output(output, ProfileError)
    reached = Reached.parse(reach)
    for name in device:
        sheet_of(name)
    doing(f"loading PyTorch and {job}")
    from calibrate.estimating.estimate import estimate_profile
    from morph.preflight.checks import users_code

    with progress() as told, users_code(job):
        made = estimate_profile(
            job, device, reached=reached, gbit_per_s=gbit_per_s, micro_batch_sizes=micro_batch, progress=told
        )
    write_profile(made, output)
    for line in (*tables.whole_model_lines(made), *estimates(made, device)):
        print(line)
    print(f"written: {output}")


@profile_app.command("add-type")
def add_type_command(
    profile: ProfileArgument,
    name: Annotated[str, typer.Argument(help="Name of the type, as in a pool.", metavar="NAME", show_default=False)],
    slower: Annotated[
        float, typer.Option("--slower", help="How many times as long every task takes as on the profile's own type.")
    ],
    memory_gib: Annotated[
        float | None, typer.Option("--memory-gib", help="Memory of one GPU in GiB. Default: no limit.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="File of the profile. Default: the given one.")
    ] = None,
) -> None:
    """Add a type of GPU that was not measured: its times are those of the profile, scaled.

    The factor may come from published speeds. The profile and every plan say that the type was not measured;
    `morph calibrate --add-node-type` replaces it by what it measures.

    \b
    Example:
      morph profile add-type profile.json t4 --slower 1.92 --memory-gib 15
    """
    from morph.contract import ranges
    from morph.contract.cluster import NODE_TYPE
    from morph.contract.errors import ProfileError
    from morph.contract.files import write_output
    from morph.contract.profile import load_profile
    from simulator.inputs.synthetic import with_type

    if not NODE_TYPE.fullmatch(name) or "@" in name:
        allowed = "a name without spaces, commas, = and @"
        raise ProfileError("is not a name of a type", field="NAME", value=name, allowed=allowed)
    known, target = load_profile(profile), output or profile
    check_output(target, ProfileError)
    if any(name == each.name and not each.environment.estimated for each in known.node_types):
        raise ProfileError("was measured", source=str(profile), field="NAME", value=name, allowed="another name")
    ranges.FACTOR.check("--slower", slower)
    if memory_gib is not None:
        ranges.MEMORY_GIB.check("--memory-gib", memory_gib)
    memory_bytes = None if memory_gib is None else int(memory_gib * 2**30)
    others = tuple(each for each in known.node_types if each.name != name)
    added = with_type(known.model_copy(update={"node_types": others}), name, slower, memory_bytes)
    write_output(target, added.model_dump_json(indent=2) + "\n", ProfileError)
    print(f"{name}: {added.node_types[-1].environment.estimated} (not measured); written: {target}")


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
