from __future__ import annotations

from pathlib import Path

import pytest
import torch

from calibrate.writing import storage
from calibrate.writing.storage import (
    check_upload_url,
    measure_checkpoint_speed,
    measure_host_copy,
    measure_upload_speed,
)
from morph.contract.errors import ConfigError


def test_writing_and_copying_have_a_speed() -> None:
    assert measure_checkpoint_speed(1) > 1e6
    assert measure_host_copy(torch.device("cpu"), 1) > 1e6


def test_an_upload_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("the user's", encoding="utf-8")
    check_upload_url(tmp_path.as_uri())
    assert measure_upload_speed(tmp_path.as_uri(), 1) > 1e6
    assert [entry.name for entry in tmp_path.iterdir()] == ["own.txt"]


def test_uploads_go_to_any_file_system() -> None:
    assert measure_upload_speed("memory://bucket/checkpoints", 1) > 1e6


@pytest.mark.parametrize("url", ["nosuch://bucket/folder", "{folder}/own.txt/below"])
def test_a_url_that_cannot_be_written_is_refused(tmp_path: Path, url: str) -> None:
    (tmp_path / "own.txt").write_text("a file, not a folder", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^checkpoint_url: cannot be written: .*\(got '.*'\); allowed: a place"):
        check_upload_url(url.format(folder=tmp_path))


def test_an_upload_that_breaks_off_cleans_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_off(url: str, *_: object) -> None:
        folder = Path(url.removeprefix("file://"))
        folder.mkdir()
        (folder / "half").write_bytes(b"half")
        raise OSError("the bucket is full")

    monkeypatch.setattr(storage, "write_unit", break_off)
    with pytest.raises(ConfigError, match="the bucket is full"):
        measure_upload_speed(tmp_path.as_uri(), 1)
    assert list(tmp_path.iterdir()) == []
