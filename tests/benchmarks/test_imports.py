"""Benchmarks run seldom; what they import of the project must be there all the same, also inside their functions."""

import ast
import importlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
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
