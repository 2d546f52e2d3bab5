"""``morph stop``: end a run from another terminal, saved and resumable."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def stop_command(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run's directory.")],
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for the end; 0: only ask.")] = 600.0,
) -> None:
    """Ask a run to end at its next step boundary, with a checkpoint, and wait until it has.

    \b
    Example:
      morph stop runs/tiny
    """
    from manager.run_dir import read_facts
    from manager.stopping import ask_to_stop, wait_for_end

    read_facts(run_dir)
    holder = ask_to_stop(run_dir)
    print(f"process {holder} was asked to stop at the next step boundary", flush=True)
    if wait:
        wait_for_end(run_dir, wait)
        print("the run has ended; the same command goes on from its newest checkpoint")
