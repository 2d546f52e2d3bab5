"""``morph``: the commands and how they are started. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import atexit
import gc
import logging
import signal
from typing import Annotated

import typer

from morph import __version__
from morph.cli.checkpoints.checkpoints import checkpoints_app
from morph.cli.clouds.cloud import cloud_app
from morph.cli.clouds.config import config_app
from morph.cli.models.cut import cut_command
from morph.cli.models.export import export_command
from morph.cli.models.import_ import import_command
from morph.cli.models.trace_deps import trace_deps_command
from morph.cli.plans.plan import plan_command
from morph.cli.plans.rehearse import rehearse_command
from morph.cli.plans.replay import replay_command
from morph.cli.plans.simulate import simulate_command
from morph.cli.plans.trace import trace_app
from morph.cli.profiles.calibrate import calibrate_command
from morph.cli.profiles.calibrate_peer import calibrate_peer_command
from morph.cli.profiles.profile import profile_app
from morph.cli.reading.errors import MorphGroup
from morph.cli.runs.demo import demo_command
from morph.cli.runs.elastic import elastic_command
from morph.cli.runs.inject import inject_command
from morph.cli.runs.run import resume_command, run_command
from morph.cli.runs.spot_run import spot_run_command
from morph.cli.views.commands import events_command, page_command, report_command, status_command, stop_command
from morph.cli.views.history import history_command
from morph.cli.views.timeline import timeline_command

HELP = """Train one PyTorch model on whatever spot GPUs are there right now.

\b
Example:
  morph calibrate configs/jobs/tiny_gpt.py:job -o profile.json
  morph plan profile.json --gpus 6
  morph run configs/jobs/tiny_gpt.py:job --profile profile.json --cluster configs/clusters/local.yaml

Each command has its own help and example: morph COMMAND --help
"""

app = typer.Typer(
    cls=MorphGroup,
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


class _OnceEach(logging.Filter):
    """Lets a library say the same only once: one that is asked again, with a wrong key, fills the screen each time."""

    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it was not said before."""
        said = record.getMessage()
        is_new = said not in self._said
        self._said.add(said)
        return is_new


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"morph {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Give the root command its options, its help being HELP; remove what killed runs of this user left."""
    from manager.host.folders import sweep

    del version  # its callback printed it
    sweep()


app.command("calibrate")(calibrate_command)
app.command("calibrate-peer")(calibrate_peer_command)
app.command("cut")(cut_command)
app.add_typer(profile_app, name="profile")
app.add_typer(cloud_app, name="cloud")
app.command("plan")(plan_command)
app.command("simulate")(simulate_command)
app.command("replay")(replay_command)
app.add_typer(trace_app, name="trace")
app.command("rehearse")(rehearse_command)
app.command("run")(run_command)
app.command("resume")(resume_command)
app.command("status")(status_command)
app.add_typer(config_app, name="config")
app.command("events")(events_command)
app.command("report")(report_command)
app.command("page")(page_command)
app.command("stop")(stop_command)
app.command("elastic")(elastic_command)
app.command("spot-run")(spot_run_command)
app.command("inject")(inject_command)
app.command("history")(history_command)
app.command("timeline")(timeline_command)
app.add_typer(checkpoints_app, name="checkpoints")
app.command("export")(export_command)
app.command("import")(import_command)
app.command("demo")(demo_command)
app.command("trace-deps")(trace_deps_command)


def main() -> None:
    """Run the command line and exit with its code."""
    if logging.lastResort is not None:
        logging.lastResort.addFilter(_OnceEach())
    gc.set_threshold(
        50_000, 20, 10
    )  # what commands import stays: to look through it so often takes a fifth of the time
    atexit.register(gc.freeze)  # nothing is looked through at the end: with torch loaded that takes 0.4 s
    try:
        app(prog_name="morph")
    finally:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C again, while the process ends: no traceback


if __name__ == "__main__":
    main()
