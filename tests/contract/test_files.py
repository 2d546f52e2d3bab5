from __future__ import annotations

import stat
from pathlib import Path

import pytest

from morph.contract.files import PRIVATE, write_whole


def test_a_file_is_replaced_whole_with_the_mode_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("a longer text than the next")
    path.chmod(0o644)
    write_whole(path, b"new", PRIVATE)
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"new", 0o600)
    write_whole(path, "gr\u00fcn")
    assert path.read_bytes() == "gr\u00fcn".encode()
    assert [entry.name for entry in tmp_path.iterdir()] == ["secret"]


def test_what_cannot_be_replaced_is_left_as_it_was_and_nothing_beside_it(tmp_path: Path) -> None:
    (tmp_path / "taken" / "inside").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path / "taken", "text")
    assert [entry.name for entry in tmp_path.rglob("*")] == ["taken", "inside"]
