"""Files of compiled loops are checked before use and remade if damaged; Morph never needs them."""

from __future__ import annotations

import importlib.util
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from simulator.engine import compilation
from tests.test_user_cache import flip

SOURCE = """
from simulator.engine.compilation import entry, loop

@loop
def more(number):
    return number + 1

@entry
@loop
def twice(number):
    return more(number) + more(number)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "loops_of_a_test.py").write_text(SOURCE)
    return tmp_path


def again(folder: Path) -> Any:
    """Load the module as another process does."""
    compilation._checked.cache_clear()
    compilation._digest_of_sources.cache_clear()
    spec = importlib.util.spec_from_file_location("loops_of_a_test", folder / "loops_of_a_test.py")
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answers(folder: Path) -> bool:
    """Call the loop; return whether numba had to compile it."""
    module = again(folder)
    assert module.twice(20) == 42
    return not getattr(module.twice.__wrapped__, "stats", module.more.stats).cache_hits


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "a bit flipped": flip,
    "gone": Path.unlink,
}


@pytest.mark.parametrize("harm", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_file_is_compiled_anew_and_kept_again(harm: Callable[[Path], object], folder: Path) -> None:
    assert [answers(folder), answers(folder)] == [True, False]
    for kind in ("*twice*.nbi", "*twice*.nbc"):
        (path,) = folder.rglob(kind)
        harm(path)
        assert [answers(folder), answers(folder)] == [True, False]


@pytest.mark.parametrize("seal", ["", "{}", "[]", '{"about": 1, "files": {}}', None])
def test_files_without_their_digests_are_not_used(seal: str | None, folder: Path) -> None:
    assert answers(folder)
    (path,) = folder.rglob("morph-loops.json")
    told = json.loads(path.read_text())
    assert len(told["files"]) == 2, "helpers are part of the loop that calls them"
    path.write_text(json.dumps({**told, "files": []}) if seal is None else seal)
    assert [answers(folder), answers(folder)] == [True, False]


def test_a_loop_is_compiled_anew_when_another_source_of_it_changed(folder: Path) -> None:
    (folder / "other.py").write_text("MORE = 1\n")
    assert [answers(folder), answers(folder)] == [True, False]
    (folder / "other.py").write_text("MORE = 2\n")
    assert [answers(folder), answers(folder)] == [True, False]


def test_a_disk_that_takes_no_files_costs_only_time(folder: Path) -> None:
    loop = again(folder).twice
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, usual[1]))  # each write fails, as on a full disk
    try:
        assert loop(20) == 42
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert [answers(folder), answers(folder)] == [True, False]


def test_files_that_cannot_be_removed_are_not_used(folder: Path) -> None:
    assert answers(folder)
    (path,) = folder.rglob("*twice*.nbi")
    path.unlink()
    path.mkdir()
    assert answers(folder)


def test_where_numba_finds_no_folder_nothing_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = compilation._njit

    def refuse(**options: Any) -> Any:
        if options.get("cache"):
            raise RuntimeError("no locator available")
        return made(**options)

    monkeypatch.setattr(compilation, "_njit", refuse)
    assert answers(folder)
    assert not list(folder.rglob("*.nb[ic]"))
