"""``morph calibrate-peer``: the other end of ``morph calibrate --peer``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

DEFAULT_LISTEN = "127.0.0.1:7420"
TOKEN_HELP = "File with the shared secret of both nodes, mode 0600. Default: the environment variable MORPH_PEER_TOKEN."


def calibrate_peer_command(
    listen: Annotated[
        str,
        typer.Option("--listen", metavar="HOST:PORT", help="The address at which the other node reaches this one."),
    ] = DEFAULT_LISTEN,
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", help=f"{TOKEN_HELP} Created if it does not exist.", show_default=False),
    ] = None,
    wait_s: Annotated[float, typer.Option("--wait-s", min=1, help="Seconds to wait for a calibration.")] = 1800.0,
) -> None:
    """Lend this node to a calibration on another node: the link between the two is measured, then the command ends.

    \b
    Example, on one node and then on the other:
      morph calibrate-peer --listen 10.0.0.2:7420 --token-file peer.token
      morph calibrate job.py:job --peer 10.0.0.2:7420 --token-file peer.token
    """
    from calibrate.helpers.token import TOKEN_VARIABLE, find_token
    from calibrate.links.peer_node import PeerNode
    from calibrate.links.two_nodes import parse_address

    host, port = parse_address(listen, "--listen")
    token = find_token(token_file, os.environ.get(TOKEN_VARIABLE), make=True)

    def say(line: str) -> None:
        print(line, flush=True)

    with PeerNode(host, port, token, say) as node:
        shown = f"[{node.host}]" if ":" in node.host else node.host
        say(f"listening on {shown}:{node.port}")
        node.serve(wait_s)
