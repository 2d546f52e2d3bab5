"""Every benchmark is started in one way, and docs name only benchmarks that are there, with options that they have."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from benchmarks.__main__ import HERE, load_program, programs
from benchmarks.harness import in_turns, numbers, quartiles, ratio, spread, words, worst_cases

ROOT = Path(__file__).resolve().parents[2]
COMMAND = re.compile(r"python -m benchmarks ([\w.]+)((?: +(?!#)[^`\n]+)?)")


def commands() -> list[tuple[str, str, str]]:
    """Page, benchmark and options of each command that documentation gives."""
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "Makefile"]
    return [
        (str(page.relative_to(ROOT)), name, options)
        for page in [*documents, *HERE.rglob("*.sh"), *HERE.rglob("*.py")]
        if page.name != "CHANGELOG.md" and page != HERE / "__main__.py"
        for name, options in COMMAND.findall(page.read_text(encoding="utf-8"))
        if name != "NAME"
    ]


def test_documentation_gives_commands_of_most_benchmarks_and_of_no_others() -> None:
    named = {name for _, name, _ in commands()}
    assert named <= set(programs()), named - set(programs())
    assert len(named) > 40


@pytest.mark.slow
def test_each_option_that_documentation_gives_is_one_of_its_benchmark() -> None:
    unknown = []
    for page, name, options in commands():
        known = inspect.signature(load_program(name).main).parameters
        given = {option.replace("-", "_") for option in re.findall(r"--([a-z][\w-]*)", options)}
        renamed = {"grouped": "groups"}
        unknown += [(page, name, option) for option in given - {renamed.get(one, one) for one in known}]
    assert unknown == []


def test_the_list_names_every_benchmark_and_an_unknown_one_is_refused_in_a_sentence() -> None:
    listed = subprocess.run([sys.executable, "-m", "benchmarks"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert [line.split()[0] for line in listed.stdout.splitlines()] == list(programs())
    refused = subprocess.run(
        [sys.executable, "-m", "benchmarks", "no_such"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert refused.returncode == 1
    assert refused.stderr == "error: no benchmark is named 'no_such'; python -m benchmarks prints which there are\n"


def test_ways_are_measured_in_turns_and_warming_up_does_not_count() -> None:
    order: list[str] = []

    def way(name: str) -> int:
        order.append(name)
        return len(order)

    found = in_turns({"a": lambda: way("a"), "b": lambda: way("b")}, 2, warm_up=1)
    assert order == ["a", "b"] * 3
    assert found == {"a": [3, 5], "b": [4, 6]}


def test_figures_are_medians_with_their_range() -> None:
    assert spread([0.001, 0.003, 0.002], "ms", 1, 1e3) == "2.0 ms (1.0 to 3.0)"
    assert worst_cases([*range(1, 101)]) == (50.5, 95, 100)
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 3.0, 4.0, 5.0)
    assert quartiles([7.0]) == (7.0, 7.0, 7.0, 7.0)
    assert ratio([2.0, 9.0, 4.0], [1.0, 3.0, 1.0]) == 3.0


def test_an_option_with_several_values_is_split_at_commas() -> None:
    assert numbers("8, 64") == [8, 64]
    assert words("a,b", "abc") == ["a", "b"]
    with pytest.raises(typer.BadParameter, match=r"^d; allowed: a, b$"):
        words("a,d", "ab")
    with pytest.raises(typer.BadParameter, match="invalid literal"):
        numbers("8 64")
