"""The files and folders that the documentation names are there, and the table of layers is that of pyproject.toml.

python -m tests.test_contributing     # writes the table anew
"""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
TEXT = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`((?:morph|manager|simulator|calibrate|tests|benchmarks|docs|configs)/[\w/.\-]*\w)(?:::\w+)?`")
STEP = re.compile(r"^(\d+)\. `([\w/]+\.py)`: ", re.MULTILINE)
BEGIN, END = "<!-- layers: begin -->\n", "<!-- layers: end -->\n"


def _row(number: int, module: str) -> str:
    """A package, or a module, with the first sentence of its docstring."""
    path = Path(module.replace(".", "/"))
    name = path if (REPOSITORY / path).is_dir() else path.with_suffix(".py")
    source = REPOSITORY / (name / "__init__.py" if name == path else name)
    docstring = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
    sentence = re.split(r"\.(?:\s|$)", " ".join(docstring.split()), maxsplit=1)[0]
    return f"| {number} | `{name}` | {sentence} |"


def layers_table() -> str:
    """The layers of import-linter's first contract, from the top, with what each of their packages says it is."""
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    layers = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    rows = ["| layer | package | what it is |", "|---|---|---|"]
    rows += [_row(number, module) for number, layer in enumerate(layers, 1) for module in layer.split(" | ")]
    return "\n".join(rows) + "\n"


def test_the_table_of_layers_is_that_of_import_linter() -> None:
    assert TEXT.split(BEGIN)[1].split(END)[0] == layers_table(), "python -m tests.test_contributing writes it anew"


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


if __name__ == "__main__":
    before, rest = TEXT.split(BEGIN)
    text = f"{before}{BEGIN}{layers_table()}{END}{rest.split(END)[1]}"
    (REPOSITORY / "CONTRIBUTING.md").write_text(text, encoding="utf-8")
