"""Every benchmark is started in one way, and docs name only benchmarks that are there, with options that they have."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer

from benchmarks.__main__ import HERE, load_program, programs
from benchmarks.device_speed import training
from benchmarks.device_speed.__main__ import TINY, communicators, copies, kernels, main, steps
from benchmarks.harness import in_turns, numbers, quartiles, ratio, spread, words, worst_cases
from benchmarks.remote import InThisProcess
from morph.runtime.step.kernels import CUBLAS_VARIABLE, CUBLAS_WORKSPACES, kernels_now, set_kernels

ROOT = Path(__file__).resolve().parents[2]
HOW = re.compile(r"^\|.*\| (`[^|]*`) \|$", re.MULTILINE)
"""The last cell of a row of docs/benchmarks.md: what follows ``python -m benchmarks``, or a command of its own."""
COMMAND = re.compile(r"python -m benchmarks ([\w.]+)((?: +(?!#)[^`\n]+)?)")


def _written_out(text: str) -> str:
    """A page's text with whole commands in its tables' last column."""
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
    assert len(named) > 35


@pytest.mark.slow
def test_each_option_that_documentation_gives_is_one_of_its_benchmark() -> None:
    unknown = []
    for page, name, options in commands():
        known = inspect.signature(load_program(name).main).parameters
        given = {option.replace("-", "_") for option in re.findall(r"--([a-z][\w-]*)", options)}
        renamed = {"grouped": "groups"}
        unknown += [(page, name, option) for option in given - {renamed.get(one, one) for one in known}]
    assert unknown == []


def test_the_list_names_every_benchmark_and_refuses_unknown_ones() -> None:
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


PACKAGES = ("morph", "calibrate", "simulator", "manager", "benchmarks", "tests", "configs")


def _imported(path: Path) -> list[tuple[str, str | None]]:
    """The project's modules that a file imports, with the name that is taken from each."""
    found: list[tuple[str, str | None]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in PACKAGES:
            found += [(node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(alias.name, None) for alias in node.names if alias.name.split(".")[0] in PACKAGES]
    return found


def test_everything_that_a_program_imports_of_the_project_exists() -> None:
    missing = []
    for path in sorted((ROOT / "benchmarks").rglob("*.py")):
        for module, name in _imported(path):
            if module.split(".")[0] == "benchmarks" and module.endswith("__main__"):
                continue
            try:
                found = importlib.import_module(module)
                if name is not None and name != "*" and not hasattr(found, name):
                    importlib.import_module(f"{module}.{name}")
            except ImportError as error:
                missing.append(f"{path.relative_to(ROOT)}: {module} {name or ''}: {error}")
    assert missing == []


def test_sums_and_copies_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    kernels("cpu", 1 << 10, 1)
    copies("cpu", 1 << 12, 1)
    communicators("cpu")
    *rates, last = capsys.readouterr().out.splitlines()
    assert len(rates) == 5
    assert all(re.fullmatch(r".+: \d+\.\d GB/s", line) for line in rates)
    assert last == "communicators: need a CUDA device, and a torch with NCCL"


@pytest.mark.slow
def test_a_worker_is_timed_beside_a_plain_loop(capsys: pytest.CaptureFixture[str]) -> None:
    """Run in this process, where everything is imported already."""
    num_threads, kernels_before = torch.get_num_threads(), kernels_now()
    try:
        ((name, job_path),) = TINY.items()
        steps("cpu", name, job_path, 1, depths=(1,), make=InThisProcess)
    finally:
        torch.set_num_threads(num_threads)
        set_kernels(kernels_before)
    plain, morph = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"tiny_gpt, plain loop: \d+\.\d{3} s a step", plain)
    assert re.fullmatch(r"tiny_gpt, Morph 1x1: \d+\.\d{3} s a step, \d+\.\d\d of the plain loop", morph)


def test_a_plain_loop_prepares_cublas_for_the_kernels_of_exact_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CUBLAS_VARIABLE, "")
    monkeypatch.delenv(CUBLAS_VARIABLE)
    num_threads, kernels_before = torch.get_num_threads(), kernels_now()
    try:
        training.PlainLoop(*TINY.values(), "cpu")
        assert kernels_now().determinism == 2
    finally:
        torch.set_num_threads(num_threads)
        set_kernels(kernels_before)
    assert os.environ[CUBLAS_VARIABLE] in CUBLAS_WORKSPACES


def test_two_workers_run_one_forward_and_one_backward_by_turns() -> None:
    plan = training.plan_of(2, "f", 6, 2, 3)
    assert plan.shape == "2x1"
    assert [(stage.first_section, stage.end_section, stage.window) for stage in plan.stages] == [(0, 3, 2), (3, 6, 1)]
    assert plan.orders == {3: ("FFBFBB", "FBFBFB")}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_it_refuses_in_one_sentence_where_there_is_no_device() -> None:
    with pytest.raises(SystemExit, match=r"^needs a CUDA device; torch \S+ finds none$"):
        main()
