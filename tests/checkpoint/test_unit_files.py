from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest
import torch
from torch import Tensor

from morph.checkpoint.manifest import read_file
from morph.checkpoint.unit_files import from_payload, read_unit, to_payload, write_unit
from morph.contract.checkpoint import Manifest, UnitFile
from morph.contract.errors import CheckpointDamaged, CheckpointError


def make_tensors() -> dict[str, Tensor]:
    return {
        "param/w": torch.arange(6, dtype=torch.float32).view(2, 3),
        "optim/w/step": torch.tensor(3.0),
        "param/half": torch.ones(2, dtype=torch.bfloat16),
        "numbers": torch.frombuffer(bytearray(b"{}"), dtype=torch.uint8),
    }


def save(url: str, unit: str = "s0+s4", tensors: dict[str, Tensor] | None = None) -> Manifest:
    written = write_unit(url, 8, unit, "w0", tensors or make_tensors())
    entry = UnitFile(**written.model_dump(exclude={"worker", "version", "stall_s"}))
    return Manifest(fingerprint="f", version=8, units=(entry,))


def file_of(tmp_path: Path, manifest: Manifest) -> Path:
    return tmp_path / "v00000008" / manifest.units[0].file


def test_a_unit_comes_back_bit_for_bit_from_any_storage(tmp_path: Path) -> None:
    for url in (str(tmp_path), f"memory://{uuid4().hex}"):
        loaded = read_unit(url, save(url), "s0+s4")
        assert loaded.keys() == make_tensors().keys()
        for name, tensor in make_tensors().items():
            assert loaded[name].dtype == tensor.dtype
            assert torch.equal(loaded[name], tensor)


def test_equal_tensors_make_equal_bytes_whatever_their_order() -> None:
    tensors = make_tensors()
    assert to_payload(tensors) == to_payload(dict(reversed(tensors.items())))
    assert from_payload(to_payload(tensors)).keys() == tensors.keys()


def test_the_file_of_a_tied_unit_has_a_plain_name(tmp_path: Path) -> None:
    manifest = save(str(tmp_path))
    assert manifest.units[0].unit == "s0+s4"
    assert "+" not in manifest.units[0].file
    assert file_of(tmp_path, manifest).stat().st_size == manifest.units[0].size_bytes


def test_another_state_of_the_same_version_does_not_replace_what_a_manifest_names(tmp_path: Path) -> None:
    """As when a run was set back, and a slow writer of the old history comes late."""
    manifest = save(str(tmp_path))
    save(str(tmp_path), tensors={"param/w": torch.zeros(2, 3)})
    assert torch.equal(read_unit(str(tmp_path), manifest, "s0+s4")["param/w"], make_tensors()["param/w"])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    manifest = save(str(tmp_path))
    path = file_of(tmp_path, manifest)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{path.name}: the file is missing"):
        read_unit(str(tmp_path), manifest, "s0+s4")


def by_sha256_alone(manifest: Manifest) -> Manifest:
    """As manifests were written before they had a quicker checksum."""
    units = tuple(entry.model_copy(update={"xxh3_128": None}) for entry in manifest.units)
    return manifest.model_copy(update={"units": units})


@pytest.mark.parametrize("damage", ["truncated", "longer", "one bit", "empty", "other content"])
@pytest.mark.parametrize("older", [False, True])
def test_a_damaged_file_is_named(tmp_path: Path, damage: str, older: bool) -> None:
    manifest = save(str(tmp_path))
    if older:
        manifest = by_sha256_alone(manifest)
    assert read_unit(str(tmp_path), manifest, "s0+s4").keys() == make_tensors().keys()
    path = file_of(tmp_path, manifest)
    content = path.read_bytes()
    path.write_bytes(
        {
            "truncated": content[:-1],
            "longer": content + b"\0",
            "one bit": content[:-1] + bytes([content[-1] ^ 4]),
            "empty": b"",
            "other content": to_payload({"param/w": torch.zeros(2, 3)}),
        }[damage]
    )
    with pytest.raises(CheckpointError, match=f"{path.name}: the file differs from its manifest"):
        read_unit(str(tmp_path), manifest, "s0+s4")


def test_a_unit_is_loaded_by_the_quick_checksum_and_verified_by_sha256(tmp_path: Path) -> None:
    """Each is held against the bytes by itself: a wrong one of the other kind is not seen."""
    manifest, where = save(str(tmp_path)), str(tmp_path)
    (right,) = manifest.units
    for changed, loads in (({"sha256": "0" * 64}, True), ({"xxh3_128": "0" * 32}, False)):
        entry = right.model_copy(update=changed)
        outcomes = []
        for sha256 in (False, True):
            try:
                read_file(where, 8, entry, sha256=sha256)
                outcomes.append(True)
            except CheckpointDamaged:
                outcomes.append(False)
        assert outcomes == [loads, not loads]


def test_a_directory_in_place_of_a_file_is_named(tmp_path: Path) -> None:
    manifest = save(str(tmp_path))
    path = file_of(tmp_path, manifest)
    path.unlink()
    path.mkdir()
    with pytest.raises(CheckpointError, match=f"{path.name}: cannot be read"):
        read_unit(str(tmp_path), manifest, "s0+s4")


def test_a_unit_that_the_manifest_lacks_is_named(tmp_path: Path) -> None:
    manifest = save(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"v00000008: the manifest lacks unit s7"):
        read_unit(str(tmp_path), manifest, "s7")


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    """A pickle in place of the file is refused before anybody looks into it."""
    manifest = save(str(tmp_path))
    path = file_of(tmp_path, manifest)
    path.write_bytes(b"\x80\x04cposix\nsystem\n(S'touch pwned'\ntR.")
    with pytest.raises(CheckpointError):
        read_unit(str(tmp_path), manifest, "s0+s4")
