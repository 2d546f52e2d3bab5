"""A lid on growth: no room may have more lines of Python than ``tests/lines.json`` allows it.

``make lines`` checks it, as ``make check`` does. Whoever needs more raises the room's line in the same commit, and says
in its message why, and what went in return. ``python -m tests.lines record`` writes the lines that there are now.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
ALLOWED = Path(__file__).with_name("lines.json")
PRODUCT = ("morph", "calibrate", "simulator", "manager")
BESIDE = ("benchmarks", "tests")


def lines_by_room(root: Path = REPOSITORY) -> dict[str, int]:
    """Return the lines of Python files by room: a top folder's own files, or a folder in it with all below."""
    found = Counter[str]()
    for folder in (*PRODUCT, *BESIDE):
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root).parts
            found["/".join(parts[: min(2, len(parts) - 1)])] += len(path.read_text(encoding="utf-8").splitlines())
    return dict(sorted(found.items()))


def excess(found: dict[str, int], allowed: dict[str, int]) -> list[str]:
    """Return a sentence for every room that is larger than it may be, or has no line."""
    told = []
    for room, lines in found.items():
        if room not in allowed:
            told.append(f"{room}: has no line in tests/lines.json (it has {lines} lines)")
        elif lines > allowed[room]:
            told.append(
                f"{room}: has {lines} lines; allowed: {allowed[room]}. Remove some, or raise its line and say why"
            )
    return told


def main() -> None:
    found = lines_by_room()
    if sys.argv[1:] == ["record"]:
        ALLOWED.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")
    told = excess(found, json.loads(ALLOWED.read_text(encoding="utf-8")))
    product = sum(lines for room, lines in found.items() if room.split("/")[0] in PRODUCT)
    tests = sum(lines for room, lines in found.items() if room.split("/")[0] == "tests")
    print(*told, f"{product} lines of product, {tests} of tests", sep="\n")
    sys.exit(bool(told))


if __name__ == "__main__":
    main()
