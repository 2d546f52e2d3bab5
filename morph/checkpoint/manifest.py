"""The manifest of a checkpoint: written last and atomically; a directory without one is not a checkpoint.

Layout under the checkpoint URL: ``v00000040/<unit file>`` and ``v00000040/manifest.json``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import uuid
from typing import Protocol, cast

import fsspec
import xxhash
from pydantic import ValidationError

from morph.checkpoint.storage import is_local, open_file, read_whole, reading
from morph.contract.base import first_problem
from morph.contract.checkpoint import Manifest, UnitFile
from morph.contract.errors import CheckpointDamaged

MANIFEST = "manifest.json"
ALIGNMENT = 64
"""Alignment of torch's own memory in bytes, so that results do not depend on a tensor's origin."""
DEVICE_ALIGNMENT = 512
"""Alignment of torch's allocator on a device in bytes; libraries choose kernels by alignments up to 256."""
PIECE_BYTES = 1 << 22
OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"})
"""Protocols of storage without folders and renaming, in which a file appears only when its upload is complete."""
LEASE_FOLDER, LEASE_NAME, _LEASE_END = "run", "lease-", ".json"


def version_url(url: str, version: int) -> str:
    """Return the URL of the folder of one version's files."""
    return f"{url.rstrip('/')}/v{version:08d}"


def write_atomically(url: str, *parts: bytes | memoryview) -> None:
    """Write a file, given in parts, so that a reader sees all of it or nothing."""
    filesystem, path = fsspec.core.url_to_fs(url)
    protocols = (filesystem.protocol,) if isinstance(filesystem.protocol, str) else filesystem.protocol
    if not OBJECT_STORES.isdisjoint(protocols):
        filesystem.pipe_file(path, b"".join(parts))
        return
    parent = path.rsplit("/", 1)[0]
    filesystem.makedirs(parent, exist_ok=True)
    temporary = f"{parent}/.{uuid.uuid4().hex}.tmp"
    local = "file" in protocols
    try:
        with filesystem.open(temporary, "wb") as out:
            for part in parts:
                out.write(part)
            if local:
                out.flush()
                os.fsync(out.fileno())
        filesystem.mv(temporary, path)
    except BaseException:
        with contextlib.suppress(Exception):  # a full disk: leave nothing behind
            filesystem.rm_file(temporary)
        raise
    if local:
        _sync_directory(parent)


def _sync_directory(path: str) -> None:
    """Make a rename durable, so that a power cut cannot undo it and yet keep a later deletion."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_half_written(name: str) -> bool:
    """Whether this is the name of a file that ``write_atomically`` has begun and not finished."""
    return name.startswith(".") and name.endswith(".tmp")


def remove_half_written(url: str, version: int) -> list[int]:
    """Remove what killed saves left in the folder of a version that no save writes now; return the sizes in bytes."""
    filesystem, folder = fsspec.core.url_to_fs(version_url(url, version))
    removed = []
    for name, size_bytes in files_in(filesystem, folder).items():
        if is_half_written(name):
            filesystem.rm_file(f"{folder}/{name}")
            removed.append(size_bytes)
    return removed


class StoredManifest(Manifest):
    """A manifest as stored. ``sha256``: of the other fields as compact JSON; older manifests have none."""

    sha256: str | None = None


def _digest(manifest: Manifest) -> str:
    return hashlib.sha256(manifest.model_dump_json().encode()).hexdigest()


def write_manifest(url: str, manifest: Manifest) -> None:
    """Write the manifest that makes a set of unit files a checkpoint."""
    data = StoredManifest(**dict(manifest), sha256=_digest(manifest)).model_dump_json(indent=2).encode()
    write_atomically(f"{version_url(url, manifest.version)}/{MANIFEST}", data)
    with contextlib.suppress(Exception):  # they cost only space, and `morph checkpoints gc` removes them too
        remove_half_written(url, manifest.version)


def read_manifest(url: str, version: int, name: str = MANIFEST) -> Manifest:
    """Return one version's manifest; ``name``: the name of the file, if it is not ``manifest.json``.

    Raises CheckpointDamaged if the file is missing, or is not a manifest of that version.
    """
    where = f"{version_url(url, version)}/{name}"
    try:
        with reading(where):
            filesystem, path = fsspec.core.url_to_fs(where)
            data = read_whole(filesystem, path)
        stored = StoredManifest.model_validate_json(data)
    except FileNotFoundError as error:
        raise CheckpointDamaged(f"{where}: there is no such checkpoint") from error
    except ValidationError as error:
        field, problem, _ = first_problem(error)
        raise CheckpointDamaged(": ".join(part for part in (where, field, problem) if part)) from error
    manifest = Manifest(**{name: getattr(stored, name) for name in Manifest.model_fields})
    if stored.sha256 is not None and stored.sha256 != _digest(manifest):
        raise CheckpointDamaged(f"{where}: the file differs from what was written (its sha256 differs)")
    if manifest.version != version:
        raise CheckpointDamaged(f"{where}: version is {manifest.version}, expected {version}")
    return manifest


class Hash(Protocol):
    """The used part of a hashlib object."""

    def update(self, data: memoryview, /) -> None:
        """Add bytes to the hash."""

    def hexdigest(self) -> str:
        """Return the digest of all bytes added, in hexadecimal."""


def read_file(url: str, version: int, entry: UnitFile, *, sha256: bool = False) -> memoryview:
    """Return a file of a version in memory of its own, after checking every byte against its manifest.

    ``sha256``: whether to check by SHA-256, although the quicker checksum also finds any damage. Raises
    CheckpointDamaged if the file is missing or differs.
    """
    where = f"{version_url(url, version)}/{entry.file}"
    quick, hashed = None if sha256 else entry.xxh3_128, cast(Hash, hashlib.sha256())
    if quick is not None:
        hashed = xxhash.xxh3_128()
    try:
        with reading(where):
            filesystem, path = fsspec.core.url_to_fs(where)
            if is_local(where):
                data = _read_local(path, entry.size_bytes, hashed)
            else:
                data = _own(read_whole(filesystem, path), hashed)
    except FileNotFoundError as error:
        raise CheckpointDamaged(f"{where}: the file is missing") from error
    if len(data) != entry.size_bytes or hashed.hexdigest() != (quick or entry.sha256):
        raise CheckpointDamaged(f"{where}: the file differs from its manifest (size or checksum)")
    return data


def _read_local(path: str, size_bytes: int, hashed: Hash) -> memoryview:
    """Return a file of this size, read into memory; each piece is hashed while it is in the processor's cache."""
    with open_file(path) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
        data = _memory(file.read(8), size_bytes + 1)
        file.seek(0)
        end = 0
        while size := file.readinto(data[end : end + PIECE_BYTES]):
            hashed.update(data[end : end + size])
            end += size
    return data[:end]


def _own(given: bytes, hashed: Hash) -> memoryview:
    """Return a writable copy of bytes from a storage client, hashed in the same way."""
    source, data = memoryview(given), _memory(given[:8], len(given))
    for begin in range(0, len(given), PIECE_BYTES):
        end = begin + PIECE_BYTES
        data[begin:end] = source[begin:end]
        hashed.update(data[begin:end])
    return data


def _memory(head: bytes, size_bytes: int) -> memoryview:
    """Return memory for a safetensors file with this head: the data after its header is aligned for any kernel."""
    before = -(8 + int.from_bytes(head, "little")) % ALIGNMENT
    memory = mmap.mmap(-1, before + size_bytes + 1, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return memoryview(memory)[before : before + size_bytes]


def complete_versions(url: str) -> tuple[int, ...]:
    """Return the versions that have a manifest, ascending."""
    with reading(url):
        return _list_complete(url)


def _list_complete(url: str) -> tuple[int, ...]:
    filesystem, path = fsspec.core.url_to_fs(url)
    folders = version_folders(filesystem, path)
    return tuple(version for version, folder in folders.items() if MANIFEST in files_in(filesystem, folder))


def version_folders(filesystem: fsspec.AbstractFileSystem, path: str) -> dict[int, str]:
    """Return the folders of versions, complete or not, ascending; other files and folders are ignored."""
    filesystem.invalidate_cache()  # workers write there too
    folders = {}
    with contextlib.suppress(FileNotFoundError):
        for entry in filesystem.ls(path, detail=False):
            folder = entry.rstrip("/")
            name = folder.rsplit("/", 1)[-1]
            if name[:1] == "v" and name[1:].isdecimal() and name == f"v{int(name[1:]):08d}":
                folders[int(name[1:])] = folder
    return dict(sorted(folders.items()))


def files_in(filesystem: fsspec.AbstractFileSystem, folder: str) -> dict[str, int]:
    """Return the size of each file of a folder in bytes, by name; empty if the folder is gone."""
    with contextlib.suppress(FileNotFoundError):
        filesystem.invalidate_cache(folder)
        entries = filesystem.ls(folder, detail=True)
        names = {entry["name"].rstrip("/").rsplit("/", 1)[-1]: entry for entry in entries}
        return {name: entry["size"] or 0 for name, entry in names.items()}
    return {}


def lease_file(number: int) -> str:
    """Return the name of a lease's file: of all leases of a place, the one with the highest number counts."""
    return f"{LEASE_NAME}{number:08d}{_LEASE_END}"


def newest_lease(url: str) -> tuple[int | None, bytes | None]:
    """Return the highest lease number and the content of its file; None for both if there is no lease."""
    filesystem, folder = fsspec.core.url_to_fs(f"{url.rstrip('/')}/{LEASE_FOLDER}")
    filesystem.invalidate_cache()
    names = [name for name in files_in(filesystem, folder) if name.startswith(LEASE_NAME) and name.endswith(_LEASE_END)]
    numbers = [int(middle) for name in names if (middle := name[len(LEASE_NAME) : -len(_LEASE_END)]).isdecimal()]
    if not numbers:
        return None, None
    number = max(numbers)
    with contextlib.suppress(FileNotFoundError):
        return number, cast(bytes, filesystem.cat_file(f"{folder}/{lease_file(number)}"))
    return number, None


def run_that_holds(url: str) -> str | None:
    """Return the name of the run that holds the newest lease of a place; None if no lease can be read."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(newest_lease(url)[1] or b"{}")["holder"]["run"])
    return None
