"""Training loops that Morph does not run, on one spot VM at a time: saved before it is taken, and restored on the next.

Four lines of a script, whatever its framework (the API of Spotify, Table 5.1)::

    if (path := morph.spot.restore()) is not None:
        load(path)
    for batch in data:
        with morph.spot.step():
            train(batch)
        if morph.spot.should_save():
            save("checkpoint.pt")
            morph.spot.backup("checkpoint.pt")

Start the script with ``morph spot-run job.yaml -- python train.py``; otherwise nothing is saved or restored. Loads no
torch.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path

from morph.spot.script import Script


@cache
def _script() -> Script:
    return Script.of_environment()


def step() -> AbstractContextManager[None]:
    """Mark one training step: its duration shows whether a save will be in time."""
    return _script().step()


def should_save() -> bool:
    """Return whether the loop should save now and call ``backup``: the VM will go soon, or much would be lost.

    In a group of VMs this is true only at the first one (RANK 0).
    """
    return _script().should_save()


def backup(path: str | Path) -> None:
    """Send a file or folder to storage in the background. The loop may overwrite it as soon as this returns.

    Raises:
        InputError: there is no such file or folder.
    """
    _script().backup(Path(path))


def restore() -> Path | None:
    """Return the path of the newest whole backup on this VM, under its own name; None if there is no backup yet.

    Raises:
        CheckpointError: storage cannot be read.
    """
    return _script().restore()
