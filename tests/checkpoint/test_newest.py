"""The newest whole checkpoint: what is damaged is passed over and kept, and storage that is silent proves nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
import torch

from morph.checkpoint.manifest import MANIFEST, complete_versions, read_manifest, version_url, write_manifest
from morph.checkpoint.newest import find_whole, newest_whole
from morph.checkpoint.retention import delete_superfluous
from morph.checkpoint.stored import SET_ASIDE, delete_version
from morph.checkpoint.unit_files import write_unit
from morph.contract.checkpoint import Manifest, UnitFile
from morph.contract.errors import CheckpointDamaged, CheckpointError
from morph.contract.rules import CheckpointRules

UNITS = ("s0", "s1")


def save(url: str, *versions: int) -> None:
    """Write whole checkpoints of these versions."""
    for version in versions:
        written = [write_unit(url, version, unit, "vm0", {"w": torch.full((64,), float(version))}) for unit in UNITS]
        files = tuple(
            UnitFile(unit=entry.unit, file=entry.file, size_bytes=entry.size_bytes, sha256=entry.sha256)
            for entry in written
        )
        write_manifest(url, Manifest(fingerprint="f", version=version, units=files))


def changed(url: str, version: int, file: str, change: Callable[[bytes], bytes]) -> None:
    """Change a file of a checkpoint whose name begins so."""
    filesystem, folder = fsspec.core.url_to_fs(version_url(url, version))
    path = next(path for path in filesystem.find(folder) if path.rsplit("/", 1)[-1].startswith(file))
    filesystem.pipe_file(path, change(filesystem.cat_file(path)))


def contents(url: str, version: int) -> dict[str, bytes]:
    filesystem, folder = fsspec.core.url_to_fs(version_url(url, version))
    filesystem.invalidate_cache()
    return {path.rsplit("/", 1)[-1]: filesystem.cat_file(path) for path in filesystem.find(folder)}


def _flipped(url: str, version: int) -> None:
    changed(url, version, "s1", lambda data: data[:-1] + bytes([data[-1] ^ 1]))


def _truncated(url: str, version: int) -> None:
    changed(url, version, "s1", lambda data: data[:-1])


def _missing(url: str, version: int) -> None:
    filesystem, folder = fsspec.core.url_to_fs(version_url(url, version))
    filesystem.rm_file(next(path for path in filesystem.find(folder) if "/s1" in path))


def _half_a_manifest(url: str, version: int) -> None:
    changed(url, version, MANIFEST, lambda data: data[:40])


Damage = Callable[[str, int], None]
SEEN_AT_ONCE: tuple[Damage, ...] = (_truncated, _missing, _half_a_manifest)


@pytest.fixture
def local(tmp_path: Path) -> str:
    return str(tmp_path / "checkpoints")


def newest(url: str, *, every_byte: bool = False) -> int | None:
    manifest, _ = newest_whole(url, every_byte=every_byte)
    return None if manifest is None else manifest.version


def test_without_a_checkpoint_there_is_none(url: str) -> None:
    assert newest_whole(url) == (None, ())


@pytest.mark.parametrize("every_byte", [False, True])
def test_the_newest_is_taken_where_it_is_whole(local: str, every_byte: bool) -> None:
    save(local, 2, 10, 9)
    Path(version_url(local, 11)).mkdir()
    manifest, told = newest_whole(local, every_byte=every_byte)
    assert manifest is not None
    assert (manifest.version, told) == (10, ())


@pytest.mark.parametrize("damage", SEEN_AT_ONCE)
def test_what_is_damaged_is_passed_over_with_a_sentence_and_loses_no_byte(url: str, damage: Damage) -> None:
    save(url, 2, 4, 6)
    for version in (4, 6):
        damage(url, version)
    before = contents(url, 6)
    manifest, told = newest_whole(url)
    assert manifest is not None
    assert manifest.version == 2
    assert len(told) == 2
    assert all("v0000000" in line and "version 2 is the newest that is whole" in line for line in told)
    after = contents(url, 6)
    assert {**after, MANIFEST: after[SET_ASIDE]} == {**before, SET_ASIDE: before[MANIFEST]}
    assert complete_versions(url) == (2,)


def test_a_flipped_bit_is_found_when_every_byte_is_read(local: str) -> None:
    save(local, 2, 4)
    _flipped(local, 4)
    assert newest(local) == 4
    assert newest(local, every_byte=True) == 2


@pytest.mark.slow
def test_no_byte_of_any_file_can_be_flipped_or_lost_unnoticed(local: str) -> None:
    save(local, 2, 4)
    folder = Path(version_url(local, 4))
    for file in sorted(folder.iterdir()):
        data = file.read_bytes()
        places = range(0, len(data), 1 if file.name == MANIFEST else 7)
        flips = [data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :] for at in places]
        for damaged in (*flips, data[:-1], data[: len(data) // 2], b"", data + b"0"):
            file.write_bytes(damaged)
            found, newer = find_whole(local, every_byte=True)
            assert found is not None
            assert (found.version, list(newer)) == (2, [4]), f"{file.name}: {damaged!r}"
        file.unlink()
        found, _ = find_whole(local, every_byte=True)
        assert found is not None
        assert found.version == 2, file.name
        file.write_bytes(data)
    assert newest(local, every_byte=True) == 4


@pytest.mark.parametrize("damage", [*SEEN_AT_ONCE, _flipped])
def test_where_all_are_damaged_it_is_said_and_nothing_is_changed(local: str, damage: Damage) -> None:
    save(local, 2, 4)
    for version in (2, 4):
        damage(local, version)
    with pytest.raises(CheckpointDamaged, match=r"v00000004.*; no other checkpoint there is whole"):
        newest_whole(local, every_byte=True)
    assert complete_versions(local) == (2, 4)


def test_storage_that_does_not_answer_damages_nothing(local: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save(local, 2, 4)

    def silent(*_: object, **__: object) -> bytes:
        raise TimeoutError("no answer within 60 s")

    filesystem = type(fsspec.core.url_to_fs(local)[0])
    monkeypatch.setattr(filesystem, "cat_file", silent)
    with pytest.raises(CheckpointError, match="no answer within 60 s") as caught:
        newest_whole(local, every_byte=True)
    assert not isinstance(caught.value, CheckpointDamaged)
    assert complete_versions(local) == (2, 4)


def test_storage_that_hangs_damages_nothing(local: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save(local, 2, 4)
    answer = threading.Event()
    monkeypatch.setattr("morph.checkpoint.newest.read_file", lambda *_, **__: answer.wait(60))
    with pytest.raises(CheckpointError, match=r"v00000004.*storage took longer than 0.05 s") as caught:
        newest_whole(local, every_byte=True, limit_s=lambda num_bytes: 0.05 if num_bytes else 60.0)
    answer.set()
    assert not isinstance(caught.value, CheckpointDamaged)
    assert complete_versions(local) == (2, 4)


def test_what_cannot_be_set_aside_is_not_passed_over(local: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save(local, 2, 4)
    _truncated(local, 4)

    def read_only(*_: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr("morph.checkpoint.newest.write_atomically", read_only)
    with pytest.raises(CheckpointError, match="cannot be set aside: read-only"):
        newest_whole(local)
    assert complete_versions(local) == (2, 4)


def test_what_was_passed_over_does_not_count_when_the_oldest_are_deleted_and_can_be_written_again(local: str) -> None:
    save(local, 2, 4, 6)
    _truncated(local, 6)
    assert newest(local) == 4
    delete_superfluous(local, CheckpointRules(keep_newest=2))
    assert complete_versions(local) == (2, 4)
    save(local, 6)
    assert newest(local, every_byte=True) == 6


def test_a_version_that_is_deleted_while_it_is_looked_at_is_passed_over(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(url, 2, 4, 6)

    def deleting(where: str, version: int) -> Manifest:
        if version == 6:
            delete_version(url, version)
        manifest = read_manifest(where, version)
        if version == 4:
            delete_version(url, version)
        return manifest

    monkeypatch.setattr("morph.checkpoint.newest.read_manifest", deleting)
    manifest, told = newest_whole(url)
    assert manifest is not None
    assert manifest.version == 2
    assert ["there is no such checkpoint" in told[0], "the file is missing" in told[1]] == [True, True]
    assert complete_versions(url) == (2,)
