"""What a user keeps, and what may be removed: a marker beside the manifest, and a pure answer."""

from __future__ import annotations

from collections.abc import Sequence

import fsspec

from morph.checkpoint.looking import Look, State
from morph.checkpoint.manifest import MANIFEST, files_in, version_url, write_atomically
from morph.checkpoint.storage import writing
from morph.checkpoint.stored import KEPT
from morph.contract.errors import CheckpointError


def keep(url: str, version: int) -> None:
    """Keep a complete version, so that it is never deleted as an old one.

    Raises:
        CheckpointError: it was deleted meanwhile, or storage cannot be written.
    """
    where = version_url(url, version)
    with writing(f"{where}/{KEPT}"):
        write_atomically(f"{where}/{KEPT}", b"kept by its user\n")
        filesystem, folder = fsspec.core.url_to_fs(where)
        is_whole = MANIFEST in files_in(filesystem, folder)
    if not is_whole:
        let_go(url, version)
        raise CheckpointError(f"{where}: it was deleted just now, because newer ones were written")


def let_go(url: str, version: int) -> None:
    """Let a version be deleted in its turn again.

    Raises:
        CheckpointError: storage cannot be written.
    """
    where = version_url(url, version)
    with writing(f"{where}/{KEPT}"):
        filesystem, folder = fsspec.core.url_to_fs(where)
        if KEPT in files_in(filesystem, folder):
            filesystem.rm_file(f"{folder}/{KEPT}")


def refusal(looks: Sequence[Look], version: int, *, force: bool, holder: int | None) -> tuple[str, str] | None:
    """Say why a version is not removed, and what is allowed; None: it may be.

    A run goes back to the newest version that is whole, and writes newer ones: a manifest must not be put beside files
    that were just removed. Older ones it never touches but to delete them.

    Args:
        looks: Every version that is there.
        version: One of them.
        force: The user means it.
        holder: The process that manages their run now, if that is known.
    """
    newest = max((look.version for look in looks if look.state is State.WHOLE), default=-1)
    if version == newest:
        what = "is the newest that is whole"
    elif version > newest:
        what = "is not whole, and may be on its way, for no newer one is whole"
    elif not force and next(look.kept for look in looks if look.version == version):
        return "is kept", "those that are not kept; or --force"
    else:
        return None
    if holder is not None:
        return f"{what}; and process {holder} manages its run", "older ones; or any once the run was stopped"
    return None if force else (what, "older ones; or --force")
