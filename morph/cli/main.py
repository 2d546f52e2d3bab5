"""``morph``: the commands and how they are started. Nothing heavy is imported before a command runs."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Annotated

import typer

from morph import __version__
from morph.cli.errors import MorphGroup

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
    """Give the root command its options; its help is HELP."""


for _name in ("calibrate", "plan", "simulate", "run", "status", "demo"):
    if find_spec(f"morph.cli.{_name}") is not None:
        app.command(_name)(getattr(import_module(f"morph.cli.{_name}"), f"{_name}_command"))


def main() -> None:
    """Run the command line and exit with its code."""
    app(prog_name="morph")


if __name__ == "__main__":
    main()
