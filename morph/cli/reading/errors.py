"""Shows errors on the command line.

==================  ====================================  ====
error               shown                                 exit
==================  ====================================  ====
InputError          one line on standard error            2
BadParameter        the same, with the value given        2
TrainingStopped     one line on standard error            1
KeyboardInterrupt   one line on standard error            130
OSError: no room    one line on standard error            1
OSError: a path     one line, if it may not be used       2
anything else       its traceback: it is a bug            1
==================  ====================================  ====
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import typer

from morph.cli.reading.help import HelpGroup, name_of
from morph.contract.errors import InputError, TrainingStopped, printable, problem_text
from morph.contract.files import NO_ROOM

_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG})
EXIT_STOPPED = 1
EXIT_INPUT = 2
EXIT_GOES_ON = 75
"""``morph stop`` ended the run before its last step: it is saved, and the same command continues it."""
EXIT_INTERRUPTED = 130


def one_line(error: Exception) -> str:
    """Return ``error: ...`` without line breaks, so that it stays one line in a log."""
    return "error: " + printable(" ".join(str(error).split()))


@contextmanager
def places(known: Mapping[str, tuple[str, str]]) -> Iterator[None]:
    """Add the source to errors that name a field but no source, so that users know where a value is set.

    ``known``: (source, the user's name of the field) by the internal name of the field.
    """
    try:
        yield
    except InputError as error:
        if error.source is not None or error.field is None or error.field not in known:
            raise
        source, field = known[error.field]
        raise type(error)(
            error.message, source=source, field=field, value=error.value, allowed=error.allowed
        ) from error


def _usage(error: typer.BadParameter) -> InputError:
    """Return the error of a value that an option refuses. Only the error's cause may have the value."""
    details = getattr(error.__cause__, "errors", None)
    value = details()[0].get("input") if callable(details) else None
    where = None if error.param is None else name_of(error.param)
    message, is_choice, choices = problem_text(error.message).partition(" is not one of ")
    if is_choice:
        return InputError("is unknown", field=where, value=value, allowed=choices.rstrip(".").replace("'", ""))
    return InputError(message, field=where, value=value)


class MorphGroup(HelpGroup):
    """The root command: turns Morph's errors and Ctrl-C, from any command, into one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the context names; typer.Exit has the code of the table above."""
        try:
            return super().invoke(ctx)
        except InputError as error:
            print(one_line(error), file=sys.stderr)
            raise typer.Exit(EXIT_INPUT) from error
        except typer.BadParameter as error:
            if not error.message:  # an option or argument is missing: the usage explains it best
                raise
            print(one_line(_usage(error)), file=sys.stderr)
            raise typer.Exit(EXIT_INPUT) from error
        except TrainingStopped as error:
            print(one_line(error), file=sys.stderr)
            raise typer.Exit(EXIT_STOPPED) from error
        except OSError as error:
            refused = error.errno in _REFUSED and error.filename is not None
            if error.errno not in NO_ROOM and not refused:
                raise
            print(one_line(InputError(str(error.strerror), source=str(error.filename or ""))), file=sys.stderr)
            raise typer.Exit(EXIT_INPUT if refused else EXIT_STOPPED) from error
        except KeyboardInterrupt as error:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(EXIT_INTERRUPTED) from error
