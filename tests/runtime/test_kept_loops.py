"""What numba compiled of a loop is found wherever its file lies, and never that of another one."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numba
import pytest

from morph.runtime.state import loops
from morph.runtime.state.fixed_point import prepare
from morph.runtime.state.loops import kept_for_user

SOURCE = "def loop(number):\n    return number + {more}\n"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MORPH_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "loops"


def called(folder: Path, more: int) -> tuple[int, bool]:
    """Call the loop of a file in a folder, as another process does; its result, and whether numba compiled it."""
    folder.mkdir(exist_ok=True)
    path = folder / "code.py"
    path.write_text(SOURCE.format(more=more))
    spec = importlib.util.spec_from_file_location("code_of_a_test", path)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    loop = numba.njit(cache=True)(kept_for_user(module.loop))
    return loop(1), not loop.stats.cache_hits


def test_a_loop_is_compiled_once_wherever_its_file_lies(tmp_path: Path) -> None:
    assert called(tmp_path / "a", 1) == (2, True)
    assert called(tmp_path / "b", 1) == (2, False)


def test_what_was_compiled_of_another_source_is_not_taken(tmp_path: Path) -> None:
    assert called(tmp_path / "a", 1) == (2, True)
    assert called(tmp_path / "b", 2) == (3, True)
    assert called(tmp_path / "a", 2) == (3, False)


def test_a_cache_that_others_can_write_is_not_used(tmp_path: Path, cache: Path) -> None:
    assert called(tmp_path / "a", 1) == (2, True)
    cache.chmod(0o770)
    assert called(tmp_path / "b", 1) == (2, True)


def test_the_exact_sums_are_kept_there(cache: Path) -> None:
    loops.adding.cache_clear()
    loops.averaging.cache_clear()
    prepare()
    assert {path.name.split(".")[1].split("-")[0] for path in cache.rglob("*.nbc")} == {"_add", "_mean"}
