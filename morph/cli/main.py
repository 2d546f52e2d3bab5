"""``morph``: the commands and how they are started. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import atexit
import gc
import logging
import signal
from collections.abc import Callable
from typing import Annotated

import typer

from morph import __version__
from morph.cli.checkpoints.checkpoints import checkpoints_app
from morph.cli.models.cut import cut_command
from morph.cli.models.export import export_command
from morph.cli.models.import_ import import_command
from morph.cli.models.sample import sample_command
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
from morph.cli.reading.help import MorphCommand
from morph.cli.runs.cloud import cloud_app
from morph.cli.runs.config import config_app
from morph.cli.runs.demo import demo_command
from morph.cli.runs.elastic import elastic_command
from morph.cli.runs.inject import inject_command
from morph.cli.runs.run import resume_command, run_command
from morph.cli.runs.service import service_command
from morph.cli.runs.spot_run import spot_run_command
from morph.cli.views.commands import events_command, page_command, report_command, status_command, stop_command
from morph.cli.views.history import history_command
from morph.cli.views.timeline import timeline_command
from morph.contract.errors import printable

HELP = """Train one PyTorch model on whatever spot GPUs are there right now.

\b
Example (morph COMMAND --help explains a command):
  morph calibrate configs/jobs/tiny_gpt.py:job -o profile.json
  morph plan profile.json --gpus 6
  morph run configs/jobs/tiny_gpt.py:job --profile profile.json \\
      --cluster configs/clusters/local.yaml
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
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Give the root command its options, and remove what killed runs of this user left; its help is HELP."""
    from manager.host.folders import sweep

    del version  # the callback has printed it
    sweep()


_COMMANDS: dict[str, dict[str, Callable[..., None] | typer.Typer]] = {
    "Measure": {
        "calibrate": calibrate_command,
        "calibrate-peer": calibrate_peer_command,
        "profile": profile_app,
    },
    "Plan": {"plan": plan_command, "simulate": simulate_command},
    "Check": {"cut": cut_command, "trace-deps": trace_deps_command, "config": config_app},
    "Run": {
        "run": run_command,
        "resume": resume_command,
        "stop": stop_command,
        "service": service_command,
        "elastic": elastic_command,
        "spot-run": spot_run_command,
    },
    "Look": {
        "status": status_command,
        "events": events_command,
        "report": report_command,
        "page": page_command,
        "timeline": timeline_command,
        "history": history_command,
    },
    "Weights": {
        "checkpoints": checkpoints_app,
        "export": export_command,
        "import": import_command,
        "sample": sample_command,
    },
    "Cloud": {"cloud": cloud_app},
    "Try out": {
        "demo": demo_command,
        "rehearse": rehearse_command,
        "replay": replay_command,
        "trace": trace_app,
        "inject": inject_command,
    },
}
"""Commands by title, in the order of the help."""

for _title, _commands in _COMMANDS.items():
    for _name, _command in _commands.items():
        if isinstance(_command, typer.Typer):
            for _registered in _command.registered_commands:
                _registered.cls = MorphCommand
            app.add_typer(_command, name=_name, rich_help_panel=_title)
        else:
            app.command(_name, cls=MorphCommand, rich_help_panel=_title)(_command)


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
