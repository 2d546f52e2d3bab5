"""What import-linter cannot say: it checks that the layer table of pyproject.toml is kept and covers every package."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_layers_are_kept() -> None:
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(cache_dir=None))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_package_is_under_the_layer_table() -> None:
    packages = {path.parent.name for path in REPOSITORY.glob("*/__init__.py")} - {"tests"}
    assert packages == set(PYPROJECT["tool"]["importlinter"]["root_packages"])
    assert {f"{name}*" for name in packages} == set(PYPROJECT["tool"]["setuptools"]["packages"]["find"]["include"])


@pytest.mark.parametrize("module", ["morph.contract.plan", "morph.contract.trace", "morph.contract.messages"])
def test_the_contract_loads_neither_torch_nor_ray(module: str) -> None:
    code = f"import sys, {module}; print([n for n in ('torch', 'ray', 'numpy') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_every_dependency_has_a_tested_version() -> None:
    pins = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if not line.startswith("#")
    }
    project = PYPROJECT["project"]
    asked = [*project["dependencies"], *(name for extra in project["optional-dependencies"].values() for name in extra)]
    names = {requirement.split(">=")[0].split("==")[0].lower().replace("_", "-") for requirement in asked}
    assert names - pins == set()
