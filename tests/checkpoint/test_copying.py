"""A copy is a checkpoint when every byte of it was checked, and not before."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import fsspec
import pytest

from morph.checkpoint import copying
from morph.checkpoint.copying import copy_version
from morph.checkpoint.manifest import complete_versions, read_manifest, write_atomically
from morph.checkpoint.newest import find_whole
from morph.checkpoint.stored import RECOVERY, stored_versions
from morph.contract.errors import CheckpointDamaged, CheckpointError, InputError
from tests.checkpoint.test_newest import _flipped, _truncated, contents, save


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


def test_a_copy_that_breaks_off_is_no_checkpoint_and_is_gone_on_with(
    tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(tmp_path)
    save(url, 4)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(copying, "write_manifest", full)
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
