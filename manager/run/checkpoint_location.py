"""Finds checkpoints in the place that a user names, a run directory, a folder or a URL, and checks such a place."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import fsspec

from manager.run_dir import checkpoint_url, is_run, read_facts
from morph.checkpoint.newest import find_whole, told_of
from morph.contract.checkpoint import Manifest
from morph.contract.cluster import CloudVms, ProvidedVms
from morph.contract.errors import CheckpointDamaged, ConfigError, InputError
from morph.contract.kinds import mistaken

Used = TypeVar("Used")


@dataclass(frozen=True)
class Stored:
    """A place with checkpoints. ``given``: as the user names it. ``run_dir``: None if it is not a run directory."""

    given: str
    url: str
    run_dir: Path | None = None


def stored_at(given: str) -> Stored:
    """Find out which place a user means, without checking that anything is stored there.

    RunDirError: the run directory cannot be read. InputError: there is no such folder. ConfigError: the package for
    such a URL is not installed.
    """
    if "://" in given:
        check_url(given, "", "RUN_DIR_OR_URL")
        return Stored(given, given)
    path = Path(given)
    if is_run(path):
        facts = read_facts(path)
        url = checkpoint_url(path, facts)
        check_url(url, str(path / "run.json"), "checkpoint_url")
        return Stored(given, url, path)
    if not path.is_dir():
        allowed = "a run directory, a folder with checkpoints, or a URL"
        raise InputError(mistaken(path, "there is no such folder"), source=given, allowed=allowed)
    return Stored(given, str(path.resolve()))


def target_url(given: str) -> str:
    """Return the URL of a folder for new checkpoints; the folder need not exist yet.

    ConfigError: the package for such a URL is not installed, or the place is a run directory or a file.
    """
    check_url(given, "", "DEST_URL")
    if "://" in given:
        return given
    path = Path(given)
    if is_run(path) or path.is_file():
        what = "a run directory" if path.is_dir() else "a file"
        raise ConfigError(f"is {what}", field="DEST_URL", value=given, allowed="a folder of its own, or a URL")
    return str(path.resolve())


def with_newest(stored: Stored, use: Callable[[Manifest], Used]) -> tuple[Manifest, Used]:
    """Use the newest complete checkpoint; say on standard error which newer ones are skipped, and why.

    If ``use`` finds damage that only reading shows, it is called again with the newest one whose bytes are all right.
    InputError: there is no checkpoint. CheckpointError: all are damaged, or storage does not answer.
    """
    try:
        manifest = _newest(stored, every_byte=False)
        return manifest, use(manifest)
    except CheckpointDamaged:
        manifest = _newest(stored, every_byte=True)
        return manifest, use(manifest)


def _newest(stored: Stored, *, every_byte: bool) -> Manifest:
    manifest, damaged = find_whole(stored.url, every_byte=every_byte)
    for sentence in told_of(manifest, damaged):
        print(f"note: {sentence}", file=sys.stderr)
    if manifest is None:
        raise no_checkpoint(stored)
    return manifest


def no_checkpoint(stored: Stored) -> InputError:
    """Return the error for a place with no complete checkpoint."""
    what = "" if stored.run_dir is not None or "://" in stored.given else "is not a run directory, and "
    return InputError(f"{what}holds no complete checkpoint", source=stored.url)


def unknown_version(stored: Stored, field: str, version: int, known: tuple[int, ...]) -> InputError:
    """Return the error for a version that does not exist."""
    if not known:
        return no_checkpoint(stored)
    allowed = ", ".join(map(str, known))
    return InputError("has no such checkpoint", source=stored.url, field=field, value=version, allowed=allowed)


def check_url(checkpoint_url: str, source: str, field: str) -> None:
    """Refuse a URL whose storage package is not installed, by a ConfigError that names the package."""
    scheme = _scheme(checkpoint_url)
    try:
        fsspec.get_filesystem_class(scheme or "file")
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"cannot be used: {error}", source=source, field=field, value=checkpoint_url, allowed="a URL fsspec knows"
        ) from error


def check_storage(vms: ProvidedVms, checkpoint_url: str | None, source: str, field: str) -> None:
    """Refuse a place for checkpoints that VMs cannot reach; ConfigError names the file and what is allowed."""
    if vms.shared_storage:
        return
    if checkpoint_url is not None and _scheme(checkpoint_url) not in ("", "file", "local"):
        if isinstance(vms, CloudVms) and vms.uid and not vms.metadata and not vms.pass_variables:
            raise ConfigError(
                "the VMs have no credentials for it",
                source=source,
                field=field,
                value=checkpoint_url,
                allowed="with vms.pass_variables, which name its credentials, or vms.metadata: true, for VMs whose "
                "identity may write there",
            )
        return
    raise ConfigError(
        "is on this machine, where the VMs cannot reach it" if checkpoint_url else "is not given",
        source=source,
        field=field,
        value=checkpoint_url,
        allowed="a URL that every VM reaches (az://, s3://, gs://), or vms.shared_storage: true",
    )


def _scheme(url: str) -> str:
    return urlsplit(url).scheme
