"""``morph``: the commands and how they are started. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import atexit
import gc
import logging
import signal
from typing import Annotated

import typer

from morph import __version__
from morph.cli.reading.errors import MorphGroup
from morph.cli.reading.help import found_by_name
from morph.contract.errors import printable

HELP = """Train one PyTorch model on whatever spot GPUs are there right now.

\b
Example (morph COMMAND --help explains a command):
  morph calibrate configs/jobs/tiny_gpt.py:job -o profile.json
  morph plan profile.json --gpus 6
  morph run configs/jobs/tiny_gpt.py:job --profile profile.json \\
      --cluster configs/clusters/local.yaml
"""

COMMANDS: dict[str, dict[str, str | dict[str, str]]] = {
    "Measure": {
        "calibrate": "calibrate.commands.calibrate:calibrate_command",
        "calibrate-peer": "calibrate.commands.calibrate_peer:calibrate_peer_command",
        "profile": {
            "": "calibrate.commands.profile:profile_app",
            "add-type": "simulator.commands.add_type:add_type_command",
            "refine": "manager.commands.refine:refine_command",
        },
    },
    "Plan": {
        "plan": "simulator.commands.plan:plan_command",
        "simulate": "simulator.commands.simulate:simulate_command",
    },
    "Check": {
        "cut": "morph.cli.cut:cut_command",
        "trace-deps": "morph.cli.trace_deps:trace_deps_command",
        "config": "manager.commands.config:config_app",
    },
    "Run": {
        "run": "manager.commands.run:run_command",
        "resume": "manager.commands.run:resume_command",
        "stop": "manager.commands.look:stop_command",
        "service": "manager.commands.service:service_command",
        "elastic": "morph.cli.elastic:elastic_command",
        "spot-run": "manager.commands.spot_run:spot_run_command",
    },
    "Look": {
        "status": "manager.commands.look:status_command",
        "events": "manager.commands.look:events_command",
        "report": "manager.commands.look:report_command",
        "page": "manager.commands.look:page_command",
        "timeline": "manager.commands.timeline:timeline_command",
        "history": "manager.commands.history:history_command",
    },
    "Weights": {
        "checkpoints": "manager.commands.checkpoints:checkpoints_app",
        "export": "manager.commands.export:export_command",
        "import": "manager.commands.import_:import_command",
        "sample": "manager.commands.sample:sample_command",
    },
    "Cloud": {"cloud": "manager.commands.cloud:cloud_app"},
    "Try out": {
        "demo": "manager.commands.demo:demo_command",
        "rehearse": "manager.commands.rehearse:rehearse_command",
        "replay": "manager.commands.replay:replay_command",
        "trace": "simulator.commands.trace:trace_app",
        "inject": "manager.commands.inject:inject_command",
    },
}
"""Commands by title, in the order of the help: where each is. A group of commands from several places has its own under
the empty name. They are found by name when they are called, so that nothing here knows the rooms that they belong to.
"""


AT_START = "manager.host.folders:sweep"
"""What runs before each command."""
OFFERED = {
    "commit round": "manager.engine.on_processes.commit_round:measure_commit_round",
    "followers": "manager.run.controller_config:redundancy_line",
}
"""What only the manager knows, for commands of the rooms below it: see ``offered``."""


class _Root(MorphGroup):
    table = COMMANDS


app = typer.Typer(
    cls=_Root,
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


class _OnceEach(logging.Filter):
    """Lets a library log each message only once: some libraries fill the screen with retries after a wrong key."""

    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the message is new; it is made printable, because it may come from another machine."""
        record.msg, record.args = printable(record.getMessage()), ()
        said = record.msg
        is_new = said not in self._said
        self._said.add(said)
        return is_new


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"morph {__version__}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Give the root command its options, and remove what killed runs of this user left; its help is HELP."""
    del version  # the callback has printed it
    context.obj = OFFERED
    found_by_name(AT_START)()


def main() -> None:
    """Run the command line and exit with its code."""
    if logging.lastResort is not None:
        logging.lastResort.addFilter(_OnceEach())
    # imported modules stay; at the default frequency, scanning them takes a fifth of the time
    gc.set_threshold(50_000, 20, 10)
    atexit.register(gc.freeze)  # nothing is scanned at the end: with torch loaded, a scan takes 0.4 s
    try:
        app(prog_name="morph")
    finally:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C while the process ends shows no traceback


if __name__ == "__main__":
    main()
