"""Decides which versions stay, and deletes the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import fsspec

from morph.checkpoint.inspection import State, VersionStatus
from morph.checkpoint.manifest import MANIFEST, files_in, version_url, write_atomically
from morph.checkpoint.storage import writing
from morph.checkpoint.versions import BEST, KEPT, StoredVersion, delete_version, stored_versions
from morph.contract.errors import CheckpointError
from morph.contract.evaluation import Best
from morph.contract.rules import CheckpointRules


def keep(url: str, version: int) -> None:
    """Keep a complete version, so that it is never deleted as an old one.

    Raises CheckpointError if the version was deleted meanwhile, or storage cannot be written.
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
    """Release a kept version, so that it may be deleted in its turn again."""
    where = version_url(url, version)
    with writing(f"{where}/{KEPT}"):
        filesystem, folder = fsspec.core.url_to_fs(where)
        if KEPT in files_in(filesystem, folder):
            filesystem.rm_file(f"{folder}/{KEPT}")


def mark_best(url: str, best: Best) -> None:
    """Mark the checkpoint of the best version, if it is stored, and unmark all others; a crash between leaves two
    marks.
    """
    stored_at = {stored.version: stored for stored in stored_versions(url)}
    if best.version not in stored_at or not stored_at[best.version].complete:
        return
    where = version_url(url, best.version)
    with writing(f"{where}/{BEST}"):
        write_atomically(f"{where}/{BEST}", best.model_dump_json().encode())
    for version, stored in stored_at.items():
        if BEST in stored.files and version != best.version:
            where = version_url(url, version)
            with writing(f"{where}/{BEST}"):
                filesystem, folder = fsspec.core.url_to_fs(where)
                filesystem.rm_file(f"{folder}/{BEST}")


def best_version(url: str) -> int | None:
    """Return the version that is marked as the best, the newest of several; None if none is marked."""
    return max((stored.version for stored in stored_versions(url) if stored.best), default=None)


def refusal(
    inspect_versions: Sequence[VersionStatus], version: int, *, force: bool, holder: int | None
) -> tuple[str, str] | None:
    """Return why a version must not be removed, and what is allowed; None if it may be removed.

    A run resumes from the newest whole version, and writes newer ones: a manifest must not be put beside files that
    were just removed. The run touches older ones only to delete them. ``inspect_versions``: every stored version.
    ``holder``: the process that now manages their run, if known.
    """
    newest = max((look.version for look in inspect_versions if look.state is State.WHOLE), default=-1)
    if version == newest:
        what = "is the newest whole version"
    elif version > newest:
        what = "is not whole, but may become so: no newer one is whole"
    elif not force and next(look.kept or look.best for look in inspect_versions if look.version == version):
        best = next(look.best for look in inspect_versions if look.version == version)
        return "is the best" if best else "is kept", "versions that are neither kept nor the best; or --force"
    else:
        return None
    if holder is not None:
        return f"{what}; and process {holder} manages its run", "older versions; or any once the run has stopped"
    return None if force else (what, "older versions; or --force")


def superfluous(
    versions: Iterable[StoredVersion],
    rules: CheckpointRules,
    back_steps: int | None = None,
    spared: Collection[int] = (),
) -> tuple[int, ...]:
    """Return the versions to delete, ascending. Nothing is deleted before ``keep_newest`` newer ones are complete.

    Versions that a user keeps stay, complete or not, and do not count among the newest, so keeping one costs no other
    its place. The best version stays. So do the first complete version of each span of ``keep_every_steps`` steps, the
    newest that ``back_steps`` divides, to which the run returns after a bad step, and those that are ``spared``.
    Incomplete versions, and those set aside, are deleted if they are older than the newest; newer ones may still be
    under way.
    """
    ascending = sorted(versions, key=lambda stored: stored.version)
    complete = [stored.version for stored in ascending if stored.complete]
    newest = [stored.version for stored in ascending if stored.complete and not stored.kept][-rules.keep_newest :]
    if len(newest) < rules.keep_newest:
        return ()
    first_of_span: dict[int, int] = {}
    if rules.keep_every_steps is not None:
        for version in complete:
            first_of_span.setdefault(version // rules.keep_every_steps, version)
    back = [version for version in complete if back_steps is not None and version % back_steps == 0]
    stay = {stored.version for stored in ascending if stored.kept or stored.best} | set(first_of_span.values())
    stay.update(back[-1:], spared)
    return tuple(stored.version for stored in ascending if stored.version < newest[0] and stored.version not in stay)


def delete_superfluous(
    url: str, rules: CheckpointRules, back_steps: int | None = None, spared: Collection[int] = ()
) -> None:
    """Delete the superfluous versions, the oldest first.

    Raises Exception if the storage fails to delete; the type depends on the storage.
    """
    for version in superfluous(stored_versions(url), rules, back_steps, spared):
        delete_version(url, version)
