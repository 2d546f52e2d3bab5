"""docs/reference/python-api.md is what the docstrings of the public Python API say.

python -m tests.test_reference     # writes it anew
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import morph
import morph.data
import morph.elastic
import morph.spot
import simulator
from morph import hf, lightning, losses
from morph.data import order, streams

PAGE = Path(__file__).parents[1] / "docs/reference/python-api.md"
BEGINNING = """# Python API

What a job, a loop, a script or a notebook imports from Morph, as the docstrings describe it (`python -m
tests.test_reference` writes this page). For commands see `morph COMMAND --help`, for keys of the job file `morph config
explain FILE`.
"""
SIMULATOR = (
    *("plan", "plan_table", "plan_frame", "simulate", "simulate_plan"),
    *("PlanRequest", "PlanChoice", "Simulation"),
)
MODULES: dict[str, tuple[ModuleType, tuple[str, ...]]] = {
    "morph": (morph, tuple(name for name in morph.__all__ if not name.startswith("_"))),
    "morph.losses": (losses, ("cross_entropy",)),
    "morph.data": (morph.data, ("Packed", "document_mask")),
    "morph.data.order": (order, ("weighted", "stratified", "grouped", "sample_indices")),
    "morph.data.streams": (streams, ("Stream", "ShardedFiles", "Jsonl", "Tar", "Parquet", "Mds", "Rows", "Iterated")),
    "morph.hf": (hf, ("job", "num_steps")),
    "morph.lightning": (lightning, ("job",)),
    "morph.elastic": (morph.elastic, ("Optimizer", "batches")),
    "simulator": (simulator, SIMULATOR),
    "morph.spot": (morph.spot, ("step", "should_save", "backup", "restore")),
}
CALLED_BY_MORPH = {
    *("forward", "open", "prepare", "expect_samples", "sample_order"),
    *("settled_steps", "use", "applied_to", "conditions", "nodes", "with_note", "reordered"),
}
"""Methods that the page leaves out, because only Morph calls them."""
SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields):$")
ENTRY = re.compile(r"^    (\*{0,2}\w+): (.*)$")


def _text(docstring: str) -> Iterator[str]:
    """Return a docstring in Markdown: the entries of its sections become lists."""
    for line in re.sub(r":\w+:`~?\.?([^`]*)`", r"``\1``", docstring).splitlines():
        entry = ENTRY.match(line)
        if SECTION.match(line):
            yield from (f"*{line[:-1]}*", "")
        elif entry:
            yield f"- `{entry[1]}`: {entry[2]}"
        else:
            yield re.sub(r"^(?:    ){1,2}(?=\S)", "  ", line)


def _entry(module: str, name: str, value: Any) -> Iterator[str]:
    shown = "class " if inspect.isclass(value) else ""
    names = ", ".join(str(inspect.Parameter.replace(one, annotation=one.empty)) for one in _parameters(value))
    yield from (f"### {module}.{name}", "", "```text", f"{shown}{name}({names})", "```", "")
    yield from (*_text(inspect.getdoc(value) or ""), "")
    if inspect.isclass(value):
        for method, function in vars(value).items():
            public = not method.startswith("_") and method not in CALLED_BY_MORPH
            if inspect.isfunction(function) and public and function.__doc__:
                yield from (f"`.{method}{_without_types(function)}`", "", *_text(inspect.getdoc(function) or ""), "")


def _parameters(value: Any) -> list[inspect.Parameter]:
    return list(inspect.signature(value).parameters.values())


def _without_types(function: Any) -> str:
    plain = [one.replace(annotation=one.empty) for one in _parameters(function) if one.name != "self"]
    return str(inspect.Signature(plain))


def page() -> str:
    lines = [BEGINNING, ""]
    for module, (found, names) in MODULES.items():
        lines += [f"## {module}", ""]
        for name in names:
            lines += _entry(module, name, getattr(found, name))
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in lines))
    text = re.sub(r"=PlanRequest\([^()]+\)", "=PlanRequest()", text)
    return re.sub(r"<function (\w+) at 0x\w+>", r"\1", text).rstrip() + "\n"


def test_the_reference_is_what_the_docstrings_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.test_reference writes it anew"


def test_nothing_public_goes_without_a_text() -> None:
    for module, (found, names) in MODULES.items():
        for name in names:
            assert len(inspect.getdoc(getattr(found, name)) or "") > 30, f"{module}.{name}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
