"""The newest undamaged checkpoint: damaged ones are skipped and kept, and silent storage is not taken for damage."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
import torch

from morph.checkpoint import manifest as manifest_module
from morph.checkpoint.manifest import (
    MANIFEST,
    complete_versions,
    read_manifest,
    version_url,
    write_atomically,
    write_manifest,
)
from morph.checkpoint.newest import find_whole, newest_whole
from morph.checkpoint.retention import delete_superfluous
from morph.checkpoint.unit_files import write_unit
from morph.checkpoint.versions import SET_ASIDE, delete_version
from morph.contract.checkpoint import Manifest, UnitFile
from morph.contract.errors import CheckpointDamaged, CheckpointError
from morph.contract.rules import CheckpointRules
from tests.checkpoint.fake_blobs import CONTAINER, BlobService
from tests.waiting import BOUND_S


def make_manifest(version: int = 3) -> Manifest:
    return Manifest(
        fingerprint="f",
        version=version,
        units=(UnitFile(unit="s0+s4", file="s0_s4.safetensors", size_bytes=1, sha256="0" * 64),),
    )


def names_in(url: str) -> list[str]:
    filesystem, path = fsspec.core.url_to_fs(url)
    return sorted(entry.rsplit("/", 1)[-1] for entry in filesystem.find(path))


def test_a_manifest_comes_back_as_it_was_written(url: str) -> None:
    write_manifest(url, make_manifest())
    assert read_manifest(url, 3) == make_manifest()
    assert names_in(url) == [MANIFEST]


def test_writing_again_replaces(url: str) -> None:
    for content in (b"first", b"second, longer", b"3"):
        write_atomically(f"{url}/v1/file", content)
        filesystem, path = fsspec.core.url_to_fs(f"{url}/v1/file")
        assert filesystem.cat_file(path) == content
    assert names_in(url) == ["file"]


def test_unit_files_without_a_manifest_are_not_a_checkpoint(url: str) -> None:
    assert complete_versions(url) == ()
    write_manifest(url, make_manifest(2))
    write_atomically(f"{version_url(url, 4)}/s0.safetensors", b"x")
    assert complete_versions(url) == (2,)
    with pytest.raises(CheckpointError, match=r"v00000004/manifest\.json"):
        read_manifest(url, 4)


def test_versions_are_found_in_numerical_order(url: str) -> None:
    for version in (40, 7, 100000000, 9):
        write_manifest(url, make_manifest(version))
    write_atomically(f"{url}/vault/{MANIFEST}", b"not ours")
    assert complete_versions(url) == (7, 9, 40, 100000000)


@pytest.mark.parametrize("fails_in", ["write", "rename"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_in: str
) -> None:
    write_manifest(str(tmp_path), make_manifest())

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    if fails_in == "write":
        monkeypatch.setattr(manifest_module.os, "fsync", fail)
    else:
        monkeypatch.setattr(fsspec.get_filesystem_class("file"), "mv", fail)
    with pytest.raises(OSError, match="No space"):
        write_atomically(f"{version_url(str(tmp_path), 3)}/{MANIFEST}", b"half")
    monkeypatch.undo()
    assert read_manifest(str(tmp_path), 3) == make_manifest()
    assert names_in(str(tmp_path)) == [MANIFEST]


def test_a_manifest_with_sha256_alone_is_read_and_still_verified(tmp_path: Path) -> None:
    """Manifests were once written without the additional fast checksum."""
    unit = {"unit": "s0", "file": "s0.safetensors", "size_bytes": 1, "sha256": "0" * 64}
    written = {"schema_version": 2, "fingerprint": "f", "version": 3, "units": [unit], "kind": "periodic"}
    written |= {"shape": "2x1", "saved_s": 1.5}
    digest = hashlib.sha256(json.dumps(written, separators=(",", ":")).encode()).hexdigest()
    (tmp_path / "v00000003").mkdir()
    (tmp_path / "v00000003" / MANIFEST).write_text(json.dumps(written | {"sha256": digest}))
    assert read_manifest(str(tmp_path), 3).units[0].xxh3_128 is None
    (tmp_path / "v00000003" / MANIFEST).write_text(json.dumps(written | {"shape": "3x1", "sha256": digest}))
    with pytest.raises(CheckpointError, match="its sha256 differs"):
        read_manifest(str(tmp_path), 3)


@pytest.mark.parametrize("cut", [0, 1, 40, -1])
def test_a_truncated_manifest_is_named(tmp_path: Path, cut: int) -> None:
    write_manifest(str(tmp_path), make_manifest())
    path = tmp_path / "v00000003" / MANIFEST
    path.write_bytes(path.read_bytes()[: cut or None] if cut else b"")
    with pytest.raises(CheckpointError, match=r"v00000003/manifest\.json: .*JSON"):
        read_manifest(str(tmp_path), 3)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"schema_version": 3}, "schema_version"),
        ({"units": []}, "units"),
        ({"surprise": 1}, "surprise"),
        ({"version": -1}, "version"),
    ],
)
def test_a_manifest_that_breaks_the_schema_names_the_field(
    tmp_path: Path, change: dict[str, object], field: str
) -> None:
    write_manifest(str(tmp_path), make_manifest())
    path = tmp_path / "v00000003" / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=rf"manifest\.json: {field}"):
        read_manifest(str(tmp_path), 3)


@pytest.mark.parametrize("name", ["../s0", "/etc/passwd", "..", ".", "a/b", "a\\b", "", ".hidden", "s0\n", "s0 "])
def test_a_file_name_that_leaves_the_directory_is_refused(tmp_path: Path, name: str) -> None:
    write_manifest(str(tmp_path), make_manifest())
    path = tmp_path / "v00000003" / MANIFEST
    content = json.loads(path.read_text())
    content["units"][0]["file"] = name
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"units\.0\.file"):
        read_manifest(str(tmp_path), 3)


def test_a_manifest_of_another_version_is_refused(tmp_path: Path) -> None:
    write_manifest(str(tmp_path), make_manifest(3))
    (tmp_path / "v00000003").rename(tmp_path / "v00000005")
    with pytest.raises(CheckpointError, match="version is 3, expected 5"):
        read_manifest(str(tmp_path), 5)


def test_a_manifest_that_is_a_directory_is_unreadable(tmp_path: Path) -> None:
    (tmp_path / "v00000003" / MANIFEST).mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"manifest\.json: cannot be read"):
        read_manifest(str(tmp_path), 3)


def test_storage_that_refuses_is_reported_in_one_sentence(blobs: BlobService) -> None:
    url = f"abfs://{CONTAINER}/runs"
    write_manifest(url, make_manifest())
    for read in (lambda: complete_versions(url), lambda: read_manifest(url, 3)):
        blobs.faults = [(403, "AuthorizationPermissionMismatch")] * 9
        with pytest.raises(CheckpointError, match=rf"^{url}\S*: cannot be read: [^\n]+$"):
            read()
    assert blobs.key not in "".join(blobs.asked)


def test_a_refused_write_leaves_the_earlier_file(blobs: BlobService) -> None:
    url = f"abfs://{CONTAINER}/runs/file"
    write_atomically(url, b"first")
    blobs.faults = [(403, "AuthorizationPermissionMismatch")]
    with pytest.raises(Exception, match="AuthorizationPermissionMismatch"):
        write_atomically(url, b"second")
    assert blobs.blobs == {"runs/file": b"first"}


def test_a_file_is_put_on_an_object_store_whole_and_in_place(blobs: BlobService) -> None:
    write_atomically(f"abfs://{CONTAINER}/runs/file", b"x" * 2**20)
    assert blobs.asked == ["PUT runs/file"]


def test_a_key_that_is_not_the_accounts_is_refused(blobs: BlobService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs, "key", "b3RoZXI=")
    with pytest.raises(CheckpointError, match="cannot be read"):
        complete_versions(f"abfs://{CONTAINER}/runs")


UNITS = ("s0", "s1")


def save(url: str, *versions: int) -> None:
    for version in versions:
        written = [write_unit(url, version, unit, "vm0", {"w": torch.full((64,), float(version))}) for unit in UNITS]
        files = tuple(
            UnitFile(unit=entry.unit, file=entry.file, size_bytes=entry.size_bytes, sha256=entry.sha256)
            for entry in written
        )
        write_manifest(url, Manifest(fingerprint="f", version=version, units=files))


def changed(url: str, version: int, file: str, change: Callable[[bytes], bytes]) -> None:
    """Change the file of a checkpoint whose name begins like this."""
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
    assert (manifest.version, told) == (10, ())


@pytest.mark.parametrize("damage", SEEN_AT_ONCE)
def test_damaged_versions_are_skipped_with_a_sentence_and_keep_every_byte(url: str, damage: Damage) -> None:
    save(url, 2, 4, 6)
    for version in (4, 6):
        damage(url, version)
    before = contents(url, 6)
    manifest, told = newest_whole(url)
    assert manifest.version == 2
    assert len(told) == 2
    assert all("v0000000" in line and "version 2 is the newest whole version" in line for line in told)
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
        places = range(0, len(data), 3 if file.name == MANIFEST else 23)
        flips = [data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :] for at in places]
        for damaged in (*flips, data[:-1], data[: len(data) // 2], b"", data + b"0"):
            file.write_bytes(damaged)
            found, newer = find_whole(local, every_byte=True)
            assert (found.version, list(newer)) == (2, [4]), f"{file.name}: {damaged!r}"
        file.unlink()
        found, _ = find_whole(local, every_byte=True)
        assert found.version == 2, file.name
        file.write_bytes(data)
    assert newest(local, every_byte=True) == 4


@pytest.mark.parametrize("damage", [*SEEN_AT_ONCE, _flipped])
def test_if_all_are_damaged_this_is_reported_and_nothing_changed(local: str, damage: Damage) -> None:
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

    monkeypatch.setattr("morph.checkpoint.storage.open_file", silent)
    with pytest.raises(CheckpointError, match="no answer within 60 s") as caught:
        newest_whole(local, every_byte=True)
    assert not isinstance(caught.value, CheckpointDamaged)
    assert complete_versions(local) == (2, 4)


def test_storage_that_hangs_damages_nothing(local: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save(local, 2, 4)
    answer = threading.Event()
    monkeypatch.setattr("morph.checkpoint.newest.read_file", lambda *_, **__: answer.wait(BOUND_S))
    with pytest.raises(CheckpointError, match=r"v00000004.*storage took longer than 0.05 s") as caught:
        newest_whole(local, every_byte=True, limit_s=lambda num_bytes: 0.05 if num_bytes else 60.0)
    answer.set()
    assert not isinstance(caught.value, CheckpointDamaged)
    assert complete_versions(local) == (2, 4)


def test_a_damaged_version_that_cannot_be_set_aside_is_an_error(local: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save(local, 2, 4)
    _truncated(local, 4)

    def read_only(*_: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr("morph.checkpoint.newest.write_atomically", read_only)
    with pytest.raises(CheckpointError, match="cannot be set aside: read-only"):
        newest_whole(local)
    assert complete_versions(local) == (2, 4)


def test_a_skipped_version_does_not_count_for_retention_and_can_be_rewritten(local: str) -> None:
    save(local, 2, 4, 6)
    _truncated(local, 6)
    assert newest(local) == 4
    delete_superfluous(local, CheckpointRules(keep_newest=2))
    assert complete_versions(local) == (2, 4)
    save(local, 6)
    assert newest(local, every_byte=True) == 6


def test_a_version_deleted_while_it_is_examined_is_skipped(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert manifest.version == 2
    assert ["there is no such checkpoint" in told[0], "the file is missing" in told[1]] == [True, True]
    assert complete_versions(url) == (2,)
