"""``morph profile add-type``: adds a type of GPU that was not measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from morph.cli.reading.options import ProfileArgument
from morph.contract.files import check_output


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
    check_output(target)
    if any(name == each.name and not each.environment.estimated for each in known.node_types):
        raise ProfileError("was measured", source=str(profile), field="NAME", value=name, allowed="another name")
    ranges.FACTOR.check("--slower", slower)
    if memory_gib is not None:
        ranges.MEMORY_GIB.check("--memory-gib", memory_gib)
    memory_bytes = None if memory_gib is None else int(memory_gib * 2**30)
    others = tuple(each for each in known.node_types if each.name != name)
    added = with_type(known.model_copy(update={"node_types": others}), name, slower, memory_bytes)
    write_output(target, added.model_dump_json(indent=2) + "\n")
    print(f"{name}: {added.node_types[-1].environment.estimated} (not measured); written: {target}")
