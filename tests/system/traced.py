"""A command that also writes which of Morph's files its process enters on each walk of CONTRIBUTING.md.

``python -m tests.system.traced FILE COMMAND..``; FILE gets the walks' names, each with its files in order. Only calls
count, of all threads; a walk begins with the call of one function, and ends with that of another.
"""

from __future__ import annotations

import atexit
import inspect
import json
import re
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).resolve().parents[2]
ROOMS = tuple(f"{ROOT}/{room}/" for room in ("manager", "morph", "simulator"))
WALKS = {
    "run": ("", "training_loop.begin"),
    "loss": ("worker_pool.died", "training_loop.begin"),
    "checkpoint": ("checkpoints.begin_checkpoint_if_due", "save_measuring.record_save_complete"),
}
"""The functions with which walks begin and end; a walk may be gone several times."""
LAST = {"checkpoint": ("morph/checkpoint/retention.py",)}
"""Files that another thread enters at the end of a walk, perhaps when this one has already ended it."""
WHOLE = {
    "run": ("manager/commands/", "manager/run/", "manager/engine/"),
    "loss": ("manager/controller/shape/", "manager/controller/steps/"),
    "checkpoint": ("manager/controller/steps/", "manager/engine/loop/", "morph/checkpoint/"),
}
"""Folders of which a walk names every file on its way."""
STAIR = ("manager/commands/", "manager/run/")
"""Folders whose files are steps in the order in which they are first entered; one thread enters them."""


class Walks:
    """A profile function, which notes the files of the walks that are under way."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, None]] = {walk: {} for walk in WALKS}
        self._under_way = {"run"}
        self._known: dict[CodeType, tuple[str, str]] = {}

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        """Note a call of one of Morph's functions."""
        if event != "call":
            return
        known = self._known.get(frame.f_code)
        if known is None:
            known = self._known[frame.f_code] = _file_and_name(frame.f_code)
        file, name = known
        if not file:
            return
        for walk, (begins, ends) in WALKS.items():
            if name == begins:
                self._under_way.add(walk)
            if walk in self._under_way or file in LAST.get(walk, ()):
                self.files[walk].setdefault(file)
                if name == ends:
                    self._under_way.discard(walk)


def _file_and_name(code: CodeType) -> tuple[str, str]:
    """Return the file of a function, and ``module.function``; nothing for a module's or a class's own code."""
    is_ours = code.co_filename.startswith(ROOMS) and code.co_flags & inspect.CO_OPTIMIZED
    path = Path(code.co_filename)
    return (str(path.relative_to(ROOT)), f"{path.stem}.{code.co_name}") if is_ours else ("", "")


def check_walks(traced: dict[str, list[str]]) -> None:
    """Check that each walk of CONTRIBUTING.md names all entered files of ``WHOLE``, and no others as its steps."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for walk, entered in traced.items():
        section = text.split(f"(walk: {walk})")[1].split("\n**")[0].split("\n## ")[0]
        steps = re.findall(r"^\d+\. `([\w/]+\.py)`", section, re.MULTILINE)
        beside = re.findall(r"`([\w/]+\.py)`", section)
        whole = [file for file in entered if file.startswith(WHOLE[walk])]
        assert [file for file in steps if file.startswith(WHOLE[walk]) and file not in entered] == [], walk
        assert [file for file in whole if file not in beside] == [], walk
        stair = [file for file in entered if file in steps and file.startswith(STAIR)]
        assert stair == [file for file in steps if file.startswith(STAIR)], walk


def main() -> None:
    """Run the command under the profile function."""
    path, arguments, walks = Path(sys.argv[1]), sys.argv[2:], Walks()
    atexit.register(lambda: path.write_text(json.dumps({walk: [*files] for walk, files in walks.files.items()})))
    from morph.cli.main import main as command

    sys.argv = ["morph", *arguments]
    threading.setprofile(walks)
    sys.setprofile(walks)
    command()


if __name__ == "__main__":
    main()
