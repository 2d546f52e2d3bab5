"""The files and folders that the documentation names are there."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
TEXT = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`((?:morph|manager|simulator|calibrate|tests|benchmarks|docs|configs)/[\w/.\-]*\w)(?:::\w+)?`")
STEP = re.compile(r"^(\d+)\. `([\w/]+\.py)`: ", re.MULTILINE)


def test_every_file_of_the_walks_is_there_and_each_walk_is_whole() -> None:
    steps = [(int(number), file) for number, file in STEP.findall(TEXT)]
    assert [number for number, _ in steps].count(1) == 3
    for (before, _), (number, _) in zip([(0, ""), *steps], steps, strict=False):
        assert number in {1, before + 1}
    assert [file for _, file in steps if not (REPOSITORY / file).is_file()] == []


def test_every_file_and_folder_that_the_documentation_names_is_there() -> None:
    pages = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")]
    named = {(page.name, name) for page in pages for name in NAMED.findall(page.read_text(encoding="utf-8"))}
    assert len({name for _, name in named}) > 150
    assert sorted((page, name) for page, name in named if not (REPOSITORY / name).exists()) == []
