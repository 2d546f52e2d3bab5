"""Which checkpoints are kept; and a checkpoint that is being removed is never seen in part."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from morph.checkpoint.manifest import MANIFEST, complete_versions, version_url, write_atomically, write_manifest
from morph.checkpoint.retention import delete_superfluous, superfluous
from morph.checkpoint.versions import KEPT, SET_ASIDE, StoredVersion, delete_version, stored_versions
from morph.contract.errors import CheckpointError
from morph.contract.rules import CheckpointRules
from tests.checkpoint.fake_blobs import CONTAINER, BlobService
from tests.checkpoint.test_manifest import make_manifest, names_in


def stored(version: int, *names: str) -> StoredVersion:
    return StoredVersion(version, dict.fromkeys(names, 1))


def whole(*versions: int) -> list[StoredVersion]:
    return [stored(version, MANIFEST) for version in versions]


def goes(versions: list[StoredVersion], newest: int, every_steps: int | None = None) -> tuple[int, ...]:
    return superfluous(versions, CheckpointRules(keep_newest=newest, keep_every_steps=every_steps))


def save(url: str, *versions: int) -> None:
    for version in versions:
        write_atomically(f"{version_url(url, version)}/s0.safetensors", b"x")
        write_manifest(url, make_manifest(version))


def keep(url: str, version: int) -> None:
    write_atomically(f"{version_url(url, version)}/{KEPT}", b"")


@pytest.mark.parametrize(("newest", "expected"), [(1, (10, 20, 30)), (2, (10, 20)), (4, ()), (5, ())])
def test_the_newest_stay_whatever_their_order(newest: int, expected: tuple[int, ...]) -> None:
    assert goes(whole(40, 10, 30, 20), newest) == expected


def test_of_each_span_of_steps_the_first_stays_however_irregular_they_come() -> None:
    assert goes(whole(0, 30, 95, 130, 131, 199, 430, 431, 432), 1, every_steps=100) == (30, 95, 131, 199, 431)


def test_the_first_version_of_a_span_stays_however_old() -> None:
    left: list[int] = []
    for version in (3, 9, 14, 22, 37, 38, 39, 41):
        left.append(version)
        gone = goes(whole(*left), 2, every_steps=10)
        left = [known for known in left if known not in gone]
    assert left == [3, 14, 22, 37, 39, 41]


def test_the_newest_to_which_a_bad_step_goes_back_stays() -> None:
    assert superfluous(whole(5, 10, 12, 13, 14), CheckpointRules(keep_newest=2), back_steps=5) == (5, 12)
    assert superfluous(whole(5, 10, 12), CheckpointRules(keep_newest=1), back_steps=3) == (5, 10)
    assert superfluous(whole(5, 10, 12), CheckpointRules(keep_newest=1), spared=(10, 11)) == (5,)


def test_a_version_that_a_user_keeps_displaces_no_other() -> None:
    versions = [*whole(10, 20), stored(30, MANIFEST, KEPT), *whole(40), stored(50, MANIFEST, KEPT)]
    assert goes(versions, 2) == (10,)
    assert goes(versions, 1) == (10, 20)
    assert goes([stored(1, MANIFEST, KEPT), *whole(5, 25, 26)], 1, every_steps=10) == (5,)


def test_incomplete_and_set_aside_versions_go_with_those_older_than_the_newest() -> None:
    versions = [stored(5), stored(10, SET_ASIDE), *whole(20, 30), stored(35), *whole(40), stored(45)]
    assert goes(versions, 3) == (5, 10)
    assert goes(versions, 1) == (5, 10, 20, 30, 35)
    assert goes(versions, 1, every_steps=100) == (5, 10, 30, 35)
    assert goes([stored(5, KEPT), stored(10, SET_ASIDE, KEPT), *whole(20, 30)], 1) == (20,)


def test_nothing_goes_before_enough_newer_ones_are_complete() -> None:
    assert goes([], 1) == ()
    assert goes([stored(1), stored(2), *whole(3)], 2) == ()
    assert goes([*whole(1), stored(2, MANIFEST, KEPT), stored(3, SET_ASIDE)], 2) == ()


def test_every_kind_of_storage_lists_versions_and_deletes_them(url: str) -> None:
    assert stored_versions(url) == ()
    save(url, 2, 4, 6, 8)
    keep(url, 2)
    for version in (1, 7, 9):  # never completed; 7 and 9 may still be under way
        write_atomically(f"{version_url(url, version)}/s0.safetensors", b"x")
    for name in ("vault", "v5"):
        write_atomically(f"{url}/{name}/{MANIFEST}", b"not ours")
    found = {entry.version: entry for entry in stored_versions(url)}
    assert found[2].files.keys() == {"s0.safetensors", MANIFEST, KEPT}
    assert found[1] == stored(1, "s0.safetensors")
    assert [version for version, entry in found.items() if entry.complete] == [2, 4, 6, 8]
    delete_superfluous(url, CheckpointRules(keep_newest=2))
    assert complete_versions(url) == (2, 6, 8)
    assert [entry.version for entry in stored_versions(url)] == [2, 6, 7, 8, 9]
    assert names_in(url).count(MANIFEST) == 5


def test_a_version_with_only_a_manifest_is_deleted_too(url: str) -> None:
    for version in (1, 2, 3):
        write_manifest(url, make_manifest(version))
    delete_superfluous(url, CheckpointRules(keep_newest=1))
    assert complete_versions(url) == (3,)
    assert names_in(url) == [MANIFEST]


def test_a_version_that_is_deleted_first_stops_being_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(str(tmp_path), 1, 2)

    def interrupted(*_: object, **__: object) -> None:
        raise OSError("gone")

    monkeypatch.setattr(fsspec.get_filesystem_class("file"), "rm", interrupted)
    with pytest.raises(OSError, match="gone"):
        delete_superfluous(str(tmp_path), CheckpointRules(keep_newest=1))
    assert complete_versions(str(tmp_path)) == (2,)


def test_a_version_that_a_user_keeps_during_its_deletion_stays_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(tmp_path)
    save(url, 1)
    before = names_in(url)
    filesystem: type = fsspec.get_filesystem_class("file")
    remove: Callable[..., None] = filesystem.rm_file  # type: ignore[attr-defined]

    def kept_meanwhile(self: object, path: str) -> None:
        remove(self, path)
        keep(url, 1)

    monkeypatch.setattr(filesystem, "rm_file", kept_meanwhile)
    assert not delete_version(url, 1)
    monkeypatch.undo()
    assert names_in(url) == sorted([*before, KEPT])
    assert complete_versions(url) == (1,)
    assert delete_version(url, 1, even_kept=True)
    assert names_in(url) == []


def test_storage_that_cannot_be_listed_is_reported_in_one_sentence(blobs: BlobService) -> None:
    save(f"abfs://{CONTAINER}/runs", 1, 2)
    blobs.faults = [(403, "AuthorizationPermissionMismatch")] * 9
    with pytest.raises(CheckpointError, match=r"cannot be read: [^\n]+$"):
        delete_superfluous(f"abfs://{CONTAINER}/runs", CheckpointRules(keep_newest=1))
    blobs.faults.clear()
    assert complete_versions(f"abfs://{CONTAINER}/runs") == (1, 2)
