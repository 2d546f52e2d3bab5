"""Write the blocks of documentation that benchmarks print, or list those that are stale.

    python -m benchmarks printed            # runs each command again and rewrites its block
    python -m benchmarks printed --check    # writes nothing; ends with 1 where a block differs

A block stands between ``<!-- printed: NAME OPTIONS -->`` and ``<!-- end -->`` and holds what ``python -m benchmarks
NAME OPTIONS`` prints. Only figures that are the same on every machine belong into one. One whose command names files
that are not there is left as it is.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from benchmarks.harness import ROOT, option

BLOCK = re.compile(r"(?P<begin><!-- printed: (?P<command>[^>]+?) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)
PAGES = (ROOT / "docs", ROOT / "README.md")
MOST_S = 1800.0


def pages() -> Iterator[Path]:
    """Yield every page that may have a block."""
    for place in PAGES:
        yield from sorted(place.rglob("*.md")) if place.is_dir() else (place,)


def printed(command: str) -> str | None:
    """Return the output of a command; None if a file that it names does not exist.

    Raises:
        SystemExit: the command fails, or does not end in time.
    """
    words = shlex.split(command)
    if any("/" in word and not (ROOT / word).exists() for word in words):
        return None
    run = [sys.executable, "-m", "benchmarks", *words]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=MOST_S)
    if done.returncode:
        raise SystemExit(f"python -m benchmarks {command}: {done.stderr.strip()[-500:]}")
    return done.stdout.strip("\n") + "\n"


def stale(page: Path, only: str = "", *, write: bool = False) -> list[str]:
    """Return the commands of stale blocks of a page; ``only``: restrict to commands that contain this text."""
    found: list[str] = []

    def renewed(block: re.Match[str]) -> str:
        text = printed(block["command"]) if only in block["command"] else None
        new = block[0] if text is None else f"{block['begin']}\n{text}\n{block['end']}"
        found.extend([block["command"]] if new != block[0] else [])
        return new

    text = page.read_text(encoding="utf-8")
    new = BLOCK.sub(renewed, text)
    if write and new != text:
        page.write_text(new, encoding="utf-8")
    return found


def main(
    check: Annotated[bool, option("write nothing")] = False,
    only: Annotated[str, option("blocks whose command has this in it")] = "",
) -> None:
    found = [(page, command) for page in pages() for command in stale(page, only, write=not check)]
    for page, command in found:
        print(f"{page.relative_to(ROOT)}: {'stale' if check else 'written'}: python -m benchmarks {command}")
    if check and found:
        raise SystemExit(1)
