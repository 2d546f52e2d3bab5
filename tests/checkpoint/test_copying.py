"""Listing, removing and copying stored versions."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import fsspec
import pytest
from typer.testing import CliRunner

from morph.checkpoint import inspection, transfer
from morph.checkpoint.inspection import State, VersionStatus, inspect_versions
from morph.checkpoint.manifest import complete_versions, read_manifest, version_url, write_atomically, write_manifest
from morph.checkpoint.newest import find_whole, newest_whole
from morph.checkpoint.retention import keep, let_go, refusal
from morph.checkpoint.transfer import copy_version
from morph.checkpoint.versions import RECOVERY, delete_version, stored_versions
from morph.cli.main import app
from morph.contract.checkpoint import Manifest
from morph.contract.errors import CheckpointDamaged, CheckpointError, InputError
from tests.checkpoint.test_manifest import SEEN_AT_ONCE, _flipped, _truncated, contents, save


@pytest.fixture
def target() -> str:
    return f"memory://{uuid4().hex}/copy"


def test_a_copy_has_every_byte_from_and_to_any_kind_of_storage(url: str, target: str, tmp_path: Path) -> None:
    save(url, 2, 4)
    write_atomically(f"{url}/{RECOVERY}", b"{}")
    assert copy_version(url, read_manifest(url, 4), target)
    assert contents(target, 4) == contents(url, 4)
    assert complete_versions(target) == (4,)
    filesystem, path = fsspec.core.url_to_fs(f"{target}/{RECOVERY}")
    assert filesystem.cat_file(path) == b"{}"
    assert not copy_version(url, read_manifest(url, 4), target)
    assert copy_version(target, read_manifest(target, 4), str(tmp_path / "back"))
    assert contents(str(tmp_path / "back"), 4) == contents(url, 4)


def test_a_damaged_version_is_not_copied_and_leaves_nothing(url: str, target: str) -> None:
    save(url, 4)
    _flipped(url, 4)
    with pytest.raises(CheckpointDamaged, match=r"s1\S*: the file differs from its manifest"):
        copy_version(url, read_manifest(url, 4), target)
    assert stored_versions(target) == ()


def test_an_interrupted_copy_is_not_a_checkpoint_and_can_be_continued(
    tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(tmp_path)
    save(url, 4)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(transfer, "write_manifest", full)
    with pytest.raises(CheckpointError, match=r"cannot be written: .*No space left"):
        copy_version(url, read_manifest(url, 4), target)
    assert complete_versions(target) == ()
    monkeypatch.undo()
    assert copy_version(url, read_manifest(url, 4), target)
    assert find_whole(target, every_byte=True)[0] == read_manifest(url, 4)


def test_a_copy_that_was_damaged_is_made_again(tmp_path: Path, target: str) -> None:
    url = str(tmp_path)
    save(url, 4)
    copy_version(url, read_manifest(url, 4), target)
    _truncated(target, 4)
    assert copy_version(url, read_manifest(url, 4), target)
    assert contents(target, 4) == contents(url, 4)


def test_checkpoints_of_different_runs_are_not_mixed(tmp_path: Path, target: str) -> None:
    url, other = str(tmp_path / "one"), str(tmp_path / "other")
    save(url, 2, 4)
    save(other, 4)
    manifest = read_manifest(other, 4)
    changed = manifest.units[0].model_copy(update={"size_bytes": 1})
    for change, problem in (
        ({"fingerprint": "another"}, "holds checkpoints of another model"),
        ({"units": (changed, *manifest.units[1:])}, "holds another checkpoint of version 4"),
    ):
        with pytest.raises(InputError, match=problem):
            copy_version(other, manifest.model_copy(update=change), url)
    assert copy_version(other, manifest, target)


Damage = Callable[[str, int], None]


def seen(url: str, *, every_byte: bool = False) -> dict[int, VersionStatus]:
    return {look.version: look for look in inspect_versions(url, every_byte=every_byte)}


def test_each_version_is_listed_with_its_manifests_facts(url: str) -> None:
    save(url, 2, 4)
    said = {"kind": "emergency", "shape": "3x2", "saved_s": 17.0}
    write_manifest(url, read_manifest(url, 4).model_copy(update=said))
    write_atomically(f"{version_url(url, 6)}/s0.safetensors", b"x")
    keep(url, 2)
    found = seen(url)
    assert [(look.version, look.state, look.kept) for look in found.values()] == [
        (2, State.WHOLE, True),
        (4, State.WHOLE, False),
        (6, State.INCOMPLETE, False),
    ]
    assert (found[4].kind, found[4].shape, found[4].saved_s) == ("emergency", "3x2", 17.0)
    assert found[4].where == version_url(url, 4)
    assert found[4].size_bytes > read_manifest(url, 4).size_bytes
    assert found[2].saved_s is not None
    assert abs(found[2].saved_s - 1e9) < 5e9  # seconds, by the storage's clock
    assert (found[6].kind, found[6].size_bytes, found[6].saved_s) == (None, 1, None)
    let_go(url, 2)
    assert not seen(url)[2].kept


@pytest.mark.parametrize("damage", SEEN_AT_ONCE)
def test_a_damaged_version_is_listed_with_its_file_even_once_set_aside(tmp_path: Path, damage: Damage) -> None:
    url = str(tmp_path)
    save(url, 2, 4)
    damage(url, 4)
    for _ in range(2):
        look = seen(url, every_byte=True)[4]
        assert look.state is State.DAMAGED
        assert "v00000004/" in look.problem
        assert look.problem.partition("v00000004/")[2][:2] in ("s1", "ma")
        newest_whole(url)


def test_a_named_pipe_in_place_of_a_file_counts_as_damage(tmp_path: Path) -> None:
    url = str(tmp_path)
    save(url, 2, 4, 6)
    manifest = tmp_path / "v00000006" / "manifest.json"
    manifest.unlink()
    os.mkfifo(manifest)
    unit = next(path for path in (tmp_path / "v00000004").iterdir() if path.name.startswith("s1"))
    unit.unlink()
    os.mkfifo(unit)
    found = seen(url, every_byte=True)
    assert [found[version].state for version in (2, 4, 6)] == [State.WHOLE, State.DAMAGED, State.DAMAGED]
    assert "is not a regular file" in found[6].problem
    newest, passed_over = newest_whole(url)
    assert newest.version == 2
    assert len(passed_over) == 2


@pytest.mark.parametrize("linked", ["manifest.json", "s1", ""], ids=["its manifest", "a unit", "its folder"])
def test_a_link_out_of_a_checkpoint_is_not_followed(tmp_path: Path, linked: str) -> None:
    url, place = str(tmp_path / "stored"), tmp_path / "stored" / "v00000004"
    save(url, 2, 4)
    file = place if not linked else next(path for path in place.iterdir() if path.name.startswith(linked))
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    look = seen(url, every_byte=True)[4]
    assert look.state is State.DAMAGED
    assert "symbolic link" in look.problem
    newest, _ = newest_whole(url, every_byte=True)
    assert newest.version == 2


def test_half_written_files_of_killed_saves_are_not_counted_and_go_with_the_next_manifest(url: str) -> None:
    save(url, 2, 4, 6)
    counted = {version: look.size_bytes for version, look in seen(url).items()}
    filesystem, _ = fsspec.core.url_to_fs(url)
    halves = [f"{version_url(url, version)}/.{version:032x}.tmp" for version in (2, 4, 6, 8)]
    for half in halves:
        write_atomically(half, b"half")

    def left() -> list[int]:
        return [index for index, half in enumerate(halves) if filesystem.exists(fsspec.core.url_to_fs(half)[1])]

    assert {version: look.size_bytes for version, look in seen(url).items()} == counted | {8: 0}
    write_manifest(url, read_manifest(url, 2))
    assert left() == [1, 2, 3]
    told = CliRunner().invoke(app, ["checkpoints", "gc", url])
    assert left() == [3], "a save may be under way there"
    assert "removed 2 half-written files of killed saves, 8 bytes" in told.output
    assert {
        version: look.state for version, look in seen(url, every_byte=True).items() if version < 8
    } == dict.fromkeys((2, 4, 6), State.WHOLE)


def test_a_flipped_bit_is_found_where_every_byte_is_read(tmp_path: Path) -> None:
    url = str(tmp_path)
    save(url, 2, 4)
    _flipped(url, 2)
    assert seen(url)[2].state is State.WHOLE
    found = seen(url, every_byte=True)
    assert (found[2].state, found[4].state) == (State.DAMAGED, State.WHOLE)


def test_a_version_that_is_deleted_while_it_is_read_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(tmp_path)
    save(url, 2, 4)

    def deleting(where: str, version: int, name: str) -> Manifest:
        manifest = read_manifest(where, version, name)
        if version == 2:
            delete_version(where, version)
        return manifest

    monkeypatch.setattr(inspection, "read_manifest", deleting)
    assert list(seen(url)) == [4]


def test_a_version_just_deleted_cannot_be_kept(tmp_path: Path) -> None:
    url = str(tmp_path)
    save(url, 2)
    delete_version(url, 2)
    with pytest.raises(CheckpointError, match="was deleted just now"):
        keep(url, 2)


def look(version: int, state: State = State.WHOLE, *, kept: bool = False) -> VersionStatus:
    return VersionStatus(version=version, state=state, kept=kept, size_bytes=1, where="")


THERE = (look(10), look(20, kept=True), look(30, State.DAMAGED), look(40), look(50, State.INCOMPLETE))


@pytest.mark.parametrize(
    ("version", "holder", "force", "problem"),
    [
        (10, None, False, None),
        (10, 7, False, None),
        (20, None, False, "is kept"),
        (20, 7, True, None),
        (30, 7, False, None),
        (40, None, False, "is the newest whole version"),
        (40, None, True, None),
        (40, 7, True, "is the newest whole version; and process 7 manages its run"),
        (50, None, False, "is not whole, but may become so: no newer one is whole"),
        (50, None, True, None),
        (50, 7, True, "is not whole, but may become so: no newer one is whole; and process 7 manages its run"),
    ],
)
def test_kept_and_newest_versions_are_removed_only_by_force(
    version: int, holder: int | None, force: bool, problem: str | None
) -> None:
    answer = refusal(THERE, version, force=force, holder=holder)
    assert (answer and answer[0]) == problem


def test_without_an_undamaged_version_none_is_removed_unless_forced(tmp_path: Path) -> None:
    save(str(tmp_path), 2)
    _truncated(str(tmp_path), 2)
    found = tuple(inspect_versions(str(tmp_path), every_byte=False))
    assert refusal(found, 2, force=False, holder=None) is not None
    assert refusal(found, 2, force=True, holder=None) is None
