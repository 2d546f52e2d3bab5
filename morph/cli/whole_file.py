"""Answers written to files."""

from __future__ import annotations

from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all.

    Raises:
        PlanError: naming the file, if it cannot be written.
    """
    from morph.contract.errors import PlanError
    from morph.contract.files import write_whole

    try:
        write_whole(path, text)
    except OSError as error:
        raise PlanError(f"cannot be written: {error.strerror}", source=str(path)) from error
