"""A unit's state as bytes: its tensors are aligned views of them, and any safetensors reader can read them."""

from __future__ import annotations

import json
from pathlib import Path
from uuid import uuid4

import pytest
import safetensors.torch
import torch
from torch import Tensor

from morph.checkpoint.manifest import ALIGNMENT, read_file, read_manifest, version_url, write_manifest
from morph.checkpoint.unit_files import DTYPES, from_payload, read_unit, to_payload, write_unit
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


def test_another_state_of_a_version_does_not_replace_what_a_manifest_names(tmp_path: Path) -> None:
    """This happens when a run was set back while a slow writer still writes the discarded version."""
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
    """Rewrite a manifest as it was before there was a fast checksum."""
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
    """Each digest is checked alone: a wrong digest of the other kind goes unnoticed."""
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
    """A pickle in place of the file is refused before it is loaded."""
    manifest = save(str(tmp_path))
    path = file_of(tmp_path, manifest)
    path.write_bytes(b"\x80\x04cposix\nsystem\n(S'touch pwned'\ntR.")
    with pytest.raises(CheckpointError):
        read_unit(str(tmp_path), manifest, "s0+s4")


TENSORS = {
    "scalar": torch.tensor(3.5),
    "large": torch.arange(4096, dtype=torch.float32).reshape(64, 64),
    "odd": torch.arange(7, dtype=torch.int16),
    "empty": torch.empty(0, 4),
    "wide": torch.arange(1024, dtype=torch.float64),
    "transposed": torch.arange(64, dtype=torch.float32).reshape(8, 8).T,
    "numbers": torch.frombuffer(bytearray(b'{"version": 3}'), dtype=torch.uint8),
}


def same(found: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> bool:
    """Check that two states are equal in names, types, shapes and bits."""
    return found.keys() == tensors.keys() and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in tensors.items()
    )


def test_the_library_reads_it_and_what_the_library_writes_is_read() -> None:
    payload = to_payload(TENSORS)
    assert same(safetensors.torch.load(payload), TENSORS)
    assert same(from_payload(payload), TENSORS)
    library = safetensors.torch.save({name: tensor.contiguous() for name, tensor in TENSORS.items()})
    assert same(from_payload(memoryview(bytearray(library))), TENSORS)
    assert to_payload(dict(reversed(TENSORS.items()))) == payload, "equal tensors give equal bytes"


@pytest.mark.parametrize("name", DTYPES)
def test_every_type_comes_back(name: str) -> None:
    tensors = {"x": torch.arange(5).to(DTYPES[name]), "y": torch.ones(3, 1).to(DTYPES[name])}
    found = from_payload(memoryview(bytearray(to_payload(tensors))))
    assert all(torch.equal(found[key].view(torch.uint8), tensors[key].view(torch.uint8)) for key in tensors)
    assert all(found[key].dtype == tensors[key].dtype for key in tensors)


def test_complex_types_that_safetensors_lacks_are_stored_as_pairs_of_reals() -> None:
    wide = torch.complex128
    tensors = {"x": torch.tensor([[1 + 2j, 3 - 4j]], dtype=wide), "y": torch.ones(3), "z": torch.tensor(5j, dtype=wide)}
    payload = to_payload(tensors)
    for given in (payload, memoryview(bytearray(payload))):
        assert same(from_payload(given), tensors)
    assert safetensors.torch.load(payload)["x"].tolist() == [[[1.0, 2.0], [3.0, -4.0]]]
    assert from_payload(payload)["x"].data_ptr() % wide.itemsize == 0


def test_tensors_are_views_of_memory_that_may_be_written_to() -> None:
    payload = bytearray(to_payload(TENSORS))
    found = from_payload(memoryview(payload))
    found["large"].fill_(1.0)
    assert torch.equal(from_payload(bytes(payload))["large"], torch.ones(64, 64))


@pytest.mark.parametrize(
    "wrong",
    [
        {"data_offsets": [0, 8]},
        {"data_offsets": [8, 4]},
        {"data_offsets": [-4, 12]},
        {"data_offsets": [1 << 40, (1 << 40) + 16]},
        {"shape": [5]},
        {"dtype": "F99"},
    ],
)
def test_a_header_that_does_not_fit_its_data_is_refused(wrong: dict[str, object]) -> None:
    header = {"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} | wrong}
    text = json.dumps(header).encode()
    payload = bytearray(len(text).to_bytes(8, "little") + text + bytes(16))
    with pytest.raises(ValueError, match="x"):
        from_payload(memoryview(payload))


def test_a_header_that_is_cut_off_is_refused() -> None:
    with pytest.raises(ValueError, match="header"):
        from_payload(memoryview(bytearray(to_payload(TENSORS)[:20])))


def stored(tmp_path: Path) -> tuple[str, Manifest, Path]:
    url = str(tmp_path)
    written = write_unit(url, 3, "s0", "w", TENSORS)
    unit = UnitFile(**written.model_dump(exclude={"worker", "version", "stall_s"}))
    write_manifest(url, Manifest(fingerprint="f", version=3, units=(unit,)))
    return url, read_manifest(url, 3), Path(version_url(url, 3)) / unit.file


def test_loaded_tensors_are_aligned_for_kernels(tmp_path: Path) -> None:
    url, manifest, _ = stored(tmp_path)
    found = read_unit(url, manifest, "s0")
    assert same(found, TENSORS)
    for name in ("large", "wide", "transposed"):
        assert found[name].data_ptr() % ALIGNMENT == 0, name


@pytest.mark.parametrize("at", [0, 3, 9, 200, -1])
def test_a_flipped_byte_anywhere_is_damage(tmp_path: Path, at: int) -> None:
    url, manifest, path = stored(tmp_path)
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)
    with pytest.raises(CheckpointDamaged, match="differs"):
        read_unit(url, manifest, "s0")


@pytest.mark.parametrize("size", [0, 4, 100, 10**4, 10**6])
def test_another_size_is_damage(tmp_path: Path, size: int) -> None:
    url, manifest, path = stored(tmp_path)
    data = path.read_bytes()
    path.write_bytes((data + bytes(size))[:size])
    with pytest.raises(CheckpointDamaged, match="differs"):
        read_unit(url, manifest, "s0")
