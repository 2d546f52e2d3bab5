"""``morph resume``: go on with a run by its directory alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from morph.cli.carry_out import IfChangedOption, LogFormat, LogFormatOption, PageOption, PlainOption, Shown, carry_out
from morph.cli.run_code import IfChanged


def resume_command(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run's directory.")],
    plain: PlainOption = False,
    log_format: LogFormatOption = LogFormat.TEXT,
    page: PageOption = True,
    if_changed: IfChangedOption = IfChanged.REFUSE,
) -> None:
    """Go on with a run as it was started: the same as giving its `morph run` command again.

    It takes over from a run whose process was killed, while its VMs live, and goes on from the newest checkpoint
    otherwise. It refuses when the job's code (but see --if-changed), the profile, the cluster file or the trace were
    changed or are gone.

    \b
    Example:
      morph resume runs/tiny
    """
    from manager.run_dir import read_facts
    from morph.cli.kept_command import kept_command

    read_facts(run_dir)
    carry_out(kept_command(run_dir), run_dir, Shown(plain, log_format, page), if_changed)
