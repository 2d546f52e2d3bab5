"""Start a benchmark: ``python -m benchmarks NAME [options]``; without a name it lists all benchmarks."""

from __future__ import annotations

import ast
import importlib
import inspect
import signal
import sys
from pathlib import Path
from types import ModuleType

import typer

HERE = Path(__file__).resolve().parent


def programs() -> dict[str, str]:
    """Return the modules with a function ``main``, each with the first line of its help."""
    found = {}
    for path in sorted(HERE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if path != Path(__file__).resolve() and any(getattr(node, "name", "") == "main" for node in tree.body):
            name = ".".join(path.relative_to(HERE).with_suffix("").parts).removesuffix(".__main__")
            found[name] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def load_program(name: str) -> ModuleType:
    """Import the module of a benchmark."""
    is_package = HERE.joinpath(*name.split(".")).is_dir()
    return importlib.import_module(f"benchmarks.{name}" + (".__main__" if is_package else ""))


def run(name: str, arguments: list[str]) -> None:
    """Run a benchmark with these options."""
    module = load_program(name)
    paragraphs = inspect.cleandoc(module.__doc__ or "").split("\n\n")
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(help="\n\n".join(f"\b\n{each}" for each in paragraphs))(module.main)
    app(arguments, prog_name=f"python -m benchmarks {name}")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        for known, about in programs().items():
            print(f"{known:22} {about}")
    elif sys.argv[1] not in programs():
        sys.exit(f"error: no benchmark is named {sys.argv[1]!r}; python -m benchmarks prints which there are")
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # its processes are ended first
        run(sys.argv[1], sys.argv[2:])
