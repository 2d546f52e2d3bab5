"""The layer table of pyproject.toml is kept and covers every package; every dependency has a tested version."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

REPOSITORY = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_layers_are_kept() -> None:
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(cache_dir=None))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_folder_imports_one_that_imports_it() -> None:
    """A folder is a room: the modules in it, without those of the folders below it."""
    graph = grimp.build_graph(*PYPROJECT["tool"]["importlinter"]["root_packages"], cache_dir=None)
    rooms = {module for module in graph.modules if graph.find_children(module)}
    room_of = {module: module if module in rooms else module.rpartition(".")[0] for module in graph.modules}
    leads_to: dict[str, set[str]] = {room: set() for room in rooms}
    for module, room in room_of.items():
        # What ``morph`` itself offers is found when it is asked for: nothing is imported with it.
        found = set() if module == "morph" else graph.find_modules_directly_imported_by(module)
        leads_to[room] |= {room_of[other] for other in found} - {room}
    try:
        list(TopologicalSorter(leads_to).static_order())
    except CycleError as error:
        pytest.fail(f"imports in a circle: {error.args[1]}")


def test_no_module_imports_one_that_imports_it() -> None:
    graph = grimp.build_graph(*PYPROJECT["tool"]["importlinter"]["root_packages"], cache_dir=None)
    leads_to = {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}
    leads_to["morph"] = set()  # what it offers is found when it is asked for: nothing is imported with it
    try:
        list(TopologicalSorter(leads_to).static_order())
    except CycleError as error:
        pytest.fail(f"imports in a circle: {error.args[1]}")


def test_every_package_is_under_the_layer_table() -> None:
    packages = {path.parent.name for path in REPOSITORY.glob("*/__init__.py")} - {"tests"}
    assert packages == set(PYPROJECT["tool"]["importlinter"]["root_packages"])
    assert {f"{name}*" for name in packages} == set(PYPROJECT["tool"]["setuptools"]["packages"]["find"]["include"])


@pytest.mark.parametrize("module", ["morph.contract.plan", "morph.contract.trace", "morph.contract.messages"])
def test_the_contract_loads_neither_torch_nor_ray(module: str) -> None:
    code = f"import sys, {module}; print([n for n in ('torch', 'ray', 'numpy') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_a_manager_that_takes_over_a_run_on_rays_nodes_loads_no_torch() -> None:
    code = "import sys, manager.run.managed, manager.engine.on_ray.ray_cluster, manager.engine.on_ray.launcher; "
    done = subprocess.run(
        [sys.executable, "-c", f"{code}print('torch' in sys.modules)"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "False"


def pins() -> dict[str, str]:
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def plain_name(requirement: str) -> str:
    return requirement.split(">=")[0].split("==")[0].lower().replace("_", "-")


def test_every_dependency_has_a_tested_version() -> None:
    project = PYPROJECT["project"]
    asked = [*project["dependencies"], *(name for extra in project["optional-dependencies"].values() for name in extra)]
    assert {plain_name(requirement) for requirement in asked} <= {plain_name(name) for name in pins()}


def test_tested_versions_name_no_build_and_no_place() -> None:
    assert {version for version in pins().values() if not set(version) <= set("0123456789.")} == set()


def test_the_makefile_installs_the_tested_torch() -> None:
    assert f" torch=={pins()['torch']}\n" in (REPOSITORY / "Makefile").read_text(encoding="utf-8")
