"""The layer table of pyproject.toml is kept and includes every package; every dependency has a tested version."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

from tests.waiting import BOUND_S

REPOSITORY = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_layers_are_kept() -> None:
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(cache_dir=None))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=BOUND_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_folder_imports_one_that_imports_it() -> None:
    """Return the modules in a folder, without those of its subfolders."""
    graph = grimp.build_graph(*PYPROJECT["tool"]["importlinter"]["root_packages"], cache_dir=None)
    layers = PYPROJECT["tool"]["importlinter"]["contracts"][0]["layers"]
    rooms = {module for module in graph.modules if graph.find_children(module)}
    rooms |= {module for layer in layers for module in layer.split(" | ")}  # some are files
    room_of = {module: module if module in rooms else module.rpartition(".")[0] for module in graph.modules}
    leads_to: dict[str, set[str]] = {room: set() for room in rooms}
    for module, room in room_of.items():
        # Names that ``morph`` itself offers are imported when they are requested.
        found = set() if module == "morph" else graph.find_modules_directly_imported_by(module)
        leads_to[room] |= {room_of[other] for other in found} - {room}
    try:
        list(TopologicalSorter(leads_to).static_order())
    except CycleError as error:
        pytest.fail(f"imports in a circle: {error.args[1]}")


def test_no_module_imports_one_that_imports_it() -> None:
    graph = grimp.build_graph(*PYPROJECT["tool"]["importlinter"]["root_packages"], cache_dir=None)
    leads_to = {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}
    leads_to["morph"] = set()  # its names are imported when they are requested
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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=BOUND_S, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_a_manager_that_takes_over_a_run_on_rays_nodes_loads_no_torch() -> None:
    """Its workers wait for it. It does not load Ray either, which would read data that VMs send."""
    code = "import sys, manager.run.train, manager.engine.on_ray.ray_cluster, manager.engine.on_ray.launcher; "
    done = subprocess.run(
        [sys.executable, "-c", f"{code}print([name for name in ('torch', 'ray') if name in sys.modules])"],
        capture_output=True, text=True, timeout=BOUND_S, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "[]"


PUBLIC_OF_RAY = {"ray", "ray.cluster_utils"}


def private_uses(code: str) -> list[str]:
    """Return a module's uses of Ray beyond its public interface; import-linter knows only whole packages."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names if name.name.split(".")[0] == "ray"]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ray":
            found += [node.module or "", *(f"ray.{name.name}" for name in node.names if name.name.startswith("_"))]
        elif isinstance(node, ast.Attribute):
            names = ast.unparse(node).replace("self._library", "ray").split(".")
            is_private = names[0] == "ray" and any(name.startswith("_") for name in names)
            is_set = names[0] == "ray" and len(names) > 1 and isinstance(node.ctx, ast.Store)
            found += [ast.unparse(node)] if is_private or is_set else []
        elif isinstance(node, ast.ClassDef):
            found += [name for name in map(ast.unparse, node.bases) if name in ("Node", "Cluster", "RayParams")]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found += [node.value] if node.value.startswith("ray._") else []
    return [name for name in found if name not in PUBLIC_OF_RAY]


@pytest.mark.parametrize(
    "code",
    [
        "import ray._private",
        "from ray._private import services",
        "from ray import _raylet",
        "ray._private.worker.global_worker",
        "ray.get = None",
        "from ray.core.generated import common_pb2",
        "sys.modules['ray._private.ray_constants']",
        "class Mine(Node): pass",
    ],
)
def test_a_use_of_rays_internals_is_seen(code: str) -> None:
    assert private_uses(code)


def test_ray_is_used_through_its_public_interface() -> None:
    assert private_uses("import ray\nfrom ray.cluster_utils import Cluster\nray.init()\n") == []
    folders = ("morph", "calibrate", "simulator", "manager", "benchmarks")
    files = [path for folder in folders for path in (REPOSITORY / folder).rglob("*.py")]
    found = {str(path): private_uses(path.read_text(encoding="utf-8")) for path in files}
    assert {path: uses for path, uses in found.items() if uses} == {}


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


def test_the_newest_and_oldest_ray_of_the_range_are_tested() -> None:
    (asked,) = [name for name in PYPROJECT["project"]["dependencies"] if name.startswith("ray")]
    oldest, end = asked.removeprefix("ray>=").split(",<")
    major, minor, _ = pins()["ray"].split(".")
    assert end == f"{major}.{int(minor) + 1}"
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    assert f"\nOLDEST_RAY := {oldest}.0\n" in makefile


def test_the_oldest_transformers_of_the_range_is_tested() -> None:
    (asked,) = [name for name in PYPROJECT["project"]["optional-dependencies"]["examples"] if "transformers" in name]
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    assert f"\nOLDEST_TRANSFORMERS := {asked.removeprefix('transformers>=')}.0\n" in makefile


def test_every_public_method_has_a_docstring_or_implements_one_with() -> None:
    """A method that implements an interface is described there."""
    roots = PYPROJECT["tool"]["importlinter"]["root_packages"]
    files = [path for root in roots for path in (REPOSITORY / root).rglob("*.py")]
    nodes = [node for path in files for node in ast.parse(path.read_text(encoding="utf-8")).body]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    methods = [(node.name, one) for node in classes for one in node.body if isinstance(one, ast.FunctionDef)]
    described = {one.name for _, one in methods if ast.get_docstring(one)}
    bare = [(name, one.name) for name, one in methods if one.name not in described]
    assert [(name, method) for name, method in bare if not method.startswith("_")] == []
