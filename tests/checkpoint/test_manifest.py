from __future__ import annotations

import hashlib
import json
from pathlib import Path

import fsspec
import pytest

from morph.checkpoint import manifest as manifest_module
from morph.checkpoint.manifest import (
    MANIFEST,
    complete_versions,
    read_manifest,
    version_url,
    write_atomically,
    write_manifest,
)
from morph.contract.checkpoint import Manifest, UnitFile
from morph.contract.errors import CheckpointError
from tests.checkpoint.fake_blobs import CONTAINER, BlobService


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


def test_unit_files_without_a_manifest_are_no_checkpoint(url: str) -> None:
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


def test_a_manifest_with_sha256_alone_is_read_and_its_own_digest_still_holds(tmp_path: Path) -> None:
    """As it was written before files had a quicker checksum too."""
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


def test_storage_that_refuses_is_told_in_one_sentence(blobs: BlobService) -> None:
    url = f"abfs://{CONTAINER}/runs"
    write_manifest(url, make_manifest())
    for read in (lambda: complete_versions(url), lambda: read_manifest(url, 3)):
        blobs.faults = [(403, "AuthorizationPermissionMismatch")] * 9
        with pytest.raises(CheckpointError, match=rf"^{url}\S*: cannot be read: [^\n]+$"):
            read()
    assert blobs.key not in "".join(blobs.asked)


def test_what_is_refused_leaves_what_was_there(blobs: BlobService) -> None:
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
