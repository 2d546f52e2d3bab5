"""All benchmarks start in the same way, and the documentation names only existing benchmarks and options."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import HERE, load_program, programs
from benchmarks.device_speed.__main__ import communicators, copies, kernels
from tests.waiting import BOUND_S

ROOT = Path(__file__).resolve().parents[2]
HOW = re.compile(r"^\|.*\| (`[^|]*`) \|$", re.MULTILINE)
"""The last cell of a row of docs/benchmarks.md: the arguments of ``python -m benchmarks``, or a whole command."""
COMMAND = re.compile(r"python -m benchmarks ([\w.]+)((?: +(?!#)[^`\n]+)?)")


def _written_out(text: str) -> str:
    """Return a page's text with the commands in its tables' last column written in full."""
    if "# Benchmarks\n" not in text:
        return text
    cells = HOW.findall(text)
    return text + "\n".join(re.sub(r"`(?!make |morph )([^`]+)`", r"`python -m benchmarks \1`", cell) for cell in cells)


def commands() -> list[tuple[str, str, str]]:
    """Yield page, benchmark and options of each command in the documentation."""
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "Makefile"]
    return [
        (str(page.relative_to(ROOT)), name, options)
        for page in [*documents, *HERE.rglob("*.sh"), *HERE.rglob("*.py")]
        if page.name != "CHANGELOG.md" and page != HERE / "__main__.py"
        for name, options in COMMAND.findall(_written_out(page.read_text(encoding="utf-8")))
        if name != "NAME"
    ]


def test_documentation_gives_commands_of_most_benchmarks_and_of_no_others() -> None:
    named = {name for _, name, _ in commands()}
    assert named <= set(programs()), named - set(programs())
    assert len(named) > 30


@pytest.mark.slow
def test_each_documented_option_exists_in_its_benchmark() -> None:
    unknown = []
    for page, name, options in commands():
        known = inspect.signature(load_program(name).main).parameters
        given = {option.replace("-", "_") for option in re.findall(r"--([a-z][\w-]*)", options)}
        renamed = {"grouped": "groups"}
        unknown += [(page, name, option) for option in given - {renamed.get(one, one) for one in known}]
    assert unknown == []


def test_the_list_names_every_benchmark_and_refuses_unknown_ones() -> None:
    listed = subprocess.run(
        [sys.executable, "-m", "benchmarks"], cwd=ROOT, capture_output=True, text=True, timeout=BOUND_S
    )
    assert [line.split()[0] for line in listed.stdout.splitlines()] == list(programs())
    refused = subprocess.run(
        [sys.executable, "-m", "benchmarks", "no_such"], cwd=ROOT, capture_output=True, text=True, timeout=BOUND_S
    )
    assert refused.returncode == 1
    assert refused.stderr == "error: no benchmark is named 'no_such'; python -m benchmarks prints which there are\n"


def test_sums_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    kernels("cpu", 1 << 10, 1)
    copies("cpu", 1 << 12, 1)
    communicators("cpu")
    *rates, of_copies, of_communicators = capsys.readouterr().out.splitlines()
    assert len(rates) == 3
    assert all(re.fullmatch(r".+: \d+\.\d GB/s", line) for line in rates)
    assert of_copies == "copies through pinned memory: need a CUDA device"
    assert of_communicators == "communicators: need a CUDA device, and a torch with NCCL"
