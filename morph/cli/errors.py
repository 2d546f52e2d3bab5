"""How errors leave the command line.

==================  ====================================  ====
error               shown                                 exit
==================  ====================================  ====
InputError          one line on standard error            2
TrainingStopped     one line on standard error            1
KeyboardInterrupt   one line on standard error            130
anything else       its traceback: it is a bug            1
==================  ====================================  ====
"""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.core import TyperGroup

from morph.contract.errors import InputError, TrainingStopped

EXIT_STOPPED = 1
EXIT_INPUT = 2
EXIT_INTERRUPTED = 130


def one_line(error: Exception) -> str:
    """Return ``error: ...`` without line breaks, so that it stays one line in a log."""
    return "error: " + " ".join(str(error).split())


class MorphGroup(TyperGroup):
    """The root command: turns Morph's errors and Ctrl-C, from any command, into one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the context names.

        Raises:
            typer.Exit: with the code of the table above.
        """
        try:
            return super().invoke(ctx)
        except InputError as error:
            print(one_line(error), file=sys.stderr)
            raise typer.Exit(EXIT_INPUT) from error
        except TrainingStopped as error:
            print(one_line(error), file=sys.stderr)
            raise typer.Exit(EXIT_STOPPED) from error
        except KeyboardInterrupt as error:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(EXIT_INTERRUPTED) from error
