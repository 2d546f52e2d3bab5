"""Write a profile so that a reader sees all of it or nothing."""

from __future__ import annotations

import os
from pathlib import Path

from morph.contract.errors import ProfileError
from morph.contract.files import write_whole
from morph.contract.profile import Profile


def check_output(path: Path) -> None:
    """Refuse a place that cannot be written, before anything is measured.

    Raises:
        ProfileError: naming the path.
    """
    folder = path.parent
    if path.is_dir():
        raise ProfileError("is a folder", source=str(path), allowed="a file name")
    if not folder.is_dir():
        raise ProfileError("its folder does not exist", source=str(path), allowed="a file in an existing folder")
    if not os.access(folder, os.W_OK):
        raise ProfileError("its folder is not writable", source=str(path), allowed="a file in a writable folder")


def write_profile(profile: Profile, path: Path, *, as_read: bool = False) -> None:
    """Replace ``path`` by the profile.

    Args:
        profile: The profile.
        path: The file.
        as_read: Write no default for what the profile's own file did not have.

    Raises:
        ProfileError: when it cannot be written.
    """
    check_output(path)
    try:
        write_whole(path, profile.model_dump_json(indent=2, exclude_unset=as_read) + "\n")
    except OSError as error:
        raise ProfileError(f"cannot be written: {error.strerror}", source=str(path)) from error
