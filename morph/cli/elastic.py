"""``morph elastic``: start workers of a training script that continues when some of them are lost."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from morph.contract.errors import InputError


def elastic_command(
    command: Annotated[list[str], typer.Argument(help="Command of each worker, after --.", metavar="-- COMMAND...")],
    workers: Annotated[int, typer.Option(min=1, max=1024, help="Workers to start on this machine.")] = 1,
    founders: Annotated[
        int | None,
        typer.Option(
            min=1, max=1024, help="Workers, of all machines, that begin together; default: those of this machine."
        ),
    ] = None,
    listen: Annotated[
        str,
        typer.Option(
            help="Address at which workers of this machine listen; with a port, others can join there.",
            metavar="HOST[:PORT]",
        ),
    ] = "127.0.0.1",
    join: Annotated[
        str | None,
        typer.Option(
            help="Join the job of a worker that listens at this address, or at one of several.",
            metavar="HOST:PORT[,HOST:PORT...]",
        ),
    ] = None,
    silence_s: Annotated[
        float,
        typer.Option(min=0.5, max=600, help="A worker that is silent for this many seconds counts as lost."),
    ] = 5.0,
) -> None:
    """Start workers of a script that uses morph.elastic; they continue when some of them are lost.

    On one machine nothing else is needed. On several machines, set MORPH_ELASTIC_SECRET to the same long random text on
    each, start the first with --listen and an address that the others reach, and the others with --join. A command that
    joins may have --listen HOST:PORT too; machines that join later name one or more of these addresses, in case some
    are gone. The command ends with its last worker, with code 0 if a worker finished.

    \b
    Example:
      morph elastic --workers 4 -- python train.py
      morph elastic --listen 10.0.0.1:29400 --founders 4 --workers 2 \\
          -- python train.py
      morph elastic --listen 10.0.0.2 --join 10.0.0.1:29400 --workers 2 \\
          -- python train.py
    """
    from morph.elastic.invitation import SECRET, parse_address, parse_addresses
    from morph.elastic.launcher import LaunchSpec, launch
    from morph.link.proof import new_secret

    host, port = parse_address(listen, "--listen") if ":" in listen else (listen, 0)
    where = parse_addresses(join, "--join") if join is not None else ()
    given = os.environ.get(SECRET, "")
    if where and founders is not None:
        raise InputError("is set where the job begins", field="--founders", allowed="only without --join")
    if not given and (where or (founders is not None and founders > workers)):
        raise InputError(
            "is not set", source="environment", field=SECRET, allowed="one for all machines: openssl rand -hex 32"
        )
    num_founders = founders if founders is not None else workers
    if not where and num_founders < workers:
        raise InputError("is less than --workers", field="--founders", value=founders, allowed=f"{workers} or more")
    plan = LaunchSpec(
        command=tuple(command),
        num_workers=workers,
        num_founders=num_founders,
        listen=(host, port),
        join=where,
        secret=given or new_secret(),
        is_open=bool(given),
        silence_s=silence_s,
    )
    try:
        outcome = launch(plan)
    except OSError as error:
        if error.filename is not None:  # the program's; an error of a socket has none
            told, allowed = f"cannot be started: {error.strerror}", "a program: -- python train.py"
            raise InputError(told, field="COMMAND", value=command[0], allowed=allowed) from error
        raise InputError(
            f"cannot be listened on: {error}", field="--listen", value=listen, allowed="HOST[:PORT]"
        ) from error
    raise typer.Exit(outcome.code)
