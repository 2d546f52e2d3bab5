"""The user's cache is private and bounded; damaged entries count as missing."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import pytest

from morph import user_cache
from morph.user_cache import data_folder, keep, open_kept, read_kept

CONTENT = b"what was found" * 100


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def replace_by_link(path: Path) -> None:
    path.rename(path.with_name("target"))
    path.symlink_to("target")


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "gone": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: os.truncate(path, len(CONTENT) // 2),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "a bit flipped": flip,
    "another can write it": lambda path: path.chmod(0o622),
    "another can write its folder": lambda path: path.parent.chmod(0o770),
    "a link": replace_by_link,
    "a folder": replace_by_folder,
    "a pipe": replace_by_pipe,
}


@pytest.mark.parametrize("harm", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_entries_are_not_read(harm: Callable[[Path], object], tmp_path: Path) -> None:
    folder = tmp_path / "cuts"
    keep(folder, "one", CONTENT)
    assert read_kept(folder, "one") == CONTENT
    harm(folder / "one")
    assert read_kept(folder, "one") is None


def test_files_of_another_user_are_neither_read_nor_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(tmp_path, "one", CONTENT)
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    assert read_kept(tmp_path, "one") is None
    keep(tmp_path, "two", CONTENT)
    assert not (tmp_path / "two").exists()


def test_file_and_folder_are_of_this_user_alone(tmp_path: Path) -> None:
    keep(tmp_path / "cuts", "one", CONTENT)
    assert (tmp_path / "cuts").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "cuts" / "one").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("error", [PermissionError, OSError(28, "no room")])
def test_where_nothing_can_be_written_nothing_is_kept(
    error: OSError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(user_cache.tempfile, "mkstemp", refuse)
    keep(tmp_path, "one", CONTENT)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    keep(tmp_path / "file", "one", CONTENT)  # without a folder


def test_the_least_recently_used_entry_is_removed_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_cache, "MOST_BYTES", 4 * len(CONTENT))
    for age, name in enumerate(("used", "old", "new")):
        keep(tmp_path, name, CONTENT)
        os.utime(tmp_path / name, ns=(age, age))
    assert read_kept(tmp_path, "used") == CONTENT
    keep(tmp_path, "newest", CONTENT)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "newest", "used"]
    keep(tmp_path, "too long", CONTENT * 3)
    assert not (tmp_path / "too long").exists()


def test_several_writers_and_readers_at_once_see_one_of_what_was_written(tmp_path: Path) -> None:
    contents = [bytes([number]) * 200_000 for number in range(4)]

    def work(number: int) -> set[bytes | None]:
        seen = set()
        for _ in range(20):
            keep(tmp_path, "one", contents[number])
            seen.add(read_kept(tmp_path, "one"))
        return seen

    with ThreadPoolExecutor(4) as pool:
        seen = set().union(*pool.map(work, range(4)))
    assert seen <= set(contents)
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


@pytest.mark.parametrize(
    ("platform", "variables", "folder"),
    [
        ("linux", {"MORPH_DATA_DIR": "/own", "XDG_DATA_HOME": "/general"}, "/own"),
        ("linux", {"XDG_DATA_HOME": "/general"}, "/general/morph"),
        ("linux", {"XDG_DATA_HOME": "not absolute", "HOME": "/home/me"}, "/home/me/.local/share/morph"),
        ("darwin", {"HOME": "/Users/me"}, "/Users/me/Library/Application Support/morph"),
    ],
)
def test_data_of_all_runs_is_where_the_user_has_data(
    platform: str, variables: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "morph-tests-data-" in os.environ["MORPH_DATA_DIR"], "no test adds to what a developer's runs have seen"
    for name in ("MORPH_DATA_DIR", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.platform", platform)
    assert data_folder() == Path(folder)


def test_a_file_that_many_want_is_written_once(tmp_path: Path) -> None:
    writers: list[int] = []

    def write(file: BinaryIO) -> None:
        writers.append(file.write(CONTENT))

    def read(_: int) -> bytes:
        with open_kept(tmp_path / "own", "name", write, 10 * len(CONTENT)) as file:
            return file.read()

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(read, range(8))) == {CONTENT}
    assert writers == [len(CONTENT)]


@pytest.mark.parametrize("harmed", ["name", "name.xxh3"])
@pytest.mark.parametrize("harm", ["gone", "empty", "truncated", "a bit flipped"])
def test_a_file_that_was_harmed_is_written_again(harmed: str, harm: str, tmp_path: Path) -> None:
    writers: list[int] = []

    def content() -> bytes:
        with open_kept(tmp_path, "name", lambda file: writers.append(file.write(CONTENT)), 10 * len(CONTENT)) as file:
            return file.read()

    assert content() == CONTENT
    if harm == "truncated":
        os.truncate(tmp_path / harmed, 7)
    else:
        DAMAGE[harm](tmp_path / harmed)
    assert [content(), content()] == [CONTENT, CONTENT]
    assert len(writers) == 2


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    def fail(file: BinaryIO) -> None:
        file.write(CONTENT)
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        open_kept(tmp_path / "own", "name", fail, 1 << 20)
    assert [path for path in (tmp_path / "own").iterdir() if not path.name.startswith(".lock-")] == []
    (tmp_path / "others").mkdir()
    (tmp_path / "others").chmod(0o777)
    with pytest.raises(PermissionError, match="belongs to another user, or others may write to it"):
        open_kept(tmp_path / "others", "name", fail, 1 << 20)
