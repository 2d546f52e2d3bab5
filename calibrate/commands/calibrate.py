"""``morph calibrate``: measure a job once on this machine."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from calibrate.commands.calibrate_peer import TOKEN_HELP
from morph.cli.reading.help import offered
from morph.cli.reading.options import JobArgument
from morph.cli.reading.progress import Told, doing, progress

if TYPE_CHECKING:
    from calibrate.computing.subject import Subject
    from calibrate.links.two_nodes import PeerAddress
    from morph.contract.profile import Profile

CALIBRATE_HELP = """Measure a job on this machine: once, section by section, into a profile.

    The profile holds for any number of GPUs, and other machines can read it. On a machine of another type,
    --add-node-type adds the differences to a profile. With --peer, links and all-reduces to another node, on which
    `morph calibrate-peer` listens, are measured.

    \b
    Example:
      morph calibrate configs/jobs/tiny_gpt.py:job -o profile.json
      morph calibrate job.py:job --add-node-type small --profile profile.json
      morph calibrate job.py:job --peer 10.0.0.2:7420 --token-file peer.token
      morph calibrate job.py:job --between-zones --profile p.json --peer b:7420
"""
DEFAULT_OUTPUT = Path("profile.json")
_BUSY_SHARE = 0.5
PLACES = {
    "device": ("", "--device"),
    "checkpoint_url": ("", "--checkpoint-url"),
    "micro_batch_size": ("", "--micro-batch"),
}


class LinkName(StrEnum):
    """The values of ``LinkSetting``."""

    STAGED = "staged"
    IPC = "ipc"
    AUTO = "auto"


class RingName(StrEnum):
    """The values of ``RingSetting``."""

    GLOO = "gloo"
    NCCL = "nccl"
    AUTO = "auto"


def calibrate_command(
    context: typer.Context,
    job: JobArgument,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="File of the profile. Default: profile.json, or the file of --profile."),
    ] = None,
    micro_batch: Annotated[
        list[int] | None,
        typer.Option(
            "--micro-batch",
            "-m",
            min=1,
            help="Micro-batch size to measure. Default: the job's, else growing sizes. Repeatable.",
        ),
    ] = None,
    samples: Annotated[
        int, typer.Option(min=5, help="Most samples of each time, from 5. Fewer are taken once the median is stable.")
    ] = 100,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    checkpoint_url: Annotated[
        str | None,
        typer.Option("--checkpoint-url", help="fsspec URL for checkpoints: measure uploads to it."),
    ] = None,
    commit_round: Annotated[
        bool, typer.Option("--commit-round", help="Measure the manager's commit round with two workers.")
    ] = False,
    peer: Annotated[
        str | None,
        typer.Option("--peer", metavar="HOST:PORT", help="Measure links to a node with `morph calibrate-peer`."),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help=f"With --peer: {TOKEN_HELP}", show_default=False)
    ] = None,
    links: Annotated[
        LinkName, typer.Option("--links", help="With cuda: the run's vms.links, to measure.")
    ] = LinkName.STAGED,
    rings: Annotated[
        RingName, typer.Option("--rings", help="With cuda: the run's vms.rings, to measure.")
    ] = RingName.GLOO,
    node_type: Annotated[
        str | None, typer.Option("--add-node-type", metavar="NAME", help="Add this machine's type to --profile.")
    ] = None,
    between_zones: Annotated[
        bool, typer.Option("--between-zones", help="Add the links to a --peer in another zone.")
    ] = False,
    profile: Annotated[
        Path | None, typer.Option("--profile", help="The profile to which something is added.", show_default=False)
    ] = None,
) -> None:
    """Run the command; CALIBRATE_HELP is its help."""
    from morph.cli.reading.errors import places
    from morph.contract.errors import ConfigError
    from morph.contract.files import check_output
    from morph.contract.profile import load_profile, write_profile

    others = {
        "--micro-batch": micro_batch,
        "--checkpoint-url": checkpoint_url,
        "--commit-round": commit_round,
        "--peer": None if between_zones else peer,
        "--links": links != LinkName.STAGED,
        "--rings": rings != RingName.GLOO,
    }
    _check_options(node_type, between_zones, profile, others)
    if between_zones and peer is None:
        raise ConfigError("needs a node in another zone", field="--between-zones", allowed="with --peer")
    other_node = _peer_address(peer, token_file)
    path = output or profile or DEFAULT_OUTPUT
    check_output(path)
    known = load_profile(profile) if profile is not None else None
    busy = _busy_note()
    begun_s = time.monotonic()

    def measure(advance: Told) -> Profile:
        from calibrate import add_node_type, add_zone_links, calibrate
        from calibrate.links.network import Carriers

        if known is not None and node_type is not None:
            return add_node_type(known, job, node_type, num_samples=samples, device=device, progress=advance)
        if known is not None and other_node is not None:
            return add_zone_links(known, other_node, num_samples=samples, device=device, progress=advance)
        sizes = tuple(micro_batch) if micro_batch else None
        measured = calibrate(
            job,
            micro_batch_sizes=sizes,
            num_samples=samples,
            device=device,
            checkpoint_url=checkpoint_url,
            peer=other_node,
            carriers=Carriers(links.value, rings.value),
            progress=advance,
            check=_check_job,
        )
        return _with_commit(measured, offered(context, "commit round")(samples)) if commit_round else measured

    doing(f"loading PyTorch and {job}")
    from morph.preflight.checks import users_code

    with progress() as advance, users_code(job), places(PLACES):
        measured = measure(advance)
    write_profile(measured, path, as_read=known is not None)
    for field in ("links", "rings") if known is None else ():
        if field in measured.sources:
            print(f"warning: {field} were measured over {measured.sources[field]}", file=sys.stderr)
    _show(measured, node_type)
    if busy is not None:
        print(busy, file=sys.stderr)
    print(f"measured in {time.monotonic() - begun_s:.0f} s; written: {path}")


calibrate_command.__doc__ = CALIBRATE_HELP


def _check_job(subject: Subject) -> None:
    """Make the checks that a run makes, except those of the data, which was checked when the subject was loaded."""
    from calibrate.computing.compute import free_bytes_of
    from morph.preflight.checks import CutJob, Effort, check

    device, model = subject.device, subject.cut(subject.job.micro_batch_size or 1)
    effort = Effort(memory_bytes=free_bytes_of(device), device=device, leave_out=frozenset({"data"}))
    report = check(CutJob(subject.job_path, subject.job, subject.loaded.exported, model), effort)
    for line in (*report.warnings, report.comparison):
        print(line, file=sys.stderr)


def _busy_note() -> str | None:
    """Return a warning if other work, which shares caches and clock with the measurement, takes much of the machine."""
    num_cores = os.cpu_count() or 1
    load = os.getloadavg()[0]
    if load <= _BUSY_SHARE * num_cores:
        return None
    return f"warning: this machine was busy (load {load:.1f} on {num_cores} cores): measured times may be too long"


def _check_options(
    node_type: str | None, between_zones: bool, profile: Path | None, others: Mapping[str, object]
) -> None:
    from morph.contract.errors import ConfigError

    def refuse(field: str, message: str, value: object, allowed: str) -> None:
        raise ConfigError(message, field=field, value=value, allowed=allowed)

    option, given = ("--between-zones", "") if between_zones else ("--add-node-type", node_type)
    if given is None:
        if profile is not None:
            refuse("--profile", "is used only to add to it", str(profile), "with --add-node-type or --between-zones")
        return
    if between_zones and node_type is not None:
        refuse("--add-node-type", "contradicts --between-zones", node_type, "one of the two")
    if profile is None:
        refuse(option, "needs a profile to add to", given or None, "with --profile")
    for field, value in others.items():
        if value:
            refuse(field, f"contradicts {option}, which measures sizes of the profile", value, "one of the two")


def _peer_address(peer: str | None, token_file: Path | None) -> PeerAddress | None:
    from morph.contract.errors import ConfigError

    if peer is None:
        if token_file is not None:
            raise ConfigError("has no effect without --peer", field="--token-file", value=str(token_file))
        return None
    from calibrate.helpers.token import TOKEN_VARIABLE, find_token
    from calibrate.links.two_nodes import PeerAddress, parse_address

    host, port = parse_address(peer, "--peer")
    return PeerAddress(host, port, find_token(token_file, os.environ.get(TOKEN_VARIABLE)))


def _with_commit(profile: Profile, samples_s: list[float]) -> Profile:
    from calibrate.timing.samples import timing

    sources = {field: source for field, source in profile.sources.items() if field != "commit"}
    return profile.model_copy(update={"commit": timing(samples_s), "sources": sources})


def _show(profile: Profile, node_type: str | None) -> None:
    from calibrate.render import tables
    from morph.tables import wide_console

    console = wide_console(tables.WIDTH)
    shown = profile if node_type is None else profile.for_node_type(node_type)
    console.print(tables.section_table(shown))
    for line in tables.whole_model_lines(shown):
        console.print(line, highlight=False)
    console.print(f"times while others compute here: {tables.contention_text(shown.contention)}", highlight=False)
    if node_type is None:
        speed = profile.checkpoint_write_bytes_per_s / 1e6
        console.print(f"checkpoints: {speed:.0f} MB/s; {profile.environment.device}", highlight=False)
    else:
        console.print(tables.node_type_table(profile))
