"""Everything that the documentation names exists (files, links, commands, options, keys); its layers are right.

python -m tests.test_contributing     # writes the table anew
"""

from __future__ import annotations

import ast
import re
import shlex
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import typer
import yaml
from pydantic import BaseModel

from morph.cli.main import app
from morph.contract.cluster import JobFile

REPOSITORY = Path(__file__).parents[1]
TEXT = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`((?:morph|manager|simulator|calibrate|tests|benchmarks|docs|configs)/[\w/.\-]*\w)(?:::\w+)?`")
STEP = re.compile(r"^(\d+)\. `([\w/]+\.py)`: ", re.MULTILINE)
BEGIN, END = "<!-- layers: begin -->\n", "<!-- layers: end -->\n"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s#:]*)(?:#([^)\s]*))?\)")


def pages() -> list[Path]:
    """Return every page about the present state: the documentation, and files at the root except the changelog."""
    root = [page for page in REPOSITORY.glob("*.md") if page.name != "CHANGELOG.md"]
    return [*root, *REPOSITORY.glob("docs/**/*.md")]


def blocks(*kinds: str) -> Iterator[tuple[str, str]]:
    """Yield page and text of each code block of these kinds."""
    for page in pages():
        for kind, text in FENCE.findall(page.read_text(encoding="utf-8")):
            if kind in kinds:
                yield page.name, text


def _row(number: int, module: str) -> str:
    """Return the table row of a package or module, with the first sentence of its docstring."""
    path = Path(module.replace(".", "/"))
    name = path if (REPOSITORY / path).is_dir() else path.with_suffix(".py")
    source = REPOSITORY / (name / "__init__.py" if name == path else name)
    docstring = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
    sentence = re.split(r"\.(?:\s|$)", " ".join(docstring.split()), maxsplit=1)[0]
    return f"| {number} | `{name}` | {sentence} |"


def _with_rooms(module: str) -> Iterator[str]:
    """Yield a module, and after it the folders of the manager, of the engine and of the simulator."""
    yield module
    if module in {"manager", "manager.engine", "simulator"}:
        for folder in sorted((REPOSITORY / module.replace(".", "/")).glob("*/__init__.py")):
            yield from _with_rooms(f"{module}.{folder.parent.name}")


def layers_table() -> str:
    """Return the layers of import-linter's first contract from the top, with each package's own description."""
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    layers = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    rows = ["| layer | package | what it is |", "|---|---|---|"]
    for number, layer in enumerate(layers, 1):
        rows += [_row(number, room) for module in layer.split(" | ") for room in _with_rooms(module)]
    return "\n".join(rows) + "\n"


def test_the_table_of_layers_is_that_of_import_linter() -> None:
    assert TEXT.split(BEGIN)[1].split(END)[0] == layers_table(), "python -m tests.test_contributing writes it anew"


def test_every_file_of_the_walks_is_there_and_each_walk_is_whole() -> None:
    steps = [(int(number), file) for number, file in STEP.findall(TEXT)]
    assert [number for number, _ in steps].count(1) == 5
    for (before, _), (number, _) in zip([(0, ""), *steps], steps, strict=False):
        assert number in {1, before + 1}
    assert [file for _, file in steps if not (REPOSITORY / file).is_file()] == []


def test_every_file_and_folder_that_the_documentation_names_is_there() -> None:
    named = {(page.name, name) for page in pages() for name in NAMED.findall(page.read_text(encoding="utf-8"))}
    assert len({name for _, name in named}) > 150
    assert sorted((page, name) for page, name in named if not (REPOSITORY / name).exists()) == []


def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the documentation's site make them."""
    heads = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", head).lower() for head in heads)
    return {re.sub(r"[^\w\- ]", "", head).strip().replace(" ", "-") for head in plain}


def test_every_link_of_the_pages_at_the_root_leads_somewhere() -> None:
    """Pages below docs are checked by ``make docs``, which generates some of them."""
    generated = {"command-line.md", "job-file.md", "trainer-arguments.md"}
    for page in [page for page in pages() if page.parent == REPOSITORY]:
        for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
            found = page.parent / target if target else page
            assert found.exists() or found.name in generated, (page.name, target)
            assert not anchor or anchor in _anchors(found), (page.name, target, anchor)


def test_the_picture_of_the_packages_shows_each_once() -> None:
    """Small packages, and modules that all others use, may be left out."""
    shown = re.findall(r'class="p">([^<]+)<', (REPOSITORY / "docs/images/architecture.svg").read_text(encoding="utf-8"))
    used_by_all = {
        f"morph/{name}"
        for name in ("contract", "link", "machine.py", "pictures.py", "tables.py", "user_cache.py", "words.py")
    }
    used_by_all |= {"morph/file_lock.py", "morph/yaml_files.py", "manager/run_dir.py", "morph/runtime"}
    packages = {"simulator", "calibrate"}
    for top in ("morph", "manager", "morph/runtime"):
        for path in (REPOSITORY / top).iterdir():
            if (path.suffix == ".py" and path.name != "__init__.py") or (path / "__init__.py").is_file():
                packages.add(f"{top}/{path.name}")
    assert sorted(shown) == sorted(packages - used_by_all)


def _command(found: click.Command, words: list[str]) -> tuple[click.Command, list[str]]:
    while words and words[0] in getattr(found, "commands", {}):
        found, words = found.commands[words[0]], words[1:]  # type: ignore[attr-defined]
    return found, words


def test_each_command_in_the_documentation_is_there_with_its_options() -> None:
    seen, root = set(), typer.main.get_command(app)
    for page, text in blocks("", "bash", "console"):
        for line in text.replace("\\\n", " ").splitlines():
            if re.match(r"(?:[\w-]+\$ )?morph ", line):
                command, words = _command(
                    root, shlex.split(line.partition("morph ")[2].partition(" && ")[0], comments=True)
                )
                own = words[: words.index("--")] if "--" in words else words
                known = {option for one in command.params for option in (*one.opts, *one.secondary_opts)}
                assert not getattr(command, "commands", {}), (page, line)
                assert {word.partition("=")[0] for word in own if word.startswith("--")} <= known, (page, line)
                seen.add(command.name)
    assert len(seen) > 25


def _unknown(section: type[BaseModel] | None, given: object, before: str = "") -> Iterator[str]:
    """Return the keys of a mapping that no kind of section has."""
    if section is None or not isinstance(given, dict):
        return
    schema = section.model_json_schema()
    yield from _unknown_of(schema, schema, given, before)


def _unknown_of(root: dict, schema: dict, given: dict, before: str) -> Iterator[str]:
    parts = [schema, *schema.get("anyOf", ()), *schema.get("oneOf", ())]
    parts = [root["$defs"][part["$ref"].rsplit("/", 1)[1]] if "$ref" in part else part for part in parts]
    properties: dict[str, list[dict]] = {}
    for part in parts:
        for name, value in part.get("properties", {}).items():
            properties.setdefault(name, []).append(value)
    if not properties:
        return
    for name, value in given.items():
        if name not in properties:
            yield f"{before}{name}"
        elif isinstance(value, dict):
            yield from _unknown_of(root, {"anyOf": properties[name]}, value, f"{before}{name}.")


def test_each_key_of_a_job_file_in_the_documentation_is_known() -> None:
    sections = set(JobFile.model_fields)
    checked = 0
    for page, text in blocks("yaml"):
        given = yaml.safe_load(text)
        if isinstance(given, dict) and given.keys() <= sections and page != "spot-run.md":
            assert list(_unknown(JobFile, given)) == [], page
            checked += 1
    assert checked >= 5


def test_each_message_that_troubleshooting_explains_is_in_the_code() -> None:
    """Literal words of a message must be in the code's own texts, in order."""
    table = (REPOSITORY / "docs/guides/troubleshooting.md").read_text(encoding="utf-8").split("## By message")[1]
    messages = re.findall(r"`([^`]*)`", " ".join(re.findall(r"^\| ([^|]*) \|", table.split("\n## ")[0], re.MULTILINE)))
    sources = [
        path.read_text(encoding="utf-8") for top in ("morph", "manager") for path in (REPOSITORY / top).rglob("*.py")
    ]
    texts = re.sub(r'"\s*f?"', "", "".join(sources))  # of a message in several literals, one
    wanted = [part.strip(" :,") for message in messages for part in re.split(r"\.\.\.|\S*\d\S*", message)]
    assert [part for part in wanted if len(part) > 4 and part not in texts] == []
    assert len(messages) > 10


def test_the_python_in_the_documentation_is_python() -> None:
    sources = list(blocks("python"))
    for page, text in sources:
        compile(textwrap.dedent(text), page, "exec")
    assert len(sources) > 20


if __name__ == "__main__":
    before, rest = TEXT.split(BEGIN)
    text = f"{before}{BEGIN}{layers_table()}{END}{rest.split(END)[1]}"
    (REPOSITORY / "CONTRIBUTING.md").write_text(text, encoding="utf-8")
