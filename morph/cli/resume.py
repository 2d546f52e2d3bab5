"""``morph resume``: go on with a run by its directory alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from morph.cli.carry_out import LogFormat, LogFormatOption, PageOption, PlainOption, Shown, carry_out


def resume_command(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run's directory.")],
    plain: PlainOption = False,
    log_format: LogFormatOption = LogFormat.TEXT,
    page: PageOption = True,
) -> None:
    """Go on with a run as it was started: the same as giving its `morph run` command again.

    It takes over from a run whose process was killed, while its VMs live, and goes on from the newest checkpoint
    otherwise. It refuses when the job's file, the profile, the cluster file or the trace were changed or are gone.

    \b
    Example:
      morph resume runs/tiny
    """
    from manager.run_dir import read_facts
    from morph.cli.kept_command import kept_command

    read_facts(run_dir)
    carry_out(kept_command(run_dir), run_dir, Shown(plain, log_format, page))
