"""Everything that the scripts of the kit for GPU machines name exists; mypy checks the kit's Python code."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import typer
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from morph.cli.main import app

ROOT = Path(__file__).parents[2]
KIT = ROOT / "benchmarks" / "gpu_kit"
SCRIPT, RUNS, JOBS = ((KIT / name).read_text(encoding="utf-8") for name in ("on_device.sh", "runs.py", "jobs.py"))


def test_every_module_file_and_name_that_the_kit_runs_is_there() -> None:
    modules = {name.replace("$KITMOD", "benchmarks.gpu_kit") for name in re.findall(r"-m (\$?[\w.]+)", SCRIPT)}
    modules -= {"gpu", "pip"}  # "gpu" is a mark of tests; a search for pip makes setuptools leave distutils to Python
    modules |= set(re.findall(r'^HOST = "(.+)"', RUNS, re.MULTILINE))
    assert modules >= {"benchmarks.gpu_kit.facts", "morph.cli.main", "manager.engine.on_processes.process_host"}
    assert [name for name in modules if find_spec(name) is None] == []
    jobs = [*re.findall(r"job (\w+)\)", SCRIPT), *re.findall(r"for variant in (.+);", SCRIPT)[0].split(), "tiny"]
    assert [name for name in jobs if not re.search(rf"^{name} = ", JOBS, re.MULTILINE)] == []
    for path in ("tests/gpu", "configs/jobs/gpt2_stdlib.py", "configs/jobs/tiny_gpt.py", "tests/gpu/test_mailboxes.py"):
        assert (ROOT / path).exists()


def test_every_option_in_the_kit_exists_in_its_command() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    calibrate = set(re.findall(r" (--?[a-z][a-z-]*)", "\n".join(re.findall(r"main calibrate (.*)", SCRIPT))))
    run = set(re.findall(r'"(--?[a-zA-Z-]+)"', RUNS.split("shape = {")[1].split("process = ")[0])) - {"-m"}
    assert {"--device", "-o"} < calibrate
    assert {"--cluster", "-P"} < run
    for name, given in (("calibrate", calibrate), ("run", run)):
        parameters = commands[name].params
        known = {option for each in parameters for option in (*each.opts, *each.secondary_opts)}
        assert given - known == set()


def packed() -> set[str]:
    found = re.search(r"GPU_KIT_PACKAGES:-([^}]+)}", (KIT / "prepare.sh").read_text(encoding="utf-8"))
    assert found is not None
    return {canonicalize_name(name) for name in found[1].split()}


def required_by(*names: str) -> set[str]:
    """Return these packages and their requirements, in the versions installed here, for Python 3.12 on Linux."""
    python: dict[str, str] = {"python_version": "3.12", "python_full_version": "3.12.0", "extra": ""}
    found, left = set[str](), {canonicalize_name(name) for name in names}
    while left:
        found.add(name := left.pop())
        wanted = [Requirement(text) for text in metadata.requires(name) or []]
        holds = [one for one in wanted if one.marker is None or one.marker.evaluate(python)]
        left |= {canonicalize_name(one.name) for one in holds} - found
    return found


def test_every_wheel_that_the_kit_packs_has_a_tested_version() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert packed() - {canonicalize_name(line.partition("==")[0]) for line in lines if "==" in line} == set()


def test_the_kit_packs_every_package_that_its_image_lacks() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    own = {Requirement(text).name for text in project["dependencies"]} - {"ray"}
    there = required_by("torch", "numpy", "numba", "pandas", "matplotlib", "pytest")
    assert required_by(*own, "transformers", "pytest-timeout") - there - packed() == set()
