"""``morph page``: where a run's page is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def page_command(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run's directory.")],
) -> None:
    """Print the address of the page that a running job serves on loopback, with its token; give it to nobody.

    \b
    Example:
      morph page runs/tiny
      curl -H "Authorization: Bearer TOKEN" http://127.0.0.1:PORT/metrics     # for Prometheus
    """
    from manager.dashboard.server import read_address
    from manager.run_dir import read_facts

    read_facts(run_dir)
    print(read_address(run_dir).with_token)
