"""A Python environment as in an image: with Morph's requirements, but without Morph."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.waiting import BOUND_S


def bare_python(directory: Path) -> str:
    """Make an environment without pip in a folder, and return its interpreter.

    It sees the packages of this environment except those that are installed in place, as Morph is.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True, timeout=2 * BOUND_S)
    python = directory / "bin" / "python"
    found = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
        timeout=BOUND_S,
    )
    (Path(found.stdout.strip()) / "image.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return str(python)
