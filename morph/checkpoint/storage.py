"""What storage does not do, told in one sentence: each kind has errors of its own, which have no common class."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from morph.contract.errors import CheckpointError, MorphError

MOST_CHARACTERS = 300


@contextmanager
def reading(where: str) -> Iterator[None]:
    """Tell whatever storage raises as a CheckpointError; a file that is not there stays a FileNotFoundError."""
    try:
        yield
    except (FileNotFoundError, MorphError):
        raise
    except Exception as error:
        raise CheckpointError(f"{where}: cannot be read: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:MOST_CHARACTERS] if lines else type(error).__name__
