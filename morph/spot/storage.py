"""Backups in storage: one folder per backup, whose manifest is written last and lists each file with its SHA-256.

A file is stored under its SHA-256: the user's own names may mean something to a storage, or be that of the manifest.
"""

from __future__ import annotations

import hashlib
import json
import logging
import posixpath
import shutil
from pathlib import Path
from typing import Any

import fsspec

from morph.checkpoint.manifest import write_atomically
from morph.checkpoint.storage import reading, writing

log = logging.getLogger("morph.spot")

MANIFEST = "manifest.json"
NUM_KEPT = 2


def write_backup(url: str, path: Path) -> int:
    """Store a file or folder as the newest backup, delete older backups except the newest of them, and return the new
    number.

    Raises CheckpointError if storage cannot be written.
    """
    with writing(url):
        filesystem, root = fsspec.core.url_to_fs(url)
        there = _numbers(filesystem, root)
        number = max(there, default=0) + 1
        folder = f"{root.rstrip('/')}/b{number:08d}"
        filesystem.makedirs(folder, exist_ok=True)
        entries: dict[str, dict[str, Any]] = {}
        folders: list[str] = []
        for entry in sorted([path, *path.rglob("*")]):
            name = entry.relative_to(path.parent).as_posix()
            if entry.is_dir():
                folders.append(name)
                continue
            entries[name] = {"bytes": entry.stat().st_size, "sha256": _digest(entry)}
            filesystem.put_file(str(entry), f"{folder}/{entries[name]['sha256']}")
        manifest = {"schema_version": 2, "name": path.name, "files": entries, "folders": folders}
        write_atomically(f"{url.rstrip('/')}/b{number:08d}/{MANIFEST}", json.dumps(manifest).encode())
        whole = [each for each in there if filesystem.exists(f"{root.rstrip('/')}/b{each:08d}/{MANIFEST}")]
        for old in sorted(there):
            if old not in sorted(whole)[-(NUM_KEPT - 1) :]:
                filesystem.rm(f"{root.rstrip('/')}/b{old:08d}", recursive=True)
    return number


def read_newest(url: str, into: Path) -> Path | None:
    """Fetch the newest whole backup into a folder, which is emptied first; return its path, or None without a backup.

    Corrupted backups are skipped with a warning. Raises CheckpointError if storage cannot be read.
    """
    with reading(url):
        filesystem, root = fsspec.core.url_to_fs(url)
        for number in sorted(_numbers(filesystem, root), reverse=True):
            folder = f"{root.rstrip('/')}/b{number:08d}"
            try:
                manifest = json.loads(filesystem.cat_file(f"{folder}/{MANIFEST}"))
            except FileNotFoundError:
                continue  # its upload was not complete
            except ValueError:
                log.warning("backup %d in %s is damaged: its manifest is not JSON", number, url)
                continue
            shutil.rmtree(into, ignore_errors=True)
            problem = _fetched(filesystem, folder, manifest, into)
            if problem is None:
                return into / Path(manifest["name"]).name
            log.warning("backup %d in %s is damaged: %s", number, url, problem)
    return None


def _fetched(filesystem: fsspec.AbstractFileSystem, folder: str, manifest: dict[str, Any], into: Path) -> str | None:
    """Fetch the files of a backup; return the problem with them, or None."""
    into.mkdir(parents=True)
    folders, files = manifest.get("folders", []), manifest["files"]
    for name in (*folders, *files):
        if not (into / name).resolve().is_relative_to(into.resolve()):
            return f"{name} would lie outside the folder"
    for name in folders:
        (into / name).mkdir(parents=True, exist_ok=True)
    for name, entry in files.items():
        target = into / name
        target.parent.mkdir(parents=True, exist_ok=True)
        stored = name if manifest["schema_version"] == 1 else entry["sha256"]  # older backups have the user's names
        try:
            filesystem.get_file(f"{folder}/{stored}", str(target))
        except FileNotFoundError:
            return f"{name} is missing"
        if _digest(target) != entry["sha256"]:
            return f"{name} differs from the file that was written"
    return None


def _numbers(filesystem: fsspec.AbstractFileSystem, root: str) -> list[int]:
    try:
        names = [posixpath.basename(path.rstrip("/")) for path in filesystem.ls(root, detail=False)]
    except FileNotFoundError:
        return []
    return [int(name[1:]) for name in names if name.startswith("b") and name[1:].isdecimal()]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
