"""The product code as numbers: files and their lengths, folders, and imports between folders.

    python -m benchmarks house

A folder is a room: the modules in it, without those of the folders below it. An arrow leads from a room to one that its
modules import; imports in a circle are named.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from statistics import median

import grimp

from benchmarks.harness import ROOT


def main() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = settings["tool"]["importlinter"]["root_packages"]
    files = [path for name in packages for path in ROOT.glob(f"{name}/**/*.py")]
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    modules = [length for path, length in lengths.items() if path.name != "__init__.py"]
    print(
        f"{sum(lengths.values())} lines in {len(modules)} modules: median {median(modules):.0f}, longest {max(modules)}"
    )

    graph = grimp.build_graph(*packages, cache_dir=None)
    rooms = {module for module in graph.modules if graph.find_children(module)}
    room_of = {module: module if module in rooms else module.rpartition(".")[0] for module in graph.modules}
    leads_to: dict[str, set[str]] = {room: set() for room in rooms}
    for module, room in room_of.items():
        leads_to[room] |= {room_of[other] for other in graph.find_modules_directly_imported_by(module)} - {room}
    sizes = Counter(room for module, room in room_of.items() if module not in rooms)
    print(f"{len(sizes)} rooms: median {median(sizes.values()):.0f} modules, fullest {max(sizes.values())}")
    print(f"{sum(len(others) for others in leads_to.values())} arrows between rooms")
    leads_to["morph"] = set()  # what it offers is imported when it is requested
    try:
        list(TopologicalSorter(leads_to).static_order())
    except CycleError as error:
        print(f"a circle: {' > '.join(reversed(error.args[1]))}")
    else:
        print("no circle")
